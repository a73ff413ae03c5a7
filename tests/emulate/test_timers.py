"""Timers: each call is made once, in order, not too soon, unless it was called off."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from tailrace.emulate.timers import FileTimers, LoopTimers

FILES = Path("/proc/self/fd")
KINDS = [LoopTimers, *([FileTimers] if sys.platform == "linux" else [])]


def run(kind, work):
    async def main():
        timers = kind(asyncio.get_running_loop())
        try:
            return await work(timers)
        finally:
            timers.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_calls_come_once_in_order_and_not_too_soon(kind):
    async def work(timers):
        start = time.monotonic()
        delays = [0.03, 0.01, 0.02, 0.01, -1.0, 0.0]
        told, over = [], asyncio.Event()

        def tell(k):
            told.append((k, time.monotonic() - start))
            if len(told) == len(delays):
                over.set()

        for k, delay in enumerate(delays):
            timers.call_at(start + delay, lambda k=k: tell(k))
        await asyncio.wait_for(over.wait(), 10)
        await asyncio.sleep(0.02)
        return delays, told

    delays, told = run(kind, work)
    assert sorted(k for k, _ in told) == list(range(len(delays)))
    assert [delays[k] for k, _ in told] == sorted(delays)
    for k, at in told:
        assert at >= delays[k] - 1e-3 * (kind is LoopTimers)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_called_off_or_closed_is_not_called(kind):
    async def work(timers):
        now, told = time.monotonic(), []
        first = timers.call_at(now + 0.005, lambda: told.append("first"))
        timers.call_at(now + 0.01, lambda: told.append("second"))
        first.cancel()
        await asyncio.sleep(0.03)
        if kind is FileTimers:
            timers.call_at(time.monotonic() + 0.005, lambda: told.append("third"))
            timers.close()
            timers.close()
            timers.call_at(time.monotonic(), lambda: told.append("fourth"))
            await asyncio.sleep(0.02)
        return told

    assert run(kind, work) == ["second"]


@pytest.mark.skipif(sys.platform != "linux", reason="has no timerfd")
def test_an_earlier_call_and_one_made_by_a_call_come_in_time():
    async def work(timers):
        start, told, over = time.monotonic(), [], asyncio.Event()
        timers.call_at(start + 5.0, over.set)

        def first():
            told.append("first")
            timers.call_at(start + 0.01, second)

        def second():
            told.append("second")
            over.set()

        timers.call_at(start + 0.005, first)
        await asyncio.wait_for(over.wait(), 3)
        return told

    assert run(FileTimers, work) == ["first", "second"]


@pytest.mark.skipif(sys.platform != "linux", reason="has no timerfd")
def test_no_file_stays_open():
    before = len(list(FILES.iterdir()))

    async def work(timers):
        timers.call_at(time.monotonic() + 60, print)

    for _ in range(5):
        run(FileTimers, work)
    assert len(list(FILES.iterdir())) <= before + 1
