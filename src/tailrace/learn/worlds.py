"""Worlds to learn in: a scenario with its own traffic, and the tasks that processes run in it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Scenario
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.learn import kernels
from tailrace.learn.samples import Samples
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned import architecture
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, require, seeds
from tailrace.sim import engine
from tailrace.sim.simulator import Simulation
from tailrace.sim.types import Fleet
from tailrace.workload import library

#: Requests by which it is found out how long a request stays.
RESIDENCE_REQUESTS = 2000


@dataclass(frozen=True)
class CompiledPolicy:
    """A policy that runs inside the compiled engine: its code and its parameters."""

    code: int
    params: NDArray[np.float64]

    @classmethod
    def of(cls, name: str) -> "CompiledPolicy":
        """A built-in rule, or a trained policy."""
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
    late_share: float = 1.0  #: of the target for the first token: lateness is charged from there on
    tail_weight: float = 0.0  #: of squared times to first token over their targets, in the cost

    def simulation(self) -> Simulation:
        """The cluster at time 0, with room for looking ahead."""
        require(self.seed, Purpose.TRAINING)
        settings = self.scenario.workload.model_copy(update={"requests": self.requests})
        rate = resolve_rate(self.scenario)
        table = library.from_settings(settings, rate, self.seed)
        simulation = Simulation(
            self.scenario.cluster,
            table,
            router=self.scenario.router,
            engine=self.scenario.engine,
            events=self.scenario.events,
            seed=self.seed,
            lookahead=True,
        )
        simulation.arrays[0].clusters["late_share"] = self.late_share
        return simulation

    def residence_time_s(self) -> float:
        """P90 of the time a request stays in this scenario under a good rule, s."""
        return _residence_time_s(self.scenario)


@lru_cache(maxsize=256)
def _residence_time_s(scenario: Scenario) -> float:
    simulation = World(scenario, seeds(Purpose.TRAINING, 1)[0], RESIDENCE_REQUESTS).simulation()
    simulation.run(registry.get("lmetric"))
    result = simulation.result().requests
    return float(np.nanpercentile(result["finished_s"] - result["arrived_s"], 90))


@dataclass(frozen=True)
class LabelTask:
    """Let a driver route while a teacher says what each choice would have cost."""

    world: World
    network: NDArray[np.float64]  #: packed network in training
    teachers: tuple[CompiledPolicy, ...]  #: of several, the one that does best in this world
    student_acts: bool
    warmup: int  #: decisions before the first label
    unbalanced: bool  #: most of the warm-up goes to one replica
    rows: int
    epsilon: float  #: share of random choices


@dataclass(frozen=True)
class BranchTask:
    """At some decisions of the network try several choices and see what they cost."""

    world: World
    network: NDArray[np.float64]
    warmup: int
    rows: int
    gap: int  #: decisions between two such decisions
    candidates: int
    horizon: float  #: as a multiple of the P90 time a request stays
    min_horizon_s: float
    max_horizon_s: float
    return_share: float  #: of the pauses within sessions that the horizon covers
    logit_margin: float  #: to depart from the first branch's choices, as a difference of logits


@dataclass(frozen=True)
class ScoreTask:
    """Play a world from start to end."""

    world: World
    policy: CompiledPolicy


@dataclass(frozen=True)
class WorldScore:
    """How a world went."""

    cost_s: float  #: mean composite cost of a request, and what the world adds for the tail
    figures: Mapping[str, float | None]  #: of FIGURE_NAMES; None: no request has it
    shares: tuple[float, ...]  #: of the requests, per replica


#: What is logged of an evaluation, besides cost and score.
FIGURE_NAMES = (
    *(f"{latency}_{p}_s" for latency in ("ttft", "tpot", "e2e") for p in ("p50", "p90", "p99")),
    "e2e_mean_s", "requests_per_s", "batch_size", "imbalance",
)  # fmt: skip


def figures_of(summary: Summary) -> dict[str, float | None]:
    """Return the figures of FIGURE_NAMES."""
    latencies = {"ttft": summary.ttft_s, "tpot": summary.tpot_s, "e2e": summary.e2e_s}
    found = {
        f"{name}_{p}_s": getattr(latency, p)
        for name, latency in latencies.items()
        for p in ("p50", "p90", "p99")
    }
    return found | {
        "e2e_mean_s": summary.e2e_s.mean,
        "requests_per_s": summary.requests_per_s,
        "batch_size": summary.mean_batch_size,
        "imbalance": summary.imbalance,
    }


def label(task: LabelTask) -> Samples:
    """Do a label task."""
    simulation = task.world.simulation()
    fleet, tables = simulation.arrays
    network = task.network.copy()  # its memory moves
    teacher = task.teachers[0]
    if len(task.teachers) > 1:
        teacher = min(task.teachers, key=lambda t: score(ScoreTask(task.world, t)).cost_s)
    teacher = replace(teacher, params=teacher.params.copy())  # so may a teacher's
    behaviour = CompiledPolicy(engine.LEARNED_CODE, network) if task.student_acts else teacher
    if task.unbalanced:
        kernels.unbalance(fleet, tables, 0, task.warmup)
    else:
        kernels.route(fleet, tables, 0, behaviour.code, behaviour.params, task.warmup)
    out = _samples(task.world, fleet, network, task.rows)
    rows = kernels.label(
        fleet,
        tables,
        0,
        behaviour.code,
        behaviour.params,
        teacher.code,
        teacher.params,
        task.student_acts,
        network,
        task.epsilon,
        _rows(out),
    )
    out.tried[:] = out.mask
    return out.head(rows)


def branch(task: BranchTask) -> Samples:
    """Do a branch task."""
    simulation = task.world.simulation()
    fleet, tables = simulation.arrays
    twin, _ = simulation.copy().arrays
    network = task.network.copy()  # its memory moves
    out = _samples(task.world, fleet, network, task.rows)
    after = np.zeros(out.memory.shape[1], np.float32)
    plan = np.zeros(task.world.requests, np.int64)
    table = simulation.table
    horizon_s = _horizon_s(task, table.rows["think_s"][table.rows["parent"] >= 0])
    decisions, rows = task.warmup, _rows(out)
    for k in range(task.rows):
        if not kernels.route(fleet, tables, 0, engine.LEARNED_CODE, network, decisions):
            return out.head(k)
        kernels.branch(
            fleet,
            tables,
            0,
            twin,
            network,
            task.candidates,
            horizon_s,
            task.logit_margin,
            task.world.tail_weight,
            rows,
            k,
            after,
            plan,
        )
        decisions = task.gap
    return out


def _horizon_s(task: BranchTask, think_s: NDArray[np.float64]) -> float:
    """Return the horizon of a task, s, in a world with these pauses within sessions [m]."""
    stay_s = task.world.residence_time_s()
    horizon_s = max(task.horizon * stay_s, task.min_horizon_s)
    if task.return_share > 0 and think_s.size:
        horizon_s = max(horizon_s, stay_s + float(np.quantile(think_s, task.return_share)))
    return min(horizon_s, task.max_horizon_s)


def _samples(world: World, fleet: Fleet, network: NDArray[np.float64], rows: int) -> Samples:
    replicas = int(fleet.clusters[0]["n_replicas"])
    return Samples.empty(rows, replicas, world.number, int(network[architecture.MEMORY]))


def _rows(samples: Samples) -> kernels.Rows:
    return kernels.Rows._make(getattr(samples, name) for name in kernels.Rows._fields)


def score(task: ScoreTask) -> WorldScore:
    """Do a score task."""
    simulation = task.world.simulation()
    fleet, tables = simulation.arrays
    code, params = task.policy.code, task.policy.params.copy()
    while kernels.route(fleet, tables, 0, code, params, 10_000):
        pass
    result = simulation.result()
    summary = summarise(result)
    cluster = fleet.clusters[0]
    facts = tables.facts[cluster["table"]]
    tail_s = kernels.tail_s(fleet.requests[0], facts, 0, cluster["highest"], 0.0)
    return WorldScore(
        summary.cost_s + task.world.tail_weight * tail_s / task.world.requests,
        figures_of(summary),
        tuple(summary.replica_share),
    )
