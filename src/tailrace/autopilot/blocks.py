"""Requests grouped by the blocks of time in which policies took turns."""

import numpy as np
from numpy.typing import NDArray

from tailrace.autopilot.sequential import Cycle
from tailrace.router.decide.turns import Turns

Floats = NDArray[np.float64]

#: Fewest requests of a block; a cycle with a block of fewer does not count.
LEAST_REQUESTS = 20


def cycles_of(
    turns: Turns,
    arrived_s: Floats,
    cost_s: Floats,
    predicted_s: Floats | None,
    *,
    washout_s: float,
    begin_s: float,
    end_s: float,
) -> dict[int, Cycle]:
    """Return the cycles, by number, that lie between two Unix times and have enough requests.

    ``arrived_s``, ``cost_s`` and ``predicted_s`` [R]: Unix time of arrival, cost, and the cost that
    the simulator gives the request under the present policy; None: it was not simulated. Requests
    of the first ``washout_s`` of a block are left out, and so is every cycle that is not complete:
    which cycles count must not depend on how they went.
    """
    first = turns.cycle(begin_s - 1e-6) + 1
    last = turns.cycle(end_s) - 1
    number = np.floor(arrived_s / turns.block_s).astype(np.int64)
    block = number - first * turns.blocks
    count = max(0, last - first + 1) * turns.blocks
    kept = (arrived_s - number * turns.block_s >= washout_s) & (block >= 0) & (block < count)
    requests = np.bincount(block[kept], minlength=count)[:count]

    def log_means(values: Floats | None) -> Floats:
        if values is None:
            return np.zeros(count)
        sums = np.bincount(block[kept], values[kept], minlength=count)[:count]
        return np.log(np.maximum(sums / np.maximum(requests, 1), 1e-9))

    costs, predicted = (
        log_means(values).reshape(-1, turns.blocks) for values in (cost_s, predicted_s)
    )
    enough = np.min(requests.reshape(-1, turns.blocks), axis=1, initial=LEAST_REQUESTS)
    return {
        cycle: Cycle(
            turns.candidates_block(cycle), tuple(costs[k].tolist()), tuple(predicted[k].tolist())
        )
        for k, cycle in enumerate(range(first, last + 1))
        if enough[k] >= LEAST_REQUESTS
    }
