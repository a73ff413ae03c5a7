"""The reward: minus the cost accrued since the last decision, plus optional shaping terms.

The default is exact and dense: the sum over an episode is minus the composite cost of its requests
(view/objective.py). All terms are seconds of cost per decision, or are weighted to be; each is
logged before weights and bound. It applies to the environments and to PPO on them; imitation and
branching, on which default training is built, use the composite cost itself.
"""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tailrace.config import Positive, Settings
from tailrace.sim import cost_accounts
from tailrace.sim.fleet import Step
from tailrace.view import objective

Array = NDArray[np.float64]
#: A reward this near to its bound, as a share of it, counts as being at it.
AT_BOUND = 0.95
#: Weights of terms that a cluster's accounts keep, and which of them are rewarded.
TERM_OF_WEIGHT = {
    "e2e": cost_accounts.E2E,
    "ttft": cost_accounts.TTFT,
    "late": cost_accounts.LATE,
    "lost": cost_accounts.LOST_REQUESTS,
    "soft_late": cost_accounts.SOFT_LATE,
    "early": cost_accounts.EARLY,
    "e2e_late": cost_accounts.E2E_LATE,
    "e2e_soft_late": cost_accounts.E2E_SOFT_LATE,
    "e2e_early": cost_accounts.E2E_EARLY,
    "tpot_late": cost_accounts.TPOT_LATE,
    "tpot_soft_late": cost_accounts.TPOT_SOFT_LATE,
    "tpot_early": cost_accounts.TPOT_EARLY,
    "tail": cost_accounts.TAIL,
}
#: Quantiles of the raw reward that are logged.
RAW_QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
BONUSES = frozenset({"early", "e2e_early", "tpot_early"})
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
    tail: Weight = 0.0
    """Cost of a squared time to first token over its target, when the token comes: one long wait
    costs more than several short ones. Training also compares checkpoints and teachers by it."""
    soft_late: Weight = 0.0
    """Cost of a late first token by a logistic curve, between 0 (early) and 1 (late)."""
    soft_centre: Positive = 1.0
    """Centre of the logistic curves as a multiple of the target."""
    soft_scale: Positive = 0.1
    """Width of the logistic curves as a multiple of the target."""
    early: Weight = 0.0
    """Bonus for a first token far under its target, from 0 (at `early_share` of it) to 1."""
    early_share: Positive = 0.5
    """Share of a target below which a latency earns the bonus."""
    e2e_target_s: Positive = cost_accounts.E2E_TARGET_S
    """Target of the end-to-end latency, s."""
    e2e_late: Weight = 0.0
    """Cost of a second of end-to-end latency past its target, when the request ends."""
    e2e_soft_late: Weight = 0.0
    """Cost of a late end by the logistic curve of the end-to-end latency, between 0 and 1."""
    e2e_early: Weight = 0.0
    """Bonus for an end-to-end latency far under its target, from 0 to 1."""
    tpot_late: Weight = 0.0
    """Cost of a second that an answer takes longer than its target per output token allows."""
    tpot_soft_late: Weight = 0.0
    """Cost of a slow answer by the logistic curve of its time per output token, between 0 and 1."""
    tpot_early: Weight = 0.0
    """Bonus for a time per output token far under its target, from 0 to 1."""
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
    """Bound of the reward of a decision, upwards and downwards; none by default."""
    bound_low: Positive | None = None
    """Bound downwards, if it is another: 8 and 4 keep rewards within [-4, 8]."""
    hard_bound: bool = False
    """Cut rewards off at the bound instead of bending them towards it (tanh)."""

    @model_validator(mode="after")
    def _not_dead(self) -> "RewardSettings":
        others = (self.throughput, self.balance, self.improvement)
        weights = {name: getattr(self, name) for name in TERM_OF_WEIGHT if name != "lost"}
        if not any((*weights.values(), *others)):
            raise ValueError("every weight is zero: there is nothing to learn from")
        if self.hard_bound and self.bounds == (None, None):
            raise ValueError("hard_bound needs bound or bound_low")
        return self

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Bounds downwards and upwards, both positive; None: there is none."""
        return self.bound if self.bound_low is None else self.bound_low, self.bound

    @property
    def needs_answer_lengths(self) -> bool:
        """Whether a term needs the output tokens of every request."""
        return bool(self.tpot_late or self.tpot_soft_late or self.tpot_early)

    def shape(self, cluster: Any) -> None:
        """Write targets and curves into the accounts of a cluster, a CLUSTER record."""
        for name in ("soft_centre", "soft_scale", "early_share"):
            cluster[name] = getattr(self, name)
        cluster["e2e_target"] = self.e2e_target_s

    @property
    def rule(self) -> str | None:
        """Name of the built-in rule to compare with, if there is one."""
        return self.reference if self.relative > 0 and self.reference != "past" else None


class Reward:
    """Rewards of ``n`` clusters, step by step."""

    def __init__(self, settings: RewardSettings, n: int) -> None:
        """Begin with clusters that have just started."""
        self.settings = settings
        weights = np.zeros(cost_accounts.N_TERMS)
        for name, term in TERM_OF_WEIGHT.items():
            weights[term] = getattr(settings, name) * (-1 if name in BONUSES else 1)
        # Apart, so that rewards without terms of ended requests stay the same to the last bit.
        self._weights, self._weights_of_ended = np.split(weights, [cost_accounts.FIRST_OF_ENDED])
        self._weighs_ended = bool(self._weights_of_ended.any())
        self._low, self._high = settings.bounds
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
        first = cost_accounts.FIRST_OF_ENDED
        cost = step.terms[:, :first] @ self._weights
        if self._weighs_ended:
            cost += step.terms[:, first:] @ self._weights_of_ended
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
        return reward if self._low is self._high is None else self._bounded(reward)

    def _bounded(self, reward: Array) -> Array:
        low, high = self._low, self._high
        if self.settings.hard_bound:
            return np.clip(reward, None if low is None else -low, high)
        if low == high:
            return reward if high is None else np.asarray(high * np.tanh(reward / high))
        up = reward if high is None else high * np.tanh(reward / high)
        down = reward if low is None else low * np.tanh(reward / low)
        return np.where(reward > 0, up, down)

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

    def shares_at_bounds(self, level: float = AT_BOUND) -> tuple[float, float]:
        """Return the shares of the last rewards that are at the lower and at the upper bound.

        That is, beyond ``level`` of the bound after it was applied.
        """
        bounded = self._bounded(self.raw)
        low = 0.0 if self._low is None else float((bounded <= -level * self._low).mean())
        return low, 0.0 if self._high is None else float((bounded >= level * self._high).mean())
