import pickle
from dataclasses import replace

import numpy as np
import pytest

from policy.networks import random_tensors, small
from tailrace.config import Cluster, Event, Replica, Scenario, Workload
from tailrace.env.reward import RewardSettings
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.errors import TailraceError
from tailrace.learn.improve import rollout as module
from tailrace.learn.improve.rollout import (
    Rollout,
    RolloutTask,
    behaviour,
    collect,
    sample,
    split_by_size,
)
from tailrace.policy.learned.observation import REPLICA_FEATURES
from tailrace.seeds import Purpose, seeds

CHAT = Scenario(
    name="chat-3",
    cluster=Cluster(
        replicas=(Replica(count=2, num_blocks=3000), Replica(speed=0.5, num_blocks=3000))
    ),
    workload=Workload(name="chat", rate=15.0),
)
SESSIONS = CHAT.model_copy(
    update={"name": "sessions", "workload": Workload(name="sessions-hot", rate=10)}
)
IN_FLIGHT = [feature.name for feature in REPLICA_FEATURES].index("in_flight")
SEEDS = tuple(seeds(Purpose.TRAINING, 8))


def task(variant: str = "plain", **changes) -> RolloutTask:
    config = small(variant)
    settings = {
        "worlds": (CHAT,),
        "episode_seeds": SEEDS[:4],
        "seed": SEEDS[0],
        "clusters": 4,
        "decisions": 24,
        "chunk": 8,
    }
    return RolloutTask(config=config, tensors=random_tensors(config), **(settings | changes))


def arrays(rollout: Rollout) -> list[bytes]:
    found = [v.tobytes() for v in vars(rollout).values() if isinstance(v, np.ndarray)]
    return found + [v.tobytes() for v in vars(rollout.bootstrap).values()]


# ---- choices ------------------------------------------------------------------------------------


def test_behaviour_by_hand():
    logits = np.log(np.array([[1.0, 3.0, 4.0]], np.float32))
    logits[0, 2] = -np.inf
    mask = np.array([[True, True, False]])
    assert behaviour(logits, mask)[0].tolist() == pytest.approx([0.25, 0.75, 0])
    warm = np.sqrt([1.0, 3.0])
    assert behaviour(logits, mask, 2.0)[0, :2] == pytest.approx(warm / warm.sum())
    mixed = behaviour(logits, mask, 1.0, 0.2)[0]
    assert mixed.tolist() == pytest.approx([0.8 * 0.25 + 0.1, 0.8 * 0.75 + 0.1, 0])


def test_samples_follow_the_probabilities_and_never_the_impossible():
    policy = np.tile([[0.0, 0.2, 0.0, 0.7, 0.1, 0.0]], (20_000, 1))
    chosen = sample(policy, np.random.default_rng(0).random(20_000))
    shares = np.bincount(chosen, minlength=6) / 20_000
    assert shares == pytest.approx(policy[0], abs=0.01)
    # The ends of the range, rounding included.
    edge = np.array([[0.0, 0.1, 0.2, 0.7, 0.0]] * 2)
    assert sample(edge, np.array([0.0, np.nextafter(1, 0)])).tolist() == [1, 3]


def test_bad_tasks_are_refused():
    with pytest.raises(TailraceError, match="chunks of 7"):
        task(chunk=7)
    with pytest.raises(TailraceError, match="epsilon = 1 "):
        task(epsilon=1.0)
    with pytest.raises(TailraceError, match="temperature = 0"):
        task(temperature=0.0)


# ---- roll-outs ----------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_a_task_gives_the_same_bytes_wherever_it_is_done(variant):
    given = task(variant, warmup=5, worlds=(CHAT, SESSIONS), group=2, episode_seeds=SEEDS[:2])
    first = collect(given)
    collect(replace(given, episode_seeds=SEEDS[4:6]))  # leaves other traces in the environment
    assert arrays(collect(given)) == arrays(first)
    module._environment.cache_clear()
    assert arrays(collect(pickle.loads(pickle.dumps(given)))) == arrays(first)
    other = collect(replace(given, seed=SEEDS[1]))
    assert (other.action != first.action).any()


