"""Requests at each backend counted over all workers of a router, so that limits apply to the sum.

A limit is checked and a request counted under a lock, because two workers may see the same last
slot. Each worker counts its requests in its own cell, which the supervisor clears when the worker
dies. Among workers with waiting requests, the one that got a slot least recently goes first; a
worker that frees a slot wakes the others.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from tailrace.router.state.shared_state import WORKER, SharedState, memory_of

#: How long a free place is left to a worker that has waited for longer, in s.
YIELD_S = 0.05
#: A worker that has been silent for longer is not waited for, in s.
SILENT_S = 1.0
#: Attempts to get the lock. It is held for a few microseconds, unless its holder is stopped: then
#: there is no room for now.
_TRIES = 200
_CELLS = WORKER.itemsize // 8
_BEAT, _VERSION, _WAITING = range(3)
assert WORKER.names == ("beat_at", "version", "waiting_since")


@dataclass(slots=True)
class WorkerSignals:
    """What workers share beside memory; made before they are forked."""

    count: int
    lock: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    wakes: list[tuple[int, int]] = field(default_factory=list)
    """A pipe to each worker, for reading and for writing."""

    def __post_init__(self) -> None:
        for _ in range(self.count):
            pipe = os.pipe()
            for end in pipe:
                os.set_blocking(end, False)
            self.wakes.append(pipe)

    def close(self) -> None:
        """Close all."""
        self.lock.close()
        for pipe in self.wakes:
            for end in pipe:
                os.close(end)
        self.wakes.clear()


class WorkerRoom:
    """The requests in progress of all workers, as one worker counts and limits them."""

    def __init__(
        self,
        shared: SharedState,
        worker: int,
        signals: WorkerSignals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._clock = clock
        self._signals = signals
        self._workers, self._room = shared.workers, shared.room
        self._in_flight: Any = memory_of(shared.in_flight.reshape(-1))
        self._freed_at: Any = memory_of(shared.freed_at)
        self._times: Any = memory_of(shared.reports.view("f8"))
        self._numbers: Any = memory_of(shared.reports.view("i8"))

    # ---- places ---------------------------------------------------------------------------------

    def count(self, backend: int) -> int:
        """Requests in progress at a backend, of all workers."""
        cells, step = self._in_flight, self._room
        return sum(cells[backend + w * step] for w in range(self._workers))

    def take(self, backend: int, limit: int | None = None) -> bool:
        """Count a request at a backend, if there is a place; without a limit there always is."""
        own = backend + self.worker * self._room
        if limit is None:
            self._in_flight[own] += 1
            return True
        if not self._locked():
            return False
        try:
            free = limit - self.count(backend)
            if free <= 0 or self._yields(backend, free):
                return False
            self._in_flight[own] += 1
            waiting = self.worker * _CELLS + _WAITING
            if self._times[waiting]:
                self._times[waiting] = self._clock()
            return True
        finally:
            fcntl.lockf(self._signals.lock, fcntl.LOCK_UN)

    def give_back(self, backend: int, *, limited: bool = True) -> None:
        """A request at a backend is over; if there is a limit, wake those whose requests wait."""
        self._in_flight[backend + self.worker * self._room] -= 1
        if not limited:
            return
        self._freed_at[backend] = self._clock()
        for worker in range(self._workers):
            if worker != self.worker and self._times[worker * _CELLS + _WAITING]:
                with contextlib.suppress(BlockingIOError):  # it is full: it wakes anyway
                    os.write(self._signals.wakes[worker][1], b"1")

    def wait(self, waiting: bool) -> None:
        """Report whether requests of this worker wait for room."""
        at = self.worker * _CELLS + _WAITING
        if waiting != bool(self._times[at]):
            self._times[at] = self._clock() if waiting else 0.0

    @property
    def wake(self) -> int:
        """File descriptor that becomes readable when there may be room."""
        return self._signals.wakes[self.worker][0]

    def woken(self) -> None:
        """Take note of having been woken."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def _locked(self) -> bool:
        for _ in range(_TRIES):
            try:
                fcntl.lockf(self._signals.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.sched_yield()
            else:
                return True
        return False

    def _yields(self, backend: int, free: int) -> bool:
        """Whether the free places are for others, who have waited for longer.

        They may be waiting for another backend, so nothing is left to them for long.
        """
        now, times = self._clock(), self._times
        if now - self._freed_at[backend] > YIELD_S:
            return False
        own_since = times[self.worker * _CELLS + _WAITING] or now
        longer = 0
        for worker in range(self._workers):
            since, beat_at = times[worker * _CELLS + _WAITING], times[worker * _CELLS + _BEAT]
            if worker != self.worker and 0 < since < own_since and now - beat_at < SILENT_S:
                longer += 1
        return free <= longer

    # ---- what workers report of themselves ------------------------------------------------------

    def beat(self) -> None:
        """Report that this worker is alive."""
        self._times[self.worker * _CELLS + _BEAT] = self._clock()

    def applied(self, version: int) -> None:
        """Report the version of this worker's configuration."""
        self._numbers[self.worker * _CELLS + _VERSION] = version + 1

    def is_idle(self, backend: int, version: int) -> bool:
        """Whether no worker has a request at a backend, and all have at least this version."""
        running = [self._numbers[w * _CELLS + _VERSION] for w in range(self._workers)]
        return self.count(backend) == 0 and not any(0 < v <= version for v in running)
