"""Training and evaluation on a real Ray: the same results as here, whatever happens to workers."""

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from ray_helpers import DyingPool, complain, die, touch_and_wait

from learn.tiny import content, scenario_file, settings
from tailrace.cli import cli
from tailrace.errors import TailraceError
from tailrace.integrations.ray.pool import RayPool
from tailrace.learn.trainer import Trainer
from tailrace.parallel import WorkerPool, running_on

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("cluster"),
]

#: Enough tasks for both workers.
BRANCHING = {"branching": {"worlds": 4}, "demonstrations": {"worlds": 4}}
PPO = {"advantage": "gae", "objective": "clipped"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the scenario of the runs is: its path is in their policy files."""
    return tmp_path_factory.mktemp("runs")


def changed(a, b):
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def test_results_come_in_the_order_of_the_tasks(cluster):
    with running_on(RayPool), WorkerPool(1) as pool:
        assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
        assert dict(pool.run(abs, [-4, 4, -5])) == {-4: 4, 4: 4, -5: 5}
    assert cluster.is_initialized()  # it was not the pool's own


def test_arrays_can_be_written_to_as_from_a_process_of_ones_own():
    with running_on(RayPool), WorkerPool(1) as pool:
        (found,) = pool.map(np.sort, [np.array([3.0, 1.0])])
    found[0] = 5.0


def test_a_large_array_of_many_tasks_is_stored_once_unless_it_changes():
    pool = RayPool()
    large = np.ones(20_000)
    with pool:
        assert [pool.submit(np.sum, large).result() for _ in range(3)] == [20_000.0] * 3
        assert len(pool._stored) == 1
        large[0] = 5.0
        assert pool.submit(np.sum, large).result() == 20_004.0
        assert len(pool._stored) == 2


def test_errors_arrive_as_they_are():
    with running_on(RayPool), WorkerPool(1) as pool:
        with pytest.raises(TailraceError, match=r"^7 is wrong$"):
            list(pool.map(complain, [7]))
        with pytest.raises(TypeError, match="has no len"):
            list(pool.map(len, [7]))


def test_a_task_that_kills_every_worker_is_given_up():
    with running_on(RayPool), WorkerPool(1) as pool:
        with pytest.raises(TailraceError, match="its workers died 4 times"):
            list(pool.map(die, [0]))
        assert list(pool.map(abs, [-1])) == [1]


def test_what_nobody_waits_for_is_stopped(cluster, tmp_path):
    pool = RayPool()
    futures = [pool.submit(touch_and_wait, str(tmp_path / str(k))) for k in range(5)]
    _until(lambda: (tmp_path / "0").exists())
    pool.shutdown(cancel_futures=True)
    assert all(future.cancelled() or future.exception() for future in futures)
    _until(lambda: cluster.available_resources().get("CPU") == 2.0)


@pytest.mark.parametrize("over", [BRANCHING, PPO], ids=["branching", "ppo"])
def test_a_run_is_the_same_as_with_processes_here(folder, over):
    name = over.get("advantage", "branching")
    Trainer(folder / f"{name}-here", settings(folder, over), 1).run()
    with running_on(RayPool):
        Trainer(folder / f"{name}-ray", settings(folder, over), 1).run()
    assert changed(content(folder / f"{name}-here"), content(folder / f"{name}-ray")) == []


def test_nothing_is_lost_with_workers_that_die(folder, tmp_path):
    numbers = (2, 6, 7, 13)  # judging rules, demonstrations, and later
    Trainer(folder / "unharmed", settings(folder, BRANCHING), 1).run()
    with running_on(lambda: DyingPool(tmp_path, numbers)):
        Trainer(folder / "dying", settings(folder, BRANCHING), 1).run()
    assert {path.name for path in tmp_path.iterdir()} == {f"died-{n}" for n in numbers}
    assert changed(content(folder / "unharmed"), content(folder / "dying")) == []


def test_evaluate_gives_the_same_table(tmp_path):
    found = []
    for workers in ("local", "ray"):
        common = ["evaluate", "--scenario", scenario_file(tmp_path), "-p", "lmetric", "--against",
                  "rules", "--seeds", "2", "--selection-seeds", "1", "--requests", "60", "-j", "1",
                  "--json"]  # fmt: skip
        result = CliRunner().invoke(cli, [*common, "--workers", workers])
        assert result.exit_code == 0, result.stderr
        found.append(json.loads(result.stdout))
    assert found[0] == found[1]


def _until(happens):
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)
