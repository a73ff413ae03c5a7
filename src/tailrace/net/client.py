"""Client side of HTTP: a pool of connections to one server, one request at a time on each.

No coroutine stands between a request and its response: a connection calls its sink as bytes arrive.
"""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from tailrace.net.framing import BodyReader, BrokenMessageError, CloseReader, reader_for
from tailrace.net.head_cache import ResponseHeadCache, length_in
from tailrace.net.heads import NO_NAMES, RequestHead, ResponseHead, upstream_start
from tailrace.net.origin import Origin
from tailrace.net.tls import TlsContext, TlsFiles, client_context, explain

#: vLLM closes connections that are idle for 5 s, so those idle for nearly as long are not reused.
IDLE_S = 4.0
#: Idle connections kept per server.
MAX_IDLE = 256
#: Beginnings of heads that are kept per server; when there are more, all are dropped.
MAX_STARTS = 128
#: Largest response head, in bytes.
MAX_HEAD_BYTES = 65_536
#: Request bodies below this size are joined with their head into one write, in bytes.
JOIN_BYTES = 16_384
#: Largest response body that :meth:`Pool.fetch` accepts, in bytes.
MAX_FETCH_BYTES = 16 * 2**20
#: A kept connection that is lost this soon after a request was sent on it was closed before, s.
STALE_S = 0.1
#: Reported when a connection ends before its response does.
CLOSED = "the connection was closed by the backend"
#: Reported when a connection cannot be made because this process has too many.
NO_FILES = "this process has no file descriptor or port left for a connection"
_CONNECT_TIMEOUT = "no connection within"
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM,
                        errno.EADDRNOTAVAIL))  # fmt: skip

_log = logging.getLogger("tailrace.net")


class Sink(Protocol):
    """Receiver of a response. It ends with ``whole``, ``body(done=True)`` or ``failed``."""

    def connected(self, connection: "UpstreamConnection") -> bool:
        """Use a new connection; return False if it is no longer wanted."""

    def failed(self, why: str, *, connecting: bool) -> None:
        """Take note that there will be no response, or no more of it."""

    def head(self, head: ResponseHead) -> None:
        """Take the head of the response; ``body`` follows in the same turn of the loop."""

    def body(self, raw: bytes, parts: list[bytes], done: bool) -> None:
        """Take bytes as received, framing included, and the decoded parts of the body in them."""

    def whole(self, head: ResponseHead, body: bytes) -> None:
        """Take a response of known length that came in one piece, instead of ``head`` and ``body``.

        Content-Length in ``head`` may belong to a different response.
        """


