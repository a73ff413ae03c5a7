"""Which backends may get requests, and how many: circuit breaker, probes, drain, slow start.

A breaker is closed (normal), open (no requests) or half open (a few trial requests). It opens after
some failures in a row, or when the share of failures in a window is too large. While it is open the
router probes the server's health path, and only a good response admits trial requests. A response
of 4xx is the client's fault and counts as good.

A failure may be the request's fault, so the caller that reports it decides whether it may open the
breaker (``may_open``); :meth:`Backends.may_eject
<tailrace.router.proxy.backends.Backends.may_eject>` keeps a share of the replicas in any case.
"""

import math
from collections import deque
from collections.abc import Callable

from tailrace.router.observe.snapshot import CLOSED, HALF_OPEN, OPEN
from tailrace.router.settings import HealthSettings

#: No limit, as a number of requests.
NO_LIMIT = 1 << 30
#: The longest that a broken replica is left alone, as a multiple of ``open_s``.
MAX_BACKOFF = 12


class Breaker:
    """Circuit breaker of one replica; times are in s of any one clock."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.state = CLOSED
        self.reason = ""
        """Why it is not closed."""
        self.died = False
        """Whether it opened because the server does not listen: its KV cache is lost."""
        self.opened = 0
        """How often it has opened."""
        self.open_until = 0.0
        self.closed_at = -math.inf
        """When it last closed after having been open; before all times: never."""
        self.failures = 0
        """Failures of requests in a row."""
        self._suspicions = 0  # in a row: failures that may have been the requests' fault
        self._probes_in_a_row = 0  # apart: a server may answer probes and nothing else
        self._trials = 0
        self._backoff = 1
        self._window: deque[list[float]] = deque()  # [second, requests, failures]

    def success(self, now: float) -> None:
        """A request, or a probe, was answered."""
        self.failures = self._suspicions = 0
        if self.state == CLOSED:
            window = self._window
            if window and window[-1][0] == int(now):
                window[-1][1] += 1  # as most of the time
            else:
                self._count(now, failed=False)
        elif self.state == HALF_OPEN:
            self._trials += 1
            if self._trials >= self.settings.trials:
                self._close(now)

    def failure(self, now: float, why: str, *, may_open: bool = True, died: bool = False) -> None:
        """A request failed for a reason that is the replica's; ``died``: it cannot be reached.

        ``may_open``: whether this is enough to take the replica out; it is not when too many are
        out already, because then the requests, or too many of them, are to blame.
        """
        self.failures += 1
        if self.state == HALF_OPEN:
            if may_open:
                self._backoff = min(2 * self._backoff, MAX_BACKOFF)
                self._open(now, why, died)
        elif self.state == CLOSED:
            self._count(now, failed=True)
            if may_open and (self.failures >= self.settings.failures or self._share_too_large(now)):
                self._open(now, why, died)

    def suspect(self, now: float, why: str, *, may_open: bool) -> None:
        """A request failed here and at other replicas: its fault, unless nothing else succeeds."""
        self._suspicions += 1
        if may_open and self.state != OPEN and self._suspicions >= self.settings.window_requests:
            self._open(now, why, died=False)

    def probed(
        self,
        now: float,
        good: bool,
        why: str,
        *,
        died: bool = False,
        may_open: bool = True,
        trying: bool = False,
    ) -> None:
        """The health path was asked; ``trying``: trial requests wait for their answer.

        Those decide then: a server may answer its health path and nothing else.
        """
        self._probes_in_a_row = 0 if good else self._probes_in_a_row + 1
        if self.state == OPEN:
            self.died = self.died or died
            if good and now >= self.open_until:
                self.state = HALF_OPEN
                self._trials = 0
        elif self.state == HALF_OPEN:
            if not good:
                self.failure(now, why, may_open=may_open, died=died)
            elif not trying:
                self.success(now)  # without traffic, probes alone bring it back
        elif may_open and self._probes_in_a_row >= self.settings.failures:
            self._open(now, why, died)

    def end_pause(self, now: float) -> None:
        """Let the next good probe admit trial requests."""
        self.open_until = min(self.open_until, now)

    def _open(self, now: float, why: str, died: bool) -> None:
        self.state = OPEN
        self.died = died
        self.reason = why
        self.opened += 1
        self.open_until = now + self.settings.open_s * self._backoff
        self._suspicions = 0
        self._window.clear()

    def _close(self, now: float) -> None:
        self.state = CLOSED
        self.reason = ""
        self.closed_at = now
        self._backoff = 1
        self.failures = 0
        self._window.clear()

    def _count(self, now: float, *, failed: bool) -> None:
        second = float(int(now))
        if not self._window or self._window[-1][0] != second:
            self._window.append([second, 0.0, 0.0])
            while self._window[0][0] < now - self.settings.window_s:
                self._window.popleft()
        self._window[-1][1] += 1
        self._window[-1][2] += failed

    def _share_too_large(self, now: float) -> bool:
        since = now - self.settings.window_s
        recent = [entry for entry in self._window if entry[0] >= since]
        requests = sum(entry[1] for entry in recent)
        failures = sum(entry[2] for entry in recent)
        return (
            requests >= self.settings.window_requests
            and failures >= self.settings.failure_share * requests
        )


class Health:
    """Breaker, drain and slow start of one replica, combined: how many requests it may have.

    ``changed`` is called whenever that may be another number.
    """

    def __init__(
        self,
        settings: HealthSettings,
        max_in_flight: int | None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.breaker = Breaker(settings)
        self.draining = False
        self.removed = False
        self.max_in_flight = max_in_flight or NO_LIMIT
        self.changed = changed

    def set_settings(self, settings: HealthSettings) -> None:
        """Go by other settings from now on; what has happened so far still counts."""
        self.settings = self.breaker.settings = settings

    @property
    def available(self) -> bool:
        """Whether it may get requests at all."""
        return self.breaker.state != OPEN and not self.draining and not self.removed

    @property
    def state(self) -> str:
        """One word for logs and status."""
        if self.removed:
            return "removed"
        return "draining" if self.draining else self.breaker.state

    def drain(self, draining: bool) -> None:
        """Give it no more requests, or give it some again."""
        self.draining = draining
        self.changed()

    def remove(self, removed: bool) -> None:
        """It is no longer among the backends, or is again."""
        self.removed = removed
        self.draining = False
        self.breaker = Breaker(self.settings)
        self.changed()

    def success(self, now: float) -> None:
        """A request was answered."""
        breaker = self.breaker
        before = breaker.state
        breaker.success(now)
        if breaker.state != before:
            self.changed()

    def failure(self, now: float, why: str, *, may_open: bool = True, died: bool = False) -> None:
        """A request failed for a reason that is the replica's; see :meth:`Breaker.failure`."""
        before = self.breaker.state
        self.breaker.failure(now, why, may_open=may_open, died=died)
        if self.breaker.state != before:
            self.changed()

    def suspect(self, now: float, why: str, *, may_open: bool) -> None:
        """A request failed here and at other replicas; see :meth:`Breaker.suspect`."""
        before = self.breaker.state
        self.breaker.suspect(now, why, may_open=may_open)
        if self.breaker.state != before:
            self.changed()

    def probed(
        self,
        now: float,
        good: bool,
        why: str = "",
        *,
        died: bool = False,
        may_open: bool = True,
        trying: bool = False,
    ) -> None:
        """The health path was asked; see :meth:`Breaker.probed`."""
        before = self.breaker.state, self.breaker.died
        self.breaker.probed(now, good, why, died=died, may_open=may_open, trying=trying)
        if (self.breaker.state, self.breaker.died) != before:
            self.changed()

    def warming(self, now: float) -> bool:
        """Whether it is being given its share little by little."""
        slow = self.settings.slow_start_s
        return slow > 0 and now - self.breaker.closed_at < slow

    def limit(self, now: float, peers_in_flight: float) -> int:
        """Return how many requests it may have at once.

        ``peers_in_flight``: mean of the other replicas; a returned one grows to that in time.
        """
        if not self.available:
            return 0
        limit = self.max_in_flight
        if self.breaker.state == HALF_OPEN:
            return min(limit, self.settings.trials)
        if self.warming(now):
            part = (now - self.breaker.closed_at) / self.settings.slow_start_s
            limit = min(limit, max(self.settings.trials, math.ceil(part * peers_in_flight)))
        return limit
