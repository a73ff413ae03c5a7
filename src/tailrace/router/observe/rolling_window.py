"""The last five minutes in slots of two seconds: latencies, decisions, queues.

Latencies are counted in buckets that are 6 % wide, so memory does not grow with traffic and a
percentile is right to within 3 %.
"""

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.router.observe.metrics import GONE

SLOT_S = 2.0
SLOTS = 150
_PER_DECADE = 40
_DECADES_BELOW_1_S = 4  # from 0.1 ms ...
_BUCKETS = _PER_DECADE * 8  # ... to 10 000 s
_SHIFT = _PER_DECADE * _DECADES_BELOW_1_S
_EMPTY = bytes(4 * _BUCKETS)
PERCENTILES = (50, 95, 99)


def bucket_of(seconds: float) -> int:
    """Return the bucket of a latency in s; what lies outside counts as the nearest."""
    if seconds <= 1e-4:
        return 0
    return min(int(math.log10(seconds) * _PER_DECADE + _SHIFT), _BUCKETS - 1)


def percentile(counts: NDArray[np.int64], percent: float) -> float | None:
    """Return a percentile in s of counts by bucket [B]; None: there are none."""
    total = int(counts.sum())
    if total == 0:
        return None
    rank = max(1, math.ceil(total * percent / 100))
    bucket = int(np.searchsorted(np.cumsum(counts), rank))
    return float(10.0 ** ((bucket + 0.5 - _SHIFT) / _PER_DECADE))


def percentiles(counts: NDArray[np.int64]) -> dict[str, float | int | None]:
    """Return how many and which percentiles in s of counts by bucket [B]."""
    found: dict[str, float | int | None] = {"count": int(counts.sum())}
    for percent in PERCENTILES:
        found[f"p{percent}_s"] = percentile(counts, percent)
    return found


class Slot:
    """Two seconds."""

    __slots__ = ("decided", "e2e", "in_flight", "lag_s", "number", "queued", "ttft", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        """Since the clock's zero."""
        self.ttft = array("I", _EMPTY)
        self.e2e = array("I", _EMPTY)
        self.decided: Counter[int] = Counter()
        """Decisions by replica."""
        self.lag_s = 0.0
        """The event loop's worst lag."""
        self.in_flight: Sequence[int] = ()
        """Requests by replica at the slot's end."""
        self.queued: Sequence[int] = ()
        """Those without a token yet."""
        self.waiting = 0
        """Requests that waited at the router."""


class RollingWindow:
    """The last slots, the present one last."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self.present = Slot(int(now // SLOT_S))
        self.past: deque[Slot] = deque(maxlen=SLOTS)

    def retire(self, replica: int) -> None:
        """Forget the queues of a replica that is gone: its number may be given to another one."""
        for slot in (*self.past, self.present):
            slot.decided[GONE] += slot.decided.pop(replica, 0)
            slot.in_flight, slot.queued = (
                [0 if k == replica else n for k, n in enumerate(queue)]
                for queue in (slot.in_flight, slot.queued)
            )

    def is_over(self, now: float) -> bool:
        """Whether the present slot has passed."""
        return int(now // SLOT_S) > self.present.number

    def next(
        self, now: float, in_flight: Sequence[int], queued: Sequence[int], waiting: int
    ) -> None:
        """Close the present slot with what is queued now, and begin that of ``now``."""
        slot = self.present
        slot.in_flight, slot.queued, slot.waiting = in_flight, queued, waiting
        self.past.append(slot)
        self.present = Slot(int(now // SLOT_S))

    def last(self, seconds: float) -> list[Slot]:
        """Return the slots of the last seconds, the present one included."""
        since = self.present.number - round(seconds / SLOT_S)
        return [s for s in (*self.past, self.present) if s.number > since]

    def percentiles(self, name: str, seconds: float) -> dict[str, float | int | None]:
        """Return count and percentiles in s of the last seconds; ``name``: ttft or e2e."""
        return percentiles(self.counts(name, seconds))

    def counts(self, name: str, seconds: float) -> NDArray[np.int64]:
        """Return the latencies of the last seconds by bucket; ``name``: ttft or e2e."""
        counts = np.zeros(_BUCKETS, np.int64)
        for slot in self.last(seconds):
            counts += np.frombuffer(getattr(slot, name), np.uint32)
        return counts

    def decided(self, seconds: float) -> Counter[int]:
        """Return the decisions of the last seconds by replica."""
        total: Counter[int] = Counter()
        for slot in self.last(seconds):
            total.update(slot.decided)
        return total

    def decisions_per_s(self, now: float, seconds: float) -> float:
        """Return the pace of decisions over the last seconds, or since the start if later."""
        slots = self.last(seconds)
        covered_s = now - max(self._began_at, (self.present.number + 1) * SLOT_S - seconds)
        return sum(slot.decided.total() for slot in slots) / max(covered_s, SLOT_S / 2)

    def worst_lag_s(self, seconds: float) -> float:
        """Return the event loop's worst lag within the last seconds."""
        return max(slot.lag_s for slot in self.last(seconds))
