"""Clients that do nothing wrong, in a process of their own: what an attack costs them.

Runs until its standard input ends, then prints JSON: the longest lag of a stream and the longest
wait of a short request in each tenth of a second, how many requests there were, and how often they
failed in which way:

- ``cut``: a stream that had begun ended early, whether with an error event or without
- ``reset``: the connection ended before an answer had begun
- ``refused``: no connection
- ``status``: an answer other than 200
"""

import argparse
import asyncio
import gc
import json
import re
import sys
import time
from collections import Counter
from typing import Any

HOST = "127.0.0.1"
BUCKET_S = 0.1
_STAMP = re.compile(rb'"t":(\d+)')


def request(tokens: int, *, stream: bool, every_ms: float = 10, extra: str = "") -> bytes:
    """A completion from the servers of ``backend.py``."""
    body = json.dumps(
        {"model": "emulated", "prompt": "words " * 20, "max_tokens": tokens, "stream": stream}
    ).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-tokens: {tokens}\r\n{extra}"
        f"x-every-ms: {every_ms}\r\nx-stream: {int(stream)}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


class Innocents:
    """The clients, and what they have seen."""

    def __init__(self, port: int, extra: str = "") -> None:
        self.port = port
        self.extra = extra
        self.asked = 0
        self.failed: Counter[str] = Counter()
        self.lags: dict[int, float] = {}
        self.waits: dict[int, float] = {}
        self.going = True

    async def stream(self, tokens: int, every_ms: float) -> None:
        """One stream; the time each event spent between server and client counts."""
        self.asked += 1
        began = False
        try:
            reader, writer = await asyncio.open_connection(HOST, self.port)
        except ConnectionRefusedError:
            self.failed["refused"] += 1
            return
        except OSError:  # the process that was to accept it is gone
            self.failed["reset"] += 1
            return
        try:
            writer.write(request(tokens, stream=True, every_ms=every_ms, extra=self.extra))
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                self.failed["status"] += 1
                return
            data, done = b"", False
            while not data.endswith(b"0\r\n\r\n"):
                piece = await reader.read(65_536)
                now = time.monotonic_ns()
                if not piece:
                    raise ConnectionError
                data += piece
                done = done or b"[DONE]" in data
                for stamp in _STAMP.findall(data):
                    began = True
                    _note(self.lags, (now - int(stamp)) / 1e9)
                data = data.rpartition(b"\n\n")[2][-4096:]
            if not done:
                raise ConnectionError  # it ends with an error event
        except (OSError, asyncio.IncompleteReadError):
            self.failed["cut" if began else "reset"] += 1
        finally:
            writer.transport.abort()

    async def short(self) -> None:
        """One request with an answer in one piece."""
        self.asked += 1
        start = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(HOST, self.port)
        except ConnectionRefusedError:
            self.failed["refused"] += 1
            return
        except OSError:  # the process that was to accept it is gone
            self.failed["reset"] += 1
            return
        try:
            writer.write(request(1, stream=False, every_ms=1, extra=self.extra))
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                self.failed["status"] += 1
            _note(self.waits, time.monotonic() - start)
        except (OSError, asyncio.IncompleteReadError):
            self.failed["reset"] += 1
        finally:
            writer.transport.abort()

    async def streams(self, tokens: int, every_ms: float) -> None:
        """Streams one after the other."""
        while self.going:
            await self.stream(tokens, every_ms)

    async def shorts(self) -> None:
        """Short requests, twenty per second."""
        while self.going:
            await self.short()
            await asyncio.sleep(0.05)

    def report(self) -> dict[str, Any]:
        """What was seen; times are of the monotonic clock, in s."""
        return {
            "asked": self.asked,
            "failed": self.failed,
            "lags": [(at * BUCKET_S, lag) for at, lag in self.lags.items()],
            "waits": [(at * BUCKET_S, wait) for at, wait in self.waits.items()],
        }


def _note(largest: dict[int, float], value: float) -> None:
    at = int(time.monotonic() / BUCKET_S)
    largest[at] = max(largest.get(at, 0.0), value)


async def main(port: int, streams: int, every_ms: float, extra: str) -> None:
    """Ask until standard input ends."""
    innocents = Innocents(port, extra)
    tokens = max(10, round((2000 if streams <= 10 else 10_000) / every_ms))
    tasks = []
    loop = asyncio.get_running_loop()
    ended = asyncio.ensure_future(loop.run_in_executor(None, sys.stdin.read))
    for _ in range(streams):
        tasks.append(asyncio.create_task(innocents.streams(tokens, every_ms)))
        if streams > 10:
            await asyncio.sleep(0.005)  # a second for all to connect
    tasks.append(asyncio.create_task(innocents.shorts()))
    await ended
    innocents.going = False
    await asyncio.wait(tasks, timeout=20)
    print(json.dumps(innocents.report()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--every-ms", type=float, default=10.0)
    parser.add_argument("--extra", default="", help="headers, each with its line end")
    options = parser.parse_args()
    # With 1000 streams one collection takes up to 25 ms, which would count as the router's lag.
    gc.disable()
    asyncio.run(main(options.port, options.streams, options.every_ms, options.extra))
