"""Requests grouped by the blocks of time in which policies took turns."""

import numpy as np
from numpy.typing import NDArray

from tailrace.autopilot.sequential import Cycle
from tailrace.router.decide.turns import Turns

Floats = NDArray[np.float64]

#: Fewest requests of a block; a cycle with a block of fewer does not count.
LEAST_REQUESTS = 20
#: Share of a block's requests that the policy whose block it is must have decided.
LEAST_OWN = 0.9


def cycles_of(
    turns: Turns,
    arrived_s: Floats,
    cost_s: Floats,
    predicted: tuple[Floats, Floats] | None,
    by_candidate: NDArray[np.bool_] | None = None,
    *,
    washout_s: float,
    begin_s: float,
    end_s: float,
) -> dict[int, Cycle]:
    """Return the cycles, by number, that lie between two Unix times and have enough requests.

    ``arrived_s``, ``cost_s`` [R]: Unix time of arrival, and cost. ``predicted`` [P], [P]: the same
    of the requests that were simulated under the present policy; cycles that are not covered by
    them are judged without. ``by_candidate`` [R]: whether the candidate decided; a cycle in which
    the router did not keep to the turns, for instance because it was told of them late, does not
    count. Requests of the first ``washout_s`` of a block are left out, and so is every cycle that
    is not complete: which cycles count must not depend on how they went.
    """
    first = turns.cycle(begin_s - 1e-6) + 1
    cycles = range(first, max(first, turns.cycle(end_s)))
    shape = len(cycles), turns.blocks
    chosen = np.array([turns.candidates_block(cycle) for cycle in cycles], np.int64)

    def blocks_of(at_s: Floats) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the block of each request, counted from the first cycle's, and which count."""
        number = np.floor(at_s / turns.block_s).astype(np.int64)
        block = number - first * turns.blocks
        in_time = at_s - number * turns.block_s >= washout_s
        return block, in_time & (block >= 0) & (block < shape[0] * shape[1])

    def means(at_s: Floats, values: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """Return means of values [R] and how many there are, both [cycles, blocks]."""
        block, kept = blocks_of(at_s)
        size = shape[0] * shape[1]
        counts = np.bincount(block[kept], minlength=size).reshape(shape)
        sums = np.bincount(block[kept], values[kept], minlength=size).reshape(shape)
        return sums / np.maximum(counts, 1), counts

    costs, requests = means(arrived_s, cost_s)
    counted = np.all(requests >= LEAST_REQUESTS, axis=1)
    if by_candidate is not None:
        own, _ = means(arrived_s, by_candidate.astype(np.float64))
        whose = np.arange(turns.blocks) == chosen[:, None]
        counted &= np.all(np.where(whose, own, 1.0 - own) >= LEAST_OWN, axis=1)
    logs = np.log(np.maximum(costs, 1e-9))
    told = np.zeros(shape)
    if predicted is not None:
        expected, simulated = means(*predicted)
        covered = np.all(simulated >= LEAST_REQUESTS, axis=1)
        told[covered] = np.log(np.maximum(expected[covered], 1e-9))
    return {
        cycle: Cycle(int(chosen[k]), tuple(logs[k].tolist()), tuple(told[k].tolist()))
        for k, cycle in enumerate(cycles)
        if counted[k]
    }
