from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learn.played import bytes_of, learn, network_of, play, settings  # noqa: E402
from policy.networks import VARIANTS  # noqa: E402
from tailrace.config import Cluster, Replica, Scenario, Workload, parse  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.exploration import ExplorationValues  # noqa: E402
from tailrace.learn.improve.experience import (  # noqa: E402
    evaluate,
    log_behaviour,
    log_policy,
    minibatches,
)
from tailrace.learn.improve.learner import Learner  # noqa: E402
from tailrace.learn.improve.ppo_settings import PpoSettings  # noqa: E402
from tailrace.learn.improve.returns import estimate_returns  # noqa: E402
from tailrace.learn.improve.rollout import Rollout, RolloutTask, collect  # noqa: E402
from tailrace.policy.learned.network import Network  # noqa: E402
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES  # noqa: E402
from tailrace.seeds import Purpose, seeds  # noqa: E402

SEEDS = tuple(seeds(Purpose.TRAINING, 8))


# ---- it learns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "all", "critic_memory"])
def test_the_identity_world_is_solved_in_seconds(variant):
    network = network_of(variant)
    learner = Learner(network, settings(discount_by="decision", gamma=0.1, gae_lambda=0.0), 25)
    before = play(network, np.random.default_rng(10**6)).reward.mean()
    learn(learner, range(25))
    after = play(network, np.random.default_rng(10**6)).reward.mean()
    assert before < 0.6
    assert after > 0.9


def test_it_learns_from_clusters_of_several_sizes_at_once():
    network = network_of()
    learner = Learner(network, settings(discount_by="decision", gamma=0.1, gae_lambda=0.0), 25)
    for update in range(25):
        rng = np.random.default_rng(update)
        rollouts = [play(network, rng, n=n) for n in (2, 5)]
        learner.update(rollouts, ExplorationValues(), update, torch.Generator().manual_seed(update))
    for n in (2, 3, 5):
        assert play(network, np.random.default_rng(10**6), n=n).reward.mean() > 0.85


def test_padding_makes_no_difference():
    def padded(array: np.ndarray, axis: int) -> np.ndarray:
        width = [(0, 0)] * array.ndim
        width[axis] = (0, 2)
        return np.pad(array, width)

    found = []
    for pad in (False, True):
        learner = Learner(network_of("all"), settings(), 1)
        rollout = play(learner.network, np.random.default_rng(0), n=3)
        if pad:
            rollout = replace(
                rollout,
                replica_obs=padded(rollout.replica_obs, 2),
                mask=padded(rollout.mask, 2),
                prior=padded(rollout.prior, 2),
                bootstrap=replace(
                    rollout.bootstrap,
                    replica_obs=padded(rollout.bootstrap.replica_obs, 1),
                    mask=padded(rollout.bootstrap.mask, 1),
                ),
            )
        learner.update([rollout], ExplorationValues(), 0, torch.Generator().manual_seed(0))
        found.append(bytes_of(learner.network))
    assert found[0] == found[1]


def test_the_value_of_an_endless_chain_is_that_of_a_geometric_series():
    network = network_of()
    options = {
        "discount_half_life_s": 2.0,
        "gae_lambda_half_life_s": 2.0,
        "value_weight": 1.0,
        "advantage_normalisation": "raw",
        "epochs": 3,
    }
    updates = 100
    learner = Learner(network, settings(**options), updates)

    def always(replica_obs, action):
        return np.full(action.shape, -3.0)

    for update in range(updates):
        rollout = play(network, np.random.default_rng(update), always)
        metrics = learner.update(
            [rollout], ExplorationValues(), update, torch.Generator().manual_seed(update)
        )
    exact = -3.0 / (1 - 0.5 ** (0.5 / 2.0))
    # The last per cents come slowly, and how slowly depends on the machine's linear algebra.
    assert metrics["value_mean"] == pytest.approx(exact, rel=0.05)


# ---- the same distribution in roll-outs and learner ---------------------------------------------


def log_ratio(network: Network, rollout: Rollout, exploration: ExplorationValues) -> float:
    """Largest logarithm of a ratio in the minibatches of a first epoch."""
    learner = Learner(network, settings(), 1)
    seen = estimate_returns(network, [rollout], learner.settings, None)
    groups = learner._experience(seen, exploration, None)
    largest = 0.0
    for part in minibatches(groups, 64, torch.Generator().manual_seed(0)):
        with torch.no_grad():
            logits, _ = evaluate(network, part)
            policy = log_policy(logits, part.mask, exploration.temperature)
            change = (
                log_behaviour(policy, part.mask, part.choice, exploration.epsilon) - part.log_prob
            )
        largest = max(largest, float(change.abs().max()))
    return largest


