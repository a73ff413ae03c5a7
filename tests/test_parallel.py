"""Processes that work side by side: order, failures, and that none is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tailrace.errors import TailraceError
from tailrace.parallel import WorkerPool, cores


def test_results_come_in_the_order_of_the_tasks():
    assert list(WorkerPool(1).map(abs, [-3, 2, -1])) == [3, 2, 1]
    with WorkerPool(2) as pool:
        assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
        assert dict(pool.run(abs, [-4, 4, -5])) == {-4: 4, 4: 4, -5: 5}


def test_a_dead_worker_is_reported():
    with WorkerPool(2) as pool, pytest.raises(TailraceError, match=r"worker process died.*--jobs"):
        list(pool.map(os._exit, [1, 1]))


def _killed_while_it_sends(_: int) -> bytes:
    def half(self: Connection, message: bytes) -> None:
        os.write(self.fileno(), message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = half  # type: ignore[assignment, method-assign]
    return bytes(100_000)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_half_a_result_does_not_hang_its_parent():
    with WorkerPool(2) as pool, pytest.raises(TailraceError, match="worker process died"):
        list(pool.map(_killed_while_it_sends, [1, 2]))


def test_results_larger_than_a_pipe():
    with WorkerPool(2) as pool:
        sizes = [1_000_000 + n for n in range(8)]
        assert [len(result) for result in pool.map(bytes, sizes)] == sizes
        large = [bytes([n]) * 1_000_000 for n in range(8)]
        assert list(pool.map(len, large)) == [1_000_000] * 8


class OddError(Exception):
    """One that pickle cannot make again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _fail(number: int) -> None:
    if number == 1:
        raise TailraceError("a user's mistake")
    raise OddError(number, number)


def test_what_a_task_raises_is_raised_here():
    with WorkerPool(2) as pool:
        with pytest.raises(TailraceError, match="a user's mistake") as raised:
            list(pool.map(_fail, [1, 1]))
        assert "in _fail" in "".join(raised.value.__notes__)  # where it happened
        with pytest.raises(RuntimeError, match="OddError: 2 and 2"):
            list(pool.map(_fail, [2, 2]))
        with pytest.raises(AttributeError, match="local"):
            list(pool.map(lambda number: number, [3, 4]))
        assert list(pool.map(abs, [-1, -2])) == [1, 2]


def test_two_batches_at_a_time():
    with WorkerPool(2) as pool:
        for first, second in zip(
            pool.map(abs, range(-5, 0)), pool.map(float, range(5)), strict=True
        ):
            assert first == 5 - second


def test_processes_go_when_nobody_waits_for_them():
    before = set(multiprocessing.active_children())
    pool = WorkerPool(2)
    results = pool.run(time.sleep, [0.01] * 20 + [60] * 20)
    next(results)
    assert len(set(multiprocessing.active_children()) - before) == 2
    pool.close()
    assert set(multiprocessing.active_children()) <= before


def test_an_abandoned_batch_is_not_waited_for():
    before = set(multiprocessing.active_children())
    with WorkerPool(2) as pool:
        results = pool.run(time.sleep, [0.01, 60, 60])
        next(results)
        results.close()
        assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]
    assert set(multiprocessing.active_children()) <= before


SCRIPT = """
import multiprocessing
import time
from tailrace.parallel import WorkerPool

if __name__ == "__main__":
    pool = WorkerPool(2)
    results = pool.run(time.sleep, [0.01, 0.01, 60, 60])
    next(results)
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_processes_go_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in workers)


def _lives(pid: int) -> bool:
    """Whether there is such a process that is not merely waiting to be buried."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


def test_cores_where_the_system_knows_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert cores() == 3