class UpstreamConnection(asyncio.Protocol):
    """A connection to a server, idle or with one request on it."""

    __slots__ = ("_head_bytes", "_keep", "_method", "_reader", "idle_since", "pool", "reader",
                 "reused", "sink", "transport")  # fmt: skip

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.sink: Sink | None = None
        self.reader: BodyReader | None = None
        """Reader of the current response body; None until its head has been read."""
        self.reused = False
        """Whether it has served a request before the current one."""
        self.idle_since = 0.0
        self._head_bytes = b""
        self._method = b""
        self._keep = False

    # Called by the owner of the request.

    def send(self, sink: Sink, method: bytes, head: bytes, body: bytes | memoryview) -> None:
        """Send a request; the response goes to the sink."""
        transport = self.transport
        assert transport is not None
        self.sink = sink
        self._method = method
        self.reader = None
        if len(body) < JOIN_BYTES:
            transport.write(head + body if body else head)
        else:
            transport.writelines((head, body))

    def abort(self) -> None:
        """Reset the connection, so that the server notices that the response is not wanted."""
        self.sink = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading: the client is slower than the server."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Read a response; close the connection on bytes without a request."""
        sink = self.sink
        if sink is None:
            self._close()
            return
        try:
            reader = self.reader
            if reader is None:
                self._read_head(data, sink)
                return
            self._read_body(data, 0, sink, reader)
        except BrokenMessageError as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the sink, unless the end of the connection is the end of the response."""
        self.transport = None
        self.pool.lost(self)
        sink = self.sink
        if sink is None:
            return
        self.sink = None
        if exc is None and isinstance(self.reader, CloseReader):
            sink.body(b"", [], True)
            return
        sink.failed(CLOSED, connecting=False)

    def _read_head(self, data: bytes, sink: Sink) -> None:
        last = self.pool.heads.last
        if self._head_bytes:
            data = self._head_bytes + data
        elif last is not None and self._method != b"HEAD":
            # Most responses of a server have the head of the one before.
            end, length = length_in(data, last[0], last[1])
            if end and len(data) == end + length:
                self._keep = last[2].keep_alive
                self.sink = None
                self._give_back(more=False)
                sink.whole(last[2], data[end:])
                return
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > MAX_HEAD_BYTES:
                if len(data) > MAX_HEAD_BYTES:
                    raise BrokenMessageError("the head of the answer is too long")
                self._head_bytes = data
                return
            head = self.pool.heads.read(data[:end], self._method)
            if head.status >= 200:
                break
            data = data[end:]  # 100 Continue and the like: the response follows
        self._head_bytes = b""
        self._keep = head.keep_alive
        framing = head.framing
        if framing.kind == "length" and len(data) - end == framing.length:
            self.sink = None
            self._give_back(more=False)
            sink.whole(head, data[end:])
            return
        self.reader = reader = reader_for(framing)
        sink.head(head)
        if self.sink is not sink:
            return  # not wanted: another backend is tried
        if reader.done:
            self._done(b"", [], len(data) > end, sink)
        elif len(data) > end:
            self._read_body(data, end, sink, reader)
        else:
            sink.body(b"", [], False)

    def _read_body(self, data: bytes, start: int, sink: Sink, reader: BodyReader) -> None:
        end, parts = reader.feed(data, start)
        if reader.done:
            self._done(data[start:end], parts, end < len(data), sink)
        else:
            sink.body(data[start:] if start else data, parts, False)

    def _done(self, raw: bytes, parts: list[bytes], more: bool, sink: Sink) -> None:
        """Release the connection before the sink is called, which may need one at once."""
        self.sink = None
        self._give_back(more=more)
        sink.body(raw, parts, True)

    def _give_back(self, *, more: bool) -> None:
        """Release the connection; ``more``: bytes follow the response, so it cannot be reused."""
        transport = self.transport
        if (
            self._keep
            and not more
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0
        ):
            self.pool.release(self)
        else:
            self._close()

    def _fail(self, why: str) -> None:
        sink, self.sink = self.sink, None
        if self.transport is not None:
            self.transport.abort()
        if sink is not None:
            sink.failed(why, connecting=False)

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.close()


@dataclass(slots=True)
class Response:
    """Response to :meth:`Pool.fetch`."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class FetchError(OSError):
    """:meth:`Pool.fetch` got no response."""

    def __init__(self, why: str, *, connecting: bool = False, late: bool = False) -> None:
        super().__init__(why)
        self.connecting = connecting
        """Whether no connection could be made."""
        self.late = late
        """Whether the response did not come in time."""


def failure_kind(why: str, *, connecting: bool) -> str:
    """Return the kind of a failure that :meth:`Sink.failed` reports, for counting."""
    if why == NO_FILES:
        return "no files"
    if connecting:
        return "connect timeout" if why.startswith(_CONNECT_TIMEOUT) else "connect"
    return "disconnected" if why == CLOSED else "malformed"


def _is_shortage(error: OSError) -> bool:
    """Whether no connection could be made because of this process, not of the server."""
    if error.errno in _SHORTAGES:
        return True
    try:  # resolving a name, or trying several addresses, hides the cause
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as other:
        return other.errno in _SHORTAGES
    return False


