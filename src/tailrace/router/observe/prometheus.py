"""The router's metrics in Prometheus' text form.

Counters and histograms are declared where they are counted (``telemetry.py``). What is read from a
snapshot is declared here, in two tables. A backend that was removed has no gauges, and once its
number is free its counters are added to the series "removed". Backends that had the same name one
after the other share their series.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tailrace import __version__
from tailrace.net.prometheus_text import histogram_lines
from tailrace.router.observe.metrics import GONE, CounterFamily, HistogramFamily, Labels, Metrics
from tailrace.router.observe.snapshot import (
    BREAKER_STATES,
    BackendSnapshot,
    RouterSnapshot,
    StoreSnapshot,
)
from tailrace.router.state.exact_caches import TRUST_LEVELS

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
#: Label of requests that were sent to no replica.
NO_REPLICA = "none"
#: Label of replicas that were removed and whose number is free for others.
REMOVED = "removed"

_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_Type = type[CounterMetricFamily] | type[GaugeMetricFamily]

#: Of the router as a whole: type, name, help, value.
ROUTER_METRICS: tuple[tuple[_Type, str, str, Callable[[RouterSnapshot], float]], ...] = (
    (_COUNTER, "canary_decisions", "Decisions of the canary policy", lambda s: s.canary_decisions),
    (_GAUGE, "canary_share", "Share of the sessions that the canary policy gets, as set",
     lambda s: s.canary_share if s.canary else 0.0),
    (_GAUGE, "waiting_requests", "Requests that wait at the router for room", lambda s: s.waiting),
    (_GAUGE, "longest_wait_seconds", "How long the request has waited that waits longest there",
     lambda s: s.longest_wait_s),
    (_GAUGE, "client_connections", "Open connections of clients", lambda s: s.clients),
    (_GAUGE, "settings_behind", "Whether it could not take over the latest change of settings",
     lambda s: bool(s.behind)),
    (_COUNTER, "decision_log_dropped", "Lines of the decision log that could not be written",
     lambda s: s.log_lines_dropped),
)  # fmt: skip

#: What the autopilot says about the size of the cluster: name, help, key; without it no sample.
WANTED_METRICS = (
    ("replicas_wanted", "Fewest replicas that keep the targets in the next minutes", "replicas"),
    ("replicas_wanted_low", "Lower end of its interval", "low"),
    ("replicas_wanted_high", "Upper end of its interval", "high"),
)

#: Of the store that routers on several machines share, if there is one.
STORE_METRICS: tuple[tuple[_Type, str, str, Callable[[StoreSnapshot], float]], ...] = (
    (_GAUGE, "store_connected", "Whether the shared store is there", lambda s: s.connected),
    (_GAUGE, "store_members", "Worker processes of other routers that are known",
     lambda s: s.members),
    (_COUNTER, "store_lost", "Times the connection to the shared store was lost", lambda s: s.lost),
    (_COUNTER, "store_messages_missed", "Times messages of other routers were missing",
     lambda s: s.missed),
    (_COUNTER, "store_messages_refused", "Messages of other routers that could not be used",
     lambda s: s.refused),
)  # fmt: skip

#: Of each backend, with the label "replica": type, name, help, value; None: no sample.
REPLICA_METRICS: tuple[tuple[_Type, str, str, Callable[[BackendSnapshot], float | None]], ...] = (
    (_GAUGE, "replica_in_flight", "Requests under way there", lambda b: b.in_flight),
    (_GAUGE, "replica_queued", "Those without a token yet", lambda b: b.queued),
    (_GAUGE, "replica_available", "Whether it may get requests", lambda b: b.available),
    (_GAUGE, "replica_draining", "Whether it is being drained", lambda b: b.draining),
    (_COUNTER, "replica_breaker_opened", "How often its circuit breaker has opened",
     lambda b: b.opened),
    (_GAUGE, "replica_server_waiting", "Requests in its queue, as its metrics say",
     lambda b: b.waiting),
    (_GAUGE, "replica_server_running", "Requests in its batch, as its metrics say",
     lambda b: b.running),
    (_GAUGE, "replica_server_kv_used", "Share of its KV memory in use, as its metrics say",
     lambda b: b.kv_used),
    (_GAUGE, "replica_metrics_age_seconds", "Age of what its metrics said last",
     lambda b: b.metrics_age_s),
    (_COUNTER, "replica_scrape_failures", "Times its metrics could not be read",
     lambda b: b.scrape_failures),
    (_GAUGE, "replica_index_tokens", "Tokens that the router's prefix index holds for it",
     lambda b: b.cached_tokens),
    (_GAUGE, "replica_event_lag_seconds", "How late its latest KV event was",
     lambda b: b.event_lag_s),
    (_COUNTER, "replica_event_gaps", "Times its KV events had gaps", lambda b: b.event_gaps),
    (_COUNTER, "replica_event_gaps_lost", "Gaps of its KV events that could not be replayed",
     lambda b: b.event_gaps_lost),
    (_GAUGE, "replica_tpot_seconds", "Its time per output token in a batch of 8, as predicted",
     lambda b: b.known.tpot_s if b.known else None),
    (_GAUGE, "replica_prediction_error", "Relative error of its predicted times, moving mean",
     lambda b: b.known.error if b.known else None),
)  # fmt: skip


class _Families(Collector):
    """Families that the library writes as text."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


