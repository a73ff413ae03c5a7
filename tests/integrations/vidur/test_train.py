"""Training in real Vidur: roll-outs are those of the world, and PPO learns from them."""

import numpy as np
import pytest
from vidur_helpers import cluster

from policy.networks import random_tensors, small
from tailrace.config import Scenario
from tailrace.env.reward import Reward, RewardSettings
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.rollout import VidurTask, play
from tailrace.integrations.vidur.setup import VidurSetup
from tailrace.integrations.vidur.world import VidurWorld
from tailrace.learn.improve.recorder import Recording
from tailrace.policy.learned.architecture import pack
from tailrace.seeds import Purpose, seeds

pytestmark = pytest.mark.vidur

SEED = seeds(Purpose.TRAINING, 1)[0]
REWARD = RewardSettings(soft_late=0.7, early=0.4, balance=0.2, throughput=0.5, relative=0.5)
SCENARIO = Scenario.model_validate(
    {
        "name": "four",
        "cluster": cluster().model_dump(),
        "workload": {"name": "chat", "rate": 27.0, "ttft_slo_s": 0.3},
        "engine": {"exact": True},
    }
)


def task(variant="plain", **changes):
    config = small(variant)
    params = pack(config, random_tensors(config))
    recording = Recording(config, REWARD, decisions=64, chunk=8, seed=SEED)
    values = {
        "setup": VidurSetup(SCENARIO),
        "episode_seed": SEED,
        "params": params,
        "recording": recording,
    }
    return VidurTask(**(values | {"temperature": 2.0, "epsilon": 0.1} | changes))


def test_a_roll_out_is_what_the_world_shows_for_the_same_choices():
    rollout = play(task())
    world = VidurWorld(SCENARIO, requests=65)
    world.reset(SEED)
    reward = Reward(REWARD, 1)
    for t in range(64):
        seen = world.observation()
        np.testing.assert_allclose(rollout.replica_obs[t, 0], seen["replicas"], atol=1e-6)
        np.testing.assert_allclose(rollout.request_obs[t, 0], seen["request"], atol=1e-6)
        world.step(int(rollout.action[t, 0]))
        assert rollout.reward[t, 0] == pytest.approx(reward(world.out)[0], abs=1e-9)
        assert rollout.elapsed_s[t, 0] == pytest.approx(world.out.elapsed_s[0], abs=1e-12)
    np.testing.assert_allclose(rollout.bootstrap.replica_obs[0], world.observation()["replicas"])
    assert rollout.metrics["terms/late_s"] > 0
    assert rollout.metrics["overruled"] == 0
    assert rollout.names == ("four",)
    assert len(set(rollout.action.ravel())) == 4


def test_a_group_plays_the_same_requests_with_choices_of_its_own():
    both = play(task("all", group=2))
    assert both.action.shape == (64, 2)
    assert both.group == 2
    assert both.memory.shape == (8, 2, 3)
    assert both.prior is not None
    assert both.prior.shape == both.mask.shape == (64, 2, 4)
    assert both.bootstrap.cluster.tolist() == [0, 1]
    assert (both.elapsed_s[:, 0] == both.elapsed_s[:, 1]).all()
    assert (both.action[:, 0] != both.action[:, 1]).any()
    again = play(task("all", group=2))
    for name in ("replica_obs", "action", "log_prob", "reward", "memory"):
        np.testing.assert_array_equal(getattr(again, name), getattr(both, name))


def test_evaluation_traffic_is_refused():
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        play(task(episode_seed=seeds(Purpose.EVALUATION, 1)[0]))


def test_200_ppo_steps_from_the_shipped_policy(tmp_path):
    pytest.importorskip("torch")
    from learn.tiny import SETTINGS, Noted
    from tailrace.integrations.rollout_sources import ROLLOUT_SOURCES
    from tailrace.learn import settings as s
    from tailrace.learn.trainer import Trainer
    from tailrace.policy.learned import checkpoint

    over = {
        "start": "tailrace", "env": "vidur", "advantage": "grouped",
        "objective": "clipped", "updates": 2,
        "scenarios": [SCENARIO.model_dump(mode="json")],
        "demonstrations": {"rounds": 0},
        "ppo": {"clusters": 4, "group_size": 2, "decisions": 32, "warmup": 8, "minibatch": 64},
        "exploration": {"epsilon_start": 0.05, "epsilon_end": 0.05},
    }  # fmt: skip
    watcher = Noted()
    settings = s.build(SETTINGS, over)
    outcome = Trainer(tmp_path / "run", settings, 1, watcher, ROLLOUT_SOURCES).run()
    assert outcome.best.is_file()
    assert sum(metrics["samples"] for metrics in watcher.metrics) == 256
    for metrics in watcher.metrics:
        assert metrics["phase"] == "ppo"
        # The network that learns is the one that played.
        assert metrics["behaviour_gap"] < 1e-4
        assert metrics["overruled"] == 0
        assert metrics["raw_reward"] < 0
        assert np.isfinite(metrics["score"])
    shipped = checkpoint.shipped().tensors
    trained = checkpoint.read(tmp_path / "run" / "last.tailrace")[1]
    moved = [name for name in trained if (shipped[name] != trained[name]).any()]
    assert "scorer.hidden.weight" in moved
    assert not any(np.isnan(tensor).any() for tensor in trained.values())


def test_requests_that_end_too_soon_are_told(monkeypatch):
    few = VidurSetup(SCENARIO).requests(20, SEED)
    monkeypatch.setattr(VidurSetup, "requests", lambda *_: few)
    with pytest.raises(TailraceError, match=r"four: the requests ended after 20 of 64 decisions"):
        play(task())
