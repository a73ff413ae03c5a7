"""The reward: minus the cost accrued since the last decision, plus optional shaping terms.

The default is exact and dense: the sum over an episode is minus the composite cost of its requests
(view/objective.py). All terms are seconds of cost per decision, or are weighted to be; each is
logged before weights and bound. It applies to the environments and to PPO on them; imitation and
branching, on which default training is built, use the composite cost itself.
"""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tailrace.config import Positive, Settings
from tailrace.sim import cost_accounts
from tailrace.sim.fleet import Step
from tailrace.view import objective

Array = NDArray[np.float64]
Weight = Annotated[float, Field(allow_inf_nan=False)]


class RewardSettings(Settings):
    """Weights of the reward's terms; 0 leaves a term out."""

    e2e: Weight = objective.E2E_WEIGHT
    """Cost of a second a request is in the system."""
    ttft: Weight = objective.TTFT_WEIGHT
    """Cost of a second a request is without a first token."""
    late: Weight = objective.LATE_WEIGHT
    """Cost of a second a request is past its target without a first token."""
    lost: Weight = objective.LOST_COST_S
    """Cost of a request that fails."""
    soft_late: Weight = 0.0
    """Cost of a late first token by a logistic curve, between 0 (early) and 1 (late)."""
    soft_centre: Positive = 1.0
    """Centre of that curve as a multiple of the target."""
    soft_scale: Positive = 0.1
    """Width of that curve as a multiple of the target."""
    early: Weight = 0.0
    """Bonus for a first token far under its target, from 0 (at `early_share` of it) to 1."""
    early_share: Positive = 0.5
    """Share of the target below which a first token earns the bonus."""
    throughput: Weight = 0.0
    """Cost of a second at which fewer requests finish than arrive, by the share missing."""
    throughput_cap: float = Field(default=0.2, gt=0, le=1)
    """Largest share missing that is counted: latency comes first."""
    balance: Weight = 0.0
    """Cost of a second at a coefficient of variation of 1 of the requests in flight."""
    improvement: Weight = 0.0
    """Reward for lowering the moving average of the cost per second, per unit."""
    relative: float = Field(default=0.0, ge=0, le=1)
    """Share of the reference's cost that is given back: 1 rewards only being better than it."""
    reference: str = "past"
    """Reference of `relative`: past (moving average of its own cost), or a built-in rule that
    routes the same requests."""
    history_s: Positive = 60.0
    """Time constant of the moving averages."""
    bound: Positive | None = None
    """Soft bound of the reward of a decision; none by default."""

    @model_validator(mode="after")
    def _not_dead(self) -> "RewardSettings":
        weights = (
            self.e2e,
            self.ttft,
            self.late,
            self.soft_late,
            self.early,
            self.throughput,
            self.balance,
            self.improvement,
        )
        if not any(weights):
            raise ValueError("every weight is zero: there is nothing to learn from")
        return self

    @property
    def rule(self) -> str | None:
        """Name of the built-in rule to compare with, if there is one."""
        return self.reference if self.relative > 0 and self.reference != "past" else None


class Reward:
    """Rewards of ``n`` clusters, step by step."""

    def __init__(self, settings: RewardSettings, n: int) -> None:
        """Begin with clusters that have just started."""
        self.settings = settings
        self._weights = np.zeros(cost_accounts.N_TERMS)
        self._weights[cost_accounts.E2E] = settings.e2e
        self._weights[cost_accounts.TTFT] = settings.ttft
        self._weights[cost_accounts.LATE] = settings.late
        self._weights[cost_accounts.LOST_REQUESTS] = settings.lost
        self._weights[cost_accounts.SOFT_LATE] = settings.soft_late
        self._weights[cost_accounts.EARLY] = -settings.early
        self._averages = bool(settings.throughput or settings.improvement or self._follows_past)
        # exponentially decaying sums, and the time they cover
        self._watched_s, self._cost, self._arrived, self._finished = np.zeros((4, n))
        self.terms: dict[str, Array] = {}
        """Every term [n] of the last step, before weights."""
        self.raw: Array = np.zeros(n)
        """The last rewards [n] before the bound."""

    @property
    def _follows_past(self) -> bool:
        return self.settings.relative > 0 and self.settings.rule is None

    def restart(self, which: NDArray[np.int64]) -> None:
        """Reset the moving averages of some clusters."""
        for past in (self._watched_s, self._cost, self._arrived, self._finished):
            past[which] = 0.0

    def __call__(self, step: Step, reference_cost: Array | None = None) -> Array:
        """Return the rewards [n] of a step; ``reference_cost`` [n]: a rule's in the same time."""
        settings = self.settings
        cost = step.terms @ self._weights
        names = zip(cost_accounts.TERMS, step.terms.T.copy(), strict=True)
        self.terms = {"elapsed_s": step.elapsed_s.copy(), **dict(names)}
        reward = -cost
        if settings.balance:
            self.terms["imbalance_s"] = step.spread * step.elapsed_s
            reward -= settings.balance * self.terms["imbalance_s"]
        if self._averages:
            reward += self._history(step, cost)
        if reference_cost is not None:
            self.terms["reference_cost"] = reference_cost.copy()
            reward += settings.relative * reference_cost
        self.raw = reward
        if settings.bound is None:
            return reward
        return np.asarray(settings.bound * np.tanh(reward / settings.bound))

    def _history(self, step: Step, cost: Array) -> Array:
        """Return the terms that need moving averages."""
        settings = self.settings
        keep = np.exp(-step.elapsed_s / settings.history_s)
        before = self._rate()
        self._watched_s = self._watched_s * keep + settings.history_s * (1 - keep)
        self._cost = self._cost * keep + cost
        self._arrived = self._arrived * keep + 1
        self._finished = self._finished * keep + step.terms[:, cost_accounts.FINISHED]
        missing = 1 - self._finished / self._arrived
        shortfall = np.clip(missing, 0, settings.throughput_cap) * step.elapsed_s
        improvement = before - self._rate()
        self.terms["shortfall_s"], self.terms["improvement"] = shortfall, improvement
        reward = settings.improvement * improvement - settings.throughput * shortfall
        if self._follows_past:
            self.terms["past_cost"] = before * step.elapsed_s
            reward += settings.relative * self.terms["past_cost"]
        return np.asarray(reward)

    def _rate(self) -> Array:
        """Moving average of the cost per second [n]."""
        return np.asarray(self._cost / np.maximum(self._watched_s, 1.0))

    def share_at_bound(self, level: float = 0.95) -> float:
        """Return the share of the last rewards within ``level`` of the bound."""
        if self.settings.bound is None:
            return 0.0
        return float((np.abs(np.tanh(self.raw / self.settings.bound)) >= level).mean())