class Call:
    """One request of this process and its response, without a task or a timer.

    Subclasses override ``began``, ``received``, ``ended`` and ``broken``; exactly one of the last
    two is called, as the last. A request that went out on a kept connection which the server was
    just closing is sent again, once, on a new one.
    """

    __slots__ = ("_body", "_connection", "_head", "_heard", "_method", "_pool", "_sent_s", "over")

    def __init__(self, pool: "Pool", method: bytes, head: bytes, body: bytes) -> None:
        """``head``: the whole request head, see :meth:`Pool.head`."""
        self._pool = pool
        self._method, self._head, self._body = method, head, body
        self._connection: UpstreamConnection | None = None
        self._sent_s = 0.0
        self._heard = False
        self.over = False

    def start(self, *, fresh: bool = False) -> None:
        """Send the request; ``fresh``: on a new connection in any case."""
        connection = self._pool.acquire(self, fresh=fresh)
        if connection is not None:
            self.connected(connection)

    def cancel(self) -> None:
        """Break off without a further call."""
        self.over = True
        connection, self._connection = self._connection, None
        if connection is not None and connection.sink is self:
            connection.abort()

    def began(self, head: ResponseHead) -> None:
        """Take the head of the response."""

    def received(self, data: bytes) -> None:
        """Take a part of the body."""

    def ended(self) -> None:
        """Take note that the response is complete."""

    def broken(self, why: str, *, connecting: bool) -> None:
        """Take note that there will be no complete response."""

    # Called by the connection.

    def connected(self, connection: UpstreamConnection) -> bool:
        """Send the request on a connection; False: not wanted any more."""
        if self.over:
            return False
        self._connection = connection
        self._sent_s = time.monotonic()
        connection.send(self, self._method, self._head, self._body)
        return True

    def failed(self, why: str, *, connecting: bool) -> None:
        """Send again if the connection was stale, else report the failure."""
        if self.over:
            return
        connection, self._connection = self._connection, None
        stale = connection is not None and connection.reused and not self._heard
        if stale and time.monotonic() - self._sent_s < STALE_S:
            self.start(fresh=True)
            return
        self.over = True
        self.broken(why, connecting=connecting)

    def head(self, head: ResponseHead) -> None:
        """Report the head."""
        self._heard = True
        self.began(head)

    def body(self, raw: bytes, parts: list[bytes], done: bool) -> None:
        """Report parts of the body, and its end."""
        del raw
        if parts:
            self.received(parts[0] if len(parts) == 1 else b"".join(parts))
        if done and not self.over:
            self.over = True
            self._connection = None
            self.ended()

    def whole(self, head: ResponseHead, body: bytes) -> None:
        """Report a response that came in one piece."""
        self.head(head)
        self.body(body, [body], True)


class _Fetch(Call):
    """Collects a response for :meth:`Pool.fetch`."""

    def __init__(self, pool: "Pool", method: bytes, head: bytes, body: bytes) -> None:
        super().__init__(pool, method, head, body)
        self.future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._response = Response(0, {}, b"")
        self._parts: list[bytes] = []
        self._bytes = 0

    def began(self, head: ResponseHead) -> None:
        self._response.status, self._response.headers = head.status, head.lower

    def received(self, data: bytes) -> None:
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > MAX_FETCH_BYTES and not self.over:
            self.cancel()
            self.broken("the answer is too long", connecting=False)

    def ended(self) -> None:
        self._response.body = b"".join(self._parts)
        if not self.future.done():
            self.future.set_result(self._response)

    def broken(self, why: str, *, connecting: bool) -> None:
        if not self.future.done():
            self.future.set_exception(FetchError(why, connecting=connecting))


