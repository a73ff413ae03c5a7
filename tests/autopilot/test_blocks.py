"""Requests by blocks: what is counted, and what is left out."""

import math

import numpy as np
import pytest

from tailrace.autopilot.blocks import cycles_of
from tailrace.router.decide.turns import Turns

TURNS = Turns(1, 60.0, 4)
BEGIN = 1_700_000_000 // 240 * 240.0


def test_means_of_blocks_without_the_wash_out() -> None:
    arrived = np.arange(BEGIN, BEGIN + 960, 0.5)
    block = ((arrived - BEGIN) // 60).astype(int)
    cost = 1.0 + block
    cost[(arrived - BEGIN) % 60 < 15] = 1e6
    found = cycles_of(
        TURNS,
        arrived,
        cost,
        (arrived, 2 * cost),
        washout_s=15,
        begin_s=BEGIN + 1,
        end_s=BEGIN + 900,
    )
    # The first cycle had begun, and the last has not ended.
    first = TURNS.cycle(BEGIN)
    assert sorted(found) == [first + 1, first + 2]
    cycle = found[first + 1]
    assert cycle.candidate == TURNS.candidates_block(first + 1)
    assert cycle.log_cost == pytest.approx([math.log(5 + k) for k in range(4)])
    assert cycle.log_predicted == pytest.approx([math.log(2 * (5 + k)) for k in range(4)])


def test_a_cycle_with_an_empty_block_does_not_count() -> None:
    arrived = np.arange(BEGIN, BEGIN + 720, 0.5)
    arrived = arrived[(arrived < BEGIN + 300) | (arrived >= BEGIN + 360)]
    found = cycles_of(
        TURNS, arrived, np.ones(len(arrived)), None, washout_s=0, begin_s=BEGIN, end_s=BEGIN + 721
    )
    first = TURNS.cycle(BEGIN)
    assert sorted(found) == [first, first + 2]
    assert found[first].log_predicted == (0.0,) * 4


def test_no_cycle_has_ended_yet() -> None:
    arrived = np.arange(BEGIN, BEGIN + 100, 1.0)
    ones = np.ones(len(arrived))
    window = {"washout_s": 0.0, "begin_s": BEGIN, "end_s": BEGIN + 100}
    assert cycles_of(TURNS, arrived, ones, (arrived, ones), **window) == {}


def test_a_cycle_in_which_turns_were_not_kept_does_not_count() -> None:
    arrived = np.arange(BEGIN, BEGIN + 720, 0.5)
    by_candidate = np.array([TURNS.is_candidates(at) for at in arrived])
    by_candidate[::20] = ~by_candidate[::20]  # a few of each block were decided a moment later
    first = TURNS.cycle(BEGIN)
    late = arrived < BEGIN + (TURNS.candidates_block(first) + 1) * 60 - 10
    by_candidate[late] = False  # the router was told in the midst of the candidate's block
    ones = np.ones(len(arrived))
    found = cycles_of(
        TURNS, arrived, ones, None, by_candidate, washout_s=15, begin_s=BEGIN, end_s=BEGIN + 721
    )
    assert sorted(found) == [first + 1, first + 2]


def test_cycles_that_were_not_simulated_are_judged_without_predictions() -> None:
    """A busy router's hour is longer than what is simulated of it."""
    arrived = np.arange(BEGIN, BEGIN + 720, 0.5)
    late = arrived >= BEGIN + 300
    cost = 2.0 * np.ones(len(arrived))
    found = cycles_of(
        TURNS, arrived, cost, (arrived[late], 3 * cost[late]), washout_s=0, begin_s=BEGIN,
        end_s=BEGIN + 721,
    )  # fmt: skip
    first = TURNS.cycle(BEGIN)
    assert sorted(found) == [first, first + 1, first + 2]
    assert found[first].log_predicted == found[first + 1].log_predicted == (0.0,) * 4
    assert found[first + 2].log_predicted == pytest.approx([math.log(6.0)] * 4)
    assert found[first].log_cost == pytest.approx([math.log(2.0)] * 4)
