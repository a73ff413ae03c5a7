"""What tracing costs per request, in CPU time of the router: ``bench_tracing.py [--json]``.

``off``: the checks on the path of a request, less an empty loop. ``on``: the spans of a request
with one attempt, as the router makes them, and their share of a message to the collector; sampled,
and not (then only ``traceparent`` is continued). Microseconds of the thread's CPU time, the median
over batches. What it costs a whole router: ``bench_router.py --alone --tracing``.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailrace.net.client import Response
from tailrace.net.tls import TlsContexts
from tailrace.router.observe.tracing import BATCH, Tracer, TracingSettings
from tailrace.router.state.arrival import Decision

#: Checks of a request that is routed once: at its start, its sending and its end.
CHECKS = 5
PARENT = {b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
UNSAMPLED = {b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
DECISION = Decision(0, "tailrace", np.zeros(4), 1, "shorter queue (120 against 800 tokens)",
                    cached=512, ttft_s=0.08)  # fmt: skip
ABOUT = {
    "tailrace.request_id": "2f9a-1", "tailrace.backend": "10.0.0.1:8000",
    "gen_ai.request.model": "llama", "gen_ai.usage.input_tokens": 700,
    "gen_ai.usage.output_tokens": 120,
}  # fmt: skip


class Collector:
    """Takes every message at once."""

    size = 0

    async def fetch(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float
    ) -> Response:
        """Take a message."""
        del method, path, headers, timeout_s
        self.size += len(body)
        return Response(200, {}, b"")


def median_us(rounds: int, count: int, work: Callable[[int], None]) -> float:
    """Return the median CPU time of ``count`` repetitions, each, us."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        work(count)
        times.append((time.thread_time() - began) / count * 1e6)
    return statistics.median(times)


def checks(count: int) -> None:
    """Do what a request does while tracing is off."""
    context, request = SimpleNamespace(tracer=None), SimpleNamespace(trace=None)
    for _ in range(count):
        if context.tracer is not None:
            raise AssertionError
        if request.trace is not None:
            raise AssertionError
        if request.trace is not None:
            raise AssertionError
        if request.trace is not None:
            raise AssertionError
        if request.trace is not None:
            raise AssertionError


def nothing(count: int) -> None:
    """Loop."""
    for _ in range(count):
        pass


def traced(tracer: Tracer, headers: dict[bytes, bytes], count: int) -> None:
    """Make the spans of ``count`` requests, and send them."""
    for _ in range(count):
        trace = tracer.begin(headers)
        trace.attempt()
        assert trace.header
        trace.attempt_ended("10.0.0.1:8000", "done", DECISION, 0.09)
        trace.ended("chat", 200, "done", DECISION, ABOUT)
        if len(tracer._spans) >= BATCH:
            asyncio.run(tracer._send(1.0))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rounds = options.rounds
    tracer = Tracer(TracingSettings(endpoint="http://127.0.0.1:4318"), TlsContexts())
    collector: Any = Collector()
    tracer._pool = collector
    kinds = {"on, no trace yet": {}, "on, continued": PARENT, "on, not sampled": UNSAMPLED}
    found = {
        "off": median_us(rounds, 20_000, checks) - median_us(rounds, 20_000, nothing),
        **{
            name: median_us(rounds, 1024, lambda n, h=headers: traced(tracer, h, n))  # type: ignore[misc]
            for name, headers in kinds.items()
        },
    }
    figures = {
        "us_per_request": {name: round(value, 3) for name, value in found.items()},
        "bytes_per_request": round(collector.size / max(1, tracer.sent) * 2),
        "checks": CHECKS,
    }
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in found.items():
        print(f"{name:20} {value:8.3f} us per request")


if __name__ == "__main__":
    main()
