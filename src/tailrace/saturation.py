"""Saturation throughput of a cluster, and the request rates that are fractions of it.

A scenario gives its traffic as a rate in requests/s or as a load, a fraction of its capacity. The
capacity is the saturation throughput: stored in the scenario, or else measured by simulation.
"""

from functools import lru_cache

import numpy as np

from tailrace import config
from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.seeds import Purpose, require, seeds
from tailrace.sim.result import FINISHED, SimResult
from tailrace.sim.simulator import simulate, uses_reference
from tailrace.workload.library import from_settings
from tailrace.workload.table import RequestTable

SATURATION_POLICY = "load_aware"
#: Requests per replica of a measurement, whatever the scenario asks: enough that its middle is
#: steady. Conversations begin short and take minutes to reach their usual length.
REQUESTS_PER_REPLICA = 1000
SESSION_REQUESTS_PER_REPLICA = 6000
MIN_REQUESTS, MAX_REQUESTS = 4000, 200_000
#: The reference engine is a hundred times slower: it measures roughly rather than for minutes.
REFERENCE_REQUESTS, REFERENCE_ROUNDS = 400, 3
#: Recorded traffic is measured by whoever has it, on many clusters: less exactly.
RECORDED_REQUESTS, RECORDED_TOLERANCE = 6000, 0.05
#: A rough measurement, for training on many kinds of traffic.
ROUGH_REQUESTS, ROUGH_ROUNDS = 4000, 4
FIRST_GUESS_RPS_PER_REPLICA = 5.0
#: The measurement plays traffic this much faster than it was made. Not much more, or on mixed
#: replicas the fast ones run dry before 80 % of the requests are done.
OVERLOAD = 2.0
TOLERANCE = 0.01
MAX_ROUNDS = 12


def capacity_rps(scenario: Scenario) -> float:
    """Return the scenario's capacity in requests/s: the stored one, else measured now."""
    if scenario.capacity_rps is not None:
        return scenario.capacity_rps
    return saturation_rps(scenario)


def resolve_rate(scenario: Scenario) -> float | None:
    """Return the rate of a scenario in requests/s; None: the traffic's own pace."""
    workload = scenario.workload
    if workload.rate is not None:
        return workload.rate
    if workload.load is None:
        return None
    rate = workload.load * capacity_rps(scenario)
    if not config.MIN_RATE <= rate <= config.MAX_RATE:
        raise TailraceError(
            f"a load of {workload.load:g} comes to {rate:g} requests/s; "
            f"a rate must be from {config.MIN_RATE:g} to {config.MAX_RATE:g}"
        )
    return rate


def with_capacity(scenario: Scenario) -> Scenario:
    """Return the scenario with its capacity filled in if its rate depends on it."""
    if scenario.workload.rate is not None or scenario.workload.load is None:
        return scenario
    return scenario.model_copy(update={"capacity_rps": capacity_rps(scenario)})


def saturation_rps(scenario: Scenario, seed: int | None = None, *, rough: bool = False) -> float:
    """Return the throughput of a scenario's cluster under overload, in requests/s.

    Measured with ``load_aware`` on a tuning seed, without events, between 20 % and 80 % of the
    completions. Requests are made for a rate and then played OVERLOAD times as fast, follow-ups not
    waiting for their parents, so that between two turns of a session lie as many other requests as
    there would be at that rate: cache reuse depends on it. The rate is replaced by the throughput
    it gave, damped from the third round on, until the two agree. On the reference engine there are
    at most REFERENCE_REQUESTS requests and REFERENCE_ROUNDS rounds; resampled traffic and ``rough``
    measurements have limits of their own.
    """
    seed = seeds(Purpose.TUNING, 1)[0] if seed is None else require(seed, Purpose.TUNING)
    rate = FIRST_GUESS_RPS_PER_REPLICA * scenario.cluster.size
    most, rounds, tolerance = MAX_REQUESTS, MAX_ROUNDS, TOLERANCE
    if scenario.workload.arrivals == "resampled":
        most, tolerance = RECORDED_REQUESTS, RECORDED_TOLERANCE
    if rough:
        most, rounds = ROUGH_REQUESTS, ROUGH_ROUNDS
    if _is_slow(scenario):
        most, rounds = REFERENCE_REQUESTS, REFERENCE_ROUNDS
    measured = _measurement(scenario, rate, seed, most)
    throughput = rate
    for round_number in range(rounds):
        throughput = _throughput_rps(measured, rate, seed)
        if abs(throughput - rate) <= tolerance * rate:
            break
        rate = throughput if round_number < 2 else float(np.sqrt(rate * throughput))
    return throughput


def _measurement(scenario: Scenario, rate: float, seed: int, most: int) -> Scenario:
    """Return the scenario to measure: steady arrivals, no events, as many requests as it takes.

    ``most`` limits their number.
    """

    def with_requests(per_replica: int) -> Scenario:
        count = min(max(per_replica * scenario.cluster.size, MIN_REQUESTS), most)
        arrivals = scenario.workload.arrivals
        steady = scenario.with_workload(
            requests=count, arrivals=arrivals if arrivals == "resampled" else "poisson"
        )
        return steady.model_copy(update={"events": ()})

    short = with_requests(REQUESTS_PER_REPLICA)
    if (_traffic(short, rate, seed).rows["parent"] >= 0).any():
        return with_requests(SESSION_REQUESTS_PER_REPLICA)
    return short


def _is_slow(scenario: Scenario) -> bool:
    return uses_reference(scenario.cluster, scenario.engine)


@lru_cache(maxsize=1)
def _traffic(scenario: Scenario, rate: float, seed: int) -> RequestTable:
    """Return the requests; the first round needs those that :func:`_measurement` looked at."""
    return from_settings(scenario.workload, rate, seed)


def _throughput_rps(scenario: Scenario, rate: float, seed: int) -> float:
    """Play requests made for ``rate`` OVERLOAD times as fast; return completions/s."""
    result = simulate(
        scenario.cluster,
        _rushed(_traffic(scenario, rate, seed)),
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
