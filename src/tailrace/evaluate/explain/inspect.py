"""Inspect a trained policy: its metadata, its behaviour in scenarios, what it reacts to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.explain.audit import Audit, States, audit, check_size, join
from tailrace.evaluate.measure.runner import simulation
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy, Policy
from tailrace.policy.learned.observation import REPLICA_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.sim import engine
from tailrace.sim.simulator import Simulation, uses_reference

#: States are not sampled before so large a share of the requests: the cluster is filling up.
WARM_UP = 0.1
#: Rules that look at nothing: agreeing with them says nothing.
BLIND = ("random", "round_robin")
#: Scores that differ by less than this share of the larger are equal but for rounding.
EQUAL = 1e-9
#: What may make a replica the obvious choice: name, feature, and whether most or least is best.
FACTS = (
    ("fewest in flight", "in_flight", "least"),
    ("fewest queued", "queued", "least"),
    ("least queued work", "queued_uncached", "least"),
    ("longest cached prefix", "cached", "most"),
    ("session's last replica", "is_last", "most"),
    ("fastest", "speed", "most"),
    ("least KV memory used", "kv_used", "least"),
    ("earliest first token", "ttft", "least"),
)


@dataclass(frozen=True)
class Habit:
    """How often the choice is the best one by a single criterion or by a rule."""

    name: str
    states: int  #: in which it scores replicas differently
    best: float | None  #: share of those in which the choice is among the best; None without any
    worst: float | None  #: share in which it is among the worst
    chance: float | None  #: share in which a random choice would be among the best


@dataclass(frozen=True)
class Behaviour:
    """What a policy does in one scenario."""

    scenario: str
    seed: int
    requests: int
    states: int  #: sampled
    replicas: tuple[str, ...]  #: device and speed of each
    shares: tuple[float, ...]  #: of all requests, per replica
    confidence: float  #: mean probability of the choice
    facts: tuple[Habit, ...]
    rules: tuple[Habit, ...]  #: agreement with each rule, most first


@dataclass(frozen=True)
class Inspection:
    """Everything `tailrace inspect` shows of a policy."""

    policy: str
    parameters: int  #: trainable numbers
    about: dict[str, Any]  #: what its file says: network, training, seeds, scores, versions
    behaviours: tuple[Behaviour, ...]
    audit: Audit


def learned(name: str) -> LearnedPolicy:
    """Return the trained policy of a name; raises with a hint if it is not a trained one."""
    policy: Policy = registry.get(name)
    if isinstance(policy, LearnedPolicy):
        return policy
    what = "a built-in rule" if isinstance(policy, BuiltinPolicy) else "a rule of your own"
    read = (
        f"`tailrace policies {policy.name}` says what it does, "
        if isinstance(policy, BuiltinPolicy)
        else ""
    )
    raise TailraceError(
        f"{name} is {what} without weights to look into; {read}`tailrace simulate -p {name}` and "
        f"`tailrace compare -p {name}` what comes of it; give a trained policy (a .tailrace file)"
    )


def description(policy: LearnedPolicy) -> dict[str, Any]:
    """Return the metadata in a policy's file, without its features."""
    about = {key: value for key, value in policy.about.items() if key != "schema"}
    return {"network": policy.config.model_dump(mode="json"), **about}


def parameters(policy: LearnedPolicy) -> int:
    """Return the number of trained parameters, without normalisers."""
    return sum(t.size for name, t in policy.tensors.items() if "_norm." not in name)


def inspect(
    policy: LearnedPolicy,
    worlds: Sequence[Scenario],
    seed: int,
    *,
    states: int = 1000,
    progress: Callable[[], None] = lambda: None,
) -> Inspection:
    """Run scenarios with a policy and sample about ``states`` of its decisions in each."""
    found, behaviours = [], []
    for world in worlds:
        seen, behaviour = _play(policy.copy(), with_capacity(world), seed, states)
        found.append(seen)
        behaviours.append(behaviour)
        progress()
    audited = audit(policy, join(found))
    progress()
    about = description(policy)
    return Inspection(policy.name, parameters(policy), about, tuple(behaviours), audited)


# ---- playing ------------------------------------------------------------------------------------


def _play(
    policy: LearnedPolicy, scenario: Scenario, seed: int, count: int
) -> tuple[States, Behaviour]:
    """Route a scenario with the policy and sample evenly spaced decisions."""
    if uses_reference(scenario.cluster, scenario.engine):
        raise TailraceError(
            f"inspect needs the compiled engine, and {scenario.name} runs on the reference engine"
        )
    check_size(scenario.cluster.size)
    play = simulation(scenario, resolve_rate(scenario), seed, lookahead=True)
    policy.reset(scenario.cluster.size, seed)
    watcher = _Watcher(policy, play)
    visit(play, policy, count, watcher.look)
    play.run(policy)
    if not len(watcher):
        raise TailraceError(f"{scenario.name} came to no decision to look at; use more --requests")
    states = watcher.states()
    result = play.result()
    shares = result.replicas["requests"]
    facts, rules = _facts(states, watcher.chosen), watcher.agreement()
    behaviour = Behaviour(
        scenario=scenario.name,
        seed=seed,
        requests=len(result.requests),
        states=len(states),
        replicas=tuple(f"{r.device} x{r.speed:g}" for r in scenario.cluster.expanded()),
        shares=tuple((shares / max(1, shares.sum())).tolist()),
        confidence=float(np.mean(watcher.confidence)),
        facts=facts,
        rules=rules,
    )
    return states, behaviour


