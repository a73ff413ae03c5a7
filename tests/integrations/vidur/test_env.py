"""Real Vidur as an environment: the same spaces, options and numbers as the simulator's."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from vidur_helpers import cluster

import tailrace.env
from tailrace.config import Scenario
from tailrace.env.reward import RewardSettings
from tailrace.errors import TailraceError

pytestmark = pytest.mark.vidur

WORLD = Scenario.model_validate(
    {
        "name": "four",
        "cluster": cluster().model_dump(),
        "workload": {"name": "chat", "rate": 27.0, "ttft_slo_s": 0.3},
        "engine": {"exact": True},
    }
)
REWARD = RewardSettings(soft_late=0.7, soft_centre=1.2, early=0.4, balance=0.2, throughput=0.5)


def made(name, **options):
    return gymnasium.make(name, worlds=WORLD, **({"decisions": 30} | options))


def test_passes_the_checker():
    check_env(made(tailrace.env.VIDUR_ENV_ID).unwrapped)


def test_shows_what_the_simulators_environment_shows():
    options = {"decisions": 80, "reward": REWARD, "max_replicas": 6}
    envs = [made(n, **options) for n in (tailrace.env.VIDUR_ENV_ID, tailrace.env.ENV_ID)]
    assert envs[0].observation_space == envs[1].observation_space
    assert envs[0].action_space == envs[1].action_space
    shown = [env.reset(seed=5)[0] for env in envs]
    rng, late = np.random.default_rng(1), 0.0
    for k in range(80):
        for key in ("replicas", "request", "mask"):
            np.testing.assert_allclose(shown[0][key], shown[1][key], atol=1e-5, err_msg=key)
        action = int(rng.integers(6))
        steps = [env.step(action) for env in envs]
        shown = [step[0] for step in steps]
        assert steps[0][1] == pytest.approx(steps[1][1], abs=1e-7)
        assert steps[0][2:4] == steps[1][2:4] == (False, k == 79)
        for name, value in steps[1][4]["terms"].items():
            assert steps[0][4]["terms"][name] == pytest.approx(value, abs=1e-7), name
        late += steps[0][4]["terms"]["late_s"]
    assert late > 0
    with pytest.raises(TailraceError, match=r"call reset\(\)"):
        envs[0].step(0)


def test_stable_baselines3_trains_on_it():
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    model = stable_baselines3.PPO(
        "MultiInputPolicy", made(tailrace.env.VIDUR_ENV_ID), n_steps=32, batch_size=32,
        n_epochs=1, device="cpu", seed=1,
    )  # fmt: skip
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(64)
    assert any((a != b).any() for a, b in zip(before, model.policy.parameters(), strict=True))


def test_several_of_them_at_once():
    env = gymnasium.make_vec(tailrace.env.VIDUR_ENV_ID, num_envs=2, worlds=WORLD, decisions=20)
    env.reset(seed=[1, 2])
    for _ in range(10):
        _, rewards, *_ = env.step(np.array([0, 3]))
    assert (rewards < 0).all()
    env.close()


def test_what_only_the_simulator_can_do_is_refused():
    with pytest.raises(TailraceError, match="only the simulator"):
        made(tailrace.env.VIDUR_ENV_ID, reward={"relative": 0.5, "reference": "round_robin"})
    with pytest.raises(TailraceError, match="instead of a function"):
        gymnasium.make(tailrace.env.VIDUR_ENV_ID, worlds=lambda _: WORLD)
