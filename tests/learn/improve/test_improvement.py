"""One update on a network of its own; the trainer's part is in test_trainer."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learn.tiny import scenario_file, settings  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.exploration import Exploration  # noqa: E402
from tailrace.learn.improve import branches, rollout_source  # noqa: E402
from tailrace.learn.improve.improvement import Improvement  # noqa: E402
from tailrace.learn.improve.rollout_source import SimulatorRollouts  # noqa: E402
from tailrace.learn.world_schedule import WorldSchedule  # noqa: E402
from tailrace.parallel import WorkerPool  # noqa: E402
from tailrace.policy.learned.network import Network  # noqa: E402
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES  # noqa: E402
from tailrace.seeds import Purpose, seeds  # noqa: E402

pytestmark = pytest.mark.compiled
torch.set_num_threads(1)

WORKERS = WorkerPool(1)
CAPACITIES = (("chat", 8.0),)
PPO = {"advantage": "gae", "objective": "clipped"}
RANDOM = {"scenarios": [], "randomise": {"workloads": {"chat": 1}, "replicas": [2, 6]}}


def make(folder, over=None, capacities=()):
    """An improvement of a fresh network, and the network."""
    if (over or {}).get("objective") == "clipped":  # many episodes, and chat is quickly made
        over = {"scenarios": [scenario_file(folder, "chat", 12.0)], **over}
    schedule = WorldSchedule(settings(folder, over), capacities)
    torch.manual_seed(0)
    network = Network(schedule.settings.network, len(REPLICA_FEATURES), len(REQUEST_FEATURES))
    exploration = Exploration(schedule.settings.exploration)
    source = SimulatorRollouts(network, schedule, 10)
    return Improvement(network, schedule, source, WORKERS, exploration, 10), network


def update(method, number=0, stage=None):
    rng = torch.Generator().manual_seed(number)
    return method.update(number, stage, rng, [], lambda done, total: None)


def spied(monkeypatch, module, name):
    """The tasks given to a function of a module from now on."""
    tasks, real = [], getattr(module, name)

    def spy(task):
        tasks.append(task)
        return real(task)

    monkeypatch.setattr(module, name, spy)
    return tasks


# ---- branching ----------------------------------------------------------------------------------


def test_a_branching_update_moves_the_policy_within_its_limit(tmp_path):
    method, network = make(tmp_path, {"branching": {"epochs": 20, "learning_rate": 5e-3}})
    before = network.tensors()
    told = update(method)
    assert told["samples"] == 8
    assert told["gain"] > 0
    assert 0 < told["kl"] < 0.3
    assert told["learning_rate"] == 5e-3
    assert told["features/in_flight_mean"] > 0
    assert told["features/in_flight_deviation"] > 0
    assert any((before[name] != tensor).any() for name, tensor in network.tensors().items())
    assert all(np.isfinite(value).all() for value in told.values())


def test_branching_tasks(tmp_path, monkeypatch):
    tasks = spied(monkeypatch, branches, "branch")
    method, _ = make(tmp_path, {"branching": {"logit_margin": 0.5, "candidates": 2}})
    update(method, 0)
    update(method, 1)
    start = seeds(Purpose.TRAINING, 1)[0]
    assert [task.world.seed for task in tasks] == [start + 10 + k for k in range(4)]
    for task in tasks:
        assert 3 <= task.warmup <= 30
        assert 4 <= task.gap <= 12
        assert (task.rows, task.candidates, task.logit_margin) == (4, 2, 0.5)
        # Enough requests for all of it, the look ahead included.
        assert task.world.requests >= task.warmup + task.rows * task.gap + 14 * task.max_horizon_s


def test_large_clusters_are_tried_less_often(tmp_path, monkeypatch):
    tasks = spied(monkeypatch, branches, "branch")
    over = {**RANDOM, "branching": {"states": 8, "worlds": 6, "max_horizon_s": 1.0}}
    update(make(tmp_path, over, CAPACITIES)[0])
    sizes = {task.world.scenario.cluster.size: task.rows for task in tasks}
    assert len(sizes) > 2
    assert sizes == {n: max(1, 8 * 4 // max(4, n)) for n in sizes}


def test_samples_of_some_updates_are_kept_and_restored(tmp_path):
    method, network = make(tmp_path, {"branching": {"replay_updates": 2}})
    counts = []
    for number in range(3):
        update(method, number)
        counts.append(sum(len(a) for k, a in method.state().items() if k.endswith("world")))
    assert counts == [8, 16, 16]
    other, its_network = make(tmp_path, {"branching": {"replay_updates": 2}})
    its_network.load_tensors(network.tensors())
    other.restore(method.state())
    np.testing.assert_equal(update(other, 3), update(method, 3))


def test_the_learning_rate_goes_evenly_to_its_end(tmp_path, monkeypatch):
    method, _ = make(
        tmp_path,
        {"updates": 3, "branching": {"learning_rate": 1e-3, "final_learning_rate": 2e-4}},
    )
    rates = [update(method, number)["learning_rate"] for number in range(3)]
    assert rates == pytest.approx([1e-3, 6e-4, 2e-4])


def test_traffic_that_ends_too_soon_is_told(tmp_path, monkeypatch):
    real = branches.branch

    def short(task):
        return real(replace(task, world=replace(task.world, requests=2)))

    monkeypatch.setattr(branches, "branch", short)
    with pytest.raises(TailraceError, match=r"traffic ended before.*lower branching.warmup"):
        update(make(tmp_path)[0])


# ---- PPO ----------------------------------------------------------------------------------------


def test_a_ppo_update_tells_what_there_is_to_know(tmp_path):
    method, _ = make(tmp_path, {**PPO, "exploration": {"epsilon_start": 0.2}})
    told = update(method)
    assert told["samples"] == 4 * 16
    for name in ("entropy", "kl", "clip_fraction", "explained_variance", "grad_norm", "value_loss",
                 "learning_rate", "raw_reward", "raw_reward_deviation", "raw_reward_p99",
                 "share_at_lower_bound", "terms/e2e_s", "features/in_flight_mean"):  # fmt: skip
        assert np.isfinite(told[name]), name
    assert (told["epsilon"], told["temperature"], told["pulse"]) == (0.2, 1.0, 0.0)
    assert told["behaviour_gap"] < 1e-4
    assert 0 < told["attention/entropy_head_0"] <= 1
    assert ((told["attention"] > 0) & (told["attention"] < 1)).all()


@pytest.mark.parametrize(("clusters", "group", "tasks"), [(8, 2, 2), (6, 2, 1), (1, 1, 1)])
def test_clusters_are_split_over_tasks_in_whole_groups(
    tmp_path, monkeypatch, clusters, group, tasks
):
    given = spied(monkeypatch, rollout_source, "collect")
    ppo = {"clusters": clusters, "group_size": group, "minibatch": 16}
    advantage = "grouped" if group > 1 else "gae"
    method, _ = make(tmp_path, {**PPO, "advantage": advantage, "ppo": ppo})
    update(method, 0)
    assert len(given) == tasks
    assert sum(task.clusters for task in given) == clusters
    update(method, 1)
    used = [seed for task in given for seed in (*task.episode_seeds, task.seed)]
    assert len(used) == len(set(used)) == 2 * (clusters // group + tasks)
    assert min(used) == seeds(Purpose.TRAINING, 1, 10)[0]


def test_randomised_worlds_of_any_size_fit_in(tmp_path, monkeypatch):
    given = spied(monkeypatch, rollout_source, "collect")
    method, _ = make(tmp_path, {**RANDOM, **PPO}, CAPACITIES)
    told = update(method)
    assert np.isfinite(told["policy_loss"])
    assert {task.max_replicas for task in given} == {6}


def test_a_reward_without_variance_is_dead(tmp_path):
    """A bound so low that every decision costs just that."""
    method, _ = make(tmp_path, {**PPO, "reward": {"bound": 1e-12}})
    with pytest.raises(TailraceError, match=r"reward is dead.*tailrace headroom.*bound"):
        update(method)
