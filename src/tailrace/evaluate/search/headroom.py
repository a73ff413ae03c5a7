"""Headroom of a reward: every rule and the look-aheads scored with it, on equal arrivals.

A reward is worth training on if the look-ahead gets clearly more of it than the best rule (else a
rule is the ceiling), if policies get different amounts of it at all (else it is dead), and if it
ranks policies as the latency cost does (else something else is learned).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from tailrace.config import Scenario
from tailrace.env.core import Core, EnvSettings
from tailrace.env.reward import AT_BOUND, RewardSettings
from tailrace.errors import TailraceError
from tailrace.evaluate.judge.bootstrap import bounds, resampled
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.saturation import with_capacity
from tailrace.seeds import Purpose, require
from tailrace.sim import engine
from tailrace.sim.allocation import new_fleet
from tailrace.sim.fleet import SKIP, follow, run_for, step_fleet

Array = NDArray[np.float64]

#: A look-ahead that gets less than this share more than the best rule leaves nothing to learn.
MIN_ROOM = 0.01
#: Policies whose mean rewards differ by less than this share of its usual size: it is dead.
MIN_RANGE = 0.01
#: From these rank correlations with the latency cost on, the ranking is the same, or similar.
SAME_RANKING, SIMILAR_RANKING = 0.9, 0.7
#: Up to this share of rewards at the bound does not matter.
MAX_AT_BOUND = 0.01


@dataclass(frozen=True)
class RewardDistribution:
    """Rewards of single decisions before the bound."""

    deviation: float
    p01: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Array) -> "RewardDistribution":
        """Summarise rewards [k]."""
        p01, p50, p99 = np.percentile(values, (1, 50, 99))
        return cls(float(values.std()), float(p01), float(p50), float(p99))


@dataclass(frozen=True)
class RewardResult:
    """One policy under the reward, on all seeds."""

    policy: str
    kind: str  #: rule, look-ahead or policy
    reward: float  #: mean per decision, over seeds
    cost_s: float  #: mean latency cost per decision, over seeds
    rewards: tuple[float, ...]  #: mean per decision, one per seed
    costs_s: tuple[float, ...]  #: one per seed
    magnitude: float  #: mean absolute reward of a decision
    raw: RewardDistribution
    at_bound: float  #: share of decisions whose reward the bound holds down
    terms: dict[str, float]  #: mean per decision of every term, before weights


@dataclass(frozen=True)
class Gain:
    """A policy's reward minus the best rule's, per decision, on equal arrivals."""

    policy: str
    difference: float  #: mean reward per decision, policy - best rule
    low: float | None  #: 95 % bootstrap interval over seeds; None with one seed
    high: float | None
    share: float | None  #: difference / |reward of the best rule|; None if that is nothing

    @property
    def is_real(self) -> bool:
        """Whether it is large enough to matter and has the same sign on all seeds."""
        surely = self.difference > 0 if self.low is None else self.low > 0
        return surely and (self.share is None or self.share >= MIN_ROOM)


@dataclass(frozen=True)
class Headroom:
    """A reward in one scenario."""

    scenario: Scenario
    reward: RewardSettings
    seeds: tuple[int, ...]
    decisions: int  #: per seed, at least
    played: tuple[RewardResult, ...]  #: most reward first
    best_rule: str
    teacher: Gain  #: the better of the look-aheads against the best rule
    others: tuple[Gain, ...]  #: the remaining look-ahead and the given policies
    dead: bool
    range_share: float  #: largest - smallest mean reward, as a share of its usual size
    at_ceiling: bool  #: no policy is better than the best rule
    spearman: float | None  #: rank correlation of mean reward and minus latency cost
    at_bound: float  #: largest share of rewards at the bound of any policy
    verdicts: tuple[str, ...]


class HeadroomEnv(Core):
    """An environment of several seeds that built-in policies play until the last request has ended.

    So the policy that took a decision also pays for its later costs.
    """

    def __init__(self, scenario: Scenario, seeds: Sequence[int], settings: EnvSettings) -> None:
        """Lay out one cluster per seed."""
        super().__init__(scenario, len(seeds), settings)
        self._seeds = list(seeds)

    def _lay_out_fleets(self) -> None:
        super()._lay_out_fleets()
        self._fleets[0] = new_fleet(self.allocation, self.n, lookahead=True)

    def step(self, actions: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_]]:
        """Apply actions [n], SKIP for runs that ended; return rewards [n] and which runs ended."""
        step_fleet(self._fleets[0], self._tables, actions, self.step_out)
        self._check()
        over = self.step_out.status == engine.OVER
        reference_cost = None if self._rule is None else self._follow(self._rule, over)
        return self.reward(self.step_out, reference_cost), over

    def _follow(self, rule: BuiltinPolicy, over: NDArray[np.bool_]) -> Array:
        """What the reference paid [n] in the same time, or until its own end where ours has ended.

        Otherwise a policy that finishes early would get less of the reference's cost back.
        """
        fleet, until_s = self._fleets[1], self.step_out.time_before.copy()
        driver = (rule.rule.code, rule.params, rule.lowest_id_wins)
        for c in np.flatnonzero(over):
            run_for(fleet, self._tables, int(c), *driver, np.inf)
            until_s[c] = max(until_s[c], fleet.clusters[c]["ended_at"])
        follow(fleet, self._tables, *driver, until_s, self._reference_out)
        return self._reference_out.cost

    def play(self, name: str, policy: BuiltinPolicy) -> RewardResult:
        """Play all seeds from the start."""
        self.reset(self._seeds)
        # Each cluster's own copy: a network's memory is part of its parameters.
        drivers = [_own(policy) for _ in range(self.n)]
        steps: list[Array] = []
        while (active := self.step_out.status != engine.OVER).any():
            actions = np.full(self.n, SKIP)
            for c in np.flatnonzero(active):
                rule = (drivers[c].rule.code, drivers[c].params, drivers[c].lowest_id_wins)
                actions[c] = engine.choice(self._fleets[0], self._tables, int(c), *rule)
            reward, _ = self.step(actions)
            if not np.isfinite(self.reward.raw[active]).all():
                raise TailraceError(f"the reward of {name} is not finite; check its weights")
            seen = (reward, self.reward.raw, self.step_out.cost, *self.reward.terms.values())
            steps.append(np.where(active, seen, np.nan))
        return self._summary(name, policy, np.array(steps))

    def _summary(self, name: str, policy: BuiltinPolicy, steps: Array) -> RewardResult:
        """Summarise the steps [T, 3 + terms, seeds]; NaN where a run was over.

        Rows are the reward, the same before its bound, the latency cost, and the terms.
        """
        rewards, raws, costs = steps[:, 0], steps[:, 1], steps[:, 2]
        terms = np.nanmean(steps[:, 3:], axis=(0, 2)).tolist()
        known = rewards[np.isfinite(rewards)]
        per_seed, cost_per_seed = np.nanmean(rewards, axis=0), np.nanmean(costs, axis=0)
        return RewardResult(
            policy=name,
            kind=_kind(policy),
            reward=float(per_seed.mean()),
            cost_s=float(cost_per_seed.mean()),
            rewards=tuple(per_seed.tolist()),
            costs_s=tuple(cost_per_seed.tolist()),
            magnitude=float(np.abs(known).mean()),
            raw=RewardDistribution.of(raws[np.isfinite(raws)]),
            at_bound=_share_at_bounds(known, self.settings.reward),
            terms=dict(zip(self.reward.terms, terms, strict=True)),
        )


def _share_at_bounds(rewards: Array, settings: RewardSettings) -> float:
    low, high = (np.inf if bound is None else AT_BOUND * bound for bound in settings.bounds)
    return float(((rewards <= -low) | (rewards >= high)).mean())


def _own(policy: BuiltinPolicy) -> BuiltinPolicy:
    return policy.copy() if isinstance(policy, LearnedPolicy) else policy


def _kind(policy: BuiltinPolicy) -> str:
    if isinstance(policy, LearnedPolicy):
        return "policy"
    return "look-ahead" if policy.rule.in_engine else "rule"


def players(extra: Sequence[str] = ()) -> dict[str, BuiltinPolicy]:
    """Return all built-in rules, both look-aheads and some more policies, by name."""
    names = dict.fromkeys([*(rule.name for rule in registry.rules()), *extra])
    found: dict[str, BuiltinPolicy] = {}
    for name in names:
        policy = registry.get(name)
        if not isinstance(policy, BuiltinPolicy):
            raise TailraceError(
                f"{name} cannot be played in the environment: headroom takes built-in rules and "
                "trained policies (.tailrace); compare others with `tailrace compare`"
            )
        found[name] = policy
    return found


def headroom(
    scenario: Scenario,
    reward: RewardSettings,
    policies: dict[str, BuiltinPolicy],
    seeds: Sequence[int],
    *,
    decisions: int = 1000,
    progress: Callable[[], None] = lambda: None,
) -> Headroom:
    """Play every policy on the same arrivals of every (training) seed; ``progress`` after each."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise TailraceError("headroom needs at least one seed, and each seed once")
    for seed in seeds:
        require(seed, Purpose.TRAINING)
    if not {"rule", "look-ahead"} <= {_kind(policy) for policy in policies.values()}:
        raise TailraceError("headroom needs at least one rule and one look-ahead to compare")
    scenario = with_capacity(scenario)
    # The environment adds a request that is seen but not decided; here it is decided too.
    stage = HeadroomEnv(
        scenario, seeds, EnvSettings(decisions=max(1, decisions - 1), reward=reward)
    )
    played = []
    for name, policy in policies.items():
        played.append(stage.play(name, policy))
        progress()
    return judged(scenario, reward, seeds, decisions, played)


