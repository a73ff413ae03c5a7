"""Emulated time, injectable so that tests need not wait for it."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from tailrace.emulate.timers import Handle, timers


class Clock(Protocol):
    """Emulated seconds since the start, and calls at given moments."""

    def now(self) -> float:
        """Emulated seconds since the start."""

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Handle:
        """Call back at about ``at_s`` (emulated s)."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back once everything that happens at this very moment has happened."""


class LoopClock:
    """The clock of an event loop; ``time_scale`` is real seconds per emulated second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, time_scale: float = 1.0) -> None:
        self._loop = loop
        self._time_scale = time_scale
        self._start_s = time.monotonic()
        self._timers = timers(loop)

    def now(self) -> float:
        """Emulated seconds since the start."""
        # Not the loop's own time: uvloop's has a resolution of a millisecond.
        return (time.monotonic() - self._start_s) / self._time_scale

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Handle:
        """Call back at ``at_s`` (emulated s)."""
        return self._timers.call_at(self._start_s + at_s * self._time_scale, callback)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back in the next turn of the loop."""
        self._loop.call_soon(callback)

    def close(self) -> None:
        """Call nothing back any more."""
        self._timers.close()
