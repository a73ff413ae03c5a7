"""Predicted output lengths: what a router may assume before the output is generated."""

import numpy as np
from numpy.typing import NDArray

from tailrace import seeds
from tailrace.config import PredictorName
from tailrace.errors import TailraceError
from tailrace.workload.table import RequestTable


def predicted_output(
    table: RequestTable, predictor: PredictorName, sigma: float, seed: int
) -> NDArray[np.float64] | None:
    """Return predicted output tokens [R], or None for "mean", which the router learns as it goes.

    exact: the truth. bucket: the next power of two at or above it. noisy: the truth times
    exp(``sigma`` x normal), right in the median, at least 1.
    """
    output = table.rows["output_tokens"].astype(np.float64)
    match predictor:
        case "mean":
            return None
        case "exact":
            return output
        case "bucket":
            # frexp(n - 1) gives the number of bits of n - 1, free of rounding at powers of two.
            return np.ldexp(1.0, np.frexp(output - 1.0)[1])
        case "noisy":
            noise = seeds.generator(seed, "predicted-output").standard_normal(len(output))
            return np.maximum(output * np.exp(sigma * noise), 1.0)
    raise TailraceError(f"unknown predictor '{predictor}'; known: mean, exact, bucket, noisy")
