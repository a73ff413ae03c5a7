"""Which worlds each step of a run plays, and which are kept for judging it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.learn.randomisation import Distribution
from tailrace.learn.settings import (
    FIRST_VALIDATION_SEED,
    START,
    Stage,
    TrainSettings,
    training_seed,
)
from tailrace.learn.worlds import CompiledPolicy, LabelTask, World
from tailrace.saturation import with_capacity
from tailrace.seeds import Purpose, generator, seeds
from tailrace.sim.build import why_not_compiled
from tailrace.sim.engine import LEARNED_CODE

#: Data for fitting a network's sketch (learn/imitate/sketch.py): clusters with at least this many
#: replicas, because only large clusters use it, and a share of random choices, so that it covers
#: more states than the network itself reaches.
SKETCH_REPLICAS, SKETCH_WORLDS, SKETCH_DECISIONS, SKETCH_EPSILON = 28, 24, 200, 0.05


@dataclass(frozen=True)
class ScenarioSampler:
    """What a stage draws its worlds from, at a multiple of their load."""

    scenarios: tuple[Scenario, ...]
    distribution: Distribution | None
    load: float = 1.0

    def __call__(self, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        rng = generator(seed, "scenario")
        if self.distribution is not None and rng.random() < self.distribution.settings.share:
            return self.distribution(seed, self.load)
        return at_load(self.scenarios[int(rng.integers(len(self.scenarios)))], self.load)


def at_load(scenario: Scenario, factor: float) -> Scenario:
    """Return the scenario with its load or rate multiplied."""
    workload = scenario.workload
    if factor == 1.0 or (workload.rate is None and workload.load is None):
        return scenario
    name = "load" if workload.rate is None else "rate"
    changed = workload.model_copy(update={name: getattr(workload, name) * factor})
    return scenario.model_copy(update={"workload": changed})


def enlarged(scenario: Scenario, replicas: int) -> Scenario:
    """Return the scenario several times over: as many replicas or more, and traffic to match."""
    times = -(-replicas // scenario.cluster.size)
    many = tuple(r.model_copy(update={"count": r.count * times}) for r in scenario.cluster.replicas)
    rate = scenario.workload.rate and scenario.workload.rate * times
    return scenario.model_copy(
        update={
            "cluster": scenario.cluster.model_copy(update={"replicas": many}),
            "workload": scenario.workload.model_copy(update={"rate": rate}),
            "capacity_rps": scenario.capacity_rps and scenario.capacity_rps * times,
        }
    )


class WorldSchedule:
    """Worlds by step. Each step has its own training seeds, so any step can be repeated."""

    def __init__(
        self, settings: TrainSettings, capacities: Sequence[tuple[str, float]] = ()
    ) -> None:
        """Load the scenarios, or lay out the randomised ones with capacities already measured."""
        self.settings = settings
        self.scenarios: tuple[Scenario, ...] = tuple(_load(name) for name in settings.scenarios)
        self.distribution: Distribution | None = None
        if settings.randomise is not None:
            known = tuple((name, capacity) for name, capacity in capacities)
            self.distribution = (
                Distribution(settings.randomise, known)
                if known
                else Distribution.measured(settings.randomise)
            )

    @property
    def capacities(self) -> tuple[tuple[str, float], ...]:
        """Measured capacities of the randomised workloads; they belong to the state of a run."""
        return () if self.distribution is None else self.distribution.capacities

    @property
    def max_replicas(self) -> int:
        """Replicas of the largest cluster of any stage."""
        sizes = [scenario.cluster.size for scenario in self.scenarios]
        if self.distribution is not None:
            sizes.append(self.distribution.settings.replicas[1])
        return max(sizes)

    def seed(self, number: int) -> int:
        """Return the ``number``-th training seed of this run."""
        return seeds(Purpose.TRAINING, 1, training_seed(self.settings.seed, number))[0]

    def sampler(self, stage: Stage | None) -> ScenarioSampler:
        """Return what the worlds of a stage are drawn from."""
        if stage is None:
            return ScenarioSampler(self.scenarios, self.distribution)
        chosen = self.scenarios
        if stage.scenarios:
            names = self.settings.scenario_names
            pairs = zip(names, self.scenarios, strict=True)
            chosen = tuple(scenario for name, scenario in pairs if name in stage.scenarios)
        return ScenarioSampler(chosen, self.distribution, stage.load)

    def _world(self, scenario: Scenario, seed: int, requests: int, number: int) -> World:
        s = self.settings
        weight = s.branching.tail_weight if s.advantage == "branching" else s.reward.tail
        return World(scenario, seed, requests, number, tail_weight=max(weight, 0.0))

    def worlds(self, first: int, count: int, requests: int, stage: Stage | None) -> list[World]:
        """Return ``count`` worlds from the ``first`` seed on.

        As many as their share are randomised, and come first; then the scenarios take turns.
        """
        sampler = self.sampler(stage)
        share = 0.0 if sampler.distribution is None else sampler.distribution.settings.share
        randomised = round(count * share)
        made = []
        for k in range(count):
            seed = self.seed(first + k)
            if sampler.distribution is not None and k < randomised:
                number = len(self.scenarios) + first + k
                scenario = sampler.distribution(seed, sampler.load)
                made.append(self._world(scenario, seed, requests, number))
                continue
            # Where the last step's turns ended, this one's begin.
            turn = (first // count * (count - randomised) + k - randomised) % len(sampler.scenarios)
            scenario = sampler.scenarios[turn]
            number = self.scenarios.index(scenario)
            made.append(self._world(at_load(scenario, sampler.load), seed, requests, number))
        return made

    def label_tasks(
        self, round_: int, network: np.ndarray, student_acts: bool, stage: Stage | None
    ) -> list[LabelTask]:
        """Return the tasks of a round of demonstrations."""
        d = self.settings.demonstrations
        requests = d.warmup + d.decisions + 1
        names = [name for name, share in d.teachers.items() if share > 0]
        teachers = [CompiledPolicy.of(self.settings.start if n == START else n) for n in names]
        upto = np.cumsum([d.teachers[name] for name in names])
        # Stratified: independent draws for a dozen worlds can leave a teacher of half of them with
        # one, and the clone is then that of the others.
        strata = generator(self.seed(round_ * d.worlds), "teachers").permutation(d.worlds)
        tasks = []
        for k, world in enumerate(self.worlds(round_ * d.worlds, d.worlds, requests, stage)):
            rng = generator(world.seed, "demonstrations")
            point = (strata[k] + rng.random()) / d.worlds * upto[-1]
            drawn = min(int(upto.searchsorted(point, side="right")), len(teachers) - 1)
            factor = float(rng.uniform(*d.load_factors)) if rng.random() < d.off_nominal else 1.0
            tasks.append(
                LabelTask(
                    replace(world, scenario=at_load(world.scenario, factor)),
                    network,
                    tuple(teachers) if d.best_teacher else (teachers[drawn],),
                    student_acts,
                    warmup=int(rng.integers(d.warmup // 10, d.warmup + 1)),
                    unbalanced=bool(rng.random() < d.unbalanced),
                    rows=d.decisions,
                    epsilon=d.student_epsilon if student_acts else d.epsilon,
                )
            )
        return tasks

    def sketch_tasks(self, network: np.ndarray) -> list[LabelTask]:
        """Return tasks that show what a finished network meets: it drives by itself."""
        most = self.settings.demonstrations.warmup
        itself = (CompiledPolicy(LEARNED_CODE, network),)
        tasks = []
        for small in self.worlds(0, SKETCH_WORLDS, most + SKETCH_DECISIONS + 1, None):
            world = replace(small, scenario=enlarged(small.scenario, SKETCH_REPLICAS))
            warmup = int(generator(world.seed, "sketch").integers(most // 10, most + 1))
            tasks.append(
                LabelTask(
                    world,
                    network,
                    itself,
                    student_acts=True,
                    warmup=warmup,
                    unbalanced=False,
                    rows=SKETCH_DECISIONS,
                    epsilon=SKETCH_EPSILON,
                )
            )
        return tasks

    def validation(self) -> list[World]:
        """Return the worlds a policy is judged on: the same for all runs."""
        e = self.settings.evaluation
        worlds = [
            self._world(scenario, seed, e.requests, number)
            for number, scenario in enumerate(self.scenarios)
            for seed in seeds(Purpose.TRAINING, e.worlds, FIRST_VALIDATION_SEED)
        ]
        if self.distribution is not None:
            numbers = seeds(Purpose.TRAINING, e.randomised, FIRST_VALIDATION_SEED)
            worlds += [
                self._world(self.distribution(seed), seed, e.requests, len(worlds) + k)
                for k, seed in enumerate(numbers)
            ]
        return worlds


def _load(named: str | Scenario) -> Scenario:
    given = scenarios.load(named) if isinstance(named, str) else named
    scenario = with_capacity(given)
    reason = why_not_compiled(scenario.cluster)
    if reason is not None:
        raise TailraceError(f"cannot train on {scenario.name}: {reason}")
    if scenario.cluster.size < 2:
        raise TailraceError(f"cannot train on {scenario.name}: with one replica there is no choice")
    return scenario