def judged(
    scenario: Scenario,
    reward: RewardSettings,
    seeds: Sequence[int],
    decisions: int,
    played: Sequence[RewardResult],
) -> Headroom:
    """Rank the results and interpret them."""
    ranked = sorted(played, key=lambda p: -p.reward)
    best = next(p for p in ranked if p.kind == "rule")
    magnitude = float(np.mean([p.magnitude for p in ranked]))
    gains = [_gain(p, best, magnitude) for p in ranked if p.kind != "rule"]
    teachers = {p.policy for p in ranked if p.kind == "look-ahead"}
    teacher = next(gain for gain in gains if gain.policy in teachers)
    spread = ranked[0].reward - ranked[-1].reward
    range_share = spread / magnitude if magnitude > 0 else 0.0
    found = Headroom(
        scenario=scenario,
        reward=reward,
        seeds=tuple(seeds),
        decisions=decisions,
        played=tuple(ranked),
        best_rule=best.policy,
        teacher=teacher,
        others=tuple(gain for gain in gains if gain is not teacher),
        dead=range_share < MIN_RANGE,
        range_share=range_share,
        at_ceiling=not any(gain.is_real for gain in gains),
        spearman=_rank_correlation(ranked),
        at_bound=max(p.at_bound for p in ranked),
        verdicts=(),
    )
    return replace(found, verdicts=tuple(_verdicts(found)))


