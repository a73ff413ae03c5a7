"""The highest load at which a policy keeps to service-level objectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.config import Scenario
from tailrace.errors import TailraceError, unknown_name
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import policy_for, run
from tailrace.saturation import REFERENCE_REQUESTS, capacity_rps
from tailrace.sim.simulator import uses_reference

#: Least requests of a step of the search within an SLO, and per replica; a P99 needs hundreds, and
#: a queue time to grow.
MIN_PROBE_REQUESTS, PROBE_REQUESTS_PER_REPLICA = 1000, 250
#: Relative width of the interval at which the search ends.
TOLERANCE = 0.01
#: The search within an SLO covers these multiples of the saturation throughput.
LOWEST_LOAD, FIRST_LOAD, HIGHEST_LOAD = 1 / 256, 0.8, 8.0

OBJECTIVES = ("attainment", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "scheduling_delay_p99_s")


@dataclass(frozen=True)
class ServiceObjective:
    """One condition of "within the SLO"."""

    kind: str  #: one of OBJECTIVES
    limit: float  #: least share of requests within their targets, or most seconds

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise unknown_name("objective", self.kind, OBJECTIVES)
        if not (0 < self.limit <= 1 if self.kind == "attainment" else 0 < self.limit < np.inf):
            what = "a share in (0, 1]" if self.kind == "attainment" else "a positive number"
            raise TailraceError(f"the limit of {self.kind} must be {what}, got {self.limit}")

    def met(self, summary: Summary) -> bool:
        """Whether a run meets it; a run in which requests fail or never start does not."""
        if self.kind == "attainment":
            return summary.slo_attainment >= self.limit
        value = getattr(summary, self.kind.replace("_p99_s", "_s")).p99
        return summary.finished == summary.requests and value is not None and value <= self.limit

    def __str__(self) -> str:
        """Return it as a condition."""
        return f"{self.kind} {'>=' if self.kind == 'attainment' else '<='} {self.limit:g}"


@dataclass(frozen=True)
class LoadProbe:
    """One step of the search."""

    rate_rps: float
    load: float  #: fraction of the saturation throughput
    met: bool
    summary: Summary


@dataclass(frozen=True)
class MaxLoad:
    """The highest rate found within the objectives, and how it was found."""

    policy: str
    objectives: tuple[ServiceObjective, ...]
    saturation_rps: float
    rate_rps: float | None  #: None: not even the lightest load tried is within them
    load: float | None  #: the same as a fraction of the saturation throughput
    bounded: bool  #: False: even the heaviest load tried is within them
    probes: tuple[LoadProbe, ...]  #: in the order of the search


def max_load(
    scenario: Scenario,
    policy: str,
    objectives: Sequence[ServiceObjective] = (ServiceObjective("attainment", 0.99),),
    *,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    progress: Callable[[LoadProbe], None] = lambda _: None,
) -> MaxLoad:
    """Find the highest rate at which a policy stays within all objectives, by bisection.

    Every rate is tried on traffic from the same seed, of at least MIN_PROBE_REQUESTS requests
    (REFERENCE_REQUESTS on the reference engine). ``progress`` gets each step.
    """
    policy_for(scenario, policy)
    if not objectives:
        raise TailraceError("a search for the highest load needs at least one objective")
    saturation = capacity_rps(scenario)
    requests = max(scenario.workload.requests, _least_probe_requests(scenario))
    scenario = scenario.with_workload(requests=requests)
    probes: list[LoadProbe] = []

    def within(load: float) -> bool:
        rate = load * saturation
        summary = summarise(run(scenario, policy, rate, seed))
        probe = LoadProbe(rate, load, all(o.met(summary) for o in objectives), summary)
        probes.append(probe)
        progress(probe)
        return probe.met

    low, high = _bracket(within)
    while low is not None and high is not None and high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) else (low, middle)
    rate = None if low is None else low * saturation
    bounded = high is not None
    return MaxLoad(policy, tuple(objectives), saturation, rate, low, bounded, tuple(probes))


def _bracket(within: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """Return a load that is within the objectives and one that is not; None where there is none."""
    load = FIRST_LOAD
    if within(load):
        while load < HIGHEST_LOAD:
            low, load = load, min(1.25 * load, HIGHEST_LOAD)
            if not within(load):
                return low, load
        return load, None
    while load > LOWEST_LOAD:
        high, load = load, max(load / 2, LOWEST_LOAD)
        if within(load):
            return load, high
    return None, load


def _least_probe_requests(scenario: Scenario) -> int:
    if uses_reference(scenario.cluster, scenario.engine):
        return REFERENCE_REQUESTS
    return max(MIN_PROBE_REQUESTS, PROBE_REQUESTS_PER_REPLICA * scenario.cluster.size)
