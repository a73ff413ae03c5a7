"""What a trained policy does in a given state, and why: gradient x deviation, in words."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.evaluate.explain.audit import check_size
from tailrace.evaluate.explain.state_file import State, view_of
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.architecture import STD_FLOOR
from tailrace.policy.learned.explain import Explanation, explain
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES, Feature
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.view.records import View

#: Reasons given per replica.
REASONS = 4
#: Rules that draw lots, take turns or hash content: a state says nothing of these.
NOT_ASKED = (
    *("random", "round_robin", "power_of_two", "prefix_hash", "dual_map"),
    *("smg_power_of_two", "smg_prefix_hash", "rendezvous_hash"),
)
#: Features that compare a replica with the others show the same quantity as this one.
_COMPARISON = re.compile(r"_vs_(mean|best)$")


@dataclass(frozen=True)
class Reason:
    """Contribution of one quantity to a replica's logit, relative to other replicas."""

    name: str
    effect: float  #: gradient x deviation, in units of the logit
    text: str


@dataclass(frozen=True)
class Option:
    """One replica of a state."""

    replica: int
    available: bool
    queued: int
    in_flight: int
    cached_tokens: int
    speed: float
    logit: float | None  #: None if it cannot be chosen
    probability: float
    reasons: tuple[Reason, ...]  #: the strongest first


def load_of(row: np.void) -> dict[str, Any]:
    """Return the figures of a replica's view that are shown to users."""
    return {name: row[name].item() for name in ("queued", "in_flight", "cached_tokens", "speed")}


@dataclass(frozen=True)
class StateExplanation:
    """What a policy does in a state."""

    name: str
    description: str
    policy: str
    chosen: int
    options: tuple[Option, ...]
    rules: dict[str, tuple[int, ...]]  #: replicas each rule would be content with


def explain_state(policy: LearnedPolicy, state: State, name: str) -> StateExplanation:
    """Explain a policy's choice, with an empty memory; add what the rules would choose."""
    view = view_of(state)
    check_size(len(view.replicas))
    replica_obs, request_obs, prior = policy.observed(view)
    mask = view.replicas["available"] != 0
    explained = explain(policy, replica_obs, request_obs, mask, prior)
    reasons = _reasons(policy, explained, replica_obs, request_obs, mask)
    options = tuple(
        Option(
            replica=i,
            available=bool(mask[i]),
            **load_of(row),
            logit=float(explained.logits[i]) if np.isfinite(explained.logits[i]) else None,
            probability=float(explained.probabilities[i]),
            reasons=reasons[i],
        )
        for i, row in enumerate(view.replicas)
    )
    chosen = int(explained.logits.argmax())
    return StateExplanation(
        name, state.description, policy.name, chosen, options, _rules(view, mask)
    )


def _rules(view: View, mask: NDArray[np.bool_]) -> dict[str, tuple[int, ...]]:
    """Best replicas by every rule that runs outside the simulator."""
    found = {}
    for rule in registry.rules():
        if rule.in_engine or rule.name in NOT_ASKED:
            continue
        scores = BuiltinPolicy(rule).scores(view)
        scores = np.where(mask & ~np.isnan(scores), scores, np.inf)
        best = np.flatnonzero(mask & (scores <= scores[mask].min()))
        found[rule.name] = tuple(best.tolist())
    return found


def _reasons(
    policy: LearnedPolicy,
    explained: Explanation,
    replica_obs: NDArray[np.float32],
    request_obs: NDArray[np.float32],
    mask: NDArray[np.bool_],
) -> list[tuple[Reason, ...]]:
    """For each replica the quantities that move its logit most.

    What is known of a replica counts by its difference to the mean of the available ones, what is
    known of the request by its difference to the mean in training.
    """
    common = replica_obs[mask].mean(axis=0)
    replica_effects = explained.replica_gradients * (
        (replica_obs - common) / deviation(policy, "replica")
    )
    usual = policy.tensors["request_norm.mean"]
    request_effects = explained.request_gradients * (
        (request_obs - usual) / deviation(policy, "request")
    )
    columns = {feature.name: k for k, feature in enumerate(REPLICA_FEATURES)}
    out = []
    for i in range(len(mask)):
        found = [
            Reason(name, effect, _of_replica(columns[name], replica_obs, i, mask))
            for name, effect in by_quantity(replica_effects[i]).items()
        ]
        found += [
            Reason(feature.name, float(effect), _of_request(feature, request_obs[k], usual[k]))
            for k, (feature, effect) in enumerate(
                zip(REQUEST_FEATURES, request_effects[i], strict=True)
            )
        ]
        found.sort(key=lambda r: -abs(r.effect))
        out.append(tuple(found[:REASONS]) if mask[i] else ())
    return out


def by_quantity(effects: NDArray[np.float64]) -> dict[str, float]:
    """Sum the effects [F] of a replica's features by quantity, comparisons included."""
    total: dict[str, float] = {}
    for feature, effect in zip(REPLICA_FEATURES, effects, strict=True):
        quantity = _COMPARISON.sub("", feature.name)
        total[quantity] = total.get(quantity, 0.0) + float(effect)
    return total


def deviation(policy: LearnedPolicy, of: str) -> NDArray[np.float64]:
    """Return the standard deviations of features in training, not below STD_FLOOR.

    ``of`` is replica or request.
    """
    var = policy.tensors[f"{of}_norm.var"].astype(np.float64)
    return np.maximum(np.sqrt(var), STD_FLOOR)


def _of_replica(
    column: int, replica_obs: NDArray[np.float32], i: int, mask: NDArray[np.bool_]
) -> str:
    feature = REPLICA_FEATURES[column]
    others = mask.copy()
    others[i] = False
    here = f"{feature.help}: {shown(feature, float(replica_obs[i, column]))}"
    if not others.any():
        return here
    return f"{here}, elsewhere {shown(feature, float(replica_obs[others, column].mean()))}"


def _of_request(feature: Feature, value: float, usual: float) -> str:
    now, then = shown(feature, float(value)), shown(feature, float(usual))
    return f"{feature.help}: {now}, in training {then}"


# ---- back to units ------------------------------------------------------------------------------

_INVERSES: Sequence[tuple[str, Callable[[float, float], float]]] = (
    (r"sign\(x\) log1p\(\|x\|\)", lambda v, _: float(np.sign(v) * np.expm1(abs(v)))),
    (r"log1p\(x(?:/(?P<unit>[\d.]+))?\)", lambda v, unit: float(np.expm1(v)) * unit),
    (r"log\(x(?:/(?P<unit>[\d.]+))?\)", lambda v, unit: float(np.exp(v)) * unit),
    (r"x|clip\(x, -1, 1\)", lambda v, _: v),
)


def unscaled(feature: Feature, value: float) -> float:
    """Return the quantity that a feature's value encodes; not for comparisons."""
    for pattern, inverse in _INVERSES:
        match = re.fullmatch(pattern, feature.scaling)
        if match:
            return inverse(value, float(match.groupdict().get("unit") or 1))
    raise ValueError(f"no way back from the scaling '{feature.scaling}' of {feature.name}")


def shown(feature: Feature, value: float) -> str:
    """Return a feature's value as a quantity with its unit."""
    quantity = unscaled(feature, value)
    if feature.unit == "share":
        return f"{quantity:.0%}"
    if feature.unit == "0/1":
        return f"{quantity:.2g}"
    unit = "times" if feature.unit == "ratio" else feature.unit
    number = f"{quantity:.0f}" if abs(quantity) >= 100 else f"{quantity:.2g}"
    return f"{number} {unit}"
