"""Cells simulated again for plots that need single requests.

The cost of each replay is compared with the results file. Differences mean that the policy or the
simulator has changed since; they are counted and reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.explain.decisions import Decisions, Question, decisions
from tailrace.evaluate.judge.results_folder import Results
from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.measure.contender import Role
from tailrace.evaluate.measure.metrics import composite_cost_s, request_times, summarise
from tailrace.evaluate.measure.runner import run
from tailrace.evaluate.measure.tail import RUN_OUT, mean_present
from tailrace.parallel import WorkerPool
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.saturation import resolve_rate
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import uses_reference

Array = NDArray[np.float64]

#: Percentiles of a distribution's curve: even in the body, and ever closer in the tail.
SHARES = np.concatenate([np.linspace(0, 0.89, 60), 1 - np.logspace(-1, -3, 41)])
#: Stretches of time of a run.
BINS = 240
#: Loads of the curve over load, as fractions of the measured capacity.
LOADS = (0.3, 0.5, 0.65, 0.75, 0.85, 0.92, 1.0, 1.08, 1.16)
LOAD_SEEDS, LOAD_REQUESTS = 2, 10_000
#: Scenarios whose load is varied: these where they are part of the suite, else the first ones.
KNEES = ("uniform-chat-80", "hot-sessions-mixed-speed")
#: Decisions looked at per scenario.
LOOKS = 400
#: A replay whose cost differs by more than this share is not the run that was measured.
SAME = 1e-9


@dataclass(frozen=True)
class Timeline:
    """A run over time, in ``T`` stretches."""

    edges_s: Array  #: [T + 1]
    arrivals_rps: Array  #: [T]
    queue: Array  #: [T] mean number of requests without a first token
    shares: Array  #: [n, T] share of the requests that arrived in a stretch and went to a replica


@dataclass(frozen=True)
class Replay:
    """One policy on one traffic."""

    scenario: str
    policy: str
    seed: int
    cost_s: float
    ttft_s: Array  #: [len(SHARES)] quantiles after warm-up
    e2e_s: Array
    time: Timeline


@dataclass(frozen=True)
class LoadPoint:
    """One policy at one load of a scenario, one seed."""

    scenario: str
    policy: str
    load: float
    p99_ttft_s: float
    mean_e2e_s: float


@dataclass(frozen=True)
class Replays:
    """All replays of a report."""

    runs: tuple[Replay, ...]
    loads: tuple[LoadPoint, ...]
    decisions: tuple[Decisions, ...]
    unlike: tuple[str, ...]  #: replays that did not give the cost of the results file
    left_out: tuple[str, ...]  #: scenarios whose settings are not known here
    load_seeds: tuple[int, ...]


@dataclass(frozen=True)
class ReplayTask:
    """Some policies (label, spec) on the same traffic; ``load``: only two metrics of each."""

    traffic: Traffic
    policies: tuple[tuple[str, str], ...]
    warmup_fraction: float
    load: float | None = None
    question: Question | None = None


Found = Replay | LoadPoint | Decisions


def work(task: ReplayTask) -> list[Found]:
    """Run a task; called in worker processes."""
    if task.question is not None:
        return [decisions(task.question)]
    found: list[Found] = []
    for label, spec in task.policies:
        traffic = task.traffic
        result = run(traffic.scenario, spec, traffic.rate_rps, traffic.seed)
        if task.load is None:
            found.append(_replay(result, label, traffic, task.warmup_fraction))
            continue
        summary = summarise(result, task.warmup_fraction)
        p99, mean = summary.ttft_s.p99, summary.e2e_s.mean
        if p99 is not None and mean is not None:
            found.append(LoadPoint(traffic.scenario.name, label, task.load, p99, mean))
    return found


def tasks_of(results: Results) -> list[ReplayTask]:
    """Return the replays that the plots need; raises if a policy no longer exists."""
    there = [s for s in map(results.scenario, results.grid.scenarios) if s is not None]
    check_policies(results, there)
    return [*_runs(results, there), *_questions(results, there), *_loads(results, there)]


def play(
    results: Results,
    tasks: Sequence[ReplayTask],
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Replays:
    """Run replays; ``progress`` gets the number of finished tasks."""
    found: list[Found] = []
    with WorkerPool(jobs) as pool:
        for done, (_, part) in enumerate(pool.run(work, tasks), start=1):
            found += part
            progress(done)
    runs = tuple(f for f in found if isinstance(f, Replay))
    order = {name: k for k, name in enumerate(results.grid.scenarios)}
    decisions = [f for f in found if isinstance(f, Decisions)]
    return Replays(
        runs=runs,
        loads=tuple(f for f in found if isinstance(f, LoadPoint)),
        decisions=tuple(sorted(decisions, key=lambda d: order[d.scenario])),
        unlike=tuple(f"{r.policy} on {r.scenario}" for r in runs if not is_as_measured(results, r)),
        left_out=tuple(n for n in results.grid.scenarios if results.scenario(n) is None),
        load_seeds=results.data.seeds[:LOAD_SEEDS],
    )


def shown(results: Results, scenario: str) -> dict[str, str]:
    """Return the policies shown in a scenario's plots: name -> role."""
    parts = (
        (results.subject, "subject"),
        (results.data.best_single, "single"),
        (results.data.best_of_each[scenario], "each"),
        (results.data.reference, "reference"),
    )
    found: dict[str, str] = {}
    for name, part in parts:
        if results.standing[name].role is not Role.ORACLE:
            found.setdefault(name, part)
    return found


