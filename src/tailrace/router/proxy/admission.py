"""Admission: which requests wait when every backend is at its limit, and which are rejected.

Also the retry budget, which is admission of another kind: retries are allowed as a share of the
traffic only, so that a failing cluster does not get twice the requests.
"""

import heapq
import math
from typing import Protocol

from tailrace.router.settings import AdmissionSettings, RetrySettings

#: Limits of the Retry-After of a rejected request, in s.
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60
#: Time constant of the measured rate of admissions, in s.
PACE_S = 10.0


class Waiting(Protocol):
    """A request that waits."""

    priority: int
    """Lower goes first."""

    def admitted(self) -> bool:
        """Try again to send it; False: there is still no room."""

    def shed(self, why: str) -> None:
        """It is rejected."""


class Queue:
    """Requests that wait for room, most urgent first, and first come first served among equals."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self._heap: list[tuple[int, int, float, Waiting]] = []
        self._gone: set[int] = set()  # numbers of entries that were taken out of turn
        self._numbers: dict[int, int] = {}  # id of a waiting request -> its number
        self._next = 0
        self._pumping = False
        self._again = False
        self._pace = 0.0
        self._pace_at = 0.0

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, waiting: Waiting, now: float) -> bool:
        """Queue a request; False: the queue is full of more urgent ones, so it is rejected."""
        if len(self) >= self.settings.queue:
            worst = max(
                (e for e in self._heap if e[1] not in self._gone), default=None, key=lambda e: e[:2]
            )
            if worst is None or worst[0] <= waiting.priority:
                return False
            self._take_out(worst[3])
            worst[3].shed("a more urgent request took its place in the queue")
        heapq.heappush(self._heap, (waiting.priority, self._next, now, waiting))
        self._numbers[id(waiting)] = self._next
        self._next += 1
        return True

    def remove(self, waiting: Waiting) -> None:
        """Forget a request whose client has gone."""
        if id(waiting) in self._numbers:
            self._take_out(waiting)

    def pump(self, now: float) -> None:
        """There may be room: send what can be sent, in order."""
        if self._pumping:
            self._again = True  # sending one may end it at once, and make room again
            return
        self._pumping = True
        try:
            while self._heap:
                priority, number, since, waiting = self._heap[0]
                if number in self._gone:
                    heapq.heappop(self._heap)
                    self._gone.discard(number)
                    continue
                self._again = False
                # Out before it is tried: it may be shed or sent within the call.
                heapq.heappop(self._heap)
                del self._numbers[id(waiting)]
                if waiting.admitted():
                    self._passed(now)
                    continue
                heapq.heappush(self._heap, (priority, number, since, waiting))
                self._numbers[id(waiting)] = number
                if not self._again:
                    break
        finally:
            self._pumping = False

    def sweep(self, now: float) -> None:
        """Reject what has waited too long."""
        limit = now - self.settings.max_wait_s
        for _, number, since, waiting in list(self._heap):
            if since < limit and number not in self._gone:
                self._take_out(waiting)
                waiting.shed(f"no replica had room within {self.settings.max_wait_s:g} s")

    def clear(self, why: str) -> None:
        """Reject everything."""
        for _, number, _, waiting in list(self._heap):
            if number not in self._gone:
                self._take_out(waiting)
                waiting.shed(why)

    def retry_after_s(self, now: float) -> int:
        """Return when a client should retry: when those that wait now will have been sent."""
        pace = self._pace * math.exp((self._pace_at - now) / PACE_S) / PACE_S
        wait = len(self) / pace if pace > 0 else MIN_RETRY_AFTER_S
        return int(min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(wait))))

    def _passed(self, now: float) -> None:
        self._pace = self._pace * math.exp((self._pace_at - now) / PACE_S) + 1
        self._pace_at = now

    def _take_out(self, waiting: Waiting) -> None:
        self._gone.add(self._numbers.pop(id(waiting)))


class RetryBudget:
    """Retries as a share of requests, with a store for the moment when a replica dies."""

    def __init__(self, settings: RetrySettings) -> None:
        self.settings = settings
        self.left = float(settings.burst)
        """Retries that may be spent now."""

    def request(self) -> None:
        """A request has come: it earns its share of a retry."""
        settings = self.settings
        if self.left < settings.burst:
            self.left = min(settings.burst, self.left + settings.budget)

    def spend(self) -> bool:
        """Take one retry out; False: there is none left."""
        if self.left < 1:
            return False
        self.left -= 1
        return True
