"""The sequential test: exact under the null for any costs; intervals; detection of a change."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.autopilot.sequential import (
    Cycle,
    Evidence,
    change_detected,
    evidence,
    log_e_values,
)

ALPHA = 0.05
logs = st.floats(-5, 5)
History = tuple[list[Cycle], tuple[float, ...], tuple[float, ...]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Some cycles, then costs and predictions of one whose candidate is not drawn yet."""
    blocks = draw(st.integers(2, 6))
    values = st.tuples(*[logs] * blocks)
    past = draw(st.lists(st.builds(Cycle, st.integers(0, blocks - 1), values, values), max_size=6))
    return past, draw(values), draw(values)


@given(histories())
@settings(max_examples=150, deadline=None)
def test_no_difference_leaves_the_expected_e_value_as_it_is(history: History) -> None:
    """The martingale property, for any costs: a mean over where the candidate's block may be."""
    past, costs, predicted = history
    nothing = np.zeros(1)
    before = [np.exp(log[-1, 0]) for log in log_e_values(past, nothing)]
    after = np.mean(
        [
            [
                np.exp(log[-1, 0])
                for log in log_e_values([*past, Cycle(c, costs, predicted)], nothing)
            ]
            for c in range(len(costs))
        ],
        axis=0,
    )
    np.testing.assert_allclose(after, before, rtol=1e-9)


@given(histories(), st.floats(0, 1), st.floats(-0.5, 0.5))
@settings(max_examples=150, deadline=None)
def test_a_worse_candidate_than_tested_for_lowers_it(
    history: History, worse: float, effect: float
) -> None:
    """With a true effect of ``effect + worse``: the null of a margin holds for all beyond it."""
    past, costs, predicted = history
    tested = np.array([effect])
    before = np.exp(log_e_values(past, tested)[0][-1, 0])
    after = []
    for c in range(len(costs)):
        shifted = [y + (effect + worse) * (k == c) for k, y in enumerate(costs)]
        cycles = [*past, Cycle(c, tuple(shifted), predicted)]
        after.append(np.exp(log_e_values(cycles, tested)[0][-1, 0]))
    assert np.mean(after) <= before * (1 + 1e-9)


@given(histories(), st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_only_differences_within_a_cycle_count(history: History, shift: float) -> None:
    past, *_ = history
    moved = [
        Cycle(c.candidate, tuple(y + shift for y in c.log_cost), c.log_predicted) for c in past
    ]
    ours, theirs = evidence(past, alpha=ALPHA), evidence(moved, alpha=ALPHA)
    assert theirs.better == pytest.approx(ours.better, rel=1e-6)
    assert theirs.worse == pytest.approx(ours.worse, rel=1e-6)


def made(
    rng: np.random.Generator, cycles: int, effect: float, *, blocks: int = 4, known: float = 0.0
) -> list[Cycle]:
    """Cycles with skewed costs that drift and depend on each other; ``known``: share predicted."""
    level, found = 0.0, []
    for _ in range(cycles):
        noise = []
        for _ in range(blocks):
            level = 0.8 * level + 0.15 * rng.standard_exponential() - 0.15
            noise.append(level + 0.1 * rng.standard_t(3))
        candidate = int(rng.integers(blocks))
        costs = [x + math.log1p(effect) * (k == candidate) for k, x in enumerate(noise)]
        predicted = [known * x + 0.02 * rng.standard_normal() for x in noise]
        found.append(Cycle(candidate, tuple(costs), tuple(predicted)))
    return found


def rejections(runs: int, cycles: int, effect: float, **how: float) -> NDArray[np.bool_]:
    """Whether equality was ever rejected [2, runs]: for a better candidate, for a worse one."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(runs):
        e_values = log_e_values(made(rng, cycles, effect, **how), np.zeros(1))  # type: ignore[arg-type]
        found.append([log.max() >= math.log(1 / ALPHA) for log in e_values])
    return np.array(found).T


def test_equal_policies_are_taken_for_different_ones_in_at_most_five_percent() -> None:
    better, worse = rejections(300, 60, 0.0)
    # 300 runs at 5 %: 25 or more come with a probability of 0.7 %.
    assert better.sum() < 25
    assert worse.sum() < 25


def test_a_better_candidate_is_found() -> None:
    better, worse = rejections(60, 60, -0.1, known=0.9)
    assert better.sum() >= 55
    assert not worse.any()


def test_intervals_hold_the_true_effect() -> None:
    rng = np.random.default_rng(8)
    found = [evidence(made(rng, 40, -0.1, known=0.9), alpha=ALPHA) for _ in range(30)]
    assert sum(v.low <= -0.1 <= v.high for v in found) >= 26
    effects = [v.effect for v in found if v.effect is not None]
    assert np.median(effects) == pytest.approx(-0.1, abs=0.01)


def test_predictions_make_it_faster() -> None:
    blind, told = (rejections(40, 30, -0.1, known=known)[0] for known in (0.0, 0.9))
    assert told.sum() > 1.5 * blind.sum()


def test_wrong_predictions_do_no_harm_to_validity() -> None:
    assert rejections(200, 40, 0.0, known=-3.0)[0].sum() < 18


def test_a_margin_allows_for_equal_policies() -> None:
    rng = np.random.default_rng(3)
    cycles = made(rng, 80, 0.0, known=1.0)
    assert evidence(cycles, alpha=ALPHA).better < 20
    assert evidence(cycles, alpha=ALPHA, margin=0.1).better >= 20


def test_before_the_first_cycle_nothing_is_known() -> None:
    assert evidence([], alpha=ALPHA) == Evidence(0, None, -1.0, math.inf, 1.0, 1.0)


def test_one_cycle_out_of_the_ordinary_does_not_end_a_bet() -> None:
    rng = np.random.default_rng(5)
    cycles = made(rng, 40, -0.1, known=0.9)
    stalled = list(cycles)
    bad = list(cycles[10].log_cost)
    bad[cycles[10].candidate] += 3.0
    stalled[10] = Cycle(cycles[10].candidate, tuple(bad), cycles[10].log_predicted)
    assert evidence(stalled, alpha=ALPHA).better >= 20


def test_a_change_is_found_after_a_long_time_without_one() -> None:
    rng = np.random.default_rng(11)
    before, after = made(rng, 200, 0.1, known=0.9), made(rng, 40, -0.15, known=0.9)
    assert not change_detected(before, mean_cycles=1000)
    assert change_detected(before + after, mean_cycles=1000)
    # The plain test has to make up for all it has lost before.
    assert evidence(before + after, alpha=ALPHA).better < 20
