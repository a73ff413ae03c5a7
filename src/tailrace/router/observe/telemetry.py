"""What the router counts: for Prometheus, and the last minutes for the status page.

Events are added to plain numbers by the event loop's one thread; whatever can be read elsewhere
(queues, breakers, ages) is read when somebody asks, see ``exported.py``. Counters of the Prometheus
library lock and would cost 20 us per request.

No label's value comes from a client: kinds, outcomes and causes are from closed lists, replicas and
policies from the settings.
"""

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from tailrace.router.observe.prometheus import (
    CONTENT_TYPE,
    DECISION_BUCKETS,
    E2E_BUCKETS,
    LAG_BUCKETS,
    TPOT_BUCKETS,
    TTFT_BUCKETS,
    WAIT_BUCKETS,
    Exporter,
    Histogram,
)
from tailrace.router.observe.rolling_window import Slots, bucket_of

if TYPE_CHECKING:
    from tailrace.router.app import Router
    from tailrace.router.decide.chooser import Decision
    from tailrace.router.state.cluster import Attempt

__all__ = ["CONTENT_TYPE", "Telemetry"]

KINDS = frozenset({"chat", "completion", "embedding", "response", "other"})
OUTCOMES = frozenset(
    {"done", "client_gone", "backend_failed", "timeout", "shed", "rejected", "refused", "other"}
)
SHED_CAUSES = frozenset({"queue", "no_replica", "rate", "other"})
RETRY_CAUSES = frozenset(
    {"connect", "broken", "timeout", "other", *(f"status_{s}" for s in range(500, 600))}
)
#: Why the fallback rule decided, by the name that the chooser has for it.
FALLBACK_CAUSES = {
    "guard": "guard", "error": "error", "nan": "nan", "time": "slow", "range": "out_of_range",
}  # fmt: skip
#: Statuses that are counted by their number; others by their class.
STATUSES = frozenset({*(status.value for status in HTTPStatus), 499})
_NOWHERE = -1
#: Decisions that the status page shows.
SHOWN_DECISIONS = 50
#: Between two looks at the event loop's lag, in s.
LAG_EVERY_S = 0.25


class ReplicaCounts:
    """What the finished requests of one replica amount to."""

    __slots__ = ("believed", "checked", "output", "prompt", "reported", "tpot", "ttft")

    def __init__(self) -> None:
        self.prompt = 0
        """Prompt tokens."""
        self.output = 0
        """Tokens of answers."""
        self.believed = 0
        """Prompt tokens that the router thought cached."""
        self.checked = 0
        """The same, of requests whose server said how many were."""
        self.reported = 0
        """Cached prompt tokens as those servers said."""
        self.ttft = Histogram(TTFT_BUCKETS)
        self.tpot = Histogram(TPOT_BUCKETS)


