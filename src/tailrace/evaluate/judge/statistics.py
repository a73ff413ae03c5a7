"""Paired comparisons of policies: bootstrap over seeds, sign-flip tests, Holm's adjustment.

Metrics are arrays [S, P, K]: scenarios, policies, seeds. All policies of a scenario and seed serve
the same requests, so bootstrap draws of seeds are shared by policies. Scenarios have independent
traffic, so each has its own draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tailrace.evaluate.judge.bootstrap import BOOTSTRAP_SAMPLES, Interval, bounds
from tailrace.evaluate.measure.cells import Cell
from tailrace.seeds import generator

Array = NDArray[np.float64]
#: Random sign flips of the paired test; its smallest p-value is about one over this.
FLIPS = 9999

#: Metrics for which ratios are reported.
METRICS: dict[str, Callable[[Cell], float | None]] = {
    "cost": lambda c: c.summary.cost_s,
    "p99_ttft": lambda c: c.summary.ttft_s.p99,
    "mean_ttft": lambda c: c.summary.ttft_s.mean,
    "mean_e2e": lambda c: c.summary.e2e_s.mean,
    "p99_e2e": lambda c: c.summary.e2e_s.p99,
    "throughput": lambda c: c.extremes.steady_rps,
}


@dataclass(frozen=True)
class Grid:
    """Cells of all policies on all seeds of all scenarios."""

    scenarios: tuple[str, ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: tuple[tuple[tuple[Cell, ...], ...], ...]  #: [S][P][K]

    @classmethod
    def of(
        cls,
        cells: Sequence[Cell],
        scenarios: Sequence[str],
        policies: Sequence[str],
        seeds: Sequence[int],
    ) -> "Grid":
        """Arrange cells in a grid; cells of other scenarios, policies or seeds are ignored."""
        found = {(c.scenario, c.policy, c.seed): c for c in cells}
        return cls(
            tuple(scenarios),
            tuple(policies),
            tuple(seeds),
            tuple(tuple(tuple(found[s, p, k] for k in seeds) for p in policies) for s in scenarios),
        )

    def values(self, metric: str) -> Array:
        """Return a metric of every cell [S, P, K]; NaN where it is undefined or 0.

        Ratios that involve such a cell are NaN as well, rather than silently leaving it out.
        """
        return self._values[metric]

    @cached_property
    def _values(self) -> dict[str, Array]:
        def table(of: Callable[[Cell], float | None]) -> Array:
            rows = [[[of(cell) for cell in cells] for cells in row] for row in self.cells]
            values = np.array(rows, np.float64)
            return np.where(values > 0, values, np.nan)

        return {metric: table(of) for metric, of in METRICS.items()}

    @cached_property
    def draws(self) -> Array:
        """Bootstrap weights of the seeds [S, samples, K]; they sum to 1."""
        k = len(self.seeds)
        even = np.full(k, 1 / k)
        return np.stack(
            [
                generator(0, f"bootstrap {name}").multinomial(k, even, BOOTSTRAP_SAMPLES) / k
                for name in self.scenarios
            ]
        )

    def ratios(self, metric: str, policy: str, others: Sequence[str]) -> "Ratios":
        """Return the ratios of a policy's mean over seeds to another policy's, per scenario [S]."""
        values = self.values(metric)
        mine = values[:, self.policies.index(policy)]
        rows = np.arange(len(self.scenarios))
        theirs = values[rows, [self.policies.index(other) for other in others]]
        drawn = None
        if len(self.seeds) > 1:
            drawn = ((self.draws @ mine[..., None]) / (self.draws @ theirs[..., None]))[..., 0]
        return Ratios(mine.mean(axis=1) / theirs.mean(axis=1), drawn)


@dataclass(frozen=True)
class Ratios:
    """Ratios of one metric between two policies, per scenario."""

    ratios: Array  #: [S] of the means over seeds
    drawn: Array | None  #: [S, samples] of the same over seeds drawn at random; None: one seed

    def each(self) -> list[Interval]:
        """Return the ratio of each scenario."""
        drawn = [None] * len(self.ratios) if self.drawn is None else list(self.drawn)
        return [_interval(r, d) for r, d in zip(self.ratios, drawn, strict=True)]

    def geometric_mean(self) -> Interval:
        """Return the geometric mean over scenarios; only seeds are resampled, not scenarios."""
        drawn = None if self.drawn is None else np.exp(np.log(self.drawn).mean(axis=0))
        return _interval(np.exp(np.log(self.ratios).mean()), drawn)


def _interval(ratio: np.floating | float, drawn: Array | None) -> Interval:
    if drawn is None:
        return Interval(float(ratio), None, None)
    return Interval(float(ratio), *bounds(drawn))


def scores(grid: Grid, reference: str) -> Array:
    """Return each policy's score [P]: geometric mean over scenarios of cost / the reference's."""
    means = grid.values("cost").mean(axis=2)
    relative = means / means[:, [grid.policies.index(reference)]]
    return np.asarray(np.exp(np.log(relative).mean(axis=0)))


def best_single(grid: Grid, candidates: Sequence[str], reference: str) -> str:
    """Return the candidate of the lowest score."""
    score = dict(zip(grid.policies, scores(grid, reference), strict=True))
    return min(candidates, key=lambda name: score[name])


def best_of_each(grid: Grid, candidates: Sequence[str]) -> list[str]:
    """Return the candidate of the lowest mean cost in each scenario."""
    means = grid.values("cost").mean(axis=2)
    columns = [grid.policies.index(name) for name in candidates]
    return [candidates[int(np.argmin(row[columns]))] for row in means]


def sign_flip_p(differences: Array) -> float:
    """Return the two-sided p-value of paired differences [K] being symmetric around zero.

    If neither policy were better, either sign of each difference would be equally likely. All 2^K
    sign patterns are tried, or FLIPS random ones if there are more.
    """
    if not np.any(differences) or len(differences) == 1:  # one pair: either sign is as extreme
        return 1.0
    found = stats.permutation_test(
        (differences,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        rng=generator(0, "sign flips"),
    )
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values: those below 0.05 hold jointly with 95 % confidence."""
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, kind="stable")
    raised = np.minimum(1.0, p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(raised)
    return [float(value) for value in adjusted]


@dataclass(frozen=True)
class Verdict:
    """A policy against the best rule of one scenario."""

    scenario: str
    baseline: str  #: chosen on tuning seeds
    cost: Interval
    p99_ttft: Interval
    mean_e2e: Interval
    throughput: Interval
    p_value: float  #: of the difference in cost, paired by seeds
    p_holm: float  #: the same, adjusted for the number of scenarios


@dataclass(frozen=True)
class VersusBestSingle:
    """A policy against the best single rule: geometric means over scenarios."""

    baseline: str  #: chosen on tuning seeds
    cost: Interval
    p99_ttft: Interval
    mean_e2e: Interval
    throughput: Interval


@dataclass(frozen=True)
class VersusBestOfEach:
    """A policy against the best rule of each scenario, by latency cost."""

    verdicts: tuple[Verdict, ...]

    @property
    def share_better(self) -> float:
        """Share of scenarios in which its cost is lower."""
        return float(np.mean([v.cost.ratio < 1 for v in self.verdicts]))

    @property
    def share_surely_better(self) -> float:
        """Share of scenarios in which its cost is significantly lower (Holm, 5 %)."""
        return float(np.mean([v.cost.ratio < 1 and v.p_holm < 0.05 for v in self.verdicts]))

    @property
    def worst(self) -> Verdict:
        """The scenario in which it does worst."""
        return max(self.verdicts, key=lambda v: v.cost.ratio)


def versus_single(grid: Grid, policy: str, baseline: str) -> VersusBestSingle:
    """Compare a policy with one rule over all scenarios."""
    others = [baseline] * len(grid.scenarios)

    def mean(metric: str) -> Interval:
        return grid.ratios(metric, policy, others).geometric_mean()

    return VersusBestSingle(
        baseline, mean("cost"), mean("p99_ttft"), mean("mean_e2e"), mean("throughput")
    )


def versus_each(grid: Grid, policy: str, baselines: Sequence[str]) -> VersusBestOfEach:
    """Compare a policy with the best rule of each scenario."""

    def each(metric: str) -> list[Interval]:
        return grid.ratios(metric, policy, baselines).each()

    logs = np.log(grid.values("cost"))
    mine = logs[:, grid.policies.index(policy)]
    p_values = [
        sign_flip_p(mine[s] - logs[s, grid.policies.index(baseline)])
        for s, baseline in enumerate(baselines)
    ]
    columns = (
        grid.scenarios, baselines, each("cost"), each("p99_ttft"), each("mean_e2e"),
        each("throughput"), p_values, holm(p_values),
    )  # fmt: skip
    return VersusBestOfEach(tuple(Verdict(*row) for row in zip(*columns, strict=True)))
