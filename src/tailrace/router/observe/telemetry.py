"""Counts routing events: for Prometheus, and over the last minutes for the status page.

Every counter and histogram is declared in ``Telemetry.__init__`` and counted in the methods below
it; ``prometheus.py`` exports whatever is declared. What can be read when somebody asks (queues,
breakers, ages) is not counted here but part of the snapshot.

No value of a label comes from a client: kinds, outcomes and causes are from closed lists, replicas
and policies from the settings.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from http import HTTPStatus

from tailrace.router.access.refusals import LIMIT_CAUSES
from tailrace.router.decide.chooser import Decision
from tailrace.router.intake.routes import INFERENCE, MODELS, OTHER
from tailrace.router.observe.metrics import Metrics
from tailrace.router.observe.rolling_window import RollingWindow, bucket_of
from tailrace.router.observe.snapshot import RouterSnapshot
from tailrace.router.state.attempt import Attempt

KINDS = frozenset({OTHER, MODELS, *(route.kind for route in INFERENCE)})
OUTCOMES = frozenset(
    {"done", "client_gone", "backend_failed", "timeout", "shed", "rejected", "refused", "other"}
)
SHED_CAUSES = frozenset({"queue", "no_replica", "no_files", "other", *LIMIT_CAUSES})
RETRY_CAUSES = frozenset(
    {"connect", "broken", "timeout", "other", *(f"status_{s}" for s in (429, *range(500, 600)))}
)
#: Why the fallback rule decided, by the chooser's name for it.
FALLBACK_CAUSES = {
    "guard": "guard", "error": "error", "nan": "nan", "time": "slow", "range": "out_of_range",
}  # fmt: skip
#: Statuses that are counted by their number; others by their class.
STATUSES = frozenset({*(status.value for status in HTTPStatus), 499})
_NOWHERE = -1
#: Decisions that the status page shows.
SHOWN_DECISIONS = 50
#: Time between two measurements of the event loop's lag, s.
LAG_EVERY_S = 0.25

# Upper bounds of the histograms' buckets, s.
# fmt: off
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 80.0)
TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WAIT_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DECISION_BUCKETS = (1e-05, 2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
# fmt: on


#: Events that are counted together: one at a time they cost a request 4 us more.
_BATCH = 64
#: A request that is over: its last attempt, status, outcome, kind and client.
_Over = tuple[Attempt | None, int, str, str, str]


class Telemetry:
    """An event sink that counts. Times are in s of ``clock``, which is the router's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started_at = clock()
        self.recent: deque[tuple[float, Decision]] = deque(maxlen=SHOWN_DECISIONS)
        """The last decisions, each with its time."""
        self._window = RollingWindow(self.started_at)
        self._metrics = metrics = Metrics()
        self._made: list[tuple[float, Decision]] = []
        self._over: list[_Over] = []
        counter, histogram = metrics.counter, metrics.histogram
        self.requests = counter(
            "requests", "Requests of clients that are over",
            ("kind", "status", "outcome", "replica"),
        )  # fmt: skip
        self.decisions = counter(
            "decisions", "Decisions by the policy that was asked and the replica chosen",
            ("policy", "replica"),
        )  # fmt: skip
        self.fallbacks = counter(
            "fallbacks", "Decisions that the fallback rule made, by what kept the policy from it",
            ("cause",),
        )  # fmt: skip
        self.shadow_decisions = counter(
            "shadow_decisions", "Decisions that the shadow policy made too"
        )
        self.shadow_disagreements = counter(
            "shadow_disagreements",
            "Decisions in which the shadow policy would have chosen another replica",
        )
        self.retries = counter(
            "retries", "Requests tried elsewhere, by the replica that made it necessary and why",
            ("replica", "cause"),
        )  # fmt: skip
        self.sheds = counter("shed", "Requests rejected for lack of room", ("cause",))
        self.waited = counter("waited", "Requests sent after they had waited at the router")
        self.overtakes = counter(
            "overtakes", "Those sent before others that had waited longer, by what put them first",
            ("cause",),
        )  # fmt: skip
        self.client_requests = counter(
            "client_requests", "Requests of a client with a key that are over",
            ("client", "outcome"),
        )  # fmt: skip
        self.client_tokens = counter(
            "client_tokens", "Prompt and output tokens of a client with a key", ("client",)
        )
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of finished requests", ("replica",)
        )
        self.output_tokens = counter("output_tokens", "Tokens of answers", ("replica",))
        self.believed_tokens = counter(
            "prefix_believed_tokens", "Prompt tokens that the router thought cached", ("replica",)
        )
        self.checked_tokens = counter(
            "prefix_checked_tokens",
            "The same, of requests whose server told how many were", ("replica",),
        )  # fmt: skip
        self.reported_tokens = counter(
            "prefix_reported_tokens",
            "Prompt tokens that those servers had cached, as they say", ("replica",),
        )  # fmt: skip
        self.ttft = histogram(
            "ttft", "From a request's arrival to its first token, where that can be seen (streams)",
            TTFT_BUCKETS, by_replica=True,
        )  # fmt: skip
        self.tpot = histogram(
            "tpot", "Per token after the first, of streams that were completed",
            TPOT_BUCKETS, by_replica=True,
        )  # fmt: skip
        self.e2e = histogram(
            "e2e", "From a request's arrival to its end, of those completed", E2E_BUCKETS
        )
        self.queue_wait = histogram(
            "queue_wait", "From a request's arrival to its being sent, retries included",
            WAIT_BUCKETS,
        )  # fmt: skip
        self.decision_time = histogram("decision", "To choose a replica", DECISION_BUCKETS)
        self.lag = histogram(
            "event_loop_lag", "How late the event loop comes, looked at four times a second",
            LAG_BUCKETS,
        )  # fmt: skip

    @property
    def window(self) -> RollingWindow:
        """The last minutes."""
        self.flush()
        return self._window

    @property
    def metrics(self) -> Metrics:
        """All counters and histograms."""
        self.flush()
        return self._metrics

    # ---- events ---------------------------------------------------------------------------------

    def decided(self, decision: Decision) -> None:
        """A replica was chosen."""
        made = self._made
        made.append((self.clock(), decision))
        if len(made) >= _BATCH:
            self.flush()

    def request_done(
        self, attempt: Attempt | None, status: int, outcome: str, path_kind: str, client: str = ""
    ) -> None:
        """A client's request is over; ``attempt``: its last one, closed, if there was one."""
        over = self._over
        over.append((attempt, status, outcome, path_kind, client))
        if len(over) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Count what has happened since the last time. Readers of counters call it first."""
        made, over = self._made, self._over
        if made:
            self._made = []
            self._count_decisions(made)
        if over:
            self._over = []
            self._count_requests(over)

    def _count_decisions(self, made: list[tuple[float, Decision]]) -> None:
        self.recent.extend(made)
        decisions = [decision for _, decision in made]
        self.decisions.update([(d.policy, d.replica) for d in decisions])
        self._window.present.decided.update([d.replica for d in decisions])
        self.decision_time.observe_all([d.took_s for d in decisions])
        for d in decisions:
            if d.fell_back is not None:
                self.fallbacks[FALLBACK_CAUSES.get(d.fell_back, "other")] += 1
            if d.waited_s is not None:
                self.waited[()] += 1
                if d.overtook:
                    self.overtakes[d.overtook_why] += 1
            if d.shadow is not None:
                self.shadow_decisions[()] += 1
                if d.shadow != d.replica:
                    self.shadow_disagreements[()] += 1

    def _count_requests(self, over: list[_Over]) -> None:
        keys = [
            (kind, status, outcome, _NOWHERE if attempt is None else attempt.replica)
            for attempt, status, outcome, kind, _ in over
        ]
        for key, count in Counter(keys).items():
            self.requests[_closed_key(*key)] += count
        by_client = Counter([(client, outcome) for _, _, outcome, _, client in over if client])
        for (client, outcome), count in by_client.items():
            self.client_requests[client, outcome if outcome in OUTCOMES else "other"] += count
        routed = [(o[0], o[2], o[4]) for o in over if o[0] is not None]
        if routed:
            self._count_attempts(routed)

    def _count_attempts(self, routed: list[tuple[Attempt, str, str]]) -> None:
        """Count the last attempts of requests, each with its outcome and client."""
        most = max([attempt.replica for attempt, _, _ in routed])
        if most >= self._metrics.replicas:
            self._metrics.add_replicas(most + 1)
        prompt_tokens, output_tokens = self.prompt_tokens, self.output_tokens
        believed_tokens, slot = self.believed_tokens, self._window.present
        waits_s: list[float] = []
        e2e_s: list[float] = []
        for attempt, outcome, client in routed:
            replica, cached, output = attempt.replica, attempt.cached, attempt.output_tokens
            prompt, arrived_at = attempt.known_prompt_tokens[0], attempt.arrival.arrived_at
            if client:
                self.client_tokens[client] += prompt + output
            prompt_tokens[replica] += prompt
            output_tokens[replica] += output
            believed_tokens[replica] += cached
            if attempt.reported_cached is not None:
                self.checked_tokens[replica] += cached
                self.reported_tokens[replica] += attempt.reported_cached
            waits_s.append(max(0.0, attempt.sent_at - arrived_at))
            # An estimated first token is not counted.
            first_at = None if attempt.estimated else attempt.first_at
            if first_at is not None:
                ttft_s = max(0.0, first_at - arrived_at)
                self.ttft.observe(ttft_s, replica)
                slot.ttft[bucket_of(ttft_s)] += 1
            last_at = attempt.last_at
            if outcome == "done" and last_at is not None:
                e2e_s.append(max(0.0, last_at - arrived_at))
                if first_at is not None and output > 1:
                    self.tpot.observe(max(0.0, last_at - first_at) / (output - 1), replica)
        self.queue_wait.observe_all(waits_s)
        self.e2e.observe_all(e2e_s)
        for seconds in e2e_s:
            slot.e2e[bucket_of(seconds)] += 1

    def retried(self, replica: int, cause: str) -> None:
        """A request is tried at another replica because of this one."""
        self.retries[replica, cause if cause in RETRY_CAUSES else "other"] += 1

    def shed(self, cause: str) -> None:
        """A request was rejected for lack of room."""
        self.sheds[cause if cause in SHED_CAUSES else "other"] += 1

    def retire(self, replica: int) -> None:
        """A replica is gone, and its number may be given to another one."""
        self.flush()
        self._metrics.retire(replica)
        self._window.retire(replica)
        self.recent.clear()  # numbers stand in it

    # ---- time -----------------------------------------------------------------------------------

    async def run(self, snapshot: Callable[[], RouterSnapshot]) -> None:
        """Measure the event loop's lag and close the window's slots until cancelled."""
        while True:
            asleep_at = self.clock()
            await asyncio.sleep(LAG_EVERY_S)
            now = self.clock()
            self.lagged(now - asleep_at - LAG_EVERY_S)
            self.flush()
            if self._window.is_over(now):
                self.advance(snapshot())

    def lagged(self, late_s: float) -> None:
        """The event loop came this much later than it should have."""
        late_s = max(0.0, late_s)
        self.lag.observe(late_s)
        slot = self._window.present
        slot.lag_s = max(slot.lag_s, late_s)

    def advance(self, snapshot: RouterSnapshot) -> None:
        """Close the window's slot if its time is over; it keeps the queues of the snapshot."""
        self.flush()
        if self._window.is_over(snapshot.at):
            self._window.next(
                snapshot.at,
                [b.in_flight for b in snapshot.backends],
                [b.queued for b in snapshot.backends],
                snapshot.waiting,
            )


def _closed_key(
    path_kind: str, status: int, outcome: str, replica: int
) -> tuple[str, int, str, int]:
    """Return what a request counts as: values from closed lists only."""
    return (
        path_kind if path_kind in KINDS else "other",
        status if status in STATUSES else status // 100,
        outcome if outcome in OUTCOMES else "other",
        replica,
    )
