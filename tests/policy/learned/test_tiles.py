"""Matrix products in vector registers against numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.policy.learned.tiles import NARROW, TILE_ROWS, WIDE, multiply

SIZE = 40_000
X, W, Y = 64, 10_000, 25_000


@given(
    tiles=st.integers(1, 3),
    inputs=st.integers(0, 40),
    columns=st.sampled_from([1, 7, NARROW, NARROW + 3, WIDE, WIDE + NARROW, 2 * WIDE + 21]),
    spare=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_products_are_added_and_nothing_else_is_touched(
    tiles: int, inputs: int, columns: int, spare: int, seed: int
) -> None:
    rows = tiles * TILE_ROWS
    f = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
    before = f.copy()

    def matrix(start: int, height: int, width: int) -> np.ndarray:
        stride = width + spare
        return before[start : start + height * stride].reshape(height, stride)[:, :width]

    expected = before.astype(np.float64)
    product = matrix(X, rows, inputs).astype(float) @ matrix(W, inputs, columns).astype(float)
    stride = columns + spare
    expected[Y : Y + rows * stride].reshape(rows, stride)[:, :columns] += product
    multiply(f, X, inputs + spare, rows, inputs, W, stride, columns, Y, stride)
    untouched = expected == before
    np.testing.assert_array_equal(f[untouched], before[untouched])
    np.testing.assert_allclose(f, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [WIDE, NARROW, 5])
def test_a_row_gives_the_same_bits_wherever_it_stands(columns: int) -> None:
    f = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    inputs, rows = 37, 2 * TILE_ROWS
    f[X : X + rows * inputs] = np.tile(f[X : X + inputs], rows)
    f[Y : Y + rows * columns] = 0
    multiply(f, X, inputs, rows, inputs, W, columns, columns, Y, columns)
    out = f[Y : Y + rows * columns].reshape(rows, columns)
    assert (out == out[0]).all()
