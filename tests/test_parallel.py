"""Processes that work side by side: order, failures, and that none is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
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


def test_processes_go_when_nobody_waits_for_them():
    before = set(multiprocessing.active_children())
    pool = WorkerPool(2)
    results = pool.run(time.sleep, [0.01] * 20 + [60] * 20)
    next(results)
    assert len(set(multiprocessing.active_children()) - before) == 2
    pool.close(at_once=True)
    assert set(multiprocessing.active_children()) <= before


SCRIPT = """
import time
from tailrace.parallel import WorkerPool

if __name__ == "__main__":
    pool = WorkerPool(2)
    results = pool.run(time.sleep, [0.01, 0.01, 60, 60])
    next(results)
    print(*[process.pid for process in pool._executor._processes.values()], flush=True)
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
