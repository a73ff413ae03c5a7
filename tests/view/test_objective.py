"""The composite cost: known answers, and one formula for arrays and for compiled code."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tailrace
from tailrace.view import objective
from tailrace.view.objective import compiled_cost, composite_cost

seconds = st.floats(0, 1e7)


def test_known_answers() -> None:
    assert composite_cost(5.0, 3.0, 2.0, 0) == pytest.approx(0.2 * 5 + 3 + 2 * 2)
    assert composite_cost(5.0, 3.0, 2.0, 1) == pytest.approx(0.2 * 5 + 3 + 2 * 2 + 30)
    several = composite_cost(
        np.array([1.0, 10.0]), np.array([0.5, 2.0]), np.zeros(2), np.array([False, True])
    )
    np.testing.assert_allclose(several, [0.7, 34.0])


@settings(deadline=None)  # the first example compiles
@given(seconds, seconds, seconds, st.integers(0, 100))
def test_compiled_code_gives_the_same_bits(
    e2e_s: float, ttft_s: float, late_s: float, lost: int
) -> None:
    arrays = composite_cost(*(np.array([x]) for x in (e2e_s, ttft_s, late_s, lost)))
    assert compiled_cost(e2e_s, ttft_s, late_s, lost) == arrays[0]


@settings(deadline=None)  # the first example compiles
@given(seconds, seconds, seconds)
def test_a_cost_may_be_counted_in_parts(e2e_s: float, ttft_s: float, late_s: float) -> None:
    """Terms that are left out add nothing, not even a rounding error."""
    assert composite_cost(e2e_s, 0.0, 0.0, 0) == objective.E2E_WEIGHT * e2e_s
    expected = objective.TTFT_WEIGHT * ttft_s + objective.LATE_WEIGHT * late_s
    assert composite_cost(0.0, ttft_s, late_s, 0) == expected


def test_nobody_else_multiplies_with_the_weights() -> None:
    for path in Path(tailrace.__file__).parent.rglob("*.py"):
        if path != Path(objective.__file__):
            text = path.read_text(encoding="utf-8")
            assert "_WEIGHT * " not in text, path
            assert "LOST_COST_S * " not in text, path
