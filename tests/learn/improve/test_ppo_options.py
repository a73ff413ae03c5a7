"""Every option of PPO has the effect it is there for."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learn.played import FEATURES, GLOBALS, learn, network_of, pays, play, settings  # noqa: E402
from tailrace.learn.exploration import ExplorationValues  # noqa: E402
from tailrace.learn.imitate.fit import ImitationDataset  # noqa: E402
from tailrace.learn.improve.learner import Learner  # noqa: E402
from tailrace.learn.improve.returns import estimate_returns  # noqa: E402
from tailrace.learn.samples import Samples  # noqa: E402


def test_learning_rates_follow_their_schedule():
    rates = {
        name: [
            Learner(network_of(), settings(learning_rate_schedule=name), 10).learning_rate(u)
            for u in (0, 5, 9)
        ]
        for name in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == [2e-2] * 3
    last = 1e-5
    assert rates["linear"] == pytest.approx([2e-2, 2e-2 + 5 / 9 * (last - 2e-2), last])
    middle = last + (2e-2 - last) * np.cos(np.pi / 2 * 5 / 9) ** 2
    assert rates["cosine"] == pytest.approx([2e-2, middle, last])


def test_the_divergence_ends_an_update_early():
    free = Learner(network_of(), settings(learning_rate=0.03, epochs=8), 1)
    assert learn(free, range(1))["epochs_done"] == 8
    bounded = settings(learning_rate=0.03, epochs=8, target_kl=1e-3, kl_stop=True)
    metrics = learn(Learner(network_of(), bounded, 1), range(1))
    assert metrics["epochs_done"] < 8


def test_penalty_and_learning_rate_adapt_to_the_divergence():
    tight = {"target_kl": 1e-9, "learning_rate": 0.01}
    loose = {"target_kl": 10.0, "learning_rate": 0.01}
    found = {}
    for name, limit in (("tight", tight), ("loose", loose)):
        penalised = Learner(network_of(), settings(kl_penalty=True, **limit), 4)
        learn(penalised, range(3))
        adapted = Learner(network_of(), settings(kl_learning_rate=True, **limit), 4)
        learn(adapted, range(3))
        found[name] = (float(penalised.state()["learner.penalty"]), adapted.learning_rate(3))
    assert found["tight"] == pytest.approx((8.0, 0.01 / 1.5**3))
    assert found["loose"] == pytest.approx((1 / 8, 0.01 * 1.5**3))


def test_a_penalty_holds_the_policy_back():
    moved = {}
    for weight in (1e-4, 100.0):
        options = settings(learning_rate=0.01, target_kl=1e-3, kl_penalty=True)
        learner = Learner(network_of(), options, 1)
        learner.restore(learner.state() | {"learner.penalty": np.array(weight)})
        moved[weight] = learn(learner, range(1))["kl"]
    assert moved[100.0] < 0.2 * moved[1e-4]


def test_the_entropy_bonus_flattens_a_sharp_policy():
    def nothing(replica_obs, action):
        return np.zeros(action.shape)

    found = {}
    calm = settings(advantage_normalisation="raw", value_weight=0.0, learning_rate=5e-3)
    for weight in (0.0, 0.5):
        learner = Learner(network_of(sharp=400.0), calm, 20)
        for update in range(20):
            exploration = ExplorationValues(entropy_weight=weight)
            rollout = play(learner.network, np.random.default_rng(update), nothing, exploration)
            metrics = learner.update(
                [rollout], exploration, update, torch.Generator().manual_seed(update)
            )
        found[weight] = metrics["entropy_fraction"]
    assert found[0.5] > 0.95
    assert found[0.0] < 0.9


def test_the_warm_start_holds_the_policy_until_it_has_faded():
    start = network_of(seed=5, sharp=300.0)
    kept = {"start_kl_weight": 20.0, "start_kl_updates": 10}
    learner = Learner(network_of(seed=5, sharp=300.0), settings(**kept), 30, warm_start=start)
    held = learn(learner, range(8))
    assert 0 < held["kl_to_start"] < 0.02
    assert learn(learner, range(10, 20))["kl_to_start"] == 0
    free = Learner(network_of(seed=5, sharp=300.0), settings(), 30)
    learn(free, range(8))
    options = settings(**kept, learning_rate=1e-12)
    check = Learner(free.network, options, 30, warm_start=start)
    assert learn(check, range(1))["kl_to_start"] > 5 * held["kl_to_start"]


def demonstrations(n: int) -> ImitationDataset:
    """The replica with the largest first feature is the cheapest."""
    rng = np.random.default_rng(n)
    rows = Samples.empty(500, n, 0)
    given = {
        "replica_obs": rng.normal(size=(500, n, FEATURES)).astype(np.float32),
        "request_obs": rng.normal(size=(500, GLOBALS)).astype(np.float32),
        "mask": np.ones((500, n), np.bool_),
        "tried": np.ones((500, n), np.bool_),
    }
    rows = replace(rows, **given, costs=-given["replica_obs"][..., 0].astype(np.float64))
    return ImitationDataset.of(rows, 0.1)


def test_imitation_is_mixed_in_and_fades_out():
    def nothing(replica_obs, action):
        return np.zeros(action.shape)

    network = network_of()
    learner = Learner(network, settings(imitation_weight=1.0, imitation_updates=40), 80)
    losses = []
    for update in (*range(30), 40):
        rollout = play(network, np.random.default_rng(update), nothing)
        rng = torch.Generator().manual_seed(update)
        told = learner.update(
            [rollout], ExplorationValues(), update, rng, [demonstrations(2), demonstrations(4)]
        )
        losses.append(told["imitation_loss"])
    assert losses[-2] < 0.5 * losses[0]
    assert losses[-1] == 0
    assert play(network, np.random.default_rng(10**6)).reward.mean() > 0.8


def test_a_clipped_value_moves_no_further_than_it_may():
    learner = Learner(network_of(), settings(value_clip=0.5), 1)
    free = Learner(network_of(), settings(), 1)

    class Part:
        returns, value = torch.tensor([0.0, 0.0]), torch.tensor([3.0, 1.0])

    values = torch.tensor([1.0, 0.8])
    assert float(free._value_loss(values, Part)) == pytest.approx((1 + 0.64) / 2)
    assert float(learner._value_loss(values, Part)) == pytest.approx((2.5**2 + 0.64) / 2)


def test_advantages_are_scaled_as_asked():
    def uneven(replica_obs, action):
        return pays(replica_obs, action) * np.array([1.0] * 4 + [1000.0] * 4)

    found = {}
    for kind in ("batch", "group", "raw"):
        network = network_of()
        learner = Learner(
            network, settings(advantage_normalisation=kind, scale_rewards=kind == "raw"), 1
        )
        rollout = play(network, np.random.default_rng(0), uneven, group=4)
        scale = learner.reward_scale if kind == "raw" else None
        seen = estimate_returns(network, [rollout], learner.settings, scale)
        part = learner._experience(seen, ExplorationValues(), None)[0]
        found[kind] = part.advantage.reshape(32, 8).numpy()
        metrics = learner.update(
            [rollout], ExplorationValues(), 0, torch.Generator().manual_seed(0)
        )
        assert metrics["reward_scale"] == pytest.approx(learner.reward_scale.scale)
    assert found["batch"].std() == pytest.approx(1, abs=1e-4)
    assert found["batch"][:, :4].std() < 0.01
    assert found["group"][:, :4].std() == pytest.approx(1, abs=1e-4)
    assert found["group"][:, 4:].std() == pytest.approx(1, abs=1e-4)
    assert 0.1 < found["raw"].std() < 3  # by the reward's scale
    assert learner.reward_scale.scale > 100


def test_the_normaliser_learns_for_as_long_as_it_may():
    learner = Learner(network_of(), settings(norm_updates=2), 4)
    counts = []
    for update in range(3):
        learn(learner, range(update, update + 1))
        counts.append(float(learner.network.request_norm.count))
    assert counts == [256, 512, 512]
