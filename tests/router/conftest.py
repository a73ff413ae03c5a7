"""A scriptable backend on raw asyncio, and a router in front of several of them."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import uvloop

from tailrace.router.app import Router
from tailrace.router.serve_settings import ServeSettings

T = TypeVar("T")
LIMIT_S = 120.0


def run(
    work: Coroutine[Any, Any, T], *, limit_s: float = LIMIT_S, factory: Any = uvloop.new_event_loop
) -> T:
    """Run a test's coroutine; a hang is a failure, not a wait."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await work

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(limited())


def run_with_process(work: Coroutine[Any, Any, T]) -> T:
    """Run a test that starts a process: it may have to compile, and uvloop's end would wait."""
    return run(work, limit_s=600, factory=asyncio.new_event_loop)


@dataclass
class Seen:
    """A request as a backend saw it."""

    line: str
    headers: dict[str, str]
    names: list[str]
    body: bytes


Script = Callable[["Seen", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes, status: str = "200 OK", *, kind: str = "application/json") -> Script:
    """A script that answers in one piece."""

    async def script(seen: Seen, reader: Any, writer: asyncio.StreamWriter) -> None:
        content = b"" if seen.line.startswith("HEAD") else body
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "\r\n".encode()
            + content
        )

    return script


def raw(data: bytes, *, close: bool = False, abort: bool = False) -> Script:
    """A script that writes these bytes, and perhaps ends the connection."""

    async def script(seen: Seen, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if abort:
            writer.transport.abort()
        elif close:
            writer.close()

    return script


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def event(text: str) -> bytes:
    """An event of a completion, as vLLM sends it."""
    return b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % text.encode()


def chunked(*parts: bytes, end: bool = True) -> bytes:
    """Frame parts as chunks."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)
    return body + (b"0\r\n\r\n" if end else b"")


class Backend:
    """A server whose next answers are scripted; without a script it answers in one piece."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.scripts: list[Script] = []
        self.default: Script = reply(b'{"ok":true}')
        self.healthy = True
        self.mute = False
        """Whether it accepts questions about its health and leaves them unanswered."""
        self.metrics = b""
        """The body of /metrics."""
        self.connections = 0
        self.lost = asyncio.Event()
        """Set whenever a connection with a request under way ended."""
        self.arrived = asyncio.Event()
        self.port = 0
        self._host, self._tls = "127.0.0.1", None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{self._host}:{self.port}"

    async def start(
        self, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self._host, self._tls = f"[{host}]" if ":" in host else host, tls
        self._server = await asyncio.start_server(self._serve, host, port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Die: refuse connections, reset those there are."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            while not writer.is_closing():
                seen = await self._read(reader)
                path = seen.line.split()[1]
                if path in ("/health", "/metrics"):
                    if self.mute:
                        await reader.read()
                        return
                    status = "200 OK" if self.healthy else "503 Unavailable"
                    body = self.metrics if path == "/metrics" else b""
                    await reply(body, status)(seen, reader, writer)
                    continue
                self.seen.append(seen)
                self.arrived.set()
                script = self.scripts.pop(0) if self.scripts else self.default
                try:
                    await script(seen, reader, writer)
                finally:
                    if writer.is_closing():
                        self.lost.set()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self.lost.set()
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> Seen:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head.strip().split("\r\n")
        pairs = [entry.split(": ", 1) for entry in lines]
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Seen(line, headers, [name.lower() for name, _ in pairs], body)


class Counts:
    """An event sink that remembers."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str, str]] = []
        self.retries: list[tuple[int, str]] = []
        self.sheds: list[str] = []
        self.by_client: list[tuple[str, str]] = []

    def request_done(
        self, attempt: Any, status: int, outcome: str, path_kind: str, client: str = ""
    ) -> None:
        self.done.append((status, outcome, path_kind))
        if client:
            self.by_client.append((client, outcome))

    def decided(self, decision: Any) -> None:
        pass

    def retried(self, replica: int, cause: str) -> None:
        self.retries.append((replica, cause))

    def shed(self, cause: str) -> None:
        self.sheds.append(cause)


@dataclass
class World:
    """A router and its backends."""

    router: Router
    backends: list[Backend]
    counts: Counts
    clock: "Clock"
    opened: list["Client"] = field(default_factory=list)

    async def client(self, host: str | None = None) -> "Client":
        """Connect, from an address of this machine if one is given."""
        local = None if host is None else (host, 0)
        reader, writer = await asyncio.open_connection(*self.router.listen_at, local_addr=local)
        client = Client(reader, writer)
        self.opened.append(client)
        return client

    async def ask(self, request: bytes) -> "Answer":
        """Send one request on a connection of its own and read its answer."""
        client = await self.client()
        client.send(request)
        return await client.answer(head=request.startswith(b"HEAD"))

    def assert_quiet(self) -> None:
        """No request is in progress, by any count."""
        assert not self.router.dispatcher.active
        assert len(self.router.dispatcher.queue) == 0
        for backend in self.router.backends.all:
            assert backend.active == 0
        replicas = self.router.backends.cluster.replicas
        for name in ("in_flight", "queued", "queued_tokens", "context_tokens", "predicted_tokens"):
            assert not replicas[name].any(), name


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    """Decoded."""
    raw: bytes
    complete: bool = True


class Client:
    """A client that sees every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, head: bool = False) -> Answer:
        top = await self.reader.readuntil(b"\r\n\r\n")
        line, *lines = top.decode("latin-1").strip().split("\r\n")
        status = int(line.split()[1])
        headers = {k.lower(): v for k, _, v in (entry.partition(": ") for entry in lines)}
        if status == 100:
            return Answer(100, headers, b"", top)
        body = framed = b""
        complete = True
        if head or status == 204:
            pass
        elif headers.get("transfer-encoding") == "chunked":
            try:
                while True:
                    size_line = await self.reader.readuntil(b"\r\n")
                    size = int(size_line, 16)
                    data = await self.reader.readexactly(size + 2)
                    framed += size_line + data
                    body += data[:-2]
                    if not size:
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                complete = False
        elif "content-length" in headers:
            try:
                body = await self.reader.readexactly(int(headers["content-length"]))
            except (asyncio.IncompleteReadError, ConnectionError):
                complete = False
        else:
            body = await self.reader.read()
        return Answer(status, headers, body, top + (framed or body), complete)

    async def closed(self) -> bytes:
        """Wait for the end of the connection; return what came before it."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def abort(self) -> None:
        self.writer.transport.abort()


class Clock:
    """A clock that goes as real time does, can be put forward, and can be stopped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        at = time.monotonic() if self._stopped_at is None else self._stopped_at
        return at + self.ahead_s

    def stop(self) -> None:
        """Stand still but for ``ahead_s``, so that figures do not depend on the machine."""
        self._stopped_at = time.monotonic()


def quiet_settings(backends: list[dict[str, Any]], /, **over: Any) -> ServeSettings:
    """Settings for a test: no probes, metrics or model queries unless the test wants them."""
    data: dict[str, Any] = {
        "backends": backends,
        "listen": "127.0.0.1:0",
        "admin": {"listen": "127.0.0.1:0"},
        "routing": {"policy": "round_robin", "limit_ms": 10_000},
        "metrics": {"path": "off"},
        "models": {"path": "off"},
        "tokens": {"source": "estimate"},
        "health": {"interval_s": 1000},
        **over,
    }
    return ServeSettings.model_validate(data)


def settings_for(backends: list[Backend], /, **over: Any) -> ServeSettings:
    """Quiet settings for backends named b0, b1, ..."""
    return quiet_settings([{"url": b.url, "name": f"b{i}"} for i, b in enumerate(backends)], **over)


@asynccontextmanager
async def running_backends(n: int) -> AsyncIterator[list[Backend]]:
    """``n`` backends, killed at the end."""
    backends = [Backend() for _ in range(n)]
    for backend in backends:
        await backend.start()
    try:
        yield backends
    finally:
        for backend in backends:
            await backend.kill()


@asynccontextmanager
async def serving(router: Router, opened: list[Client]) -> AsyncIterator[None]:
    """Run a router; at the end close the connections ``opened`` and stop it."""
    await router.start()
    try:
        yield
    finally:
        for client in opened:
            client.writer.close()
        await router.stop()


@asynccontextmanager
async def world(n: int = 2, **over: Any) -> AsyncIterator[World]:
    """A router in front of ``n`` backends; everything is stopped at the end."""
    async with running_backends(n) as backends:
        counts, clock = Counts(), Clock()
        router = Router(settings_for(backends, **over), events=counts, clock=clock)
        made = World(router, backends, counts, clock)
        async with serving(router, made.opened):
            yield made


def post(
    path: str = "/v1/completions", body: bytes = b'{"prompt":"hello"}', *headers: str
) -> bytes:
    """A POST request."""
    lines = "".join(f"{h}\r\n" for h in headers)
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode()
        + body
    )


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="tailrace.router")