def _gain(played: RewardResult, best: RewardResult, magnitude: float) -> Gain:
    gains = np.array(played.rewards) - np.array(best.rewards)
    low = high = None
    if len(gains) > 1:
        low, high = bounds(gains[resampled(len(gains))].mean(axis=1))
    gain = float(gains.mean())
    # Against itself as reference a rule gets nothing, but for rounding: no share of that.
    nothing = abs(best.reward) <= 1e-6 * magnitude
    return Gain(played.policy, gain, low, high, None if nothing else gain / abs(best.reward))


def _rank_correlation(played: Sequence[RewardResult]) -> float | None:
    """Spearman's correlation of reward and minus cost; None if one of them is constant."""
    rewards = np.array([p.reward for p in played])
    costs = np.array([p.cost_s for p in played])
    if np.ptp(rewards) == 0 or np.ptp(costs) == 0:
        return None
    correlation = float(spearmanr(rewards, -costs).statistic)
    return correlation if math.isfinite(correlation) else None


def _verdicts(found: Headroom) -> list[str]:
    """Verdicts as sentences, the most serious first."""
    if found.dead:
        verdict = (
            f"The reward is dead: the means of all policies lie within {found.range_share:.2%} of "
            "its usual size, so there is nothing to learn from; "
        )
        why = "loosen its bound" if found.at_bound > MAX_AT_BOUND else "give other terms a weight"
        return [verdict + why + ".", *_bound_verdict(found)]
    return [_ceiling_verdict(found), _ranking_verdict(found), *_bound_verdict(found)]


def _ceiling_verdict(found: Headroom) -> str:
    teacher = found.teacher
    share = "" if teacher.share is None else f" ({teacher.share:+.1%})"
    finding = f"{teacher.policy} gets {teacher.difference:+.4g} per decision{share}"
    if found.at_ceiling:
        return (
            f"The best rule, {found.best_rule}, is the ceiling of this reward: {finding}. A policy "
            "can at best imitate it; reward something else."
        )
    if not teacher.is_real:
        return (
            f"Beyond the look-ahead: {finding} against the best rule, {found.best_rule}, but a "
            "given policy gets more."
        )
    return f"There is room above the best rule, {found.best_rule}: {finding} against it."


def _ranking_verdict(found: Headroom) -> str:
    if found.spearman is None:
        return "All policies cost the same here, so the ranking says nothing."
    finding = f"rank correlation {found.spearman:.2f}"
    if found.spearman >= SAME_RANKING:
        return f"It ranks policies as the latency cost does ({finding})."
    if found.spearman >= SIMILAR_RANKING:
        return f"It ranks policies much as the latency cost does ({finding})."
    return (
        f"It ranks policies otherwise than the latency cost ({finding}): "
        "more of it need not mean lower latency."
    )


def _bound_verdict(found: Headroom) -> list[str]:
    if found.at_bound <= MAX_AT_BOUND:
        return []
    finding = f"Up to {found.at_bound:.0%} of a policy's rewards are at the bound"
    return [f"{finding}: widen it, or bad and very bad decisions look the same."]
