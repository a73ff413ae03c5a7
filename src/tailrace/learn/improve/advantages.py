"""How much better a choice was than expected. Pure functions over arrays [T, C].

``T`` decisions in a row of ``C`` clusters. Routing never ends: where an episode does, it is cut off
(truncated), and what would have followed is estimated by the value of its last state.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


def discount_factors(elapsed_s: Array, half_life_s: float | Array) -> Array:
    """Return factors [T, C] that halve what lies one half-life apart.

    As a discount: a fixed factor per decision would mean another horizon on every cluster size.
    ``half_life_s`` may be given per cluster [C].
    """
    return np.asarray(0.5 ** (elapsed_s / half_life_s))


def next_values(values: Array, after: Array, ended: Flags) -> Array:
    """Return the value [T, C] of the state that each step led to.

    ``values`` [T, C] of the states decided in; ``after`` [T, C] holds the value of an episode's
    last state where ``ended`` [T, C], the last row included; it is not read elsewhere.
    """
    following = np.concatenate([values[1:], after[-1:]])
    return np.where(ended, after, following)


def gae(
    rewards: Array,
    values: Array,
    following: Array,
    discount: Array,
    gae_lambda: Array,
    *,
    truncated: Flags,
    terminated: Flags | None = None,
) -> tuple[Array, Array]:
    """Return generalised advantages [T, C] and the returns [T, C] the values should have had.

    ``following`` [T, C]: value of the state each step led to (see :func:`next_values`).
    ``discount`` and ``gae_lambda`` [T, C] are gamma and lambda of each step. After a truncated step
    the sum ends, but the value of what follows counts; after a terminated one nothing follows.
    """
    lives = np.ones_like(rewards) if terminated is None else 1.0 - terminated
    errors = rewards + discount * following * lives - values
    keep = discount * gae_lambda * lives * ~truncated
    advantages = np.empty_like(errors)
    total = np.zeros(errors.shape[1])
    for t in range(len(errors) - 1, -1, -1):
        total = errors[t] + keep[t] * total
        advantages[t] = total
    return advantages, advantages + values


def group_relative(advantages: Array, group: int) -> Array:
    """Subtract from each cluster's [T, C] the mean of the others of its group, per decision.

    ``group`` neighbouring clusters see the same arrivals, so what they have in common is luck: a
    baseline that knows the arrivals. Leaving the cluster itself out keeps it free of bias.
    """
    steps, clusters = advantages.shape
    if group < 2 or clusters % group:
        raise TailraceError(
            f"{clusters} clusters cannot be compared in groups of {group}; "
            "take a group of at least 2 that divides them"
        )
    members = advantages.reshape(steps, -1, group)
    centred = members - members.mean(axis=2, keepdims=True)
    return np.asarray(centred * (group / (group - 1))).reshape(steps, clusters)


def normalised(advantages: Array, group: int | None = None) -> Array:
    """Return advantages [T, C] with mean 0 and deviation 1, overall or per group of clusters.

    Per group, traffic in which every choice costs much does not drown the other. Advantages that
    are all equal become 0.
    """
    steps, clusters = advantages.shape
    parts = advantages.reshape(steps, -1, clusters if group is None else group)
    centred = parts - parts.mean(axis=(0, 2), keepdims=True)
    deviation = centred.std(axis=(0, 2), keepdims=True)
    return np.asarray(centred / np.maximum(deviation, 1e-8)).reshape(steps, clusters)


class RewardScale:
    """Running deviation of discounted returns, by which rewards are divided."""

    def __init__(self) -> None:
        """Begin without any returns seen: a scale of 1."""
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    def update(self, rewards: Array, discount: Array, starts: Flags) -> None:
        """Take in the discounted sums of the past of each step; [T, C] each.

        ``starts`` is true where an episode begins: its past is empty.
        """
        sums = np.empty_like(rewards)
        total = np.zeros(rewards.shape[1])
        for t in range(len(rewards)):
            before = discount[t - 1] * total if t else total
            total = rewards[t] + np.where(starts[t], 0.0, before)
            sums[t] = total
        count, mean = float(sums.size), float(sums.mean())
        squares = float(((sums - mean) ** 2).sum())
        shift, both = mean - self._mean, self._count + count
        self._squares += squares + shift**2 * self._count * count / both
        self._mean += shift * count / both
        self._count = both

    @property
    def scale(self) -> float:
        """Deviation of the returns seen so far; 1 if there is none."""
        if self._count == 0 or self._squares <= 0:
            return 1.0
        return float(np.sqrt(self._squares / self._count))

    def state(self) -> dict[str, float]:
        """Return all that has to be kept to go on exactly."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        self._count, self._mean = float(state["count"]), float(state["mean"])
        self._squares = float(state["squares"])
