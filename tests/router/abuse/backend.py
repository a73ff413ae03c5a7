"""Servers behind the router under attack, which do what a request's headers say.

They parse no body, so an attack on the router does not slow them down, and stamp each event of a
stream with the time it is sent, so that a client can tell how long the router has held it.

Headers: ``x-tokens`` events of an answer, ``x-every-ms`` between two of them, ``x-stream: 1``,
``x-id`` to count how often a request was executed, and ``x-do``:

- ``close``: end the connection without an answer
- ``hang``: never answer
- ``drop-next``: answer, then end the connection at the next request, after executing it
- ``205``: answer with a status that has no body, and with a body
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any

HOST = "127.0.0.1"
HANG_S = 120.0
_MODELS = b'{"object":"list","data":[{"id":"emulated","object":"model"}]}'
_METRICS = (
    b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
)


class Servers:
    """All servers of a process, and what they have seen."""

    def __init__(self) -> None:
        self.executed: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        """Requests by path and query."""
        self.now: Counter[int] = Counter()
        """Requests in progress by port."""
        self.most: dict[int, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        drops = False
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.rstrip().split("\r\n")
                method, path, _ = first.split(" ", 2)
                pairs = (line.partition(": ") for line in lines)
                headers = {name.lower(): value for name, _, value in pairs}
                if headers.get("transfer-encoding") == "chunked":
                    while size := int(await reader.readuntil(b"\r\n"), 16):
                        await reader.readexactly(size + 2)
                    await reader.readexactly(2)
                left = int(headers.get("content-length", "0"))
                while left:
                    data = await reader.read(min(left, 262_144))
                    if not data:
                        return
                    left -= len(data)
                self.paths[path] += 1
                if "x-id" in headers:
                    self.executed[headers["x-id"]] += 1
                if drops:
                    return
                drops = headers.get("x-do") == "drop-next"
                if method != "POST":
                    self._get(writer, path)
                    continue
                self.now[port] += 1
                self.most[port] = max(self.most.get(port, 0), self.now[port])
                try:
                    if not await self._post(reader, writer, headers):
                        return
                finally:
                    self.now[port] -= 1

    def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path.endswith("/counts"):
            return _write(writer, json.dumps(self.counts()).encode())
        if path.endswith("/metrics"):
            return _write(writer, _METRICS, b"text/plain")
        return _write(writer, _MODELS)

    def counts(self) -> dict[str, Any]:
        """What was seen so far."""
        return {"executed": self.executed, "paths": self.paths, "most": self.most}

    async def _post(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> bool:
        """Answer; return whether the connection goes on."""
        what = headers.get("x-do", "")
        if what == "close":
            return False
        if what == "hang":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HANG_S):
                    await reader.read(1)
            return False
        if what == "205":
            writer.write(b"HTTP/1.1 205 Reset Content\r\ncontent-length: 7\r\n\r\nhello\r\n")
            return True
        tokens = int(headers.get("x-tokens", "2"))
        every_s = float(headers.get("x-every-ms", "10")) / 1e3
        usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
        if headers.get("x-stream") != "1":
            await asyncio.sleep(tokens * every_s)
            choice = {"index": 0, "text": "a" * tokens, "finish_reason": "length"}
            _write(writer, json.dumps({"choices": [choice], "usage": usage}).encode())
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        due = time.monotonic()
        for _ in range(tokens):
            due += every_s
            await asyncio.sleep(due - time.monotonic())
            _chunk(writer, b'{"choices":[{"index":0,"text":"a"}],"t":%d}' % time.monotonic_ns())
            await writer.drain()
        _chunk(writer, json.dumps({"choices": [], "usage": usage}).encode())
        _chunk(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        return True


def _write(writer: asyncio.StreamWriter, body: bytes, kind: bytes = b"application/json") -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
        % (kind, len(body), body)
    )


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


async def main(ports: list[int]) -> None:
    """Serve until killed."""
    servers = Servers()
    for port in ports:
        await asyncio.start_server(servers.serve, HOST, port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", nargs="+", type=int)
    asyncio.run(main(parser.parse_args().ports))