class Telemetry:
    """Everything that is counted. Times are in s of ``clock``, which is the cluster's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started_at = clock()
        self.router: Router | None = None
        self.requests: Counter[tuple[str, int, str, int]] = Counter()
        """By kind, status, outcome and replica."""
        self.decisions: Counter[tuple[str, int]] = Counter()
        """By policy and replica."""
        self.fallbacks: Counter[str] = Counter()
        """By cause."""
        self.retries: Counter[tuple[int, str]] = Counter()
        """By replica that made it necessary, and cause."""
        self.sheds: Counter[str] = Counter()
        """By cause."""
        self.shadowed = 0
        """Decisions that the shadow policy made too."""
        self.disagreed = 0
        """Those in which it would have chosen another replica."""
        self.e2e = Histogram(E2E_BUCKETS)
        self.queue_wait = Histogram(WAIT_BUCKETS)
        self.decision = Histogram(DECISION_BUCKETS)
        self.lag = Histogram(LAG_BUCKETS)
        self.replicas: list[ReplicaCounts] = []
        self.recent: deque[tuple[float, Decision]] = deque(maxlen=SHOWN_DECISIONS)
        """The last decisions, and when they were made."""
        self.slots = Slots(self.started_at)
        self._exporter = Exporter(self)

    def watch(self, router: "Router") -> None:
        """Read queues, breakers and connections from this router from now on."""
        self.router = router

    @property
    def uptime_s(self) -> float:
        """Time since the start."""
        return self.clock() - self.started_at

    # ---- events ---------------------------------------------------------------------------------

    def decided(self, decision: "Decision") -> None:
        """A replica was chosen."""
        now = self.clock()
        replica = decision.replica
        self.decisions[decision.policy, replica] += 1
        took_s, times = decision.took_s, self.decision
        times.counts[bisect_left(DECISION_BUCKETS, took_s)] += 1
        times.total += took_s
        if decision.fell_back is not None:
            self.fallbacks[FALLBACK_CAUSES.get(decision.fell_back, "other")] += 1
        if decision.shadow is not None:
            self.shadowed += 1
            if decision.shadow != replica:
                self.disagreed += 1
        self.slots.present.decided[replica] += 1
        self.recent.append((now, decision))

    def request_done(
        self, attempt: "Attempt | None", status: int, outcome: str, path_kind: str
    ) -> None:
        """A client's request is over; ``attempt``: its last attempt, closed, if there was one."""
        replica = _NOWHERE if attempt is None else attempt.replica
        key = (path_kind, status, outcome, replica)
        if key not in self.requests:
            key = _closed_key(*key)
        self.requests[key] += 1
        if attempt is None:
            return
        if replica >= len(self.replicas):
            self.replicas += [ReplicaCounts() for _ in range(len(self.replicas), replica + 1)]
        counts = self.replicas[replica]
        cached, output = attempt.cached, attempt.output_tokens
        counts.prompt += attempt.known_prompt_tokens[0]
        counts.output += output
        counts.believed += cached
        if attempt.reported_cached is not None:
            counts.checked += cached
            counts.reported += attempt.reported_cached
        arrived_at, slot = attempt.arrival.arrived_at, self.slots.present
        waited_s = attempt.sent_at - arrived_at
        self.queue_wait.observe(waited_s if waited_s > 0 else 0.0)
        # An estimated first token counts for nothing.
        first_at = None if attempt.estimated else attempt.first_at
        if first_at is not None:
            ttft_s = max(0.0, first_at - arrived_at)
            counts.ttft.observe(ttft_s)
            slot.ttft[bucket_of(ttft_s)] += 1
        last_at = attempt.last_at
        if outcome == "done" and last_at is not None:
            e2e_s = max(0.0, last_at - arrived_at)
            self.e2e.observe(e2e_s)
            slot.e2e[bucket_of(e2e_s)] += 1
            if first_at is not None and output > 1:
                counts.tpot.observe(max(0.0, last_at - first_at) / (output - 1))

    def retried(self, replica: int, cause: str) -> None:
        """A request is tried elsewhere, because of this replica."""
        self.retries[replica, cause if cause in RETRY_CAUSES else "other"] += 1

    def shed(self, cause: str) -> None:
        """A request was sent away."""
        self.sheds[cause if cause in SHED_CAUSES else "other"] += 1

    # ---- time -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch the event loop and the queues until cancelled."""
        while True:
            asleep_at = self.clock()
            await asyncio.sleep(LAG_EVERY_S)
            now = self.clock()
            self.lagged(now - asleep_at - LAG_EVERY_S)
            self.advance(now)

    def lagged(self, late_s: float) -> None:
        """The event loop came so much later than it should have."""
        late_s = max(0.0, late_s)
        self.lag.observe(late_s)
        slot = self.slots.present
        slot.lag_s = max(slot.lag_s, late_s)

    def advance(self, now: float) -> None:
        """Begin a new slot of the last minutes if it is time; the old one keeps the queues."""
        if not self.slots.is_over(now):
            return
        if self.router is None:
            self.slots.next(now, (), (), 0)
            return
        plane = self.router.plane
        self.slots.next(
            now,
            [target.active for target in plane.targets],
            plane.cluster.replicas["queued"].tolist(),
            len(self.router.forwarder.queue),
        )

    # ---- Prometheus -----------------------------------------------------------------------------

    def render(self) -> bytes:
        """Return everything in Prometheus' text form."""
        return self._exporter.render()


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
