"""Timers to some ten microseconds. Event loops fire theirs to the millisecond, late by up to one.

Linux has them as files that become readable (timerfd), which any event loop can wait for; Python
has that from 3.13 on, so two calls are made by ctypes. Elsewhere the loop's own timers do.
"""

import asyncio
import ctypes
import heapq
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

#: Asking a loop for less than its resolution makes it spin.
_LOOP_STEP_S = 1e-3
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


class Handle(Protocol):
    """A timer that can be called off."""

    def cancel(self) -> None:
        """Call it off."""


class Timers(Protocol):
    """Calls at given moments of ``time.monotonic``."""

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Handle:
        """Call back at ``at_s``."""

    def close(self) -> None:
        """Call nothing back any more."""


def timers(loop: asyncio.AbstractEventLoop) -> Timers:
    """Return the most exact timers there are for a loop."""
    if sys.platform == "linux":
        return FileTimers(loop)
    return LoopTimers(loop)


class LoopTimers:
    """The loop's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Handle:
        """Call back at ``at_s``, up to a millisecond or so late."""
        steps = max(0, math.ceil((at_s - time.monotonic()) / _LOOP_STEP_S))
        return self._loop.call_later(steps * _LOOP_STEP_S, callback)

    def close(self) -> None:
        """Nothing was opened."""


class _Call:
    """A call to be made, or not."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Call it off."""
        self.callback = None


class FileTimers:
    """One timer of the kernel, set to the next of all calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._calls: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()
        self._set_s = math.inf
        loop.add_reader(self._file, self._fired)

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Handle:
        """Call back at ``at_s``."""
        call = _Call(callback)
        if self._file < 0:  # closed: it would never come
            return call
        heapq.heappush(self._calls, (at_s, next(self._numbers), call))
        self._arm()
        return call

    def close(self) -> None:
        """Call nothing back any more."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1
        self._calls.clear()

    def _fired(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it was set anew meanwhile
            return
        self._set_s = math.inf
        now = time.monotonic()
        while self._calls and self._calls[0][0] <= now:
            callback = heapq.heappop(self._calls)[2].callback
            if callback is not None:
                self._loop.call_soon(callback)
        self._arm()

    def _arm(self) -> None:
        """Set the kernel's timer to the next call that was not called off."""
        while self._calls and self._calls[0][2].callback is None:
            heapq.heappop(self._calls)
        if not self._calls or self._calls[0][0] == self._set_s:
            return
        self._set_s = self._calls[0][0]
        # Up to a whole nanosecond: a timer that fires before the moment would find nothing to do.
        at_ns = max(1, math.ceil(self._set_s * 1e9))
        when = (ctypes.c_long * 4)(0, 0, *divmod(at_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._file, _ABSOLUTE, when, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
