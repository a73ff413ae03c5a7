"""Which of two policies costs less: a sequential test for policies that take turns.

Policies that share servers share queues and caches, so requests served side by side do not compare
them. Instead they take turns in blocks of time. K consecutive blocks are a cycle, and one block of
each cycle, drawn at random, is the candidate's; the others are the present policy's.

Let r_k be the log cost of block k, less what the simulator predicted for it under the present
policy, and c the candidate's block. If the candidate makes no difference, the r_k would have been
the same wherever its block had fallen, and it fell on each of them with probability 1/K. So

    e = K exp(-b r_c) / sum_k exp(-b r_k)

has mean 1 whatever the r_k are and whatever bet b was chosen beforehand, and the product of e over
cycles is a martingale that starts at 1. By Ville's inequality it ever reaches 1/alpha with
probability alpha at most, so it may be looked at after every cycle. Nothing is assumed about the
costs: they may be skewed, drift, and depend on each other. A wrong prediction costs time, not
validity. What is assumed is that a block does not depend on the policy of the block before; the
first seconds of every block (the wash-out) are left out for that reason.

That the candidate costs exp(m) times as much is tested by r_c - m in place of r_c. The effects that
are not rejected in either direction form an interval that holds at all times at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Bets, in units of 1 / the standard deviation of a block. The test is the mean of all of them; the
#: best one is the effect in these units, so small ones find small effects.
BETS = np.array([0.25, 0.5, 1.0, 2.0, 4.0])
#: Share of the stake that a cycle can lose: one that is out of the ordinary does not end a bet.
STAKE = 0.9
#: Standard deviation of a block's log cost before any is known, and the blocks it counts for.
PRIOR_SD, PRIOR_BLOCKS = 0.1, 4
#: Largest weight of the simulator's prediction.
MOST_WEIGHT = 1.5
#: Log effects among which the ends of intervals are searched: -50 % to +100 %.
EFFECTS = np.linspace(math.log(0.5), math.log(2.0), 281)


@dataclass(frozen=True)
class Cycle:
    """One cycle of K blocks. Mean costs must be above 0; their logarithms are kept."""

    candidate: int
    """Which block was the candidate's, 0..K-1."""
    log_cost: tuple[float, ...]
    """Log of the mean cost of each block's requests."""
    log_predicted: tuple[float, ...]
    """The same as simulated under the present policy; all equal: not known."""


@dataclass(frozen=True)
class Evidence:
    """What a number of cycles says about the candidate's cost relative to the present policy's.

    Effects are shares: -0.1 is 10 % cheaper.
    """

    cycles: int
    effect: float | None
    """Mean over cycles; None: no cycle."""
    low: float
    high: float
    """Ends of an interval that holds at all times at once, each with probability 1 - alpha."""
    better: float
    """Largest e-value so far against "costs at least 1 + margin times as much"."""
    worse: float
    """Largest e-value so far against "costs at most 1 + margin times as much"."""


def evidence(cycles: Sequence[Cycle], *, alpha: float, margin: float = 0.0) -> Evidence:
    """Judge a candidate after some cycles, in their order; may be called after each of them."""
    effects = np.append(EFFECTS, math.log1p(margin))
    better, worse = (np.exp(log.max(axis=0)) for log in log_e_values(cycles, effects))
    open_ = EFFECTS[(better[:-1] < 1 / alpha) & (worse[:-1] < 1 / alpha)]
    ends = (-1.0, math.inf)
    if len(open_):
        low, high = open_[0], open_[-1]
        # At the end of the grid the interval is not known to end.
        ends = (
            -1.0 if low == EFFECTS[0] else math.expm1(low),
            math.inf if high == EFFECTS[-1] else math.expm1(high),
        )
    return Evidence(len(cycles), mean_effect(cycles), *ends, float(better[-1]), float(worse[-1]))


def change_detected(cycles: Sequence[Cycle], *, mean_cycles: float, margin: float = 0.0) -> bool:
    """Whether the candidate is better *by now*, however long it was worse before.

    The e-values begin anew whenever they fall below 1 (an e-detector by cumulative sums): without a
    difference, an alarm comes after ``mean_cycles`` or more on average.
    """
    better, _ = log_e_values(cycles, np.array([math.log1p(margin)]), restarts=True)
    return bool(better.max() >= math.log(mean_cycles))


