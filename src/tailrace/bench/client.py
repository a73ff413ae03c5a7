"""A light HTTP/1.1 client: connections that are kept, one exchange at a time on each.

Written for thousands of streams on one core: no task and no timer per request.
"""

import asyncio
import ssl
import time
from collections import deque
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tailrace.errors import TailraceError

CONNECT_TIMEOUT_S = 10.0
#: A kept connection that is lost this soon was closed by the server before the request came.
STALE_S = 0.1


class Exchange(Protocol):
    """What becomes of a request; exactly one of ``ended`` and ``failed`` comes, as the last."""

    def head(self, code: int, headers: dict[bytes, bytes]) -> None:
        """The head of the answer has come; names of headers are in lower case."""

    def body(self, data: bytes) -> None:
        """A part of the answer has come."""

    def ended(self) -> None:
        """The answer is complete."""

    def failed(self, kind: str) -> None:
        """There will be no complete answer."""


class Sending:
    """A request on its way; it can be given up."""

    __slots__ = ("connection", "exchange", "request")

    def __init__(self, request: bytes, exchange: Exchange) -> None:
        self.request = request
        self.exchange: Exchange | None = exchange
        self.connection: _Connection | None = None

    def fail(self, kind: str) -> None:
        """Report a failure, unless something final was reported before."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.failed(kind)

    def give_up(self, kind: str) -> None:
        """Fail and close the connection it uses."""
        self.fail(kind)
        if self.connection is not None:
            self.connection.drop()


class Client:
    """Sends requests to one server."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise TailraceError(f"'{url}' is no address; give one like http://127.0.0.1:8080")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        """What stands before /v1 in all paths."""
        lines = {"host": parts.netloc.rpartition("@")[2], "user-agent": "tailrace-bench"}
        lines |= headers or {}
        if any("\r" in text or "\n" in text for pair in lines.items() for text in pair):
            raise TailraceError("a header must not contain a line break")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self.connections = 0
        """Connections made so far."""

    def send(
        self, method: str, path: str, body: bytes, exchange: Exchange, headers: str = ""
    ) -> Sending:
        """Send a request on a free connection, or on a new one; ``headers`` are whole lines."""
        head = f"{method} {self.path}{path} HTTP/1.1\r\n{self._head}{headers}"
        if body or method == "POST":
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        sending = Sending(f"{head}\r\n".encode("latin-1", "replace") + body, exchange)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                connection.begin(sending)
                return sending
        self._connect(sending)
        return sending

    async def fetch(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = 30.0
    ) -> tuple[int, bytes]:
        """Send a request and wait for status and body; raises ConnectionError or TimeoutError."""
        fetched = _Fetched()
        sending = self.send(method, path, body, fetched)
        try:
            return await asyncio.wait_for(fetched.future, timeout_s)
        finally:
            if not fetched.ended_well:
                sending.give_up("given up")

    async def close(self) -> None:
        """Close all connections."""
        for task in list(self._connecting):
            task.cancel()
        for connection in list(self._open):
            connection.drop()
        if self._connecting:
            await asyncio.wait(self._connecting)
        await asyncio.sleep(0)  # the loop tells the connections that they are closed

    def _connect(self, sending: Sending) -> None:
        task = asyncio.get_running_loop().create_task(self._open_for(sending))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _open_for(self, sending: Sending) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            sending.fail("connect timeout")
        except OSError:
            sending.fail("connect")
        except asyncio.CancelledError:
            sending.fail("given up")
            raise
        else:
            self.connections += 1
            if sending.exchange is None:
                self.release(connection)
            else:
                connection.begin(sending)

    def opened(self, connection: "_Connection") -> None:
        """A connection is there."""
        self._open.add(connection)

    def release(self, connection: "_Connection") -> None:
        """A connection is free for the next request."""
        self._idle.append(connection)

    def lost(self, connection: "_Connection", again: Sending | None) -> None:
        """A connection is no more; ``again`` was sent on it when the server had closed it."""
        self._open.discard(connection)
        if again is not None and again.exchange is not None:
            self._connect(again)


class _Connection(asyncio.Protocol):
    """One connection; a response parser and the exchange that is under way."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sending: Sending | None = None
        self._exchange: Exchange | None = None
        self._headers: dict[bytes, bytes] = {}
        self._exchanges = 0
        self._answered = False
        self._begun_s = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, sending: Sending) -> None:
        """Send a request."""
        assert self._transport is not None
        self._sending, self._exchange = sending, sending.exchange
        sending.connection = self
        self._exchanges += 1
        self._begun_s = time.monotonic()
        self._answered = False
        self._transport.write(sending.request)

    def drop(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._client.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits is told; a request the server cannot have seen is sent again."""
        del exc
        self._transport = None
        sending, self._sending = self._sending, None
        again = None
        if sending is not None:
            is_stale = time.monotonic() - self._begun_s < STALE_S
            if is_stale and self._exchanges > 1 and not self._answered:
                again = sending
            else:
                sending.fail("disconnected")
        self._client.lost(self, again)

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._sending is not None:
                self._sending.fail("malformed")
            self.drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is complete."""
        headers, self._headers = self._headers, {}
        if self._exchange is not None:
            self._exchange.head(self._parser.get_status_code(), headers)

    def on_body(self, data: bytes) -> None:
        """A part of the body has come."""
        if self._exchange is not None:
            self._exchange.body(data)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._parser.get_status_code() < 200:
            return
        sending, self._sending, self._exchange = self._sending, None, None
        if self._parser.should_keep_alive() and self.is_usable:
            self._client.release(self)
        elif self._transport is not None:
            self._transport.close()
        if sending is not None and sending.exchange is not None:
            exchange, sending.exchange = sending.exchange, None
            exchange.ended()


class _Fetched:
    """An exchange somebody waits for."""

    def __init__(self) -> None:
        self.future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.ended_well = False
        self._code = 0
        self._parts: list[bytes] = []

    def head(self, code: int, headers: dict[bytes, bytes]) -> None:
        del headers
        self._code = code

    def body(self, data: bytes) -> None:
        self._parts.append(data)

    def ended(self) -> None:
        self.ended_well = True
        if not self.future.done():
            self.future.set_result((self._code, b"".join(self._parts)))

    def failed(self, kind: str) -> None:
        if not self.future.done():
            self.future.set_exception(ConnectionError(kind))
