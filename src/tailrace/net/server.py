"""Server side of HTTP: reads requests from a connection one by one, and writes responses.

A connection handles one request at a time, and begins one per turn of the event loop. What a client
sends meanwhile waits in a small buffer, and beyond that in the client; so does a client that leaves
its responses unread. Time limits are checked by :meth:`ClientConnection.check`, which the
service calls a few times per second for all connections: that is cheaper than a timer for each.
"""

import asyncio
import logging
import select
from collections.abc import Mapping
from typing import Protocol, cast

import orjson

from tailrace.net.byte_budget import ByteBudget
from tailrace.net.chunk_kernel import RequestChunks
from tailrace.net.framing import BrokenMessageError, LengthReader, is_token
from tailrace.net.head_cache import RequestHeadCache, length_in
from tailrace.net.heads import RefusedError, RequestHead, build_response
from tailrace.net.limits import ConnectionLimits

#: What a client may send ahead of the responses, in bytes.
AHEAD_BYTES = 65_536
#: How long a refused client's further bytes are discarded, so that it can read the response, in s.
LINGER_S = 2.0
#: When a client may have gone unnoticed: how long until it is probed, in s.
PROBE_S = 1.0
#: Bytes of a body after which other connections have their turn.
TURN_BYTES = 65_536
#: Maximum framing of a chunked body: bytes in total, plus bytes per byte of data.
MAX_FRAMING_BYTES, MAX_FRAMING_SHARE = 16_384, 16
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TOO_MUCH = "too many request bodies at once"
_LINE_END = b"\r\n"

_log = logging.getLogger("tailrace.router")


class HttpRequest:
    """A complete request."""

    __slots__ = ("body", "client", "head")

    def __init__(self, head: RequestHead, body: bytes, client: "ClientConnection") -> None:
        self.head = head
        self.body = body
        self.client = client

    @property
    def path(self) -> bytes:
        """Target without its query."""
        return self.head.path

    @property
    def lower(self) -> Mapping[bytes, bytes]:
        """Its headers, with names in lower case."""
        return self.head.lower

    def failed(self) -> None:
        """Respond with an error of ours, for a bug or a lack of memory."""
        self.client.failed(self.head)

    def drop_body(self) -> None:
        """Free the body: it will not be sent (again)."""
        if self.body:
            self.body = b""
            self.client.hold(0)


class Work(Protocol):
    """A request that is being handled, as its connection sees it."""

    def client_gone(self) -> None:
        """Stop: the client has disconnected."""

    def client_slow(self) -> None:
        """Stop writing until ``client_ready``."""

    def client_ready(self) -> None:
        """Resume writing."""


