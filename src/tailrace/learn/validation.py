"""How good a policy is: its cost on fixed worlds, against rules on the very same requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tailrace.learn.worlds import CompiledPolicy, ScoreTask, World, WorldScore, score
from tailrace.parallel import WorkerPool

ScoreFunction = Callable[[ScoreTask], WorldScore]


@runtime_checkable
class OwnValidation(Protocol):
    """A rollout source whose worlds differ from the simulator's: policies are judged in them."""

    def validation(self, worlds: Sequence[World]) -> tuple[list[World], ScoreFunction]:
        """Return the validation worlds as the source plays them, and what plays them."""


@dataclass(frozen=True)
class ValidationResult:
    """A policy's costs on the validation worlds."""

    costs: tuple[float, ...]  #: mean cost of a request in each scenario, s
    score: float  #: geometric mean over scenarios of cost / cost of the reference rule
    figures: dict[str, float]  #: latencies, throughput and the like: geometric means over worlds
    largest_shares: tuple[float, ...]  #: largest share of a replica, per world
    relative_shares: NDArray[np.float64]  #: of all replicas of all worlds; 1 is an equal share
    scenario_shares: dict[str, tuple[float, ...]]  #: by scenario: share of each replica

    @property
    def ttft_p99_s(self) -> float:
        """P99 time to first token, s."""
        return self.figures["ttft_p99_s"]

    @property
    def e2e_mean_s(self) -> float:
        """Mean end-to-end latency, s."""
        return self.figures["e2e_mean_s"]


class Validation:
    """Fixed worlds and what rules achieve there."""

    def __init__(
        self, worlds: Sequence[World], rules: Sequence[str], play: ScoreFunction = score
    ) -> None:
        """Worlds are played on first use, by ``play``."""
        self.worlds = list(worlds)
        self.rules = tuple(rules)
        self._play = play
        self.rule_costs: dict[str, tuple[float, ...]] = {}
        self.rule_figures: dict[str, dict[str, float]] = {}
        """Figures of each rule, as of a policy, and its score."""

    def evaluate_rules(self, workers: WorkerPool) -> None:
        """Play all rules; the first is the reference."""
        tasks = [ScoreTask(w, CompiledPolicy.of(rule)) for rule in self.rules for w in self.worlds]
        played = list(workers.map(self._play, tasks))
        for k, rule in enumerate(self.rules):
            of_rule = played[k * len(self.worlds) : (k + 1) * len(self.worlds)]
            self.rule_costs[rule] = self._by_scenario(of_rule)
            known = {name: x for name, x in _figures(of_rule).items() if np.isfinite(x)}
            self.rule_figures[rule] = known | {"score": self.score(self.rule_costs[rule])}

    def evaluate(self, policy: CompiledPolicy, workers: WorkerPool) -> ValidationResult:
        """Play a policy."""
        tasks = [ScoreTask(world, policy) for world in self.worlds]
        played = list(workers.map(self._play, tasks))
        costs = self._by_scenario(played)
        return ValidationResult(
            costs,
            self.score(costs),
            _figures(played),
            tuple(max(p.shares) for p in played),
            np.concatenate([np.array(p.shares) * len(p.shares) for p in played]),
            self._scenario_shares(played),
        )

    def _scenario_shares(self, played: Sequence[WorldScore]) -> dict[str, tuple[float, ...]]:
        """Mean share of each replica, by scenario."""
        shares: dict[str, list[tuple[float, ...]]] = {}
        for world, one in zip(self.worlds, played, strict=True):
            shares.setdefault(world.scenario.name, []).append(one.shares)
        return {
            name: tuple(np.mean(rows, axis=0).tolist())
            for name, rows in shares.items()
            if len({len(row) for row in rows}) == 1  # one cluster, not several randomised ones
        }

    def score(self, costs: Sequence[float]) -> float:
        """Return the geometric mean of costs [scenarios] against the reference's."""
        reference = self.rule_costs[self.rules[0]]
        return float(np.exp(np.mean(np.log(np.array(costs) / np.array(reference)))))

    @property
    def best_rule(self) -> tuple[str, float]:
        """The rule with the best score, and its score."""
        scores = {rule: self.score(costs) for rule, costs in self.rule_costs.items()}
        best = min(scores, key=lambda rule: scores[rule])
        return best, scores[best]

    def _by_scenario(self, played: Sequence[WorldScore]) -> tuple[float, ...]:
        numbers = np.array([world.number for world in self.worlds])
        costs = np.array([p.cost_s for p in played])
        return tuple(float(costs[numbers == n].mean()) for n in np.unique(numbers))


def _figures(played: Sequence[WorldScore]) -> dict[str, float]:
    names = played[0].figures
    return {name: _geometric_mean([p.figures[name] for p in played]) for name in names}


def _geometric_mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and value > 0]
    return float(np.exp(np.mean(np.log(known)))) if known else float("nan")
