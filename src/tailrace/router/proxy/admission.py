"""Admission: which requests wait when every backend is at its limit, and which are rejected.

Also the retry budget, which is admission of another kind: retries are allowed as a share of the
traffic only, so that a failing cluster does not get twice the requests.
"""

import math
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Protocol

from tailrace.queueing.fair_queue import FairQueue, QueuedItem
from tailrace.router.observe.snapshot import WaitingSnapshot
from tailrace.router.settings import AdmissionSettings, RetrySettings

#: Limits of the Retry-After of a rejected request, in s.
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60
#: Time constant of the measured rate of admissions, in s.
PACE_S = 10.0


def _always() -> bool:
    return True


class Waiting(Protocol):
    """A request that waits."""

    priority: int
    """Lower goes first."""

    @property
    def flow(self) -> str:
        """Name of its client; clients share fairly."""

    @property
    def weight(self) -> float:
        """Its client's share relative to others."""

    @property
    def cost(self) -> float:
        """Tokens it is expected to take."""

    @property
    def key(self) -> int:
        """Lower goes first among the requests of one client and priority."""

    @property
    def lane(self) -> Hashable:
        """Equal for requests that the same backends can take."""

    def admitted(
        self, queued: "QueuedItem[Waiting] | None" = None, *, overdue: bool = False
    ) -> bool:
        """Try again to send it; False: there is no room.

        ``queued``: its place in the queue. ``overdue``: a policy's limits do not hold it any more.
        """

    def shed(self, why: str) -> None:
        """It is rejected."""


class Queue:
    """Requests that wait for room.

    Most urgent first, then fairly by tokens between clients, then in the policy's order.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self._waiting: FairQueue[Waiting] = FairQueue()
        self.items = self._waiting.items
        """What waits. Whether there is any is asked three times per request: 0.2 us less each
        than by ``len``."""
        self._pumping = False
        self._again = False
        self._pace = 0.0
        self._pace_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def is_waiting(self, lane: Hashable) -> bool:
        """Whether requests wait for the same backends."""
        return self._waiting.has_lane(lane)

    def push(self, waiting: Waiting, now: float) -> bool:
        """Queue a request; False: others have more right to the places, so it is rejected."""
        flow, weight, cost, priority = waiting.flow, waiting.weight, waiting.cost, waiting.priority
        if len(self) >= self.settings.queue:
            victim = self._waiting.victim(flow, weight, cost, priority) if len(self) else None
            if victim is None:
                return False
            self._waiting.remove(victim)
            victim.shed("every replica is busy, and others have more right to a place in the queue")
        self._waiting.push(
            waiting, flow=flow, weight=weight, cost=cost, priority=priority,
            key=waiting.key, lane=waiting.lane, since=now,
        )  # fmt: skip
        return True

    def remove(self, waiting: Waiting) -> None:
        """Forget a request whose client has gone."""
        self._waiting.remove(waiting)

    def serve(self, flow: str, weight: float, cost: float) -> None:
        """Charge a client for a request that is sent now."""
        self._waiting.serve(flow, weight, cost)

    def correct(self, flow: str, weight: float, more: float) -> None:
        """A request that was sent took ``more`` tokens than its client was charged for."""
        self._waiting.correct(flow, weight, more)

    def oldest(self, now: float, most: int) -> tuple[WaitingSnapshot, ...]:
        """Return the ``most`` that have waited longest."""
        return tuple(
            WaitingSnapshot(
                client=queued.flow, priority=queued.priority, waited_s=max(0.0, now - queued.since),
                overtaken=self._waiting.overtaken(queued),
            )
            for queued in islice(self._waiting, most)
        )  # fmt: skip

    def pump(
        self, now: float, max_wait_s: float = math.inf, has_room: Callable[[], bool] = _always
    ) -> None:
        """There may be room: send what can be sent, in order.

        Who has waited ``max_wait_s`` is tried first. ``has_room``: False if a backend has room for
        nobody, so that nobody else need be tried.
        """
        if self._pumping:
            self._again = True  # sending one may end it at once, and make room again
            return
        self._pumping = True
        full: set[Hashable] = set()
        try:
            if max_wait_s < math.inf:
                self._send_overdue(now, max_wait_s, full)
            # Out before it is tried: it may be shed or sent within the call.
            while has_room() and (queued := self._waiting.pop(full)) is not None:
                self._again = False
                if queued.item.admitted(queued):
                    self._passed(now)
                    continue
                self._waiting.put_back(queued)
                if self._again:
                    full.clear()
                else:
                    full.add(queued.lane)
        finally:
            self._pumping = False

    def _send_overdue(self, now: float, max_wait_s: float, full: set[Hashable]) -> None:
        """Send who has waited too long; add the lanes that have no room even so to ``full``."""
        while (queued := self._waiting.pop_overdue(now, max_wait_s, full)) is not None:
            if queued.item.admitted(queued, overdue=True):
                self._passed(now)
            else:
                self._waiting.put_back(queued)
                full.add(queued.lane)

    def sweep(self, now: float) -> None:
        """Reject what has waited too long."""
        limit = now - self.settings.max_wait_s
        late = []
        for queued in self._waiting:
            if queued.since >= limit:
                break  # the others came later
            late.append(queued.item)
        for waiting in late:
            if self._waiting.remove(waiting):
                waiting.shed(f"no replica had room within {self.settings.max_wait_s:g} s")

    def clear(self, why: str) -> None:
        """Reject everything."""
        for waiting in [queued.item for queued in self._waiting]:
            if self._waiting.remove(waiting):
                waiting.shed(why)

    def retry_after_s(self, now: float) -> int:
        """Return when a client should retry: when those that wait now will have been sent."""
        pace = self._pace * math.exp((self._pace_at - now) / PACE_S) / PACE_S
        wait = len(self) / pace if pace > 0 else MIN_RETRY_AFTER_S
        return int(min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(wait))))

    def _passed(self, now: float) -> None:
        self._pace = self._pace * math.exp((self._pace_at - now) / PACE_S) + 1
        self._pace_at = now


class RetryBudget:
    """Retries as a share of requests, with a store for the moment when a replica dies."""

    def __init__(self, settings: RetrySettings) -> None:
        self.set_up(settings)
        self.left = float(settings.burst)
        """Retries that may be spent now."""

    def set_up(self, settings: RetrySettings) -> None:
        """Go by other settings; what is left stays."""
        self._share, self._burst = settings.budget, settings.burst

    def request(self) -> None:
        """A request has come: it earns its share of a retry."""
        if self.left < self._burst:
            self.left = min(self._burst, self.left + self._share)

    def spend(self) -> bool:
        """Take one retry out; False: there is none left."""
        if self.left < 1:
            return False
        self.left -= 1
        return True
