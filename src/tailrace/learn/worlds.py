"""Worlds to learn in: a scenario with traffic of its own, and the work done in it by a process."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.learn import kernels
from tailrace.learn.samples import Samples
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.seeds import Purpose, require, seeds
from tailrace.sim.simulator import Simulation
from tailrace.workload import library


@dataclass(frozen=True)
class Driver:
    """A policy that runs inside the compiled engine: its code and its parameters."""

    code: int
    params: NDArray[np.float64]

    @classmethod
    def of_rule(cls, name: str) -> "Driver":
        """A built-in rule."""
        policy = registry.get(name)
        assert isinstance(policy, BuiltinPolicy)
        return cls(policy.rule.code, policy.params)


@dataclass(frozen=True)
class World:
    """A scenario and the seed of its traffic."""

    scenario: Scenario
    seed: int
    requests: int
    number: int = 0  #: of the scenario, to tell samples apart

    def simulation(self) -> Simulation:
        """The cluster at time 0, with room for looking ahead."""
        require(self.seed, Purpose.TRAINING)
        settings = self.scenario.workload.model_copy(update={"requests": self.requests})
        rate = scenarios.resolve_rate(self.scenario)
        table = library.from_settings(settings, rate, self.seed)
        return Simulation(
            self.scenario.cluster,
            table,
            router=self.scenario.router,
            engine=self.scenario.engine,
            events=self.scenario.events,
            seed=self.seed,
            lookahead=True,
        )

    def horizon_s(self) -> float:
        """Three times the P90 time a request stays in this scenario, s."""
        return _horizon_s(World(self.scenario, seeds(Purpose.TRAINING, 1)[0], 2000))


@lru_cache(maxsize=256)
def _horizon_s(world: World) -> float:
    simulation = world.simulation()
    simulation.run(registry.get("lmetric"))
    result = simulation.result().requests
    return 3.0 * float(np.nanpercentile(result["finished_s"] - result["arrived_s"], 90))


@dataclass(frozen=True)
class LabelTask:
    """Let a driver route while a teacher says what each choice would have cost."""

    world: World
    driver: Driver
    teacher: Driver
    warmup: int  #: decisions before the first label
    rows: int
    epsilon: float


@dataclass(frozen=True)
class BranchTask:
    """At some decisions try every choice and see what it costs."""

    world: World
    driver: Driver
    warmup: int
    rows: int
    gap: int  #: decisions between two such decisions
    horizon_s: float


def label(task: LabelTask) -> Samples:
    """Do a label task."""
    simulation = task.world.simulation()
    fleet, tables = simulation.arrays
    samples = Samples.empty(task.rows, fleet.servers.shape[1], task.world.number)
    kernels.drive(fleet, tables, 0, task.driver.code, task.driver.params, task.warmup)
    rows = kernels.label(
        fleet,
        tables,
        0,
        task.driver.code,
        task.driver.params,
        task.teacher.code,
        task.epsilon,
        samples.replica_obs,
        samples.request_obs,
        samples.mask,
        samples.costs,
    )
    return samples.head(rows)


def branch(task: BranchTask) -> Samples:
    """Do a branch task."""
    simulation = task.world.simulation()
    fleet, tables = simulation.arrays
    twin, _ = simulation.copy().arrays
    samples = Samples.empty(task.rows, fleet.servers.shape[1], task.world.number)
    code, params = task.driver.code, task.driver.params
    decisions = task.warmup
    for k in range(task.rows):
        if not kernels.drive(fleet, tables, 0, code, params, decisions):
            return samples.head(k)
        kernels.branch(
            fleet,
            tables,
            0,
            twin,
            code,
            params,
            task.horizon_s,
            samples.replica_obs[k],
            samples.request_obs[k],
            samples.mask[k],
            samples.costs[k],
        )
        decisions = task.gap
    return samples


@dataclass(frozen=True)
class ScoreTask:
    """Play a world and say what it cost."""

    world: World
    driver: Driver


def score(task: ScoreTask) -> float:
    """Mean composite cost in s of a world's requests under a driver."""
    simulation = task.world.simulation()
    fleet, tables = simulation.arrays
    while kernels.drive(fleet, tables, 0, task.driver.code, task.driver.params, 10_000):
        pass
    result = simulation.result()
    requests = result.requests
    ttft = requests["first_token_s"] - requests["arrived_s"]
    e2e = requests["finished_s"] - requests["arrived_s"]
    late = np.maximum(ttft - result.table.rows["ttft_slo_s"], 0)
    return float(np.nanmean(0.2 * e2e + ttft + 2 * late))


class Workers:
    """Processes that do tasks side by side; results come in the order of the tasks."""

    def __init__(self, processes: int) -> None:
        """Start so many processes; with one, the work is done here."""
        self._pool = (
            ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
            if processes > 1
            else None
        )

    def map(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        """Do all tasks."""
        if self._pool is None:
            return map(work, tasks)
        return self._pool.map(work, tasks)

    def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