@pytest.mark.compiled
def test_what_is_recorded():
    rollout = collect(task("memory", temperature=2.0, epsilon=0.1))
    assert rollout.replica_obs.shape[:3] == (24, 4, 3)
    assert rollout.mask.all()
    assert rollout.starts[0].all()
    assert not rollout.starts[1:].any()
    assert rollout.memory.shape == (3, 4, 7)
    assert not rollout.memory[0].any()
    assert rollout.memory[1:].any(axis=2).all()
    assert rollout.bootstrap.step.tolist() == [23] * 4
    assert rollout.bootstrap.cluster.tolist() == [0, 1, 2, 3]
    assert rollout.prior is None
    assert (rollout.log_prob <= 0).all()
    assert rollout.log_prob.min() >= np.log(0.1 / 3)
    assert (rollout.reward < 0).any()
    assert rollout.names == ("chat-3",) * 4
    assert rollout.action_share.sum() == pytest.approx(1)
    assert rollout.metrics["raw_reward"] == pytest.approx(rollout.reward.mean())
    assert rollout.metrics["raw_reward_deviation"] == pytest.approx(rollout.reward.std())
    assert rollout.metrics["terms/elapsed_s"] == pytest.approx(rollout.elapsed_s.mean())
    cost = 0.2 * rollout.metrics["terms/e2e_s"] + rollout.metrics["terms/ttft_s"]
    assert -rollout.metrics["raw_reward"] >= cost > 0
    mean, deviation = rollout.replica_moments
    assert mean == pytest.approx(rollout.replica_obs.mean(axis=(0, 1, 2)), abs=1e-4)
    assert deviation == pytest.approx(rollout.replica_obs.std(axis=(0, 1, 2)), abs=1e-4)


@pytest.mark.compiled
def test_a_warm_up_is_the_same_play_with_its_beginning_left_out():
    whole = collect(task("memory", decisions=32))
    late = collect(task("memory", decisions=24, warmup=8))
    # One decision more or less changes the traffic's length, not its beginning.
    assert (late.action == whole.action[8:]).all()
    assert (late.replica_obs == whole.replica_obs[8:]).all()
    assert (late.memory == whole.memory[1:]).all()
    assert not late.starts.any()


@pytest.mark.compiled
def test_after_a_greedy_warm_up_the_clusters_of_a_group_are_in_the_same_state():
    given = task("memory", warmup=16, group=2, episode_seeds=SEEDS[:2])
    drawn, greedy = collect(given), collect(replace(given, greedy_warmup=True))
    assert (drawn.replica_obs[0, 0] != drawn.replica_obs[0, 1]).any()
    assert (greedy.replica_obs[0, 0] == greedy.replica_obs[0, 1]).all()
    assert (greedy.replica_obs[0, 0] != greedy.replica_obs[0, 2]).any()
    assert (greedy.action[:, 0] != greedy.action[:, 1]).any()  # what is recorded is drawn


@pytest.mark.compiled
def test_unbalanced_groups_begin_with_most_requests_at_one_replica_or_none_at_one():
    seeds = tuple(range(6))
    given = task(
        worlds=(CHAT,), episode_seeds=seeds, clusters=12, group=2, warmup=512, greedy_warmup=True
    )
    even, uneven = collect(given), collect(replace(given, unbalanced=1.0))
    # Requests in flight at the first decision, [C, R]; a random network spreads none evenly.
    before, after = (np.expm1(r.replica_obs[0, :, :, IN_FLIGHT]).round() for r in (even, uneven))
    assert (after > 2 * before).any(axis=1).all()
    emptied = ((after == 0) & (before > 0)).any(axis=1)
    assert 0.2 < emptied.mean() < 0.8
    first = uneven.replica_obs[0].reshape(6, 2, -1)
    assert (first[:, 0] == first[:, 1]).all(), "a group begins in one state"


def test_a_group_plays_the_same_requests_with_choices_of_its_own():
    rollout = collect(task(group=2, episode_seeds=SEEDS[:2]))
    assert (rollout.elapsed_s[:, 0] == rollout.elapsed_s[:, 1]).all()
    assert (rollout.request_obs[:, 0, :2] == rollout.request_obs[:, 1, :2]).mean() > 0.5
    assert (rollout.action[:, 0] != rollout.action[:, 1]).any()
    assert (rollout.elapsed_s[:, 0] != rollout.elapsed_s[:, 2]).any()


@pytest.mark.compiled
def test_the_priors_scores_are_those_of_the_rule():
    config = small(prior="least_outstanding", prior_weight=1.5)
    tensors = random_tensors(config)
    for name in ("scorer.output.weight", "scorer.output.bias"):
        tensors[name][:] = 0  # the rule alone decides
    rollout = collect(replace(task(), config=config, tensors=tensors))
    assert rollout.prior is not None
    in_flight = np.expm1(rollout.replica_obs[..., IN_FLIGHT].astype(np.float64))
    deviation = in_flight.std(axis=2, keepdims=True)
    expected = (in_flight - in_flight.mean(axis=2, keepdims=True)) / np.maximum(deviation, 1e-6)
    assert (deviation > 0.1).any()
    assert rollout.prior == pytest.approx(expected, abs=1e-4)
    log_policy = np.log(behaviour(-1.5 * rollout.prior.reshape(-1, 3), rollout.mask.reshape(-1, 3)))
    chosen = np.take_along_axis(log_policy, rollout.action.reshape(-1, 1), 1)[:, 0]
    assert rollout.log_prob.ravel() == pytest.approx(chosen, abs=1e-5)


