"""Bootstrap over seeds: confidence intervals of statistics of a few seeds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.seeds import generator

CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A ratio and its confidence interval; without bounds if there is a single seed."""

    ratio: float
    low: float | None
    high: float | None


def resampled(seeds: int, samples: int = BOOTSTRAP_SAMPLES) -> NDArray[np.int64]:
    """Return places of seeds [samples, seeds], drawn with replacement; always the same ones."""
    return generator(0, "bootstrap").integers(seeds, size=(samples, seeds))


def bounds(drawn: NDArray[np.float64]) -> tuple[float, float]:
    """Return the confidence interval of a statistic from its values [samples]."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, (tail, 100 - tail))
    return float(low), float(high)
