"""Client connections of emulated servers, on the HTTP server in :mod:`tailrace.net`."""

from dataclasses import dataclass, field
from typing import Any

import orjson

from tailrace.net.byte_budget import ByteBudget
from tailrace.net.framing import LAST_CHUNK
from tailrace.net.head_cache import RequestHeadCache
from tailrace.net.heads import RequestHead
from tailrace.net.limits import ConnectionLimits
from tailrace.net.server import ClientConnection, HttpRequest, Work

JSON_TYPE = b"application/json"
SERVER_LINE = b"server: tailrace-emulate\r\n"
#: Clients of an emulated server may take their time: only sizes are limited.
LIMITS = ConnectionLimits(
    header_bytes=65_536,
    body_bytes=64 * 2**20,
    bodies_bytes=2**40,
    connections=1_000_000,
    header_s=1e6,
    body_s=1e6,
    idle_s=1e6,
    client_stall_s=1e6,
)


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


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, or raise the ApiError vLLM would respond with."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"JSON decode error: {error}", "Bad Request") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", "Bad Request")
    return value


class EmulatedConnection(ClientConnection):
    """A client connection whose responses have vLLM's form."""

    internal_error = "internal error of the emulated server"

    def error_body(self, status: int, why: str, code: str | None = None) -> bytes:
        """Build the body of an error found while reading a request."""
        del code
        return ApiError(status, why).body()

    def reply(
        self, head: RequestHead, status: int, body: bytes, content_type: bytes = JSON_TYPE
    ) -> None:
        """Send a complete response."""
        self.respond(head, status, body, content_type=content_type, extra=SERVER_LINE)

    def reply_json(self, head: RequestHead, value: Any) -> None:
        """Send a value as JSON."""
        self.reply(head, 200, orjson.dumps(value))

    def start_stream(self, head: RequestHead) -> None:
        """Send the head of an event stream; its body is chunked unless the client is HTTP/1.0."""
        framing = b"connection: close\r\n" if head.http10 else b"transfer-encoding: chunked\r\n"
        if not head.http10 and not head.keep_alive:
            framing += b"connection: close\r\n"
        self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n%b%b\r\n"
            % (SERVER_LINE, framing)
        )

    def end_stream(self, head: RequestHead, data: bytes) -> None:
        """Send the last part of an event stream, framed like the others, and end the response."""
        self.write(data if head.http10 else data + LAST_CHUNK)
        self.end(keep=head.keep_alive and not head.http10)


class Listener:
    """Accepts the connections of one port; subclasses respond to requests."""

    limits = LIMITS

    def __init__(self) -> None:
        self.heads = RequestHeadCache()
        self.held = ByteBudget()
        self.now = 0.0
        """Seconds since the start, as of the last :meth:`sweep`."""
        self.connections: set[ClientConnection] = set()

    def connect(self) -> EmulatedConnection:
        """Make the protocol of a new connection."""
        return EmulatedConnection(self)

    def opened(self, client: ClientConnection) -> bool:
        """Register a new connection; all are accepted."""
        self.connections.add(client)
        return True

    def closed(self, client: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self.connections.discard(client)

    def refused(self, status: int, why: str) -> None:
        """Requests that cannot be read are not counted."""

    def check_head(self, head: RequestHead) -> None:
        """All bodies are read."""

    def handle(self, request: HttpRequest) -> Work | None:
        """Respond now, or return what will respond later."""
        client = request.client
        assert isinstance(client, EmulatedConnection)
        try:
            return self.respond(client, request)
        except ApiError as error:
            client.reply(request.head, error.status, error.body())
            return None

    def respond(self, client: EmulatedConnection, request: HttpRequest) -> Work | None:
        """Respond as :meth:`handle`, or raise ApiError to refuse."""
        raise NotImplementedError

    def sweep(self, now: float) -> None:
        """Close refused connections whose clients keep them open; ``now``: s since the start."""
        self.now = now
        for client in tuple(self.connections):
            client.check(now)

    def drop_all(self) -> None:
        """Close all connections at once."""
        for client in tuple(self.connections):
            client.abort()
