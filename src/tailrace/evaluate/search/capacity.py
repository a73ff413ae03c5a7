"""How much traffic a cluster can take: its saturation throughput, and the most within an SLO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.errors import TailraceError, unknown_name
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import policy_for, run, traffic
from tailrace.seeds import Purpose, require, seeds
from tailrace.sim.result import FINISHED, SimResult
from tailrace.sim.simulator import simulate, uses_reference
from tailrace.workload.table import RequestTable

SATURATION_POLICY = "load_aware"
#: Requests per replica of a measurement, whatever the scenario asks: enough that its middle is
#: steady. Conversations begin short and take minutes to reach their usual length.
REQUESTS_PER_REPLICA = 1000
SESSION_REQUESTS_PER_REPLICA = 6000
MIN_REQUESTS, MAX_REQUESTS = 4000, 200_000
#: The reference engine is a hundred times slower: it measures roughly rather than for minutes.
REFERENCE_REQUESTS, REFERENCE_ROUNDS = 400, 3
#: Least requests of a step of the search within an SLO, and per replica; a P99 needs hundreds, and
#: a queue time to grow.
MIN_PROBE_REQUESTS, PROBE_REQUESTS_PER_REPLICA = 1000, 250
FIRST_GUESS_RPS_PER_REPLICA = 5.0
#: The measurement plays traffic this much faster than it was made. Not much more, or on mixed
#: replicas the fast ones run dry before 80 % of the requests are done.
OVERLOAD = 2.0
TOLERANCE = 0.01
MAX_ROUNDS = 12
#: The search within an SLO covers these multiples of the saturation throughput.
LOWEST_LOAD, FIRST_LOAD, HIGHEST_LOAD = 1 / 256, 0.8, 8.0

OBJECTIVES = ("attainment", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "scheduling_delay_p99_s")


@dataclass(frozen=True)
class Objective:
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
        """Whether a run keeps to it; a run in which requests fail or never start does not."""
        if self.kind == "attainment":
            return summary.slo_attainment >= self.limit
        value = getattr(summary, self.kind.replace("_p99_s", "_s")).p99
        return summary.finished == summary.requests and value is not None and value <= self.limit

    def __str__(self) -> str:
        """Say it as a condition."""
        return f"{self.kind} {'>=' if self.kind == 'attainment' else '<='} {self.limit:g}"


@dataclass(frozen=True)
class Probe:
    """One step of the search."""

    rate_rps: float
    load: float  #: fraction of the saturation throughput
    met: bool
    summary: Summary


@dataclass(frozen=True)
class MaxLoad:
    """The highest rate found within the objectives, and how it was found."""

    policy: str
    objectives: tuple[Objective, ...]
    saturation_rps: float
    rate_rps: float | None  #: None: not even the lightest load tried is within them
    load: float | None  #: the same as a fraction of the saturation throughput
    bounded: bool  #: False: even the heaviest load tried is within them
    probes: tuple[Probe, ...]  #: in the order of the search


def saturation_rps(scenario: Scenario, seed: int | None = None) -> float:
    """Return the throughput in requests/s of the scenario's cluster when it gets too much traffic.

    Measured with ``load_aware`` on a tuning seed, without events, between 20 % and 80 % of the
    completions. Requests are made for a rate and then played OVERLOAD times as fast, follow-ups not
    waiting for their parents, so that between two turns of a session lie as many other requests as
    there would be at that rate: cache reuse depends on it. The rate is replaced by the throughput
    it gave, damped from the third round on, until the two agree. On the reference engine there are
    at most REFERENCE_REQUESTS requests and REFERENCE_ROUNDS rounds.
    """
    seed = seeds(Purpose.TUNING, 1)[0] if seed is None else require(seed, Purpose.TUNING)
    rate = FIRST_GUESS_RPS_PER_REPLICA * scenario.cluster.size
    measured = _measurement(scenario, rate, seed)
    throughput = rate
    for round_number in range(REFERENCE_ROUNDS if _is_slow(scenario) else MAX_ROUNDS):
        throughput = _throughput_rps(measured, rate, seed)
        if abs(throughput - rate) <= TOLERANCE * rate:
            break
        rate = throughput if round_number < 2 else float(np.sqrt(rate * throughput))
    return throughput


def max_load(
    scenario: Scenario,
    policy: str,
    objectives: Sequence[Objective] = (Objective("attainment", 0.99),),
    *,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    progress: Callable[[Probe], None] | None = None,
) -> MaxLoad:
    """Find the highest rate at which a policy stays within all objectives, by bisection.

    Every rate is tried on traffic from the same seed, of at least MIN_PROBE_REQUESTS requests
    (REFERENCE_REQUESTS on the reference engine). ``progress`` is told each step.
    """
    policy_for(scenario, policy)
    if not objectives:
        raise TailraceError("a search for the highest load needs at least one objective")
    saturation = scenarios.capacity_rps(scenario)
    scenario = _with_requests(
        scenario, max(scenario.workload.requests, _least_probe_requests(scenario))
    )
    probes: list[Probe] = []

    def within(load: float) -> bool:
        rate = load * saturation
        summary = summarise(run(scenario, policy, rate, seed))
        probe = Probe(rate, load, all(o.met(summary) for o in objectives), summary)
        probes.append(probe)
        if progress is not None:
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


def _measurement(scenario: Scenario, rate: float, seed: int) -> Scenario:
    """Return the scenario to measure: steady arrivals, no events, as many requests as it takes."""

    def with_requests(per_replica: int) -> Scenario:
        count = min(max(per_replica * scenario.cluster.size, MIN_REQUESTS), MAX_REQUESTS)
        if _is_slow(scenario):
            count = min(count, REFERENCE_REQUESTS)
        workload = scenario.workload.model_copy(update={"requests": count, "arrivals": "poisson"})
        return scenario.model_copy(update={"workload": workload, "events": ()})

    short = with_requests(REQUESTS_PER_REPLICA)
    if (traffic(short, rate, seed).rows["parent"] >= 0).any():
        return with_requests(SESSION_REQUESTS_PER_REPLICA)
    return short


def _is_slow(scenario: Scenario) -> bool:
    return uses_reference(scenario.cluster, scenario.engine)


def _least_probe_requests(scenario: Scenario) -> int:
    if _is_slow(scenario):
        return REFERENCE_REQUESTS
    return max(MIN_PROBE_REQUESTS, PROBE_REQUESTS_PER_REPLICA * scenario.cluster.size)


def _with_requests(scenario: Scenario, count: int) -> Scenario:
    workload = scenario.workload.model_copy(update={"requests": count})
    return scenario.model_copy(update={"workload": workload})


def _throughput_rps(scenario: Scenario, rate: float, seed: int) -> float:
    """Play requests made for ``rate`` OVERLOAD times as fast; return completions/s."""
    result = simulate(
        scenario.cluster,
        _rushed(traffic(scenario, rate, seed)),
        SATURATION_POLICY,
        router=scenario.router,
        engine=scenario.engine,
        seed=seed,
    )
    return middle_throughput_rps(result)


def _rushed(table: RequestTable) -> RequestTable:
    """Return the table OVERLOAD times as fast, every request arriving by itself."""
    rows = table.rows.copy()
    rows["arrival_s"] /= OVERLOAD
    rows["think_s"] = 0.0
    rows["parent"] = -1
    return RequestTable(rows, table.runs)


def middle_throughput_rps(result: SimResult) -> float:
    """Return completions/s between 20 % and 80 % of the completions."""
    done = result.requests
    ends = np.sort(done["finished_s"][done["status"] == FINISHED])
    first, last = int(0.2 * len(ends)), int(0.8 * len(ends))
    if last <= first or ends[last] <= ends[first]:
        raise TailraceError(f"{len(ends)} finished requests are too few to measure a throughput")
    return float((last - first) / (ends[last] - ends[first]))
