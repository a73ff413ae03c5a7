"""Many streams at once through the router: ``python benchmarks/bench_streams.py [--json]``.

Streams of 20 chunks per second, each chunk with its number and the time it was sent at, run through
the router with everything on, and at the same time a tenth as many run directly from the backends.
It is counted whether any stream lost, doubled or reordered a chunk, how late chunks arrive (P50,
P99, most) both ways, and what the router's memory and CPU time do. Late is what everything on the
machine adds together, the client's own work included; the direct streams show that share, and
``added_p99_ms`` is the difference of the two P99s.
"""

import argparse
import asyncio
import json
import time
from functools import partial
from typing import Any, cast

import numpy as np
import uvloop

from router_rig import CHUNKS_PER_S, HOST, Contender, chat_body, cpu_s, rig, rss_mb

#: When memory is looked at first: by then all streams run, s.
SETTLED_S = 10.0
#: Streams begin spread over this time, s.
SPREAD_S = 2.0


class Stream(asyncio.Protocol):
    """One stream, read and checked as it comes."""

    def __init__(self, request: bytes, chunks: int, late: list[float]) -> None:
        self._request, self._chunks, self._late = request, chunks, late
        self._rest = b""
        self._next = 0
        self.fault = ""
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream that ends before its end is lost."""
        del exc
        self._end("cut off")

    def data_received(self, data: bytes) -> None:
        """Check numbers and note how late each chunk is."""
        now = time.monotonic()
        data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b'data: {"n":'):
                number, _, rest = line[11:].partition(b',"at":')
                if int(number) != self._next:
                    self._end(f"chunk {int(number)} where {self._next} was due")
                self._next += 1
                self._late.append(now - float(rest[: rest.find(b",")]))
            elif line.startswith(b"data: [DONE]"):
                self._end("" if self._next == self._chunks else f"{self._next} chunks")
            elif b'"error"' in line:
                self._end("an error came")

    def _end(self, fault: str) -> None:
        if not self.over.done():
            self.fault = fault
            self.over.set_result(None)
            self._transport.close()


async def run_streams(
    contender: Contender, count: int, chunks: int, late: list[float]
) -> list[str]:
    """Run streams to their ends; return what was wrong with each, empty: nothing."""
    loop = asyncio.get_running_loop()
    streams = []
    for i in range(count):
        body = chat_body(1024, i, stream=True, max_tokens=chunks)
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        _, stream = await loop.create_connection(
            partial(Stream, request, chunks, late), HOST, contender.port
        )
        streams.append(stream)
        await asyncio.sleep(SPREAD_S / count)
    await asyncio.gather(*(stream.over for stream in streams))
    return [stream.fault for stream in streams]


async def measure(
    router: Contender, direct: Contender, options: argparse.Namespace
) -> dict[str, Any]:
    """Run routed and direct streams together, and watch the router."""
    chunks = round(options.seconds * CHUNKS_PER_S)
    late: dict[str, list[float]] = {"routed": [], "direct": []}
    memory: dict[str, float] = {}

    async def watch() -> None:
        await asyncio.sleep(min(SETTLED_S, options.seconds / 3))
        memory["settled_mb"] = rss_mb(router.pids[0])
        await asyncio.sleep(options.seconds - min(SETTLED_S, options.seconds / 3) - 1)
        memory["end_mb"] = rss_mb(router.pids[0])

    before = cpu_s(router.pids)
    faults, direct_faults, _ = await asyncio.gather(
        run_streams(router, options.streams, chunks, late["routed"]),
        run_streams(direct, max(1, options.streams // 10), chunks, late["direct"]),
        watch(),
    )
    used = cpu_s(router.pids) - before
    total = options.streams * chunks
    figures = {
        name: {
            "chunks": len(values),
            **{f"p{q}_ms": float(np.percentile(values, q)) * 1e3 for q in (50, 99)},
            "most_ms": max(values) * 1e3,
        }
        for name, values in late.items()
    }
    return {
        "streams": options.streams,
        "seconds": options.seconds,
        "faulty": sum(map(bool, faults)),
        "faults": sorted({fault for fault in (*faults, *direct_faults) if fault})[:10],
        "lost_chunks": total - figures["routed"]["chunks"],
        **figures,
        "added_p99_ms": figures["routed"]["p99_ms"] - figures["direct"]["p99_ms"],
        "memory": memory,
        "cpu_us_per_chunk": used / total * 1e6,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each stream")
    options = parser.parse_args()
    with rig() as made:
        made.start_backends()
        router = made.start_router()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measure(router, made.direct, options))
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name in ("routed", "direct"):
        f = result[name]
        print(
            f"{name:8}{f['chunks']:>9} chunks, late P50 {f['p50_ms']:.2f} ms, "
            f"P99 {f['p99_ms']:.2f} ms, most {f['most_ms']:.1f} ms"
        )
    print(f"streams with a fault: {result['faulty']} of {result['streams']} {result['faults']}")
    memory = result["memory"]
    print(f"memory: {memory['settled_mb']:.1f} MB settled, {memory['end_mb']:.1f} MB at the end")
    print(f"CPU time per chunk: {result['cpu_us_per_chunk']:.1f} us")


if __name__ == "__main__":
    main()
