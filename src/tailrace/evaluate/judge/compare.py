"""Policies on identical arrivals over several seeds, ranked with confidence intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.judge.bootstrap import Interval, bounds, resampled
from tailrace.evaluate.measure.metrics import Latency, Summary, summarise
from tailrace.evaluate.measure.runner import policy_for, run
from tailrace.parallel import WorkerPool
from tailrace.saturation import resolve_rate

DEFAULT_REFERENCE = "least_outstanding"


@dataclass(frozen=True)
class Entry:
    """One policy's results."""

    policy: str
    versus_reference: Interval | None  #: mean cost / mean cost of the reference, same requests
    mean: Summary  #: over seeds: counts are totals, all else is the mean
    runs: tuple[Summary, ...]  #: one per seed


@dataclass(frozen=True)
class Comparison:
    """All policies on the same traffic, lowest cost first."""

    scenario: Scenario
    rate_rps: float | None  #: offered; None: the traffic's own pace
    seeds: tuple[int, ...]
    reference: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class ComparisonTask:
    """One policy on the traffic of one seed."""

    scenario: Scenario
    rate: float | None
    policy: str
    seed: int
    warmup: float


def simulated(task: ComparisonTask) -> Summary:
    """Run a task in the simulator."""
    return summarise(run(task.scenario, task.policy, task.rate, task.seed), task.warmup)


def compare(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    reference: str = DEFAULT_REFERENCE,
    warmup_fraction: float = 0.0,
    play: Callable[[ComparisonTask], Summary] = simulated,
) -> Comparison:
    """Run every policy on every seed and rank them by latency cost.

    ``jobs`` processes work side by side (default: one per core); ``progress`` gets how many runs
    are done. The reference is added if it is missing. ``play`` runs a task, by default in the
    simulator.
    """
    wanted = list(dict.fromkeys([*policies, reference]))
    for name in wanted:
        policy_for(scenario, name)
    if not seeds or len(set(seeds)) != len(seeds):
        raise TailraceError("a comparison needs at least one seed, and each seed once")
    rate = resolve_rate(scenario)
    tasks = [
        ComparisonTask(scenario, rate, policy, seed, warmup_fraction)
        for seed in seeds
        for policy in wanted
    ]
    found: dict[tuple[str, int], Summary] = {}
    with WorkerPool(jobs) as pool:
        for done, (task, summary) in enumerate(pool.run(play, tasks), start=1):
            found[task.policy, task.seed] = summary
            progress(done)
    runs = {policy: tuple(found[policy, seed] for seed in seeds) for policy in wanted}
    entries = [
        Entry(policy, _versus(runs[policy], runs[reference]), averaged(runs[policy]), runs[policy])
        for policy in wanted
    ]
    entries.sort(key=lambda e: e.mean.cost_s)
    return Comparison(scenario, rate, tuple(seeds), reference, tuple(entries))


def averaged(runs: Sequence[Summary]) -> Summary:
    """Merge summaries of several seeds: counts add up, the rest is averaged."""
    return Summary(**{f.name: _merge([getattr(r, f.name) for r in runs]) for f in fields(Summary)})


def ratio_interval(costs: NDArray[np.float64], reference: NDArray[np.float64]) -> Interval:
    """Return mean(costs) / mean(reference), both [seeds], with its paired bootstrap interval."""
    ratio = float(costs.mean() / reference.mean())
    if len(costs) < 2:
        return Interval(ratio, None, None)
    drawn = resampled(len(costs))
    return Interval(ratio, *bounds(costs[drawn].mean(axis=1) / reference[drawn].mean(axis=1)))


def _versus(runs: Sequence[Summary], reference: Sequence[Summary]) -> Interval | None:
    costs = np.array([run.cost_s for run in runs])
    reference_costs = np.array([run.cost_s for run in reference])
    return None if 0.0 in reference_costs else ratio_interval(costs, reference_costs)


def _merge(values: Sequence[Any]) -> Any:
    """Merge one field of several summaries."""
    known = [value for value in values if value is not None]
    first = known[0] if known else None
    if isinstance(first, int):
        return sum(known)
    if isinstance(first, float):
        return float(np.mean(known))
    if isinstance(first, tuple):
        return tuple(np.mean(known, axis=0).tolist())
    if isinstance(first, Latency):
        names = [f.name for f in fields(Latency)]
        return Latency(**{n: _merge([getattr(v, n) for v in known]) for n in names})
    return None
