"""Variables and arrays' structures that stay values give what they gave in memory."""

from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba.core import cgutils, lowering

from tailrace import compile_values
from tailrace.compiled import jit

pytestmark = pytest.mark.skipif(
    bool(numba.config.DISABLE_JIT),  # type: ignore[attr-defined]
    reason="the compiler is off",
)


class Pair(NamedTuple):
    """Two arrays in one argument, as the engine's fleet."""

    rows: Any
    sums: Any


def _ways(pair: Any, start: int, step: int) -> tuple[float, int]:
    """Use variables far from where they are assigned, on several ways and in loops."""
    rows = pair.rows
    width = rows.shape[1]
    first = rows[0]
    chosen = rows[1:, :]
    if step < 0:
        chosen = rows[::-1]
    last = -1
    total = 0.0
    for i in range(start, chosen.shape[0]):
        row = chosen[i]
        if row[0] < 0.0:
            continue
        for k in range(width):
            if k == step:
                before = last
                last = k
                pair.sums[i] += before
                break
            total += row[k] * first[k]
        else:
            view = row[1:][::2]
            view[:] = total
            total += view.size
        if total > 1e6:
            return total, i
    return total + float(chosen[-1, -1]), last


@pytest.mark.parametrize(("start", "step"), [(0, 1), (1, 3), (0, 9), (2, -1), (9, 0)])
def test_variables_and_views_on_all_ways(start: int, step: int) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(1.0, 1.0, (6, 5))
    compiled, plain = (Pair(rows.copy(), np.zeros(6)) for _ in range(2))
    found = jit(_ways)(compiled, start, step)
    assert found == _ways(plain, start, step)
    np.testing.assert_array_equal(compiled.rows, plain.rows)
    np.testing.assert_array_equal(compiled.sums, plain.sums)


def test_numba_is_what_the_changes_were_written_for() -> None:
    assert lowering.Lower.lower_function_body is compile_values._lower_body
    assert cgutils.ValueStructProxy._getvalue is compile_values._whole_known
    assert compile_values._Builder.extract_value is compile_values._extract_known


def test_others_functions_keep_their_counts_of_references() -> None:
    @numba.njit  # type: ignore[misc]
    def halves(numbers):  # type: ignore[no-untyped-def]
        made = [numbers[:2].copy()]
        for _ in range(3):
            made.append(made[-1] * 0.5)
        return made[-1]

    np.testing.assert_array_equal(halves(np.full(4, 8.0)), [1.0, 1.0])