@pytest.mark.compiled
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "exploration",
    [ExplorationValues(), ExplorationValues(0.01, 1.7, 0.2)],
    ids=["plain", "explores"],
)
def test_on_unchanged_weights_every_ratio_is_one(variant, exploration):
    world = Scenario(
        cluster=Cluster(replicas=(Replica(count=2), Replica(speed=0.5))),
        workload=Workload(name="chat", rate=15.0),
    )
    network = network_of(
        variant, sharp=400.0, features=N_REPLICA_FEATURES, globals_=N_REQUEST_FEATURES
    )
    rollout = collect(
        RolloutTask(
            (world,),
            SEEDS,
            network.config,
            network.tensors(),
            SEEDS[0],
            clusters=8,
            warmup=8,
            decisions=32,
            chunk=8,
            temperature=exploration.temperature,
            epsilon=exploration.epsilon,
        )
    )
    assert rollout.log_prob.std() > 0.05  # a uniform policy would prove nothing
    assert log_ratio(network, rollout, exploration) < 1e-4
    learner = Learner(network, settings(learning_rate=1e-12, epochs=1), 1)
    metrics = learner.update([rollout], exploration, 0, torch.Generator().manual_seed(0))
    assert metrics["behaviour_gap"] < 1e-4
    assert abs(metrics["kl"]) < 1e-6
    assert metrics["clip_fraction"] == 0
    assert metrics["policy_loss"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "wrong", [ExplorationValues(0.0, 1.0, 0.2), ExplorationValues(0.0, 1.7, 0.0)]
)
def test_another_temperature_or_epsilon_than_played_shows(wrong):
    network = network_of("memory", sharp=400.0)
    rollout = play(network, np.random.default_rng(0), exploration=ExplorationValues(0.0, 1.7, 0.2))
    assert log_ratio(network, rollout, ExplorationValues(0.0, 1.7, 0.2)) < 1e-4
    assert log_ratio(network, rollout, wrong) > 0.05


def test_a_memory_that_is_not_its_own_shows():
    network = network_of("memory", sharp=400.0)
    rollout = play(network, np.random.default_rng(0))
    assert log_ratio(network, rollout, ExplorationValues()) < 1e-4
    shifted = replace(rollout, memory=np.roll(rollout.memory, 1, axis=1))
    assert log_ratio(network, shifted, ExplorationValues()) > 1e-3
    unstarted = replace(rollout, starts=np.zeros_like(rollout.starts))
    assert log_ratio(network, unstarted, ExplorationValues()) > 1e-3


def test_values_of_chunks_begin_with_the_memory_they_had_in_the_whole_rollout():
    network = network_of("critic_memory")
    played = play(network, np.random.default_rng(0))
    (seen,) = estimate_returns(network, [played], settings(), None)
    config, rollout, chunk = network.config, seen.rollout, played.chunk
    assert rollout.memory.shape[2] == config.memory + config.critic_memory
    assert not rollout.memory[0, :, config.memory :].any()  # it begins empty
    assert rollout.memory[1, :, config.memory :].any()
    for k, memory in enumerate(rollout.memory):
        part = slice(k * chunk, (k + 1) * chunk)
        arrays = (rollout.replica_obs[part], rollout.request_obs[part], rollout.mask[part])
        given = (torch.from_numpy(a) for a in (*arrays, memory, rollout.starts[part]))
        with torch.no_grad():
            _, values, _ = network.sequence(*given)
        found = network.value_norm.denormalise(values).numpy()
        np.testing.assert_allclose(found, seen.values[part], atol=1e-5)


def test_nothing_follows_an_episode_that_an_alarm_ended():
    """The last return of a terminated cluster is its reward alone; of others, a value follows."""
    network = network_of()
    network.value_norm.mean[:] = 5.0
    played = play(network, np.random.default_rng(0))
    clusters = played.action.shape[1]
    terminated = np.arange(clusters) % 2 == 0
    rollout = replace(played, bootstrap=replace(played.bootstrap, terminated=terminated))
    given = settings(discount_by="decision", gamma=0.9, gae_lambda=0.0)
    (seen,) = estimate_returns(network, [rollout], given, None)
    (usual,) = estimate_returns(network, [played], given, None)
    np.testing.assert_allclose(seen.returns[-1, terminated], played.reward[-1, terminated])
    assert (np.abs(seen.returns[-1, ~terminated] - played.reward[-1, ~terminated]) > 1).all()
    np.testing.assert_array_equal(seen.returns[-1, ~terminated], usual.returns[-1, ~terminated])