_PROCESS = ProcessCollector(registry=None)


def render(metrics: Metrics, snapshot: RouterSnapshot) -> bytes:
    """Return all metrics as text; a family without samples too, so that its name is known."""
    names = [b.name for b in snapshot.backends]
    counted = (_counter(family, names) for family in metrics.counters)
    families = [*counted, *_of_state(snapshot), *_PROCESS.collect()]
    # Histograms are most of all lines: with 128 backends they take 2.6 ms here and 52 ms in the
    # library, and the event loop stands still meanwhile.
    histograms = [_histogram(family, names) for family in metrics.histograms]
    return generate_latest(_Families(families)) + "".join(histograms).encode()


def _of_state(snapshot: RouterSnapshot) -> Iterator[Metric]:
    s, present = snapshot, snapshot.present
    yield _family(
        _GAUGE, "info", "Version and rules of the router; always 1",
        ("version", "policy", "fallback", "canary", "shadow"),
        {(__version__, s.policy, s.fallback, s.canary, s.shadow): 1},
    )  # fmt: skip
    for kind, name, text, value in ROUTER_METRICS:
        yield _family(kind, name, text, (), {(): value(s)})
    wanted = (s.autopilot or {}).get("wanted") or {}
    for name, text, key in WANTED_METRICS:
        known_wanted: dict[Labels, float] = {} if key not in wanted else {(): float(wanted[key])}
        yield _family(_GAUGE, name, text, (), known_wanted)
    for kind, name, text, of_store in STORE_METRICS:
        yield _family(kind, name, text, (), {} if s.store is None else {(): of_store(s.store)})
    for kind, name, text, of_backend in REPLICA_METRICS:
        values = ((b.name, of_backend(b)) for b in present)
        known: dict[Labels, float] = {(label,): float(v) for label, v in values if v is not None}
        yield _family(kind, name, text, ("replica",), known)
    yield _family(
        _GAUGE, "replica_breaker", "State of its circuit breaker: 1 for the one it is in",
        ("replica", "state"),
        {(b.name, state): int(b.breaker == state) for b in present for state in BREAKER_STATES},
    )  # fmt: skip
    yield _family(
        _GAUGE, "replica_caches", "How far the prefix index can be trusted for it: 1 for the level",
        ("replica", "trust"),
        {(b.name, level): int(b.caches == level) for b in present for level in TRUST_LEVELS},
    )  # fmt: skip


def _counter(counter: CounterFamily, names: list[str]) -> Metric:
    values: dict[Labels, float] = {}
    for key, count in counter.items():
        given = key if isinstance(key, tuple) else (key,)
        labels = tuple(
            _label(label, value, names) for label, value in zip(counter.labels, given, strict=True)
        )
        values[labels] = values.get(labels, 0) + count
    return _family(_COUNTER, counter.name, counter.text, counter.labels, values)


def _family(
    kind: _Type, name: str, text: str, labels: Labels, values: Mapping[Labels, float]
) -> Metric:
    family = kind(f"tailrace_{name}", text, labels=labels)
    for given, value in values.items():
        family.add_metric(given, value)
    return family


def _label(label: str, value: str | int, names: list[str]) -> str:
    """Return the value of a label as text: a backend's name, or an HTTP status."""
    if isinstance(value, str):
        return value
    if label == "replica":
        return _name(value, names)
    return str(value) if value >= 100 else f"{value}xx"  # a class, where the status is not HTTP's


def _name(replica: int, names: list[str]) -> str:
    if replica < 0:
        return REMOVED if replica == GONE else NO_REPLICA
    return names[replica] if replica < len(names) else str(replica)


def _histogram(family: HistogramFamily, names: list[str]) -> str:
    """Write a histogram; rows of backends with the same name are added up."""
    rows: dict[str, tuple[list[int], float]] = {}
    for row, (counts, total) in enumerate(zip(family.counts, family.sums, strict=True)):
        labels = f'replica="{_escaped(_name(row, names))}"' if family.by_replica else ""
        if labels in rows:
            before, sum_before = rows[labels]
            counts, total = [a + b for a, b in zip(before, counts, strict=True)], sum_before + total
        rows[labels] = counts, total
    if family.gone is not None:
        rows[f'replica="{REMOVED}"'] = family.gone
    name = f"tailrace_{family.name}_seconds"
    lines = [f"# HELP {name} {family.text}", f"# TYPE {name} histogram"]
    for labels, (counts, total) in rows.items():
        lines.extend(histogram_lines(name, labels, family.bounds, counts, total))
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
