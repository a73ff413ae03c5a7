"""Rankings under other objectives than the latency cost, so that nobody has to believe in it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.evaluate.judge.statistics import Grid
from tailrace.evaluate.measure.cells import Cell

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Weighting:
    """One way to weigh what a policy achieves."""

    key: str  #: its name in results.json
    title: str
    meaning: str  #: of the score
    more_is_better: bool = False


TTFT_ONLY = Weighting(
    "ttft_only", "TTFT only", "geometric mean over scenarios of mean TTFT / the reference's"
)
E2E_ONLY = Weighting(
    "e2e_only",
    "end to end only",
    "geometric mean over scenarios of mean end-to-end latency / the reference's",
)
SLO_MISSES = Weighting(
    "slo_misses", "SLO misses", "mean over scenarios of the share of requests that missed a target"
)
GOODPUT = Weighting(
    "goodput",
    "goodput",
    "mean over scenarios of requests/s within both targets / those of the best policy there",
    more_is_better=True,
)
WEIGHTINGS = (TTFT_ONLY, E2E_ONLY, SLO_MISSES, GOODPUT)


@dataclass(frozen=True)
class Placing:
    """One policy under a weighting."""

    score: float  #: NaN if a scenario cannot show it
    rank: int  #: from 1; equal scores have equal ranks


def placings(grid: Grid, reference: str) -> dict[str, dict[str, Placing]]:
    """Return the placing of every policy (first key) under every weighting (its key)."""
    found: dict[str, dict[str, Placing]] = {name: {} for name in grid.policies}
    for weighting in WEIGHTINGS:
        scores = _scores(weighting, grid, reference)
        signed = -scores if weighting.more_is_better else scores
        for name, score, mine in zip(grid.policies, scores, signed, strict=True):
            rank = 1 + int(np.sum(signed < mine)) if np.isfinite(mine) else len(scores)
            found[name][weighting.key] = Placing(float(score), rank)
    return found


def leader(placed: dict[str, dict[str, Placing]], weighting: Weighting) -> str:
    """Return the policy that ranks first under a weighting; of several the first one."""
    ranks = {name: of[weighting.key].rank for name, of in placed.items()}
    return min(ranks, key=lambda name: ranks[name])


def _scores(weighting: Weighting, grid: Grid, reference: str) -> Array:
    """Return the score of each policy [P]."""
    if weighting is SLO_MISSES:
        return np.asarray(1.0 - _means(grid, lambda cell: cell.summary.slo_attainment).mean(axis=0))
    if weighting is GOODPUT:
        rates = _means(grid, lambda cell: cell.summary.goodput_rps)
        best = rates.max(axis=1, keepdims=True)
        shown = best[:, 0] > 0  # where nobody meets a target, all are alike
        if not shown.any():
            return np.ones(len(grid.policies))
        return np.asarray((rates[shown] / best[shown]).mean(axis=0))
    means = grid.values("mean_ttft" if weighting is TTFT_ONLY else "mean_e2e").mean(axis=2)
    relative = means / means[:, [grid.policies.index(reference)]]
    return np.asarray(np.exp(np.log(relative).mean(axis=0)))


def _means(grid: Grid, of: Callable[[Cell], float]) -> Array:
    """Return a metric's mean over seeds [S, P]; unlike :meth:`Grid.values` 0 stays 0."""
    rows = [[np.mean([of(cell) for cell in cells]) for cells in row] for row in grid.cells]
    return np.array(rows, np.float64)