# ---- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("plain", {"target_kl": 1e-4, "kl_penalty": True, "scale_rewards": True}),
        ("all", {"target_kl": 1e-4, "kl_learning_rate": True, "norm_updates": 3}),
        ("memory", {"learning_rate_schedule": "cosine", "value_clip": 0.2}),
    ],
)
def test_a_restored_learner_goes_on_bit_for_bit(variant, changes):
    whole = Learner(network_of(variant), settings(**changes), 6)
    learn(whole, range(6))
    first = Learner(network_of(variant), settings(**changes), 6)
    learn(first, range(3))
    state = {name: array.copy() for name, array in first.state().items()}
    learn(first, range(3, 5))  # must not reach into the state
    second = Learner(network_of(variant, seed=9), settings(**changes), 6)
    learn(second, range(2))  # nor must what was before
    second.restore(state)
    metrics = learn(second, range(3, 6))
    assert bytes_of(second.network) == bytes_of(whole.network)
    assert {n: a.tobytes() for n, a in second.state().items()} == {
        n: a.tobytes() for n, a in whole.state().items()
    }
    assert all(np.isfinite(list(metrics.values())))


def test_a_state_before_the_first_update_is_complete():
    learner = Learner(network_of(), settings(), 4)
    other = Learner(network_of(seed=3), settings(), 4)
    learn(other, range(1))
    other.restore(learner.state())
    learn(other, range(2))
    learn(learner, range(2))
    assert bytes_of(other.network) == bytes_of(learner.network)


def test_changing_the_unit_of_values_does_not_change_what_they_say():
    learner = Learner(network_of(), settings(), 4)
    network, rng = learner.network, np.random.default_rng(0)
    rollout = play(network, rng)
    learner._learn_value_norm(rng.normal(5, 3, 100))
    seen = [
        torch.from_numpy(a[0]) for a in (rollout.replica_obs, rollout.request_obs, rollout.mask)
    ]
    with torch.no_grad():
        before = network.value_norm.denormalise(network(*seen)[1])
        learner._learn_value_norm(rng.normal(-40, 20, 100))
        after = network.value_norm.denormalise(network(*seen)[1])
    assert float(network.value_norm.mean) < -10
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)


# ---- what must be refused -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reward_that_is_no_number_stops_learning_and_leaves_the_network_alone(value):
    learner = Learner(network_of(), settings(scale_rewards=True), 1)
    before = {n: a.tobytes() for n, a in learner.state().items()}
    rollout = play(learner.network, np.random.default_rng(0))
    rollout.reward[3, 2] = value
    with pytest.raises(TailraceError, match=r"reward in a roll-out is not finite.*learning_rate"):
        learner.update([rollout], ExplorationValues(), 0, torch.Generator())
    assert {n: a.tobytes() for n, a in learner.state().items()} == before


def test_a_step_that_is_no_number_is_not_taken():
    learner = Learner(network_of(), settings(), 1)
    rollout = play(learner.network, np.random.default_rng(0))
    with torch.no_grad():
        learner.network.scorer.output.weight.fill_(3e38)  # the logits are beyond float32
    with pytest.raises(TailraceError, match=r"policy_loss is not finite.*learning_rate"):
        learner.update([rollout], ExplorationValues(), 0, torch.Generator())
    assert all(np.isfinite(array).all() for array in learner.network.tensors().values())


def test_values_that_run_away_stop_learning_and_leave_the_network_alone():
    learner = Learner(network_of(), settings(), 1)
    rollout = play(learner.network, np.random.default_rng(0))
    with torch.no_grad():
        learner.network.value_head.output.bias.fill_(1e20)
    before = bytes_of(learner.network)
    with pytest.raises(TailraceError, match=r"value .* runs away.*value_weight"):
        learner.update([rollout], ExplorationValues(), 0, torch.Generator())
    assert bytes_of(learner.network) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clusters": 2, "decisions": 32, "minibatch": 65}, "minibatch = 65 is more than"),
        ({"decisions": 100, "chunk": 32}, "chunk = 32 does not divide decisions = 100"),
        ({"kl_stop": True}, "kl_stop needs target_kl"),
        ({"target_kl": 0.1}, "target_kl does nothing by itself"),
        ({"target_kl": 0.1, "kl_penalty": True, "kl_learning_rate": True}, "choose one"),
        (
            {"target_kl": 0.1, "kl_learning_rate": True, "learning_rate_schedule": "cosine"},
            "constant",
        ),
        ({"clip_range": 1.5}, "clip_range"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"learning_rte": 1}, "did you mean"),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(TailraceError, match=message):
        parse(PpoSettings, given)


def test_a_minibatch_must_hold_a_chunk_of_a_network_with_memory():
    with pytest.raises(TailraceError, match="at least chunk = 8"):
        Learner(network_of("memory"), settings(minibatch=4), 1)