def check_policies(results: Results, there: Sequence[Scenario]) -> None:
    """Raise if a policy no longer exists, before any work is done."""
    needed = {name: scenario for scenario in there for name in shown(results, scenario.name)}
    for name in needed:
        spec = results.standing[name].spec
        try:
            registry.get(spec)
        except TailraceError as error:
            raise TailraceError(
                f"the plots need {name} once more, and it cannot be had: {error}; put it back, or "
                "leave the plots out with --quick"
            ) from None


# ---- tasks --------------------------------------------------------------------------------------


def _policies(results: Results, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, results.standing[name].spec) for name in names)


def _runs(results: Results, there: Sequence[Scenario]) -> Iterator[ReplayTask]:
    """Every scenario on the first seed of the evaluation; the long ones first."""
    seed = results.data.seeds[0]
    for scenario in sorted(there, key=lambda s: -s.workload.requests * s.cluster.size):
        traffic = Traffic(scenario, resolve_rate(scenario), seed)
        names = list(shown(results, scenario.name))
        yield ReplayTask(traffic, _policies(results, names), results.data.warmup_fraction)


def _loads(results: Results, there: Sequence[Scenario]) -> Iterator[ReplayTask]:
    steady = [s for s in there if s.workload.load is not None and not s.events]
    wanted = [s for name in KNEES for s in steady if s.name == name] or steady[: len(KNEES)]
    for scenario in wanted:
        names = [n for n, part in shown(results, scenario.name).items() if part != "each"]
        for load in LOADS:
            requests = min(LOAD_REQUESTS, scenario.workload.requests)
            at = scenario.with_workload(load=load, rate=None, requests=requests)
            for seed in results.data.seeds[:LOAD_SEEDS]:
                traffic = Traffic(at, resolve_rate(at), seed)
                warmup = results.data.warmup_fraction
                yield ReplayTask(traffic, _policies(results, names), warmup, load=load)


def _questions(results: Results, there: Sequence[Scenario]) -> Iterator[ReplayTask]:
    """Where the subject differs from the best single rule, if both can decide without routing."""
    rule, subject = results.data.best_single, results.subject
    specs = {name: results.standing[name].spec for name in (rule, subject)}
    if rule == subject or not all(can_decide_aside(spec) for spec in specs.values()):
        return
    for scenario in there:
        if uses_reference(scenario.cluster, scenario.engine):
            continue
        traffic = Traffic(scenario, resolve_rate(scenario), results.data.seeds[0])
        question = Question(traffic, specs[subject], specs[rule], LOOKS)
        yield ReplayTask(traffic, (), results.data.warmup_fraction, question=question)


def can_decide_aside(spec: str) -> bool:
    """Whether a policy depends on the view only, so that it can decide without routing."""
    policy = registry.get(spec)
    return isinstance(policy, BuiltinPolicy) and not policy.rule.in_engine


# ---- one run ------------------------------------------------------------------------------------


def _replay(result: SimResult, label: str, traffic: Traffic, warmup_fraction: float) -> Replay:
    kept = slice(int(warmup_fraction * len(result.requests)), None)
    times = request_times(result)
    return Replay(
        scenario=traffic.scenario.name,
        policy=label,
        seed=traffic.seed,
        cost_s=float(composite_cost_s(result)[kept].mean()),
        ttft_s=_quantiles(times.ttft_s[kept]),
        e2e_s=_quantiles(times.e2e_s[kept]),
        time=timeline(result),
    )


def _quantiles(seconds: Array) -> Array:
    known = seconds[np.isfinite(seconds)]
    return np.quantile(known, SHARES) if len(known) else np.full(len(SHARES), np.nan)


def timeline(result: SimResult) -> Timeline:
    """Return a run over time, until most requests have arrived and it begins to run out."""
    done = result.requests
    arrives = np.isfinite(done["arrived_s"])
    arrived = done["arrived_s"][arrives]
    replica = done["replica"][arrives]
    first = np.where(np.isfinite(done["first_token_s"]), done["first_token_s"], done["finished_s"])[
        arrives
    ]
    answered = np.where(np.isfinite(first), first, np.inf)
    end = float(np.quantile(arrived, RUN_OUT)) if len(arrived) else 0.0
    edges = np.linspace(0.0, end or 1.0, BINS + 1)
    counts = np.histogram(arrived, edges)[0]
    queue = [mean_present(arrived, answered, a, b) for a, b in pairwise(edges)]
    sent = np.array(
        [np.histogram(arrived[replica == i], edges)[0] for i in range(len(result.replicas))], float
    )
    with np.errstate(invalid="ignore"):
        shares = sent / sent.sum(axis=0)
    return Timeline(edges, counts / np.diff(edges), np.array(queue), shares)


def coarser(time: Timeline, factor: int) -> Timeline:
    """Return a timeline in stretches ``factor`` times as long; BINS must be a multiple of it."""

    def mean(values: Array) -> Array:
        return np.asarray(values.reshape(*values.shape[:-1], -1, factor).mean(axis=-1))

    weights = time.arrivals_rps.reshape(-1, factor)
    parts = np.nan_to_num(time.shares).reshape(len(time.shares), -1, factor) * weights
    with np.errstate(invalid="ignore"):
        shares = parts.sum(axis=-1) / weights.sum(axis=-1)
    return replace(
        time,
        edges_s=time.edges_s[::factor],
        arrivals_rps=mean(time.arrivals_rps),
        queue=mean(time.queue),
        shares=shares,
    )


def is_as_measured(results: Results, replay: Replay) -> bool:
    """Whether a replay has the cost of the cell that it repeats."""
    cells = {c.seed: c for c in results.cells(replay.scenario, replay.policy)}
    measured = cells[replay.seed].summary.cost_s
    return abs(replay.cost_s - measured) <= SAME * measured
