"""Limits over all workers: they hold, nobody starves, and a dead worker leaves no trace."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from router.clusters import Clock, backends
from tailrace.config import Replica
from tailrace.router.state.shared_state import SharedState, new_shared_state
from tailrace.router.state.worker_room import SILENT_S, YIELD_S, WorkerRoom, WorkerSignals


@contextmanager
def rooms(count: int, clock: Callable[[], float]) -> Iterator[tuple[SharedState, list[WorkerRoom]]]:
    shared, signals = new_shared_state(backends(Replica(), Replica()), count), WorkerSignals(count)
    made = [WorkerRoom(shared, worker, signals, clock) for worker in range(count)]
    for room in made:
        room.beat()
    try:
        yield shared, made
    finally:
        signals.close()


@pytest.mark.parametrize(("workers", "limit", "seed"), [(2, 1, 0), (3, 2, 1), (4, 7, 2)])
def test_the_limit_holds_over_processes(workers: int, limit: int, seed: int) -> None:
    """Processes that take and give back as fast as they can never have more than the limit."""
    with rooms(workers, time.monotonic) as (_, made):
        pids = []
        for room in made:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rng = random.Random(seed + room.worker)
                    worst = got = 0
                    while got < 1000:
                        room.beat()
                        if room.take(0, limit):
                            worst = max(worst, room.count(0))
                            got += 1
                            if rng.random() < 0.3:
                                os.sched_yield()
                            room.give_back(0)
                    code = 0 if worst <= limit else 2
                finally:
                    os._exit(code)
            pids.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * workers
        assert made[0].count(0) == 0


def test_a_worker_that_waits_for_longer_goes_first() -> None:
    clock = Clock(100.0)
    with rooms(2, clock) as (_, (a, b)):
        assert a.take(1, 1)
        assert not b.take(1, 1)
        b.wait(True)
        clock.now += 0.01
        a.wait(True)
        a.give_back(1)
        assert os.read(b.wake, 9) == b"1"  # b is told
        assert not a.take(1, 1)
        clock.now += 0.01
        assert b.take(1, 1)
        b.give_back(1)
        assert not b.take(1, 1)  # they take turns
        assert a.take(1, 1)
        a.wait(False)
        a.give_back(1)
        assert a.count(1) == 0


def test_nothing_is_left_to_those_who_do_not_take_it() -> None:
    """They may be waiting for another backend, or be stopped."""
    clock = Clock(100.0)
    with rooms(2, clock) as (_, (a, b)):
        b.wait(True)
        assert a.take(0, 1)
        clock.now += 0.01
        a.give_back(0)
        assert not a.take(0, 1)
        clock.now += YIELD_S + 0.001
        assert a.take(0, 1)
        a.give_back(0)
        clock.now += SILENT_S + 0.001  # b does not report any more
        assert a.take(0, 1)
        a.give_back(0)
        assert a.take(0, 1)


def test_a_dead_worker_leaves_nothing_behind() -> None:
    with rooms(3, time.monotonic) as (shared, (a, b, c)):
        for _ in range(5):
            assert a.take(0)
        assert b.take(0)
        a.applied(1)
        b.applied(4)
        assert c.count(0) == 6
        assert not c.take(0, 6)
        shared.clear(0)
        assert c.count(0) == 1
        assert not c.is_idle(0, 3)
        b.give_back(0)
        assert c.is_idle(0, 3)  # the dead one's version does not count
        assert not c.is_idle(0, 5)  # b does not know of that one yet
