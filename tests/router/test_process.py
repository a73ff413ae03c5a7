"""What the router does with its process."""

import sys
from pathlib import Path

import pytest

from router.conftest import run, world
from tailrace.net.byte_budget import ByteBudget
from tailrace.router import process


def own_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(process.trim is None, reason="another C library")
def test_memory_of_bodies_is_returned_although_something_lies_between() -> None:
    """The router's sweep returns it; without that the holes stay with the process."""

    async def test() -> tuple[float, float]:
        async with world(1) as w:
            before = own_mb()
            bodies, between = [], []
            for _ in range(1000):
                bodies.append(bytearray(b"a" * 100_000))
                between.append(bytearray(2000))
            w.router.held.hold(_Holder(), 100_000_000, 10**9)
            w.router.held.used = 0
            bodies.clear()
            held = own_mb() - before
            for _ in range(2):
                w.clock.ahead_s += 2
                w.router.sweep(w.clock())
            assert between
            return held, own_mb() - before

    kept, left = run(test())
    assert left < 20 or left < kept - 60


class _Holder:
    held = 0

    def evict(self) -> None:
        """It does not."""


def test_a_budget_tells_once_that_much_was_freed() -> None:
    budget, holder = ByteBudget(), _Holder()
    budget.hold(holder, 1000, 10**6)
    assert not budget.freed(500)
    budget.hold(holder, 400, 10**6)
    assert budget.freed(500)
    assert not budget.freed(500)
    budget.hold(holder, 0, 10**6)
    assert budget.freed(500)
    assert not budget.freed(500)
    budget.hold(holder, 50, 10**6)
    budget.hold(holder, 0, 10**6)
    assert not budget.freed(500)
