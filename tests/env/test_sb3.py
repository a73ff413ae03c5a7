"""Stable-Baselines3 trains on the single environment as it is, and on the vector one adapted."""

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env

from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.env.sb3 import RouterVecEnv
from tailrace.env.single_env import RouterEnv
from tailrace.env.vector_env import RouterVectorEnv

pytestmark = pytest.mark.compiled

WORLD = Scenario(
    cluster=Cluster(replicas=(Replica(count=3, num_blocks=3000),)),
    workload=Workload(name="chat", rate=20.0),
)
SMALL = {"n_steps": 64, "batch_size": 64, "n_epochs": 1, "device": "cpu", "seed": 1}


@pytest.mark.filterwarnings("ignore")
def test_trains_on_the_single_environment_unchanged() -> None:
    env = RouterEnv(WORLD, decisions=100)
    check_env(env)
    model = PPO("MultiInputPolicy", env, **SMALL)
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(256)
    assert any((a != b).any() for a, b in zip(before, model.policy.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_trains_on_many_clusters_through_the_adapter() -> None:
    env = RouterVecEnv(RouterVectorEnv(4, WORLD, decisions=50))
    model = PPO("MultiInputPolicy", env, **SMALL)
    model.learn(512)
    assert model.num_timesteps == 512
    assert len(model.ep_info_buffer) == 8
    assert all(info["l"] == 50 and info["r"] < 0 for info in model.ep_info_buffer)


def test_the_adapter_tells_the_end_of_an_episode() -> None:
    env = RouterVecEnv(RouterVectorEnv(2, WORLD, decisions=3))
    env.seed(1)
    env.reset()
    for _ in range(3):
        observation, rewards, dones, infos = env.step(np.zeros(2, np.int64))
    assert dones.all()
    assert rewards.dtype == np.float32
    for info in infos:
        assert info["TimeLimit.truncated"]
        assert env.observation_space.contains(info["terminal_observation"])
        assert info["terminal_observation"]["replicas"][0, 1] > 0
    assert not observation["replicas"][:, :, 0].any()
    assert env.get_attr("num_envs", 0) == [2]
    assert env.env_is_wrapped(object) == [False, False]
    assert env.env_method("close") == [None, None]