def visit(play: Simulation, policy: BuiltinPolicy, count: int, look: Callable[[], None]) -> None:
    """Run a policy and keep evenly spaced decisions after the warm-up."""
    fleet, tables = play.arrays
    requests = int(fleet.clusters[0]["n_requests"])
    warmup = int(WARM_UP * requests)
    gap = max(1, (requests - warmup) // count)

    def route(decisions: int) -> None:
        code, params = policy.rule.code, policy.params
        engine.run(fleet, tables, 0, code, params, policy.lowest_id_wins, decisions)

    route(warmup)
    for _ in range(count):
        if play.next_decision() is None:
            return
        look()
        route(gap)


class _Watcher:
    """Records what a policy sees and chooses, and what every rule would choose."""

    def __init__(self, policy: LearnedPolicy, simulation: Simulation) -> None:
        self._policy = policy
        self._twin = policy.copy()  # decides without routing, so that the memory stays as it is
        self._simulation = simulation
        self._rules = [BuiltinPolicy(r) for r in registry.rules() if r.name not in BLIND]
        self._seen: list[tuple[NDArray[Any], ...]] = []
        self._best: list[NDArray[np.int8]] = []  # [rules, n] 1: among a rule's best, -1: its worst
        self.chosen: list[int] = []
        self.confidence: list[float] = []

    def __len__(self) -> int:
        return len(self._seen)

    def look(self) -> None:
        """Record the current decision without side effects."""
        view = self._simulation.view()
        mask = view.replicas["available"] != 0
        before = view.router.copy()
        replica_obs, request_obs, prior = self._policy.observed(view)
        memory = self._policy.memory.copy()
        self._twin.memory[:] = memory
        logits = -self._twin.scores(view)
        self._best.append(self._opinions(mask))
        self._simulation.arrays[0].router[0] = before  # rules draw random numbers
        weights = np.exp(logits - logits[mask].max())
        self.chosen.append(int(logits.argmax()))
        self.confidence.append(float(weights.max() / weights.sum()))
        self._seen.append((replica_obs, request_obs, mask, prior.astype(np.float32), memory))

    def _opinions(self, mask: NDArray[np.bool_]) -> NDArray[np.int8]:
        fleet, tables = self._simulation.arrays
        opinions = np.zeros((len(self._rules), len(mask)), np.int8)
        for k, rule in enumerate(self._rules):
            engine.choice(fleet, tables, 0, rule.rule.code, rule.params, rule.lowest_id_wins)
            opinions[k] = _extremes(fleet.scores[0, : len(mask)], mask)
        return opinions

    def states(self) -> States:
        """Return the recorded states."""
        return States(*(np.array(part) for part in zip(*self._seen, strict=True)))

    def agreement(self) -> tuple[Habit, ...]:
        """How often each rule would have taken the policy's choice, ties included."""
        best = np.array(self._best).transpose(1, 0, 2)
        mask = np.array([seen[2] for seen in self._seen])
        habits = [
            _habit(rule.name, of_rule, mask, self.chosen)
            for rule, of_rule in zip(self._rules, best, strict=True)
        ]
        return tuple(sorted(habits, key=lambda h: -1.0 if h.best is None else h.best, reverse=True))


# ---- habits -------------------------------------------------------------------------------------


def _extremes(scores: NDArray[np.floating], mask: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Mark the least of some scores [n] with 1 and the largest with -1; all 0 if all are alike.

    A score that is no number is the worst, as it is when a policy chooses.
    """
    out = np.zeros(len(scores), np.int8)
    known = np.where(np.isnan(scores), np.inf, scores)
    low, high = known[mask].min(), known[mask].max()
    # Infinite scores are as they are; finite ones have rounding errors.
    margin = EQUAL * max((abs(x) for x in (low, high) if np.isfinite(x)), default=0.0)
    if low == high or high - low <= margin:
        return out
    out[mask & (known >= high - margin)] = -1
    out[mask & (known <= low + margin)] = 1
    return out


def _facts(states: States, chosen: Sequence[int]) -> tuple[Habit, ...]:
    columns = {feature.name: k for k, feature in enumerate(REPLICA_FEATURES)}
    habits = []
    for name, feature, sense in FACTS:
        values = states.replica_obs[..., columns[feature]]
        scores = values if sense == "least" else -values
        marks = np.array([_extremes(s, m) for s, m in zip(scores, states.mask, strict=True)])
        habits.append(_habit(name, marks, states.mask, chosen))
    return tuple(habits)


def _habit(
    name: str, marks: NDArray[np.int8], mask: NDArray[np.bool_], chosen: Sequence[int]
) -> Habit:
    """Count how often the chosen replica is marked; ``marks`` [K, n] as of :func:`_extremes`."""
    telling = (marks != 0).any(axis=1)
    if not telling.any():
        return Habit(name, 0, None, None, None)
    taken = marks[np.arange(len(marks)), np.asarray(chosen)][telling]
    chance = ((marks == 1).sum(axis=1) / mask.sum(axis=1))[telling]
    return Habit(
        name,
        int(telling.sum()),
        float((taken == 1).mean()),
        float((taken == -1).mean()),
        float(chance.mean()),
    )
