"""Where a policy's choices differ from a rule's, and why.

While the policy routes a scenario, the rule decides some of the requests too, evenly spaced, and
its choices are only recorded. Equal scores of the rule count as agreement. A rule that is a network
with a memory decides with an empty one: it did not see the decisions before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.evaluate.explain.audit import MAX_EXPLAINED
from tailrace.evaluate.explain.explain_state import Reason, by_quantity, deviation, load_of, shown
from tailrace.evaluate.explain.inspect import EQUAL, visit
from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.measure.runner import policy_for, simulation
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.architecture import STD_FLOOR
from tailrace.policy.learned.explain import explain
from tailrace.policy.learned.observation import (
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
    REPLICA_FEATURES,
    REQUEST_FEATURES,
    Feature,
    observe,
)
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.sim import engine
from tailrace.sim.simulator import Simulation
from tailrace.view.records import View

Array = NDArray[np.float64]
Array32 = NDArray[np.float32]

#: Reasons given with an example.
REASONS = 4
#: Report disagreements only for scenarios with at least this many of both kinds of states.
LEAST = 10
#: Features of a replica by itself; the others compare it with the rest and say much the same.
OWN = tuple(k for k, f in enumerate(REPLICA_FEATURES) if "_vs_" not in f.name)


@dataclass(frozen=True)
class Question:
    """A policy that routes and a rule that only decides, both as specs."""

    traffic: Traffic
    policy: str
    rule: str
    looks: int


@dataclass(frozen=True)
class Choice:
    """One replica of an example."""

    replica: int
    queued: int
    in_flight: int
    cached_tokens: int
    speed: float
    probability: float
    taken: bool  #: by the policy
    instead: bool  #: by the rule


@dataclass(frozen=True)
class Example:
    """One decision in which they differ."""

    scenario: str
    at_s: float
    prompt_tokens: int
    predicted_output: float
    choices: tuple[Choice, ...]
    reasons: tuple[Reason, ...]  #: for its choice rather than the rule's, the strongest first
    margin: float  #: logit of the choice, less that of the rule's


@dataclass(frozen=True)
class Decisions:
    """``K`` decisions of a policy in a scenario, and the rule's choices in the same states."""

    scenario: str
    differs: NDArray[np.bool_]  #: [K]
    request_obs: Array32  #: [K, G]
    taken: Array32  #: [K, F] what there was to see of the chosen replica
    instead: Array32  #: [K, F] of the rule's; equal to ``taken`` where they agree
    example: Example | None  #: the clearest; None if they never differ or it has no reasons


def decisions(question: Question) -> Decisions:
    """Route a scenario with the policy and record what the rule would have chosen."""
    traffic = question.traffic
    scenario = traffic.scenario
    policy, rule = (policy_for(scenario, spec) for spec in (question.policy, question.rule))
    assert isinstance(policy, BuiltinPolicy)
    assert isinstance(rule, BuiltinPolicy)
    play = simulation(scenario, traffic.rate_rps, traffic.seed)
    for one in (policy, rule):
        one.reset(scenario.cluster.size, traffic.seed)
    watcher = DecisionWatcher(play, policy, rule, scenario.name)
    visit(play, policy, question.looks, watcher.look)
    return watcher.decisions()


class DecisionWatcher:
    """Records decisions of a policy and of a rule, without side effects on the simulation."""

    def __init__(
        self, simulation: Simulation, policy: BuiltinPolicy, rule: BuiltinPolicy, scenario: str
    ) -> None:
        """Watch ``policy`` route a simulation of ``scenario``; both have been reset."""
        self._simulation, self._policy, self._rule = simulation, policy, rule
        self._scenario = scenario
        self._rows: list[tuple[bool, Array32, Array32, Array32]] = []
        self._clearest: Callable[[], Example] | None = None
        self._margin = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def look(self) -> None:
        """Record the current decision."""
        view = self._simulation.view()
        mask = view.replicas["available"] != 0
        replica_obs = np.zeros((len(mask), N_REPLICA_FEATURES), np.float32)
        request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
        observe(view, replica_obs, request_obs)
        taken, scores = self._ask(self._policy)
        instead, theirs = self._ask(self._rule)
        differs = not _is_best(theirs, taken, mask)
        other = instead if differs else taken
        self._rows.append((differs, request_obs, replica_obs[taken], replica_obs[other]))
        margin = float(scores[instead] - scores[taken])
        if differs and np.isfinite(margin) and margin > self._margin and len(mask) <= MAX_EXPLAINED:
            self._margin = margin
            self._keep(view, replica_obs, request_obs, mask, taken, instead)

    def _ask(self, policy: BuiltinPolicy) -> tuple[int, Array]:
        """A policy's choice and scores [n]; neither its memory nor the router's state changes."""
        fleet, tables = self._simulation.arrays
        router, params = fleet.router[0].copy(), policy.params.copy()
        rule = policy.rule.code
        chosen = engine.choice(fleet, tables, 0, rule, policy.params, policy.lowest_id_wins)
        n = len(self._simulation.view().replicas)
        scores = np.array(fleet.scores[0, :n], np.float64)
        fleet.router[0] = router
        policy.params[:] = params
        return int(chosen), scores

    def _keep(
        self,
        view: View,
        replica_obs: Array32,
        request_obs: Array32,
        mask: NDArray[np.bool_],
        taken: int,
        instead: int,
    ) -> None:
        """Keep the decision if it is the clearest so far; only the final one is explained."""
        policy = self._policy
        if not isinstance(policy, LearnedPolicy):
            return
        prior, memory = policy.observed(view)[2], policy.memory.copy()
        rows, request = view.replicas.copy(), view.request.copy()
        scenario, margin = self._scenario, self._margin

        def example() -> Example:
            explained = explain(policy, replica_obs, request_obs, mask, prior, memory)
            slopes = explained.replica_gradients
            reasons = contrast(policy, slopes, replica_obs, taken, instead)
            choices = tuple(
                Choice(
                    replica=i,
                    **load_of(row),
                    probability=float(explained.probabilities[i]),
                    taken=i == taken,
                    instead=i == instead,
                )
                for i, row in enumerate(rows)
            )
            return Example(
                scenario,
                float(request["now"]),
                int(request["prompt_tokens"]),
                float(request["predicted_output"]),
                choices,
                reasons,
                margin,
            )

        self._clearest = example

    def decisions(self) -> Decisions:
        """Return the recorded decisions."""
        shapes = ((), (N_REQUEST_FEATURES,), (N_REPLICA_FEATURES,), (N_REPLICA_FEATURES,))
        columns = [
            np.array([row[k] for row in self._rows]).reshape(len(self._rows), *shape)
            for k, shape in enumerate(shapes)
        ]
        differs, request_obs, taken, instead = columns
        example = None if self._clearest is None else self._clearest()
        return Decisions(
            self._scenario, differs.astype(np.bool_), request_obs, taken, instead, example
        )


