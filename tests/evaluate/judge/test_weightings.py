"""Rankings under other weightings, against figures worked out by hand."""

import dataclasses

import pytest

from results import make_result
from tailrace.evaluate.judge.statistics import Grid
from tailrace.evaluate.judge.weightings import WEIGHTINGS, placings
from tailrace.evaluate.measure.cells import Cell
from tailrace.evaluate.measure.metrics import Latency, summarise
from tailrace.evaluate.measure.tail import extremes

_RESULT = make_result([0.0, 1.0], [1.0, 2.0], [2.0, 3.0])
_SUMMARY, _EXTREMES = summarise(_RESULT), extremes(_RESULT, 0.0, 30.0)


def cell(scenario, policy, ttft, e2e, met, goodput):
    summary = dataclasses.replace(
        _SUMMARY,
        ttft_s=Latency(ttft, ttft, ttft, ttft),
        e2e_s=Latency(e2e, e2e, e2e, e2e),
        slo_attainment=met,
        goodput_rps=goodput,
    )
    return Cell(scenario, policy, 0, summary, _EXTREMES)


def grid_of(*cells):
    scenarios, policies = ({getattr(c, n): 0 for c in cells} for n in ("scenario", "policy"))
    return Grid.of(cells, list(scenarios), list(policies), [0])


def test_each_weighting_ranks_by_its_own_figure():
    placed = placings(
        grid_of(
            cell("x", "ref", 1.0, 4.0, 0.5, 2.0),
            cell("x", "fast", 0.5, 8.0, 1.0, 1.0),
            cell("y", "ref", 1.0, 2.0, 0.9, 4.0),
            cell("y", "fast", 2.0, 0.5, 0.1, 4.0),
        ),
        "ref",
    )
    fast = {key: place.score for key, place in placed["fast"].items()}
    assert fast == pytest.approx(
        {"ttft_only": 1.0, "e2e_only": 0.5**0.5, "slo_misses": 0.45, "goodput": 0.75}
    )
    assert {key: place.rank for key, place in placed["ref"].items()} == {
        "ttft_only": 1, "e2e_only": 2, "slo_misses": 1, "goodput": 1,
    }  # fmt: skip
    assert placed["fast"]["ttft_only"].rank == 1  # equal scores share a rank
    assert placed["fast"]["goodput"].rank == 2


def test_nobody_meets_a_target_or_nobody_misses_one():
    placed = placings(
        grid_of(cell("x", "ref", 1.0, 1.0, 0.0, 0.0), cell("x", "b", 1.0, 1.0, 1.0, 0.0)), "ref"
    )
    assert placed["b"]["slo_misses"].score == 0.0
    assert {p["goodput"].rank for p in placed.values()} == {1}


def test_every_weighting_is_placed_and_described():
    placed = placings(grid_of(cell("x", "ref", 1.0, 1.0, 0.5, 1.0)), "ref")
    assert list(placed["ref"]) == [w.key for w in WEIGHTINGS]
    assert all(w.meaning and w.title for w in WEIGHTINGS)
