import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.learn.improve.advantages import (
    RewardScale,
    discount_factors,
    gae,
    group_relative,
    next_values,
    normalised,
)


def column(*values: float):
    return np.array(values)[:, None]


def flags(*values: int):
    return np.array(values, np.bool_)[:, None]


def test_advantages_of_a_trace_by_hand():
    rewards, values = column(1.0, 2.0, 3.0), column(10.0, 20.0, 30.0)
    ended = flags(0, 0, 1)
    following = next_values(values, column(0, 0, 40.0), ended)
    discount, gae_lambda = column(0.5, 0.25, 0.5), column(0.8, 0.4, 0.7)
    found, returns = gae(rewards, values, following, discount, gae_lambda, truncated=ended)
    last = 3 + 0.5 * 40 - 30
    middle = (2 + 0.25 * 30 - 20) + 0.25 * 0.4 * last
    first = (1 + 0.5 * 20 - 10) + 0.5 * 0.8 * middle
    np.testing.assert_allclose(found, column(first, middle, last))
    np.testing.assert_allclose(returns, found + values)


def test_a_trace_of_one_is_the_discounted_sum_and_of_zero_the_error_of_one_step():
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(2, 6, 3))
    discount = rng.uniform(0.5, 1, (6, 3))
    ended = np.zeros((6, 3), np.bool_)
    ended[-1] = True
    after = np.full((6, 3), 7.0)
    following = next_values(values, after, ended)
    _, returns = gae(rewards, values, following, discount, np.ones((6, 3)), truncated=ended)
    expected = np.full(3, 7.0)
    for t in reversed(range(6)):
        expected = rewards[t] + discount[t] * expected
        np.testing.assert_allclose(returns[t], expected)
    one, _ = gae(rewards, values, following, discount, np.zeros((6, 3)), truncated=ended)
    np.testing.assert_allclose(one, rewards + discount * following - values)


def test_an_endless_chain_has_the_value_of_a_geometric_series():
    half_life_s, elapsed_s = 20.0, np.full((400, 2), 0.5)
    discount = discount_factors(elapsed_s, half_life_s)
    value = -3.0 / (1 - 0.5 ** (0.5 / 20))
    rewards = np.full((400, 2), -3.0)
    ended = np.zeros((400, 2), np.bool_)
    ended[-1] = True
    exact = np.full((400, 2), value)
    found, returns = gae(
        rewards, exact, next_values(exact, exact, ended), discount, discount, truncated=ended
    )
    np.testing.assert_allclose(found, 0, atol=1e-9)
    np.testing.assert_allclose(returns, value)
    # From a wrong estimate, returns lead to that value when they become the next estimate.
    guess = np.zeros((400, 2))
    for _ in range(60):
        following = next_values(guess, np.full((400, 2), guess.mean()), ended)
        _, returns = gae(rewards, guess, following, discount, discount, truncated=ended)
        guess[:] = returns.mean()
    np.testing.assert_allclose(guess, value, rtol=1e-3)


def test_truncation_counts_what_follows_and_termination_does_not():
    rewards, values = column(1.0, 1.0, 1.0), column(5.0, 5.0, 5.0)
    discount = gae_lambda = column(0.9, 0.9, 0.9)
    ended = flags(0, 1, 1)
    after = column(0.0, 100.0, 50.0)
    following = next_values(values, after, ended)
    cut, _ = gae(rewards, values, following, discount, gae_lambda, truncated=ended)
    dead, _ = gae(
        rewards, values, following, discount, gae_lambda, truncated=flags(0, 0, 1),
        terminated=flags(0, 1, 0),
    )  # fmt: skip
    assert cut[1, 0] == pytest.approx(1 + 0.9 * 100 - 5)
    assert dead[1, 0] == pytest.approx(1 - 5)
    assert cut[0, 0] - dead[0, 0] == pytest.approx(0.9 * 0.9 * 0.9 * 100)
    # Nothing of the next episode leaks back over either end.
    assert cut[2, 0] == dead[2, 0] == pytest.approx(1 + 0.9 * 50 - 5)


def test_time_fades_by_seconds_not_by_decisions():
    split = discount_factors(np.array([[1.0], [2.0], [3.0]]), 6.0)
    assert np.prod(split) == pytest.approx(0.5)
    assert discount_factors(np.array([[6.0, 6.0]]), np.array([6.0, 3.0])).tolist() == [[0.5, 0.25]]


def test_identical_members_of_a_group_have_no_advantage():
    one = np.random.default_rng(2).normal(size=(5, 2))
    assert (np.abs(group_relative(np.repeat(one, 3, axis=1), 3)) < 1e-12).all()


def test_a_member_is_compared_with_the_others_of_its_group_only():
    given = np.array([[1.0, 2.0, 6.0, 100.0, 200.0, 300.0]])
    found = group_relative(given, 3)
    assert found[0].tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, -150, 0, 150])
    # What all members share, per decision, makes no difference.
    shared = given + np.array([[5.0, 5, 5, -7, -7, -7]])
    np.testing.assert_allclose(group_relative(shared, 3), found)


@pytest.mark.parametrize("group", [1, 4])
def test_groups_that_cannot_be_compared_are_refused(group):
    with pytest.raises(TailraceError, match="cannot be compared in groups"):
        group_relative(np.zeros((2, 6)), group)


def test_normalised_overall_or_per_group():
    rng = np.random.default_rng(3)
    given = rng.normal(size=(50, 4)) * [1, 1, 100, 100] + 7
    whole, each = normalised(given), normalised(given, 2)
    assert whole.mean() == pytest.approx(0, abs=1e-12)
    assert whole.std() == pytest.approx(1)
    assert whole[:, :2].std() < 0.05
    for part in (each[:, :2], each[:, 2:]):
        assert part.mean() == pytest.approx(0, abs=1e-12)
        assert part.std() == pytest.approx(1)
    assert (normalised(np.full((3, 2), 4.0)) == 0).all()


def test_reward_scale_is_the_deviation_of_discounted_sums():
    rng = np.random.default_rng(4)
    rewards, discount = rng.normal(size=(30, 2)), rng.uniform(0.8, 1, (30, 2))
    starts = np.zeros((30, 2), np.bool_)
    starts[0] = starts[11, 1] = True
    sums, total = [], np.zeros(2)
    for t in range(30):
        total = rewards[t] + (discount[t - 1] * total if t else 0)
        total = np.where(starts[t], rewards[t], total)
        sums.append(total)
    scale = RewardScale()
    assert scale.scale == 1.0
    scale.update(rewards, discount, starts)
    assert scale.scale == pytest.approx(np.std(sums))
    # Merging is exact: twice the same and a shifted lot are as all at once.
    scale.update(rewards + 1, discount, starts)
    more, total = [], np.zeros(2)
    for t in range(30):
        total = rewards[t] + 1 + (discount[t - 1] * total if t else 0)
        total = np.where(starts[t], rewards[t] + 1, total)
        more.append(total)
    assert scale.scale == pytest.approx(np.std(sums + more))
    again = RewardScale()
    again.restore(scale.state())
    assert again.scale == scale.scale


def test_rewards_that_never_vary_are_left_alone():
    scale = RewardScale()
    scale.update(np.zeros((5, 2)), np.ones((5, 2)), np.zeros((5, 2), np.bool_))
    assert scale.scale == 1.0
