"""Counts routing events: for Prometheus, and over the last minutes for the status page.

Every counter and histogram is declared in ``Telemetry.__init__`` and counted in the methods below
it; ``prometheus.py`` exports whatever is declared. What can be read when somebody asks (queues,
breakers, ages) is not counted here but part of the snapshot.

No value of a label comes from a client: kinds, outcomes and causes are from closed lists, replicas
and policies from the settings.
"""

import asyncio
import time
from bisect import bisect_left
from collections import deque
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


class Telemetry:
    """An event sink that counts. Times are in s of ``clock``, which is the router's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started_at = clock()
        self.recent: deque[tuple[float, Decision]] = deque(maxlen=SHOWN_DECISIONS)
        """The last decisions, each with its time."""
        self.window = RollingWindow(self.started_at)
        self.metrics = metrics = Metrics()
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

    # ---- events ---------------------------------------------------------------------------------

    def decided(self, decision: Decision) -> None:
        """A replica was chosen."""
        replica, took_s, times = decision.replica, decision.took_s, self.decision_time
        self.decisions[decision.policy, replica] += 1
        times.counts[0][bisect_left(DECISION_BUCKETS, took_s)] += 1
        times.sums[0] += took_s
        if decision.fell_back is not None:
            self.fallbacks[FALLBACK_CAUSES.get(decision.fell_back, "other")] += 1
        if decision.shadow is not None:
            self.shadow_decisions[()] += 1
            if decision.shadow != replica:
                self.shadow_disagreements[()] += 1
        self.window.present.decided[replica] += 1
        self.recent.append((self.clock(), decision))

    def request_done(
        self, attempt: Attempt | None, status: int, outcome: str, path_kind: str, client: str = ""
    ) -> None:
        """A client's request is over; ``attempt``: its last one, closed, if there was one."""
        replica = _NOWHERE if attempt is None else attempt.replica
        key = (path_kind, status, outcome, replica)
        count = self.requests.get(key)
        if count is None:
            key = _closed_key(*key)
            count = self.requests[key]
        self.requests[key] = count + 1
        if client:
            self.client_requests[client, outcome if outcome in OUTCOMES else "other"] += 1
        if attempt is None:
            return
        if replica >= self.metrics.replicas:
            self.metrics.add_replicas(replica + 1)
        cached, output, prompt = (
            attempt.cached,
            attempt.output_tokens,
            attempt.known_prompt_tokens[0],
        )
        if client:
            self.client_tokens[client] += prompt + output
        self.prompt_tokens[replica] += prompt
        self.output_tokens[replica] += output
        self.believed_tokens[replica] += cached
        if attempt.reported_cached is not None:
            self.checked_tokens[replica] += cached
            self.reported_tokens[replica] += attempt.reported_cached
        arrived_at, slot = attempt.arrival.arrived_at, self.window.present
        waited_s = attempt.sent_at - arrived_at
        if waited_s < 0:
            waited_s = 0.0
        # These two are observed by every request: `observe` would cost 0.5 us more.
        waits, times = self.queue_wait, self.e2e
        waits.counts[0][bisect_left(WAIT_BUCKETS, waited_s)] += 1
        waits.sums[0] += waited_s
        # An estimated first token is not counted.
        first_at = None if attempt.estimated else attempt.first_at
        if first_at is not None:
            ttft_s = max(0.0, first_at - arrived_at)
            self.ttft.observe(ttft_s, replica)
            slot.ttft[bucket_of(ttft_s)] += 1
        last_at = attempt.last_at
        if outcome == "done" and last_at is not None:
            e2e_s = last_at - arrived_at
            if e2e_s < 0:
                e2e_s = 0.0
            times.counts[0][bisect_left(E2E_BUCKETS, e2e_s)] += 1
            times.sums[0] += e2e_s
            slot.e2e[bucket_of(e2e_s)] += 1
            if first_at is not None and output > 1:
                self.tpot.observe(max(0.0, last_at - first_at) / (output - 1), replica)

    def retried(self, replica: int, cause: str) -> None:
        """A request is tried at another replica because of this one."""
        self.retries[replica, cause if cause in RETRY_CAUSES else "other"] += 1

    def shed(self, cause: str) -> None:
        """A request was rejected for lack of room."""
        self.sheds[cause if cause in SHED_CAUSES else "other"] += 1

    def retire(self, replica: int) -> None:
        """A replica is gone, and its number may be given to another one."""
        self.metrics.retire(replica)
        self.window.retire(replica)
        self.recent.clear()  # numbers stand in it

    # ---- time -----------------------------------------------------------------------------------

    async def run(self, snapshot: Callable[[], RouterSnapshot]) -> None:
        """Measure the event loop's lag and close the window's slots until cancelled."""
        while True:
            asleep_at = self.clock()
            await asyncio.sleep(LAG_EVERY_S)
            now = self.clock()
            self.lagged(now - asleep_at - LAG_EVERY_S)
            if self.window.is_over(now):
                self.advance(snapshot())

    def lagged(self, late_s: float) -> None:
        """The event loop came this much later than it should have."""
        late_s = max(0.0, late_s)
        self.lag.observe(late_s)
        slot = self.window.present
        slot.lag_s = max(slot.lag_s, late_s)

    def advance(self, snapshot: RouterSnapshot) -> None:
        """Close the window's slot if its time is over; it keeps the queues of the snapshot."""
        if self.window.is_over(snapshot.at):
            self.window.next(
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