def log_e_values(
    cycles: Sequence[Cycle], effects: Floats, *, restarts: bool = False
) -> tuple[Floats, Floats]:
    """Return log e-values [n + 1, M] after 0 to n cycles against each of M log effects.

    The first array grows if the candidate is better than the effect, the second if it is worse.
    ``restarts``: see :func:`change_detected`.
    """
    logs = np.zeros((2, len(effects), len(BETS)))
    history = [_mixed(logs)]
    scale = _Scale()
    for cycle in cycles:
        residuals = scale.residuals(cycle)
        bets = BETS / scale.deviation
        if scale.blocks:  # without a scale there is nothing to bet by
            if restarts:
                logs = np.maximum(logs, 0.0)
            logs = logs + _log_factors(residuals, cycle.candidate, effects, bets)
        scale.add(cycle)
        history.append(_mixed(logs))
    better, worse = np.moveaxis(np.array(history), 1, 0)
    return better, worse


def _log_factors(residuals: Floats, candidate: int, effects: Floats, bets: Floats) -> Floats:
    """Return the logs [2, M, B] of what a cycle multiplies each bet by, in both directions."""
    blocks = np.repeat(residuals[:, None], len(effects), axis=1)  # [K, M]
    blocks[candidate] -= effects
    factors = []
    for sign in (-1.0, 1.0):
        logits = sign * blocks[:, :, None] * bets  # [K, M, B]
        logits -= logits.max(axis=0)
        share = np.exp(logits[candidate]) / np.exp(logits).sum(axis=0)
        factors.append(np.log1p(STAKE * (len(residuals) * share - 1.0)))
    return np.array(factors)


def _mixed(logs: Floats) -> Floats:
    """Return the log of the mean over bets [..., B]."""
    top = logs.max(axis=-1)
    mixed: Floats = top + np.log(np.exp(logs - top[..., None]).mean(axis=-1))
    return mixed


class _Scale:
    """How blocks vary within a cycle, and how much of it is predicted, by the cycles so far.

    Both are used for later cycles only: a bet must not know the outcome it is placed on.
    """

    def __init__(self) -> None:
        self.blocks = 0
        """Degrees of freedom: blocks less cycles."""
        self._xx = self._xy = self._yy = 0.0

    @property
    def weight(self) -> float:
        """Of the predictions: least squares, 0 to MOST_WEIGHT."""
        if self._xx <= 0.0:
            return 0.0
        return min(max(self._xy / self._xx, 0.0), MOST_WEIGHT)

    @property
    def deviation(self) -> float:
        """Standard deviation of a block's log cost less its weighted prediction."""
        weight = self.weight
        left = self._yy - 2 * weight * self._xy + weight**2 * self._xx
        known = PRIOR_BLOCKS * PRIOR_SD**2 + max(left, 0.0)
        return math.sqrt(known / (PRIOR_BLOCKS + self.blocks))

    def residuals(self, cycle: Cycle) -> Floats:
        """Return log costs [K] less what was predicted, by earlier cycles' weight."""
        x, y = _centred(cycle)
        residuals: Floats = y - self.weight * x
        return residuals

    def add(self, cycle: Cycle) -> None:
        x, y = _centred(cycle)
        self.blocks += len(y) - 1
        self._xx += float(x @ x)
        self._xy += float(x @ y)
        self._yy += float(y @ y)


def _centred(cycle: Cycle) -> tuple[Floats, Floats]:
    """Return predicted and measured log costs [K] less their means over the cycle."""
    x, y = np.array(cycle.log_predicted), np.array(cycle.log_cost)
    return x - x.mean(), y - y.mean()


def mean_effect(cycles: Sequence[Cycle]) -> float | None:
    """Return the candidate's mean effect as a share, adjusted by the weight of all cycles.

    None: there is no cycle.
    """
    if not cycles:
        return None
    scale = _Scale()
    for cycle in cycles:
        scale.add(cycle)
    found = []
    for cycle in cycles:
        residuals = scale.residuals(cycle)
        others = np.delete(residuals, cycle.candidate)
        found.append(residuals[cycle.candidate] - others.mean())
    return math.expm1(float(np.mean(found)))
