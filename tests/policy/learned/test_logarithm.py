"""The logarithm that vectorises."""

import numpy as np

from tailrace.compiled import jit
from tailrace.policy.learned.logarithm import log


@jit
def all_of(values, out):
    for i in range(values.size):
        out[i] = log(values[i])


def test_within_a_rounding_of_the_librarys():
    rng = np.random.default_rng(0)
    values = np.exp(rng.uniform(-60, 60, 3000)).astype(np.float32)
    near_one = (1 + rng.uniform(-0.4, 0.5, 3000)).astype(np.float32)
    powers = np.float32(2.0) ** np.arange(-90, 90, dtype=np.float32)
    values = np.concatenate([values, near_one, powers, np.float32([1.0])])
    out = np.zeros_like(values)
    all_of(values, out)
    exact = np.log(values.astype(np.float64))
    assert np.max(np.abs(out - exact) / np.maximum(1, np.abs(exact))) < 2e-7
    assert out[-1] == 0
