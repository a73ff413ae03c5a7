"""Hand-written parts against the libraries that could do their work.

    python benchmarks/bench_libraries.py > FILE

``token_us`` is what an emulated server spends on a token, without the network, with its own
histograms (emulate/metrics.py) and with those of prometheus_client. ``page_ms`` is the /metrics
page of that server, made by emulate/metrics_page.py and by prometheus_client from the same figures;
tokens that are due meanwhile leave late. ``panel`` is a picture of a report (four curves, sixteen
dots) by report/svg.py and by matplotlib: time and size of its SVG. Medians over rounds in which
both take turns.
"""

import heapq
import io
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bench_sim import machine
from tailrace.config import Cluster, Replica
from tailrace.emulate import metrics, metrics_page, tokenizer
from tailrace.emulate.replica import EmulatedReplica
from tailrace.emulate.timers import Handle
from tailrace.report.svg import Panel, around
from tailrace.view.devices import resolved

ROUNDS = 7
JOBS, OUTPUT_TOKENS = 64, 200


class LibraryBacked:
    """A histogram of prometheus_client in the place of ours."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.observe = LibraryHistogram("x", "x", buckets=bounds, registry=None).observe


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Time that passes only from one timer to the next."""

    def __init__(self) -> None:
        self._now_s, self._order = 0.0, itertools.count()
        self._calls: list[tuple[float, int, _Timer]] = []

    def now(self) -> float:
        """Seconds since the start."""
        return self._now_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Handle:
        """Call back at a time."""
        timer = _Timer(callback)
        heapq.heappush(self._calls, (at_s, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back at this time, after all others."""
        self.call_at(self._now_s, callback)

    def run(self) -> None:
        """Play everything."""
        while self._calls:
            at_s, _, timer = heapq.heappop(self._calls)
            self._now_s = max(self._now_s, at_s)
            if timer.callback is not None:
                timer.callback()


def busy_server(histogram: Any) -> tuple[EmulatedReplica, float]:
    """Answer some prompts; return the server and the CPU time of a token, us."""
    clock = VirtualClock()
    meter = metrics.Meter()
    for name, value in list(vars(meter).items()):
        if isinstance(value, metrics.Histogram):
            setattr(meter, name, histogram(value.bounds))
    (config,) = resolved(Cluster(replicas=(Replica(batch_cap=JOBS),)))
    server = EmulatedReplica(0, config, clock, meter)
    began = time.process_time()
    for k in range(JOBS):
        prompt, answer = tokenizer.words(k, 0, 100), tokenizer.words(k, 0, OUTPUT_TOKENS)
        server.submit(prompt, answer, lambda _job, _last: None)
    clock.run()
    return server, (time.process_time() - began) / (JOBS * OUTPUT_TOKENS) * 1e6


class _Families(Collector):
    def __init__(self, meter: metrics.Meter) -> None:
        self._meter = meter

    def collect(self) -> list[Metric]:
        """Return the histograms, which are most of the page."""
        found: list[Metric] = []
        for name, value in vars(self._meter).items():
            if isinstance(value, metrics.Histogram):
                family = HistogramMetricFamily(f"vllm:{name}", name, labels=["engine", "model"])
                totals = itertools.accumulate(value.counts)
                buckets = list(zip((*map(str, value.bounds), "+Inf"), totals, strict=True))
                family.add_metric(["0", "m"], buckets, value.sum)
                found.append(family)
        return found


def timed_ms(work: Callable[[], Any], count: int) -> float:
    """Return the CPU time of a call, ms."""
    began = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - began) / count * 1e3


def own_panel() -> str:
    """A panel by report/svg.py."""
    curves = _curves()
    panel = Panel(around(np.concatenate(curves), log=True), around([3.0]), "a distribution")
    panel.axes("time to first token, s", "")
    depths = np.linspace(0, 3, 101)
    for curve in curves:
        panel.line(zip(curve.tolist(), depths.tolist(), strict=True), "subject", "a policy")
        for k in (25, 50, 75, 100):
            panel.dot(float(curve[k]), float(depths[k]), "subject", "a policy: P50 0.1 s")
    return str(panel.svg())


def library_panel() -> str:
    """The same by matplotlib."""
    figure = Figure(figsize=(3.72, 2.6))
    axes = figure.subplots()
    depths = np.linspace(0, 3, 101)
    for curve in _curves():
        axes.plot(curve, depths)
        axes.scatter(curve[[25, 50, 75, 100]], depths[[25, 50, 75, 100]])
    axes.set(xscale="log", xlabel="time to first token, s")
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def _curves() -> list[Any]:
    return [np.exp(np.linspace(-3, 1, 101)) * (1 + k / 10) for k in range(4)]


def main() -> None:
    """Measure and print JSON."""
    tokens: dict[str, list[float]] = {"own": [], "library": []}
    pages: dict[str, list[float]] = {"own": [], "library": []}
    panels: dict[str, list[float]] = {"own": [], "library": []}
    for number in range(ROUNDS + 1):
        server, own_us = busy_server(metrics.Histogram)
        _, library_us = busy_server(LibraryBacked)
        registry = CollectorRegistry()
        registry.register(_Families(server.meter))
        made = {
            "own": (own_us, lambda s=server: metrics_page.page(s, "m"), own_panel),
            "library": (library_us, lambda r=registry: generate_latest(r), library_panel),
        }
        for name, (token_us, page, panel) in made.items():
            if number:  # the first round compiles and imports
                tokens[name].append(token_us)
                pages[name].append(timed_ms(page, 20))
                panels[name].append(timed_ms(panel, 3))
    sizes = {"own": len(own_panel().encode()), "library": len(library_panel().encode())}
    median = statistics.median
    result = {
        "machine": machine(),
        "token_us": {name: median(values) for name, values in tokens.items()},
        "page_ms": {name: median(values) for name, values in pages.items()},
        "panel": {n: {"ms": median(v), "bytes": sizes[n]} for n, v in panels.items()},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
