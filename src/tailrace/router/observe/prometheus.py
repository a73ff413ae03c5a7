"""The router's metrics in Prometheus' form: names, help, labels, buckets.

What is counted comes from ``telemetry.py``; the state of replicas is read from the router when
somebody asks. A replica that was taken out keeps its counters and has no gauges. Two replicas that
had the same name one after the other are one series.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tailrace import __version__
from tailrace.router.proxy.health import CLOSED, HALF_OPEN, OPEN

if TYPE_CHECKING:
    from tailrace.router.app import Router
    from tailrace.router.observe.telemetry import Telemetry
    from tailrace.router.proxy.backends import Target

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
#: Label of requests that were sent to no replica.
NO_REPLICA = "none"

# fmt: off
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 80.0)
TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WAIT_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DECISION_BUCKETS = (1e-05, 2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
# fmt: on

Labels = tuple[str, ...]


class Histogram:
    """Counts of times in s by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def add(self, other: "Histogram") -> None:
        """Add what another one with the same bounds has counted."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Exporter(Collector):
    """Writes the metrics of one router."""

    def __init__(self, telemetry: "Telemetry") -> None:
        self._telemetry = telemetry
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry) + "".join(self._timed()).encode()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric but histograms; one without samples too, so that its name is known."""
        yield from self._counted()
        yield from self._state()

    def label(self, replica: int) -> str:
        """Return the name of a replica."""
        router = self._telemetry.router
        if replica < 0:
            return NO_REPLICA
        targets = router.plane.targets if router is not None else []
        return targets[replica].label if replica < len(targets) else str(replica)

    # ---- events ---------------------------------------------------------------------------------

    def _counted(self) -> Iterator[Metric]:
        t, label = self._telemetry, self.label
        yield _counter(
            "requests",
            "Requests of clients that are over",
            ("kind", "status", "outcome", "replica"),
            (
                ((kind, _status(status), outcome, label(replica)), n)
                for (kind, status, outcome, replica), n in t.requests.items()
            ),
        )
        yield _counter(
            "decisions",
            "Decisions by the policy that was asked and the replica chosen",
            ("policy", "replica"),
            (((policy, label(replica)), n) for (policy, replica), n in t.decisions.items()),
        )
        yield _counter(
            "fallbacks",
            "Decisions that the fallback rule made, by what kept the policy from it",
            ("cause",),
            (((cause,), n) for cause, n in t.fallbacks.items()),
        )
        yield _counter(
            "shadow_decisions", "Decisions that the shadow policy made too", (), [((), t.shadowed)]
        )
        yield _counter(
            "shadow_disagreements",
            "Decisions in which the shadow policy would have chosen another replica",
            (),
            [((), t.disagreed)],
        )
        yield _counter(
            "retries",
            "Requests tried elsewhere, by the replica that made it necessary and why",
            ("replica", "cause"),
            (((label(replica), cause), n) for (replica, cause), n in t.retries.items()),
        )
        yield _counter(
            "shed",
            "Requests sent away because there was no room",
            ("cause",),
            (((cause,), n) for cause, n in t.sheds.items()),
        )
        for name, text in (
            ("prompt", "Prompt tokens of finished requests"),
            ("output", "Tokens of answers"),
            ("believed", "Prompt tokens that the router thought cached"),
            ("checked", "The same, of requests whose server told how many were"),
            ("reported", "Prompt tokens that those servers had cached, as they say"),
        ):
            metric = f"{name}_tokens" if name in ("prompt", "output") else f"prefix_{name}_tokens"
            values = (((label(i),), getattr(c, name)) for i, c in enumerate(t.replicas))
            yield _counter(metric, text, ("replica",), values)

    def _timed(self) -> Iterator[str]:
        """Yield the histograms as text: most of all lines, ten times as fast as the library."""
        t = self._telemetry
        labels = [f'replica="{_escaped(self.label(i))}"' for i in range(len(t.replicas))]
        yield _histogram(
            "ttft",
            "From a request's arrival to its first token, where that can be seen (streams)",
            zip(labels, (counts.ttft for counts in t.replicas), strict=True),
        )
        yield _histogram(
            "tpot",
            "Per token after the first, of streams that were completed",
            zip(labels, (counts.tpot for counts in t.replicas), strict=True),
        )
        for name, text, histogram in (
            ("e2e", "From a request's arrival to its end, of those completed", t.e2e),
            ("queue_wait", "From a request's arrival to its being sent, retries included",
             t.queue_wait),
            ("decision", "To choose a replica", t.decision),
            ("event_loop_lag", "How late the event loop comes, looked at four times a second",
             t.lag),
        ):  # fmt: skip
            yield _histogram(name, text, [("", histogram)])

    # ---- state ----------------------------------------------------------------------------------

    def _state(self) -> Iterator[Metric]:
        router = self._telemetry.router
        if router is None:
            return
        chooser, log = router.plane.chooser, router.forwarder.decision_log
        routing = chooser.settings
        yield _gauge(
            "info",
            "Version and rules of the router; always 1",
            ("version", "policy", "fallback", "canary", "shadow"),
            [((__version__, chooser.policy.name, routing.fallback, routing.canary,
               routing.shadow), 1)],
        )  # fmt: skip
        yield _counter(
            "canary_decisions", "Decisions of the canary policy", (),
            [((), chooser.counts["canary"])],
        )  # fmt: skip
        for name, text, value in (
            ("canary_share", "Share of the sessions that the canary policy gets, as set",
             routing.canary_share if routing.canary else 0.0),
            ("waiting_requests", "Requests that wait at the router for room",
             len(router.forwarder.queue)),
            ("client_connections", "Open connections of clients", len(router.clients)),
        ):  # fmt: skip
            yield _gauge(name, text, (), [((), value)])
        yield _counter(
            "decision_log_dropped",
            "Lines of the decision log that could not be written",
            (),
            [((), log.dropped if log is not None else 0)],
        )
        yield from self._replicas(router)

    def _replicas(self, router: "Router") -> Iterator[Metric]:
        cluster, scraper = router.plane.cluster, router.scraper
        now = self._telemetry.clock()
        present = router.plane.present

        def each(
            name: str, text: str, value: "Callable[[Target], float | None]"
        ) -> GaugeMetricFamily:
            values = ((target.label, value(target)) for target in present)
            return _gauge(
                f"replica_{name}", text, ("replica",),
                (((label,), v) for label, v in values if v is not None),
            )  # fmt: skip

        def said(name: str) -> "Callable[[Target], float | None]":
            return lambda target: getattr(scraper.snapshots.get(target.index), name, None)

        def age(target: "Target") -> float | None:
            taken_at = float(cluster.replicas["metrics_at"][target.index])
            return max(0.0, now - taken_at) if taken_at > float("-inf") else None

        yield each("in_flight", "Requests under way there", lambda t: t.active)
        yield each(
            "queued",
            "Those without a token yet",
            lambda t: int(cluster.replicas["queued"][t.index]),
        )
        yield each("available", "Whether it may get requests", lambda t: int(t.health.available))
        yield each("draining", "Whether it is being drained", lambda t: int(t.health.draining))
        yield _gauge(
            "replica_breaker",
            "State of its circuit breaker: 1 for the one it is in",
            ("replica", "state"),
            (
                ((target.label, state), int(target.health.breaker.state == state))
                for target in present
                for state in (CLOSED, HALF_OPEN, OPEN)
            ),
        )
        yield _counter(
            "replica_breaker_opened",
            "How often its circuit breaker has opened",
            ("replica",),
            (((target.label,), target.health.breaker.opened) for target in present),
        )
        yield each("server_waiting", "Requests in its queue, as its metrics say", said("waiting"))
        yield each("server_running", "Requests in its batch, as its metrics say", said("running"))
        yield each(
            "server_kv_used", "Share of its KV memory in use, as its metrics say", said("kv_used")
        )
        yield each("metrics_age_seconds", "Age of what its metrics said last", age)
        yield _counter(
            "replica_scrape_failures",
            "Times its metrics could not be read",
            ("replica",),
            (((target.label,), scraper.failures.get(target.index, 0)) for target in present),
        )
        yield each(
            "index_tokens",
            "Tokens that the router's prefix index holds for it",
            lambda t: int(cluster.index.totals["held_tokens"][t.index] / cluster.units_per_token),
        )


