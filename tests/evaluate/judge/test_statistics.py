import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results import make_result
from tailrace.evaluate.judge.statistics import (
    Grid,
    best_of_each,
    best_single,
    holm,
    scores,
    sign_flip_p,
    versus_each,
    versus_single,
)
from tailrace.evaluate.measure.cells import Cell
from tailrace.evaluate.measure.metrics import Latency, summarise
from tailrace.evaluate.measure.tail import extremes

_RESULT = make_result([0.0, 1.0], [1.0, 2.0], [2.0, 3.0])
_SUMMARY = summarise(_RESULT)
_EXTREMES = dataclasses.replace(extremes(_RESULT, 0.0, 30.0), steady_rps=2.0)


def make_grid(costs, p99=None):
    """A grid of costs [S][P][K]; scenarios s0, s1, policies a, b, c, seeds 0, 1."""
    costs = np.asarray(costs, float)
    p99 = costs if p99 is None else np.asarray(p99, float)
    s, p, k = costs.shape
    scenarios, policies = [f"s{i}" for i in range(s)], list("abcdef"[:p])
    cells = [
        Cell(
            scenarios[i],
            policies[j],
            seed,
            dataclasses.replace(
                _SUMMARY,
                cost_s=costs[i, j, seed],
                ttft_s=Latency(1.0, 1.0, 1.0, p99[i, j, seed]),
            ),
            _EXTREMES,
        )
        for i in range(s)
        for j in range(p)
        for seed in range(k)
    ]
    return Grid.of(cells, scenarios, policies, range(k))


def test_geometric_mean_over_scenarios_of_ratios_of_means():
    # a is twice as dear in the first scenario and at an eighth in the second: 2 * 1/8 = 1/4.
    grid = make_grid([[[2, 6], [1, 3]], [[1, 1], [8, 8]]])
    found = versus_single(grid, "a", "b")
    assert found.cost.ratio == pytest.approx(0.5)
    assert found.mean_e2e.ratio == found.throughput.ratio == 1.0


def test_the_ratio_of_means_is_not_the_mean_of_ratios():
    grid = make_grid([[[1, 10], [2, 2]]])
    assert versus_single(grid, "a", "b").cost.ratio == pytest.approx(11 / 4)


def test_pairing_makes_intervals_narrow():
    rng = np.random.default_rng(0)
    traffic = np.exp(rng.normal(size=20))  # seeds differ by a lot
    paired = make_grid([[traffic * 0.9, traffic]])
    found = versus_single(paired, "a", "b").cost
    assert found.low == pytest.approx(0.9)
    assert found.high == pytest.approx(0.9)
    shuffled = make_grid([[rng.permutation(traffic) * 0.9, traffic]])
    found = versus_single(shuffled, "a", "b").cost
    assert found.high - found.low > 0.3


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        traffic = np.exp(0.5 * rng.normal(size=30))
        mine = traffic * np.exp(0.1 * rng.normal(size=30) - 0.005) * 0.8
        (interval,) = make_grid([[mine, traffic]]).ratios("cost", "a", ["b"]).each()
        covered += interval.low <= 0.8 <= interval.high
    assert 33 <= covered <= 40


def test_one_seed_gives_no_interval():
    found = versus_single(make_grid([[[2.0], [1.0]]]), "a", "b").cost
    assert (found.ratio, found.low, found.high) == (2.0, None, None)


def test_scenarios_are_drawn_apart():
    grid = make_grid(np.ones((3, 2, 5)))
    assert not np.array_equal(grid.draws[0], grid.draws[1])
    np.testing.assert_allclose(grid.draws.sum(axis=2), 1.0)


def test_the_best_single_rule_need_not_be_best_anywhere():
    costs = [[[1.0], [1.2], [9.0]], [[9.0], [1.2], [1.0]]]
    grid = make_grid(costs)
    assert best_single(grid, ["a", "b", "c"], "a") == "b"
    assert best_of_each(grid, ["a", "b", "c"]) == ["a", "c"]
    assert best_of_each(grid, ["b", "c"]) == ["b", "c"]
    np.testing.assert_allclose(scores(grid, "a"), [1.0, 1.2 / 3, 1.0])


def test_share_better_and_the_worst_scenario():
    seeds = np.ones(20)
    wobble = np.linspace(0.99, 1.01, 20)
    costs = [
        [0.5 * wobble, seeds, 9 * seeds],
        [0.9 * wobble, 9 * seeds, seeds],
        [1.02 * wobble, seeds, seeds],
    ]
    found = versus_each(make_grid(costs), "a", ["b", "c", "b"])
    assert found.share_better == pytest.approx(2 / 3)
    assert found.share_surely_better == pytest.approx(2 / 3)
    assert (found.worst.scenario, found.worst.baseline) == ("s2", "b")
    assert found.worst.cost.ratio == pytest.approx(1.02)


def test_better_by_accident_is_not_surely_better():
    rng = np.random.default_rng(3)
    noise = np.exp(0.3 * rng.normal(size=(8, 12)))
    costs = np.stack([noise / noise.mean(axis=1, keepdims=True) * 0.999, np.ones((8, 12))], axis=1)
    found = versus_each(make_grid(costs), "a", ["b"] * 8)
    assert found.share_better == 1.0
    assert found.share_surely_better == 0.0


def test_p_values_of_few_pairs_are_exact():
    # All four signs alike: 2 of 16 ways are as extreme.
    assert sign_flip_p(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(2 / 16)
    assert sign_flip_p(np.array([1.0, -1.0])) == 1.0
    assert sign_flip_p(np.zeros(5)) == 1.0
    assert sign_flip_p(np.array([3.0])) == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_never_lowers(p):
    adjusted = holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    assert all(0 <= a <= 1 for a in adjusted)
    order = np.argsort(p, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()


def test_a_figure_nobody_could_measure_is_not_dropped_silently():
    p99 = [[[np.nan, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]
    found = versus_single(make_grid(np.ones((2, 2, 2)), p99), "a", "b")
    assert np.isnan(found.p99_ttft.ratio)
    assert found.cost.ratio == 1.0