@pytest.mark.compiled
def test_an_episode_that_ends_in_between_keeps_its_last_state():
    given = task("memory", decisions=12, chunk=4)
    env = RouterVectorEnv(4, (CHAT,), copy=False, decisions=5)
    env.reset(seed=given.seed, options={"episode_seeds": list(given.episode_seeds)})
    rollout = module._Player(env, given).record()
    assert np.flatnonzero(rollout.starts.all(axis=1)).tolist() == [0, 5, 10]
    assert rollout.bootstrap.step.tolist() == [4] * 4 + [9] * 4 + [11] * 4
    last = rollout.bootstrap.replica_obs[:4, :, IN_FLIGHT]
    assert (last > 0).any(axis=1).all()  # the old episode's requests are still under way
    assert not rollout.replica_obs[5, :, :, IN_FLIGHT].any()  # the new one begins empty
    assert rollout.bootstrap.memory.any(axis=1).all()


@pytest.mark.compiled
def test_a_replica_that_is_gone_is_never_chosen():
    gone = CHAT.model_copy(update={"events": (Event(at_s=0.0, replica=1, kind="drain"),)})
    rollout = collect(task(worlds=(gone,), epsilon=0.5))
    assert not rollout.mask[1:, :, 1].any()
    assert not (rollout.action[1:] == 1).any()
    assert (rollout.log_prob[1:] >= np.log(0.25) - 1e-6).all()


@pytest.mark.compiled
def test_rewards_at_the_bound_are_counted():
    tight = collect(task(warmup=8, reward=RewardSettings(bound=1e-6)))
    wide = collect(task(warmup=8, reward=RewardSettings(bound=1e6)))
    assert tight.metrics["share_at_lower_bound"] > 0.9
    assert wide.metrics["share_at_lower_bound"] == wide.metrics["share_at_upper_bound"] == 0
    assert tight.metrics["raw_reward"] == pytest.approx(wide.metrics["raw_reward"])


def growing(seed: int) -> Scenario:
    """Clusters that are larger than any that was seen when the environment was made."""
    blocks = 1000 if seed < SEEDS[0] + 1000 else 2000
    kind = Replica(count=2, num_blocks=blocks)
    return CHAT.model_copy(update={"cluster": Cluster(replicas=(kind,))})


@pytest.mark.compiled
def test_larger_episodes_fit_into_an_environment_that_is_used_again():
    small_ones = task(worlds=growing, clusters=2, episode_seeds=SEEDS[:2])
    large_ones = replace(small_ones, episode_seeds=tuple(seeds(Purpose.TRAINING, 2, 1000)))
    first = collect(small_ones)
    assert (collect(large_ones).reward < 0).any()
    assert arrays(collect(small_ones)) == arrays(first)


def padded_world(seed: int) -> Scenario:
    """Two or three replicas, by the seed."""
    kinds = CHAT.cluster.replicas if seed % 2 else CHAT.cluster.replicas[:1]
    return CHAT.model_copy(update={"cluster": Cluster(replicas=kinds)})


@pytest.mark.compiled
def test_clusters_of_several_sizes_are_taken_apart_without_loss():
    given = task("all", worlds=padded_world, clusters=8, group=2, max_replicas=4)
    whole = collect(given)
    parts = split_by_size(whole)
    assert [part.mask.shape for part in parts] == [(24, 4, 2), (24, 4, 3)]
    for n, part in zip((2, 3), parts, strict=True):
        which = np.flatnonzero(whole.mask[0].sum(axis=1) == n)
        assert which.tolist() == ([0, 1, 4, 5] if n == 2 else [2, 3, 6, 7])
        assert part.mask.all()
        assert (part.replica_obs == whole.replica_obs[:, which, :n]).all()
        assert (part.prior == whole.prior[:, which, :n]).all()
        assert (part.log_prob == whole.log_prob[:, which]).all()
        assert (part.memory == whole.memory[:, which]).all()
        assert part.bootstrap.cluster.tolist() == [0, 1, 2, 3]
        assert (part.bootstrap.request_obs == whole.bootstrap.request_obs[which]).all()
    assert split_by_size(parts[0]) == [parts[0]]


@pytest.mark.compiled
def test_a_replica_that_comes_back_at_the_very_end_is_not_taken_for_padding():
    rollout = collect(task())
    rollout.mask[:, 1, 2] = False
    assert [part.mask.shape for part in split_by_size(rollout)] == [(24, 4, 3)]
    rollout.bootstrap.mask[1, 2] = False
    assert [part.mask.shape for part in split_by_size(rollout)] == [(24, 1, 2), (24, 3, 3)]


def test_evaluation_traffic_is_refused():
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        collect(task(episode_seeds=tuple(seeds(Purpose.EVALUATION, 4))))
