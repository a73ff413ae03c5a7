"""Server side of HTTP: reads requests from a connection one by one, and writes responses.

A connection handles one request at a time. What a client sends meanwhile waits in a small buffer,
and beyond that in the client. Time limits are checked by :meth:`ClientConnection.check`, which the
service calls a few times per second for all connections: that is cheaper than a timer for each.
"""

import asyncio
import logging
from typing import Protocol, cast

import orjson

from tailrace.net.framing import (
    BodyReader,
    BrokenMessageError,
    ChunkedReader,
    LengthReader,
    is_token,
)
from tailrace.net.head_cache import RequestHeadCache, length_in
from tailrace.net.heads import RefusedError, RequestHead, build_response
from tailrace.net.limits import ConnectionLimits

#: What a client may send ahead of the responses, in bytes.
AHEAD_BYTES = 65_536
#: How long a refused client's further bytes are discarded, so that it can read the response, in s.
LINGER_S = 2.0

_log = logging.getLogger("tailrace.router")


class HttpRequest:
    """A complete request."""

    __slots__ = ("body", "client", "head", "path")

    def __init__(self, head: RequestHead, body: bytes, client: "ClientConnection") -> None:
        self.head = head
        self.body = body
        self.client = client
        self.path = head.path
        """Target without its query."""


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
    now: float
    """Coarse clock, s."""

    @property
    def limits(self) -> ConnectionLimits:
        """Limits of each connection; they may change between two requests."""

    def opened(self, client: "ClientConnection") -> bool:
        """Register a connection; return False if there are too many."""

    def closed(self, client: "ClientConnection") -> None:
        """Forget a connection that has ended."""

    def handle(self, request: HttpRequest) -> Work | None:
        """Start handling a request; None: it has been responded to."""

    def refused(self, status: int, why: str) -> None:
        """Count a request that was not accepted."""


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = ("_ahead", "_body_bytes", "_closing", "_deadline", "_head", "_last", "_parts",
                 "_reader", "_reading", "_service", "_stalled_at", "_transport", "_work",
                 "busy")  # fmt: skip

    internal_error = "internal error of the router"
    """Message of the response to a request that could not be handled."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._work: Work | None = None
        self.busy = False
        """Whether a request is being handled."""
        self._ahead = b""
        self._head: RequestHead | None = None
        self._last: tuple[bytes, bytes, RequestHead] | None = None  # the head before, for the cache
        self._reader: BodyReader | None = None
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._reading = False
        self._closing = False
        self._stalled_at = 0.0
        self._deadline = 0.0

    # Called by the service.

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write a part of the response."""
        if self._transport is not None:
            self._transport.write(data)

    def end(self, *, keep: bool) -> None:
        """End the response; then take the next request, or close."""
        self.busy = False
        self._work = None
        if self._transport is None:
            return
        if not keep or self._closing:
            self._closing = True
            self._transport.close()
            return
        self._deadline = self._service.now + self._service.limits.idle_s
        if self._ahead and not self._reading:
            data, self._ahead = self._ahead, b""
            self._transport.resume_reading()
            self._read(data)

    def abort(self) -> None:
        """Reset the connection, so that the client sees that its response is incomplete."""
        self.busy = False
        self._work = None
        self._ahead = b""
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
    def has_next(self) -> bool:
        """Whether :meth:`end` would handle another request before it returns."""
        return bool(self._ahead) and not self._reading

    @property
    def closing(self) -> bool:
        """Whether the current request is the last one of this connection."""
        return self._closing

    def check(self, now: float) -> None:
        """Enforce the time limits at ``now`` (s)."""
        if self._stalled_at:
            if now - self._stalled_at > self._service.limits.client_stall_s:
                self.give_up()
            return
        if self.busy or now < self._deadline or self._transport is None:
            return
        if self._closing or (self._head is None and not self._ahead):
            self._transport.close()
        else:
            self._refuse(408, "the request did not arrive in time")

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
        self._service.closed(self)
        work, self._work = self._work, None
        self.busy = False
        if work is not None:
            work.client_gone()

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        if self._closing and not self.busy:
            return  # lingering
        if self.busy:
            self._ahead += data
            if len(self._ahead) > AHEAD_BYTES and self._transport is not None:
                self._transport.pause_reading()
            return
        self._read(data)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self._stalled_at = self._service.now
        if self._work is not None:
            self._work.client_slow()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stalled_at = 0.0
        if self._work is not None:
            self._work.client_ready()

    def _read(self, data: bytes) -> None:
        """Read requests from the data until one has to wait."""
        self._reading = True
        try:
            while data and not self.busy and not self._closing:
                reader = self._reader
                if reader is None:
                    data = self._read_head(data)
                    continue
                end, parts = reader.feed(data)
                self._take(parts)
                data = data[end:] if end < len(data) else b""
                if reader.done:
                    self._complete()
        except RefusedError as refused:
            self._refuse(refused.status, refused.why)
            return
        except BrokenMessageError as broken:
            self._refuse(400, str(broken))
            return
        finally:
            self._reading = False
        if self.busy:
            self._ahead = data

    def _read_head(self, data: bytes) -> bytes:
        """Read a head; return what follows it, or nothing if it is incomplete."""
        limits = self._service.limits
        before = len(self._ahead)
        if self._last is not None and not before:
            # Most heads of a client equal the one before.
            end, length = length_in(data, self._last[0], self._last[1])
            if 0 < end <= limits.header_bytes:
                return self._begin(self._last[2], length, data, end)
        if before:
            data, self._ahead = self._ahead + data, b""
        else:
            self._deadline = self._service.now + limits.header_s
        while data.startswith(b"\r\n"):
            data = data[2:]  # some clients add an empty line after a body
            before = 0
        end = data.find(b"\r\n\r\n", max(0, before - 3)) + 4
        if end < 4:
            if len(data) > limits.header_bytes:
                raise RefusedError(431, "the request head is too long")
            if b"\n\n" in data or b"\0" in data:
                raise RefusedError(400, "malformed request")
            if data not in (b"", b"\r") and not is_token(data[:1]):
                raise RefusedError(400, "malformed request")  # TLS, for instance
            self._ahead = data
            return b""
        if end > limits.header_bytes:
            raise RefusedError(431, "the request head is too long")
        heads = self._service.heads
        head, length = heads.read(data[:end])
        self._last = heads.last
        return self._begin(head, length, data, end)

    def _begin(self, head: RequestHead, length: int, data: bytes, end: int) -> bytes:
        """Start with a head; ``data`` from ``end`` on follows it.

        Return what follows the request if its body is complete, else the part of the body received.
        """
        limits = self._service.limits
        rest = data[end:] if end < len(data) else b""
        if not head.chunked and len(rest) >= length <= limits.body_bytes:
            # The usual case: the whole body came with the head.
            if len(rest) == length:
                self._dispatch(head, rest)
                return b""
            self._dispatch(head, rest[:length])
            return rest[length:]
        self._head = head
        if length > limits.body_bytes:
            raise RefusedError(413, f"the request body is longer than {limits.body_bytes} bytes")
        self._reader = ChunkedReader() if head.chunked else LengthReader(length)
        self._deadline = self._service.now + limits.body_s
        if head.expects_continue and not rest:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return rest

    def _take(self, parts: list[bytes]) -> None:
        limits = self._service.limits
        for part in parts:
            self._body_bytes += len(part)
        if self._body_bytes > limits.body_bytes:
            raise RefusedError(413, f"the request body is longer than {limits.body_bytes} bytes")
        self._parts += parts
        self._deadline = self._service.now + limits.body_s

    def _complete(self) -> None:
        """Dispatch a request whose body came in several pieces."""
        head, parts = self._head, self._parts
        assert head is not None
        self._head = self._reader = None
        self._parts = []
        self._body_bytes = 0
        self._dispatch(head, parts[0] if len(parts) == 1 else b"".join(parts))

    def _dispatch(self, head: RequestHead, body: bytes) -> None:
        """Pass a request to the service."""
        self.busy = True
        try:
            work = self._service.handle(HttpRequest(head, body, self))
        except Exception:
            _log.exception("a request was not handled")
            self.respond(head, 500, self.error_body(500, self.internal_error), keep=False)
            return
        if self.busy:
            self._work = work

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

    def error_body(self, status: int, why: str) -> bytes:
        """Build the body of an error response of this connection."""
        return error_body(status, why)

    def _refuse(self, status: int, why: str, extra: bytes = b"") -> None:
        """Respond with an error and read no more: the end of this request is unknown."""
        self._service.refused(status, why)
        self._closing = True
        self._ahead = b""
        self._parts = []
        self._head = self._reader = None
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body = self.error_body(status, why)
        transport.write(build_response(status, body, keep_alive=False, extra=extra))
        # Closing now, with bytes unread, would make the kernel discard the response.
        if transport.can_write_eof():
            transport.write_eof()
        self._deadline = self._service.now + LINGER_S


_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    413: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
}  # fmt: skip


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """Build an error body in OpenAI's form."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": code or str(status)}}
    )