class Pool:
    """All connections to one server."""

    def __init__(
        self,
        origin: Origin,
        *,
        connect_s: float,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_idle: int = MAX_IDLE,
        tls: TlsContext | None = None,
        server_name: str = "",
    ) -> None:
        """``api_key``: sent as a bearer token, in place of any other Authorization.

        ``headers``: sent with every request of this process (not with those that are passed on).
        ``max_idle``: connections kept for later requests. ``tls``: for https; default: the system's
        authorities. ``server_name``: whose certificate the server must show, default: the host's.
        """
        self.origin = origin
        self.made = 0
        """Connections made so far."""
        self._headers = dict(headers or {})
        self._lines = b"".join(
            b"%b: %b\r\n" % (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in self._headers.items()
        )
        self._max_idle = max_idle
        self.heads = ResponseHeadCache()
        self._connect_s = connect_s
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = (tls or TlsContext(TlsFiles(), client_context)) if origin.tls else None
        self._server_name = (server_name or origin.host) if origin.tls else None
        self._host = origin.authority.encode()
        self._prefix = origin.prefix.encode()
        self._authorization = f"Bearer {api_key}".encode() if api_key else None
        self._closed = False
        self._starts: dict[tuple[RequestHead, bool, frozenset[bytes]], bytes] = {}

    @property
    def open(self) -> int:
        """Open connections, idle ones included."""
        return len(self._open)

    def request_head(
        self,
        request: RequestHead,
        body_bytes: int,
        request_id: bytes,
        *,
        keys: bool = True,
        lines: bytes = b"",
        dropped: frozenset[bytes] = NO_NAMES,
    ) -> bytes:
        """Build the head for a client's request that is passed on to this server.

        ``keys``: the client's own keys may be passed on, if this server has none of ours.
        ``lines``: further headers, each with CRLF before it. ``dropped``: lower-case names of
        headers that are not passed on.
        """
        # Most requests share their heads (head_cache.py), which makes this 1 us cheaper.
        start = self._starts.get((request, keys, dropped))
        if start is None:
            if len(self._starts) >= MAX_STARTS:
                self._starts.clear()
            start = self._starts[request, keys, dropped] = upstream_start(
                request, self._host, self._prefix, self._authorization, keys=keys, dropped=dropped
            )
        if body_bytes or request.sized:
            return b"%b%b%b\r\ncontent-length: %d\r\n\r\n" % (
                start, request_id, lines, body_bytes,
            )  # fmt: skip
        return b"%b%b%b\r\n\r\n" % (start, request_id, lines)

    def head(self, method: bytes, path: bytes, body_bytes: int, lines: bytes = b"") -> bytes:
        """Build the head of a request of this process; ``lines``: headers, each ended by CRLF."""
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%bcontent-length: %d\r\n\r\n" % (
            method, self._prefix, path, self._host, self._lines, lines, body_bytes,
        )  # fmt: skip

    def acquire(self, sink: Sink, *, fresh: bool = False) -> UpstreamConnection | None:
        """Return an idle connection, or None and call ``connected`` or ``failed`` later.

        ``fresh``: always make a new one.
        """
        now = time.monotonic()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if now - connection.idle_since < IDLE_S and connection.transport is not None:
                connection.reused = True
                return connection
            connection._close()
        task = asyncio.get_running_loop().create_task(self._connect(sink))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return None

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose response is complete."""
        if self._closed or len(self._idle) >= self._max_idle:
            connection._close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """Remove a connection that has ended."""
        self._open.discard(connection)
        if connection.sink is None and connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        old = [c for c in self._idle if now - c.idle_since >= IDLE_S]
        for connection in old:
            self._idle.remove(connection)
            connection._close()

    def close(self) -> None:
        """Close idle connections now, and the others when their responses end."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close connections that are kept for later requests."""
        for connection in self._idle:
            connection._close()
        self._idle.clear()

    def abort(self) -> None:
        """Close everything at once."""
        self.close()
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self._open):
            connection.abort()

    async def fetch(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float = 5.0,
    ) -> Response:
        """Send a request of this process and await its response; raise ``FetchError``."""
        request = RequestHead()
        request.method, request.target = method.encode(), path.encode()
        given = self._headers | (headers or {})
        request.headers = [(k.encode(), v.encode()) for k, v in given.items()]
        request.lower = {k.lower(): v for k, v in request.headers}
        head = self.request_head(request, len(body), b"tailrace")
        call = _Fetch(self, request.method, head, body)
        # A probe must not fail because an idle connection was just being closed.
        call.start(fresh=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.future
        except TimeoutError:
            raise FetchError(f"no answer within {timeout_s:g} s", late=True) from None
        finally:
            call.cancel()

    async def _connect(self, sink: Sink) -> None:
        loop = asyncio.get_running_loop()
        host, port, *_ = self.origin
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), host, port,
                    ssl=self._tls.context if self._tls is not None else None,
                    server_hostname=self._server_name,
                )  # fmt: skip
        except TimeoutError:
            sink.failed(f"{_CONNECT_TIMEOUT} {self._connect_s:g} s", connecting=True)
            return
        except OSError as error:
            why = NO_FILES if _is_shortage(error) else f"cannot connect: {explain(error)}"
            if why is NO_FILES:
                self.close_idle()
            sink.failed(why, connecting=True)
            return
        except Exception as error:  # the sink waits for an answer, whatever happens here
            _log.exception("cannot connect")
            sink.failed(f"cannot connect: {error}", connecting=True)
            return
        self._open.add(connection)
        self.made += 1
        if not sink.connected(connection):
            self.release(connection)