class Service(Protocol):
    """Handles the requests of a listener's connections."""

    heads: RequestHeadCache
    held: ByteBudget
    """Bytes of requests that are held, all connections together."""
    now: float
    """Coarse clock, s."""

    @property
    def limits(self) -> ConnectionLimits:
        """Limits of each connection; they may change between two requests."""

    def opened(self, client: "ClientConnection") -> bool:
        """Register a connection; return False if there are too many."""

    def closed(self, client: "ClientConnection") -> None:
        """Forget a connection that has ended."""

    def check_head(self, head: RequestHead) -> None:
        """Raise ``RefusedError`` if a request is not served; called before its body is read."""

    def handle(self, request: HttpRequest) -> Work | None:
        """Start handling a request; None: it has been responded to."""

    def refused(self, status: int, why: str) -> None:
        """Count a request that was not accepted."""


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = ("_ahead", "_answering", "_blank", "_body", "_body_held", "_closing", "_deadline",
                 "_eof", "_head", "_last", "_paused", "_probe_at", "_reader",
                 "_reading", "_scheduled", "_service", "_stalled", "_stalled_at", "_suspect_at",
                 "_transport",
                 "_work", "busy", "held", "probing")  # fmt: skip

    internal_error = "internal error of the router"
    """Message of the response to a request that could not be handled."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._work: Work | None = None
        self.busy = False
        """Whether a request is being handled."""
        self.held = 0
        """Bytes of requests it holds, see :class:`ByteBudget`."""
        self.probing = False
        """Whether the client may have gone, which only writing to it can show: see ``check``."""
        self._ahead = b""  # an incomplete head, or what follows the request being handled
        self._blank = 0  # bytes of empty lines before the head
        self._head: RequestHead | None = None  # of the request being received or handled
        self._last: tuple[bytes, bytes, RequestHead] | None = None  # the head before, for the cache
        self._reader: RequestChunks | LengthReader | None = None
        self._body = bytearray()
        self._body_held = 0
        self._answering = False  # a byte of the response was written
        self._reading = False
        self._scheduled = False  # the next request will be read in the next turn of the loop
        self._closing = False
        self._paused = False  # nothing is read from the client
        self._stalled = False  # the client does not read its responses
        self._stalled_at = 0.0
        self._eof = False  # all that the client has sent was read
        self._suspect_at: float | None = None  # since when the client may have gone
        self._probe_at = 0.0
        self._deadline = 0.0

    # Called by the service.

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""
        return self._transport is None or self._transport.is_closing()

    @property
    def host(self) -> str:
        """Address of the client's machine, empty if unknown."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    def write(self, data: bytes) -> None:
        """Write a part of the response."""
        if self._transport is not None:
            self._answering = True
            self._transport.write(data)

    def end(self, *, keep: bool) -> None:
        """End the response; then take the next request, or close.

        The next one is begun in a later turn of the loop: no client can keep it for itself by
        sending many requests at once.
        """
        self.busy = self.probing = False
        self._work = None
        self._head = None
        transport = self._transport
        if transport is None:
            return
        if not keep or self._closing:
            self._closing = True
            self._ahead = b""
            self.hold(0)
            transport.close()
            return
        if self.held or self._body_held:
            self.hold(0)
        self._deadline = self._service.now + self._service.limits.idle_s
        if self._reading:
            return
        if self._ahead:
            self._schedule()
        elif self._eof:
            transport.close()

    def abort(self) -> None:
        """Reset the connection, so that the client sees that its response is incomplete."""
        self.busy = self.probing = False
        self._work = None
        self._ahead = b""
        self.hold(0)
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Stop the current request and reset the connection."""
        work = self._work
        self.abort()
        if work is not None:
            work.client_gone()

    def shutdown(self) -> None:
        """Close once no request is being handled."""
        self._closing = True
        if not self.busy and self._transport is not None:
            self._transport.close()

    @property
    def closing(self) -> bool:
        """Whether the current request is the last one of this connection."""
        return self._closing

    def check(self, now: float) -> None:
        """Enforce the time limits at ``now`` (s)."""
        if self._stalled and now - self._stalled_at > self._service.limits.client_stall_s:
            self.give_up()
            return
        if self._suspect_at is not None:
            self._check_peer(now, self._suspect_at)
        if self.busy or self._stalled or now < self._deadline or self._transport is None:
            return
        if self._closing or (self._head is None and not self._ahead and not self._blank):
            self._transport.close()
        else:
            self._refuse(408, "the request did not arrive in time")

    def _check_peer(self, now: float, since: float) -> None:
        """Probe whether a client that half-closed, or whose data is not being read, has gone.

        A closed connection and a half-closed one look alike until something is written: only the
        closed one is reset. Before the response begins we write a 100 Continue, which clients
        ignore; in a stream, the handler writes a comment (``probing``).
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if _is_reset(transport):
            self.give_up()
        elif self.busy and now >= self._probe_at:
            self._probe_at = now + max(PROBE_S, now - since)  # less and less often
            if self._answering:
                self.probing = True
            elif self._head is not None and not self._head.http10:
                transport.write(CONTINUE)

    def _suspect(self) -> None:
        """Take note that a client may go without being noticed."""
        if self._suspect_at is None:
            self._suspect_at = self._service.now
            self._probe_at = self._suspect_at + PROBE_S

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the client, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if not self._service.opened(self):
            self._refuse(503, "too many connections", b"retry-after: 1\r\n")
            self._transport.close()
            return
        self._deadline = self._service.now + self._service.limits.header_s

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the current request."""
        del exc
        self._transport = None
        self._ahead = b""
        self._drop_upload()
        self._service.closed(self)
        work, self._work = self._work, None
        self.busy = self.probing = False
        if work is not None:
            work.client_gone()

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        if self._closing and not self.busy:
            return  # lingering
        if self.busy or self._scheduled or self._stalled:
            self._keep_ahead(self._ahead + data)
            return
        self._read(data)

    def eof_received(self) -> bool:
        """Respond to what a client has sent before it ended its side of the connection."""
        if self._closing and not self.busy:
            return False
        if self._transport is None or self._transport.get_extra_info("sslcontext") is not None:
            return False  # TLS has no half-open connections
        self._eof = True
        self._suspect()
        if self.busy or self._scheduled or self._stalled:
            return True
        return self._ended_early()

    def _ended_early(self) -> bool:
        """Respond to a client that has ended its side; False: it has sent nothing."""
        if self._head is None and not self._ahead:
            return False
        self._refuse(400, "the request ended before it was complete")
        return True

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self._stalled = True
        self._stalled_at = self._service.now
        if self._work is not None:
            self._work.client_slow()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stalled = False
        if self._work is not None:
            self._work.client_ready()
        elif self._ahead and not self.busy and not self._reading:
            self._schedule()

    def _schedule(self) -> None:
        """Read what has come ahead in the next turn of the loop, unless the client is slow."""
        if not self._scheduled and not self._stalled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Read the next request from what has come ahead."""
        self._scheduled = False
        transport = self._transport
        if transport is None or transport.is_closing() or self.busy or self._closing:
            return
        if self._stalled:
            return  # resume_writing goes on
        data, self._ahead = self._ahead, b""
        self.hold(0)
        if self._paused:
            self._paused = False
            if not self._eof:
                self._suspect_at = None
                transport.resume_reading()
        self._read(data)
        waits = self.busy or self._scheduled or self._stalled
        if self._eof and not waits and not self._closing and not self._ended_early():
            transport.close()

    def _keep_ahead(self, data: bytes) -> None:
        """Keep what has come ahead of its turn; beyond AHEAD_BYTES, read no more."""
        self._ahead = data
        if not self.hold(self._body_held):
            self._ahead = b""  # these requests are not begun; clients repeat them
            self._closing = True
            self.hold(self._body_held)
            if not self.busy and self._transport is not None:
                self._transport.close()
            return
        if len(data) > AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._suspect()
            if not self._eof:
                self._transport.pause_reading()

    def _read(self, data: bytes) -> None:
        """Read from the data until a request is complete; the rest waits."""
        self._reading = True
        try:
            while data and not self._closing:
                reader = self._reader
                if reader is None:
                    data, complete = self._read_head(data)
                else:
                    data, complete = self._read_body(data, reader)
                if complete:
                    break
        except RefusedError as refused:
            extra = b"retry-after: 1\r\n" if refused.status == 503 else refused.headers
            self._refuse(refused.status, refused.why, extra, refused.code)
            return
        except BrokenMessageError as broken:
            self._refuse(400, str(broken))
            return
        finally:
            self._reading = False
        if data and not self._closing:
            self._keep_ahead(data)
            if not self.busy:
                self._schedule()

    def _read_head(self, data: bytes) -> tuple[bytes, bool]:
        """Read a head; return what follows it, and whether its request is complete."""
        limits = self._service.limits
        before = len(self._ahead)
        if self._last is not None and not before and not self._blank:
            # Most heads of a client equal the one before.
            end, length = length_in(data, self._last[0], self._last[1])
            if 0 < end <= limits.header_bytes:
                return self._begin(self._last[2], length, data, end)
        if before:
            data, self._ahead = self._ahead + data, b""
        elif not self._blank:
            self._deadline = self._service.now + limits.header_s
        if data[0] in _LINE_END:
            data, before = self._skip_blank(data), 0
        end = data.find(b"\r\n\r\n", max(0, before - 3)) + 4
        if end < 4:
            if len(data) + self._blank > limits.header_bytes:
                raise RefusedError(431, "the request head is too long")
            if b"\n\n" in data or b"\0" in data:
                raise RefusedError(400, "malformed request")
            if data not in (b"", b"\r") and not is_token(data[:1]):
                raise RefusedError(400, "malformed request")  # TLS, for instance
            self._ahead = data
            return b"", False
        if end + self._blank > limits.header_bytes:
            raise RefusedError(431, "the request head is too long")
        self._blank = 0
        heads = self._service.heads
        head, length = heads.read(data[:end])
        self._last = heads.last
        return self._begin(head, length, data, end)

    def _skip_blank(self, data: bytes) -> bytes:
        """Skip empty lines before a head: some clients add one after a body.

        They count as bytes of the head, and the time for the head runs from the first of them.
        """
        rest = data.lstrip(b"\r\n")
        lines = data[: len(data) - len(rest)]
        if not rest and lines.endswith(b"\r"):
            rest, lines = b"\r", lines[:-1]  # the line may be complete with the next byte
        if lines != b"\r\n" * (len(lines) // 2):
            raise RefusedError(400, "malformed request")
        self._blank += len(lines)
        return rest

    def _begin(self, head: RequestHead, length: int, data: bytes, end: int) -> tuple[bytes, bool]:
        """Start with a head; ``data`` from ``end`` on follows it.

        Return what follows the request and True if its body is complete, else the part of the body
        that has come and False.
        """
        limits = self._service.limits
        rest = data[end:] if end < len(data) else b""
        if not head.chunked and len(rest) >= length <= limits.body_bytes:
            # The usual case: the whole body came with the head.
            if len(rest) == length:
                self._dispatch(head, rest)
                return b"", True
            self._dispatch(head, rest[:length])
            return rest[length:], True
        self._head = head
        if length > limits.body_bytes:
            raise RefusedError(413, f"the request body is longer than {limits.body_bytes} bytes")
        self._service.check_head(head)
        self._reader = RequestChunks() if head.chunked else LengthReader(length)
        self._service.held.receiving.add(self)
        self._deadline = self._service.now + limits.body_s
        if head.expects_continue and not rest and self._transport is not None:
            self._transport.write(CONTINUE)
        return rest, False

    def _read_body(self, data: bytes, reader: "RequestChunks | LengthReader") -> tuple[bytes, bool]:
        """Read a piece of the body; return what follows the request, and whether it is complete."""
        limits, body = self._service.limits, self._body
        if isinstance(reader, LengthReader):
            end, (part,) = reader.feed(data)
        else:
            end, part = reader.feed(data)
            if reader.announced > limits.body_bytes:
                raise RefusedError(
                    413, f"the request body is longer than {limits.body_bytes} bytes"
                )
            if reader.framing > MAX_FRAMING_BYTES + MAX_FRAMING_SHARE * (len(body) + len(part)):
                raise RefusedError(400, "the chunks are smaller than their framing")
        if not reader.done:
            body += part
            if not self.hold(len(body)):
                raise RefusedError(503, TOO_MUCH)
            if len(data) > TURN_BYTES:
                self._end_turn()
            return b"", False
        head = self._head
        assert head is not None
        whole = part
        if body:
            body += part
            whole = bytes(body)
        self._drop_upload()
        self._dispatch(head, whole)
        return data[end:] if end < len(data) else b"", True

    def _end_turn(self) -> None:
        """Read no more of a body in this turn of the event loop: uvloop would, up to 32 times."""
        if self._transport is not None and not self._paused:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        transport = self._transport
        if transport is not None and not (transport.is_closing() or self._paused or self._eof):
            transport.resume_reading()

    def hold(self, body_bytes: int) -> bool:
        """Count the bytes of the body, and what has come ahead; False: it is too much."""
        self._body_held = body_bytes
        service = self._service
        size = body_bytes + len(self._ahead) if self._ahead else body_bytes
        more = size - self.held
        if more > 0:
            return service.held.hold(self, size, service.limits.bodies_bytes)
        if more:
            service.held.used += more
            self.held = size
        return True

    def _drop_upload(self) -> None:
        """Forget the request that is being received."""
        if self._reader is not None:
            self._service.held.receiving.discard(self)
            self._head = self._reader = None
            self._body = bytearray()
        self.hold(0)

    def evict(self) -> None:
        """Refuse the request that is being received, to make room for others."""
        self._refuse(503, TOO_MUCH, b"retry-after: 1\r\n")

    def _dispatch(self, head: RequestHead, body: bytes) -> None:
        """Pass a request to the service."""
        self.busy = True
        self._answering = False
        self._head = head
        if body and not self.hold(len(body)):
            self.hold(0)
            self._service.refused(503, TOO_MUCH)
            self.respond(head, 503, self.error_body(503, TOO_MUCH), extra=b"retry-after: 1\r\n")
            return
        try:
            work = self._service.handle(HttpRequest(head, body, self))
        except Exception:
            self.failed(head)
            return
        if self.busy:
            self._work = work

    def failed(self, head: RequestHead) -> None:
        """Log the exception that is being handled, and respond with status 500."""
        _log.exception("a request was not handled")
        self.respond(head, 500, self.error_body(500, self.internal_error), keep=False)

    def respond(
        self,
        head: RequestHead,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
        keep: bool = True,
    ) -> None:
        """Write a complete response to the current request, and end it."""
        keep = keep and head.keep_alive and not self._closing
        self.write(
            build_response(
                status,
                body,
                content_type=content_type,
                keep_alive=keep,
                http10=head.http10,
                head_only=head.method == b"HEAD",
                extra=extra,
            )
        )
        self.end(keep=keep)

    def error_body(self, status: int, why: str, code: str | None = None) -> bytes:
        """Build the body of an error response of this connection."""
        return error_body(status, why, code)

    def _refuse(self, status: int, why: str, extra: bytes = b"", code: str | None = None) -> None:
        """Respond with an error and read no more: the end of this request is unknown."""
        self._service.refused(status, why)
        self._closing = True
        self._ahead = b""
        self._drop_upload()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body = self.error_body(status, why, code)
        transport.write(build_response(status, body, keep_alive=False, extra=extra))
        if self._eof:
            transport.close()
            return
        # Closing now, with bytes unread, would make the kernel discard the response.
        if transport.can_write_eof():
            transport.write_eof()
        self._deadline = self._service.now + LINGER_S


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other side has reset the connection, also while nothing is read from it."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poller = select.poll()
    poller.register(sock.fileno(), 0)
    return bool(poller.poll(0))  # errors are reported in any case


_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
}  # fmt: skip


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> bytes:
    """Build an error body in OpenAI's form; ``param``: the part of the request it is about."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code or str(status)}
    return orjson.dumps({"error": error})
