"""The HTTP/1.1 side of emulated servers: one connection, one exchange at a time."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools
import orjson

MAX_BODY_BYTES = 64 * 2**20
JSON_TYPE = "application/json"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class HttpRequest:
    """A request that has been read completely."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    """Names in lower case; of repeated ones the last."""
    body: bytes = b""
    keep_alive: bool = True
    chunked: bool = True
    """Whether its client understands chunks (HTTP/1.1)."""
    is_too_long: bool = False


class Handler(Protocol):
    """Answers requests."""

    def handle(self, connection: "Connection", request: HttpRequest) -> None:
        """Answer now or later through ``connection``; raise ApiError to refuse."""

    def opened(self, connection: "Connection") -> None:
        """A client has connected."""

    def closed(self, connection: "Connection") -> None:
        """A connection is no more, whoever closed it."""


@dataclass
class ApiError(Exception):
    """A request that is refused, with an error body like vLLM's."""

    status: int
    message: str
    kind: str = field(default="BadRequestError")

    def body(self) -> bytes:
        """Return the error as JSON."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return orjson.dumps({"error": error})


class Connection(asyncio.Protocol):
    """One client connection. Requests that come before the last is answered wait."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self._active: HttpRequest | None = None
        self._incoming = HttpRequest("", "", {})
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._url = b""
        self.transport: asyncio.Transport | None = None

    # ---- from the network -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of a new connection."""
        self.transport = cast(asyncio.Transport, transport)
        self._handler.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what was asked for."""
        del exc
        self.transport = None
        self._waiting.clear()
        self._handler.closed(self)

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(ApiError(400, "upgrades are not supported"))
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "Invalid HTTP request received."))

    # ---- from the parser ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A new request begins."""
        self._incoming = HttpRequest("", "", {})
        self._body.clear()
        self._body_bytes = 0
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """(A part of) the address has come."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come."""
        self._incoming.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The client may wait for permission to send a long body."""
        if self._incoming.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """A part of the body has come."""
        self._body_bytes += len(data)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """A request is complete."""
        request = self._incoming
        request.method = self._parser.get_method().decode("latin-1")
        request.path = self._url.partition(b"?")[0].decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        request.chunked = self._parser.get_http_version() == "1.1"
        request.body = b"".join(self._body)
        request.is_too_long = self._body_bytes > MAX_BODY_BYTES
        self._waiting.append(request)
        if self._active is None:
            self._next()

    # ---- to the network -------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes as they are; nothing happens if the client has gone."""
        if self.transport is not None:
            self.transport.write(data)

    def reply(
        self, status: int, body: bytes, content_type: str = JSON_TYPE, *, close: bool = False
    ) -> None:
        """Send a complete answer."""
        head = _head(status, content_type) + f"content-length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)
        if close and self._active is not None:
            self._active.keep_alive = False
        self.finish()

    def reply_json(self, value: Any) -> None:
        """Send a value as JSON."""
        self.reply(200, orjson.dumps(value))

    def start_stream(self) -> bool:
        """Send the head of a stream of events; returns whether its parts must be framed."""
        assert self._active is not None
        head = _head(200, "text/event-stream; charset=utf-8")
        framed = self._active.chunked
        if not framed:
            self._active.keep_alive = False
        self.write((head + ("transfer-encoding: chunked\r\n\r\n" if framed else "\r\n")).encode())
        return framed

    def finish(self) -> None:
        """The answer is complete: go on with the next request, or close."""
        request, self._active = self._active, None
        if self.transport is None:
            return
        if request is not None and not request.keep_alive:
            self.transport.close()
        elif self._waiting:
            # Not at once: this may run in the middle of a replica's iteration.
            self._loop.call_soon(self._next)

    def close(self) -> None:
        """Close when everything has been sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once, unsent bytes are lost."""
        if self.transport is not None:
            self.transport.abort()

    # ---- one after another ----------------------------------------------------------------------

    def _next(self) -> None:
        if self._active is not None or not self._waiting or self.transport is None:
            return
        request = self._active = self._waiting.popleft()
        try:
            if request.is_too_long:
                raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
            self._handler.handle(self, request)
        except ApiError as error:
            self.reply(error.status, error.body())

    def _refuse(self, error: ApiError) -> None:
        """What came is not HTTP: say so after what is being answered, and close."""
        if self.transport is None:
            return
        if self._active is None:
            self.reply(error.status, error.body(), close=True)
        self.transport.close()


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, or raise the ApiError vLLM would answer with."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"JSON decode error: {error}", "Bad Request") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", "Bad Request")
    return value


def _head(status: int, content_type: str) -> str:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"
    return (
        f"HTTP/1.1 {status} {phrase}\r\nserver: tailrace-emulate\r\n"
        f"content-type: {content_type}\r\n"
    )