def _is_best(scores: Array, choice: int, mask: NDArray[np.bool_]) -> bool:
    """Whether a choice is among the best by these scores [n], up to rounding."""
    known = np.where(mask & ~np.isnan(scores), scores, np.inf)
    least = known.min()
    return bool(known[choice] <= least + EQUAL * (abs(least) if np.isfinite(least) else 0.0))


def contrast(
    policy: LearnedPolicy, slopes: Array, replica_obs: Array32, taken: int, instead: int
) -> tuple[Reason, ...]:
    """Explain why a policy prefers one replica to another: mean gradient x difference.

    ``slopes`` [n, F] are gradients of logits per deviation in training. A comparison with the other
    replicas (NAME_vs_mean) counts with the quantity itself.
    """
    difference = (replica_obs[taken] - replica_obs[instead]) / deviation(policy, "replica")
    total = by_quantity(difference * (slopes[taken] + slopes[instead]) / 2)
    columns = {REPLICA_FEATURES[k].name: k for k in OWN}
    strongest = sorted(total, key=lambda name: -abs(total[name]))[:REASONS]
    found = []
    for name in strongest:
        column = columns[name]
        feature = REPLICA_FEATURES[column]
        here, there = (shown(feature, float(replica_obs[i, column])) for i in (taken, instead))
        if total[name]:
            found.append(
                Reason(name, total[name], f"{words(feature)}: {here} there, {there} at the rule's")
            )
    return tuple(found)


def words(feature: Feature) -> str:
    """Name and meaning of a feature."""
    return f"{feature.name.replace('_', ' ')} ({feature.help})"


# ---- over many decisions ------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A feature whose values differ between two kinds of decisions, or two replicas."""

    name: str
    help: str
    first: str  #: typical value, with its unit
    second: str
    deviations: float  #: second less first, in standard deviations


def states_apart(all_: Sequence[Decisions], count: int) -> list[Difference]:
    """Return features of request and cluster that differ most where a policy agrees and deviates.

    Means are compared within each scenario, so that scenarios in which it deviates often do not
    speak for all; then averaged over scenarios, weighted by how often it deviates there.
    """
    weights, agree, deviate, apart = [], [], [], []
    for found in all_:
        no, yes = found.request_obs[~found.differs], found.request_obs[found.differs]
        if min(len(no), len(yes)) < LEAST:
            continue
        spread = np.sqrt((no.var(axis=0) + yes.var(axis=0)) / 2)
        weights.append(len(yes))
        agree.append(no.mean(axis=0))
        deviate.append(yes.mean(axis=0))
        apart.append((deviate[-1] - agree[-1]) / np.maximum(spread, STD_FLOOR))
    if not weights:
        return []
    first, second, distance = (
        np.average(rows, axis=0, weights=weights) for rows in (agree, deviate, apart)
    )
    return _strongest(REQUEST_FEATURES, range(N_REQUEST_FEATURES), first, second, distance, count)


def replicas_apart(all_: Sequence[Decisions], count: int) -> list[Difference]:
    """Return features in which the chosen replica differs most from the rule's, where they differ.

    Pairs of the same decision; in standard deviations of that difference.
    """
    taken = np.concatenate([d.taken[d.differs] for d in all_])
    instead = np.concatenate([d.instead[d.differs] for d in all_])
    if len(taken) < LEAST:
        return []
    difference = taken - instead
    apart = difference.mean(axis=0) / np.maximum(difference.std(axis=0), STD_FLOOR)
    return _strongest(REPLICA_FEATURES, OWN, instead.mean(axis=0), taken.mean(axis=0), apart, count)


def _strongest(
    features: Sequence[Feature],
    columns: Sequence[int],
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    apart: NDArray[np.floating],
    count: int,
) -> list[Difference]:
    order = sorted(columns, key=lambda k: -abs(float(apart[k])))
    return [
        Difference(
            features[k].name.replace("_", " "),
            features[k].help,
            shown(features[k], float(first[k])),
            shown(features[k], float(second[k])),
            float(apart[k]),
        )
        for k in order[:count]
        if apart[k]
    ]
