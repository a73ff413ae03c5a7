"""What is left of the Ray part where Ray is not installed, and what it does before Ray is asked."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from click.testing import CliRunner

from tailrace.cli import cli
from tailrace.errors import TailraceError
from tailrace.integrations import ray
from tailrace.integrations.ray import pool
from tailrace.parallel import WorkerPool, running_on


@pytest.fixture
def without_ray(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ray, "version", version)


def run(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def test_tailrace_imports_no_ray_before_it_is_needed():
    code = (
        "import sys, tailrace.parallel, tailrace.integrations.ray.pool, tailrace.cli.train\n"
        "import tailrace.cli.sweep, tailrace.integrations.ray.space\n"
        "import tailrace.integrations.ray.serve_state\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'ray']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["train", "--workers", "ray"], "--workers ray"),
        (["train", "--workers", "ray:10.0.0.1:6379"], "--workers ray"),
        (["evaluate", "--workers", "ray"], "--workers ray"),
        (["tune", "--workers", "ray"], "--workers ray"),
        (["sweep", "--set", "updates=int(1,2)"], "a sweep"),
    ],
)
def test_without_ray_commands_say_how_to_get_it(without_ray, args, what):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr == f"error: {what} needs ray: pip install 'tailrace[ray]'\n"
    assert result.stdout == ""


@pytest.mark.parametrize("workers", ["cloud", "ray:", "rays", "local:1"])
def test_no_other_workers(workers):
    result = run("train", "--workers", workers)
    assert result.exit_code == 2
    assert "must be local, ray (started here) or ray:ADDRESS" in result.stderr


def test_sweeps_need_ray_and_something_to_vary(monkeypatch):
    assert "a sweep runs on Ray" in run("sweep", "--workers", "local").stderr
    monkeypatch.setattr(ray, "version", lambda name: "2.60.0")
    pytest.importorskip("torch")
    assert "say what to vary" in run("sweep", "--set", "updates=3").stderr
    wrong = run("sweep", "--set", "branching.keeep=choice(1,2)", "-o", "never")
    assert wrong.exit_code == 2
    assert "trial 1 (branching.keeep=" in wrong.stderr
    both = run("sweep", "--resume", "there", "--samples", "8")
    assert "--resume goes on with a sweep as it was begun" in both.stderr
    assert "there is no sweep: it has no sweep.json" in run("sweep", "--resume", "there").stderr


def test_a_pool_keeps_the_executor_it_was_created_with():
    made = []

    def factory():
        made.append(ThreadPoolExecutor(1))
        return made[-1]

    with running_on(factory):
        elsewhere = WorkerPool(1)
    here = WorkerPool(1)
    with elsewhere:
        assert list(elsewhere.map(abs, [-1])) == [1]
        assert dict(elsewhere.run(abs, [-2])) == {-2: 2}
    assert list(here.map(abs, [-1])) == [1]
    assert len(made) == 1
    with pytest.raises(RuntimeError, match="after shutdown"):
        made[0].submit(abs, 1)


def test_workers_with_other_sources_refuse_to_work():
    work = pickle.dumps((abs, (-1,), {}))
    assert pickle.loads(pool.perform(pool.fingerprint(), work)) == 1
    with pytest.raises(TailraceError, match="run another Tailrace than this machine"):
        pool.perform("sources 0123", work)


def test_large_arrays_travel_apart_and_come_back_as_they_were():
    large = np.asfortranarray(np.arange(20_000.0).reshape(100, 200))
    task = {"large": large, "again": large, "small": np.arange(3), "text": "x"}
    work, arrays = pool.packed((dict, (task,), {}))
    assert len(work) < 1000
    stored = [array.copy(order="K") for array in arrays]
    for array in stored:
        array.flags.writeable = False  # as Ray hands them out
    found = pickle.loads(pool.perform(pool.fingerprint(), work, *stored))
    assert found.keys() == task.keys()
    assert all(np.array_equal(found[name], task[name]) for name in ("large", "again", "small"))
    assert found["large"].flags.f_contiguous
    assert found["large"].flags.writeable


def test_what_a_task_prints_does_not_get_into_results(capsys):
    pool.perform(pool.fingerprint(), pickle.dumps((print, ("hello",), {})))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")