def _status(status: int) -> str:
    """A status as a label: its number, or its class where the number is none of HTTP's."""
    return str(status) if status >= 100 else f"{status}xx"


def _summed(values: Iterable[tuple[Labels, float]]) -> Mapping[Labels, float]:
    total: dict[Labels, float] = {}
    for labels, value in values:
        total[labels] = total.get(labels, 0) + value
    return total


def _counter(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tailrace_{name}", text, labels=labels)
    for given, value in _summed(values).items():
        family.add_metric(given, value)
    return family


def _gauge(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tailrace_{name}", text, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family


def _histogram(name: str, text: str, values: Iterable[tuple[str, Histogram]]) -> str:
    """Write a histogram; values by their labels as text."""
    total: dict[str, Histogram] = {}
    for labels, histogram in values:
        total.setdefault(labels, Histogram(histogram.bounds)).add(histogram)
    name = f"tailrace_{name}_seconds"
    lines = [f"# HELP {name} {text}\n# TYPE {name} histogram\n"]
    for labels, histogram in total.items():
        comma, all_labels, seen = "," if labels else "", f"{{{labels}}}" if labels else "", 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            seen += count
            lines.append(f'{name}_bucket{{{labels}{comma}le="{bound}"}} {seen}\n')
        lines.append(f"{name}_sum{all_labels} {histogram.total}\n")
        lines.append(f"{name}_count{all_labels} {seen}\n")
    return "".join(lines)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
