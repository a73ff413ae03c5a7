"""Scripted servers, to see what a router decides in a known state.

A puppet server holds every request until it is released, and reports a given load. What
reaches the servers is logged in order: requests, and questions for their load. So the state in
which a router decided is known exactly: its requests in flight, its prompts sent, its last reports.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import orjson

HOST = "127.0.0.1"
#: Time in which a router has to pass a request on, s.
PASS_ON_S = 10.0
#: Time that a router gets to enter the end of a request into its counts, s.
SETTLE_S = 0.004
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_NUMBER = re.compile(rb'"seed"\s*:\s*(\d+)')


@dataclass
class Load:
    """What a puppet server reports."""

    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0
    tokens: int | None = None
    """Tokens in use, which SGLang's servers report; None: the server has no such report."""


@dataclass
class Puppets:
    """Servers of one process, and what has reached them."""

    loads: list[Load]
    asked: list[tuple[int, str]] = field(default_factory=list)
    """Server and path of every GET."""
    polled: Callable[[int], None] = lambda _: None
    """Called with the server whose load was asked for."""
    load_report: Callable[[int], object] = lambda tokens: [{"num_tokens": tokens}]
    """How servers report their tokens: today's SGLang, unless given otherwise."""
    told: list[int] = field(default_factory=list)
    """Tokens that each server last reported."""
    polled_at: float = 0.0
    """When a load was last asked for, s."""
    ports: list[int] = field(default_factory=list)
    held: dict[int, "_Connection"] = field(default_factory=dict)
    """Requests that wait for their answer, by number."""
    _arrivals: "asyncio.Queue[tuple[int, int]]" = field(default_factory=asyncio.Queue)

    async def start(self) -> None:
        """Listen, one port per server."""
        self.told = [0] * len(self.loads)
        loop = asyncio.get_running_loop()
        for number in range(len(self.loads)):
            server = await loop.create_server(partial(_Connection, self, number), HOST, 0)
            self.ports.append(server.sockets[0].getsockname()[1])

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [f"http://{HOST}:{port}" for port in self.ports]

    async def arrival(self) -> tuple[int, int]:
        """Return number and server of the next request that reaches a server."""
        return await asyncio.wait_for(self._arrivals.get(), PASS_ON_S)

    def release(self, number: int) -> None:
        """Answer a request."""
        self.held.pop(number).answer()

    def took(self, number: int, server: int, connection: "_Connection") -> None:
        """A request has reached a server."""
        self.held[number] = connection
        self._arrivals.put_nowait((number, server))


class _Connection(asyncio.Protocol):
    """One connection of a router to a server."""

    def __init__(self, puppets: Puppets, server: int) -> None:
        self._puppets, self._server = puppets, server
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take every request that is complete."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head, rest = self._data[:end], self._data[end + 4 :]
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            if _CHUNKED.search(head):
                size = rest.find(b"0\r\n\r\n") + 5
                if size < 5:
                    return
            if len(rest) < size:
                return
            self._data = rest[size:]
            self._take(head, rest[:size])

    def _take(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"PRI "):  # HTTP/2 is tried first
            self._data = b""
            self._transport.close()
            return
        method, path, _ = head.split(b" ", 2)
        if method == b"POST" and (number := _NUMBER.search(body)):
            self._puppets.took(int(number[1]), self._server, self)
            return
        self._puppets.asked.append((self._server, path.decode()))
        load = self._puppets.loads[self._server]
        kind, text = b"application/json", b"{}"
        if path.startswith(b"/metrics"):
            kind, text = b"text/plain", _metrics(load)
            self._puppets.polled(self._server)
        elif path.startswith(b"/get_load") and load.tokens is not None:
            text = orjson.dumps(self._puppets.load_report(load.tokens))
            self._puppets.polled(self._server)
        elif path.startswith(b"/v1/models"):
            text = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
        elif path.startswith((b"/get_model_info", b"/get_server_info", b"/server_info")):
            text = b'{"model_path":"m","served_model_name":"m","is_generation":true}'
        elif path.startswith(b"/version"):
            text = b'{"version":"0.11.0"}'
        self._write(text, kind)

    def answer(self) -> None:
        """Answer the request that is held."""
        choice = {"index": 0, "text": "yes", "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
        self._write(orjson.dumps(answer | {"choices": [choice], "usage": usage}))

    def _write(self, body: bytes, kind: bytes = b"application/json") -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (kind, len(body)) + body)


def _metrics(load: Load) -> bytes:
    label = '{engine="0",model_name="m"}'
    values = {
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
        "kv_cache_usage_perc": load.kv_used,
    }
    lines = [f"# TYPE vllm:{k} gauge\nvllm:{k}{label} {float(v)}" for k, v in values.items()]
    return "\n".join([*lines, ""]).encode()


async def send(port: int, number: int, prompt: str, session: str = "") -> None:
    """Send one completion through a router and wait for its answer."""
    body = orjson.dumps({"model": "m", "prompt": prompt, "max_tokens": 8, "seed": number})
    reader, writer = await asyncio.open_connection(HOST, port)
    extra = f"x-session-id: {session}\r\n" if session else ""
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"{extra}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        + body
    )
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"request {number}: {answer[:300]!r}")
