"""How far a simulation of recorded traffic is from what was recorded.

Every request is sent to its recorded replica at its recorded moment, so that only the replicas are
put to the test: cost model, capacity and prefix cache. Times count from the sending, as a wait at
the router is no replica's doing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Engine
from tailrace.errors import TailraceError
from tailrace.policy.base import Policy
from tailrace.replay.recorded import RecordedTraffic
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import Simulation, simulate, uses_reference
from tailrace.view.records import View

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """One latency, recorded against simulated. Errors are shares: 0.1 is 10 % too long."""

    name: str
    requests: int
    recorded_mean_s: float
    simulated_mean_s: float
    recorded_p50_s: float
    simulated_p50_s: float
    recorded_p99_s: float
    simulated_p99_s: float
    typical_error: float
    """Median over requests of the size of the error."""
    worst_error: float
    """99th percentile of that."""
    correlation: float | None
    """Rank correlation over requests; None: fewer than three, or all equal."""
    mean_error: float
    p50_error: float
    p99_error: float


@dataclass(frozen=True)
class Fidelity:
    """Simulated against recorded latencies."""

    latencies: tuple[Agreement, ...]
    recorded_hit_rate: float | None
    """Cached share of prompt tokens; None: the servers did not say."""
    simulated_hit_rate: float
    recorded_s: dict[str, Floats]
    """Latencies by name and request, for plots."""
    simulated_s: dict[str, Floats]


def fidelity(
    recorded: RecordedTraffic,
    cluster: Cluster,
    engine: Engine | None = None,
    *,
    overhead_ms: Sequence[float] = (0.0,),
    only: NDArray[np.bool_] | None = None,
) -> Fidelity:
    """Simulate a log on its own replicas and compare; ``cluster`` is in the order of the log's.

    ``overhead_ms`` is what a request takes beside its iterations, for each replica or for all. All
    requests are simulated; ``only`` [R] says which are compared.
    """
    if cluster.size < recorded.replicas:
        raise TailraceError(
            f"the log names {recorded.replicas} replicas and the cluster file has {cluster.size}: "
            "give the cluster that was recorded"
        )
    rows = recorded.by_sending()
    result = _resent(recorded, rows, cluster, engine or Engine())
    done, before = with_overhead(result, overhead_ms).requests, recorded.outcomes[rows]
    counted = np.full(len(rows), True) if only is None else only[rows]
    streamed = counted & ~before["is_estimated"]
    pairs = {
        "TTFT": (before["first_s"] - before["sent_s"], done["first_token_s"] - done["arrived_s"],
                 streamed),
        "E2E": (before["last_s"] - before["sent_s"], done["finished_s"] - done["arrived_s"],
                counted),
    }  # fmt: skip
    latencies = []
    was: dict[str, Floats] = {}
    now: dict[str, Floats] = {}
    for name, (real, simulated, counts) in pairs.items():
        if counts.any():
            was[name], now[name] = real[counts], simulated[counts]
            latencies.append(agreement(name, was[name], now[name]))
    reported = counted & (before["cached_tokens"] >= 0)
    prompt = result.table.rows["prompt_tokens"].astype(np.float64)
    real_hits = (
        float(before["cached_tokens"][reported].sum() / prompt[reported].sum())
        if reported.any()
        else None
    )
    hits = float(done["cached_tokens"][counted].sum() / prompt[counted].sum())
    return Fidelity(tuple(latencies), real_hits, hits, was, now)


def with_overhead(result: SimResult, overhead_ms: Sequence[float]) -> SimResult:
    """Return a simulation whose answers all come later by what a request takes beside iterations.

    ``overhead_ms`` is repeated over the replicas. It is network, HTTP and tokenising: done before
    the first token, and by nobody whom other requests wait for.
    """
    if not any(overhead_ms):
        return result
    done = result.requests.copy()
    replica = np.maximum(done["replica"], 0) % len(overhead_ms)
    for name in ("first_token_s", "finished_s"):
        done[name] += 1e-3 * np.asarray(overhead_ms)[replica]
    return replace(result, requests=done)


def agreement(name: str, recorded_s: Floats, simulated_s: Floats) -> Agreement:
    """Compare one latency of the same requests [k], both in seconds."""
    errors = np.abs(simulated_s / recorded_s - 1.0)
    real, ours = (
        np.array([values.mean(), *np.percentile(values, (50, 99))])
        for values in (recorded_s, simulated_s)
    )
    figures: list[Any] = [*np.column_stack([real, ours]).ravel().tolist()]
    figures += [float(np.median(errors)), float(np.percentile(errors, 99))]
    figures += [_rank_correlation(recorded_s, simulated_s), *(ours / real - 1.0).tolist()]
    return Agreement(name, len(errors), *figures)


def _rank_correlation(a: Floats, b: Floats) -> float | None:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def _resent(
    recorded: RecordedTraffic, rows: NDArray[np.int64], cluster: Cluster, engine: Engine
) -> SimResult:
    """Simulate requests in order of sending, each on its recorded replica."""
    table = recorded.at(rows)
    replicas = recorded.outcomes["replica"][rows].astype(np.int64)
    if uses_reference(cluster, engine):
        return simulate(cluster, table, _Recorded(replicas), engine=engine)
    simulation = Simulation(cluster, table, engine=engine)
    simulation.replay(replicas)
    return simulation.result()


class _Recorded(Policy):
    """Sends every request where it was sent before."""

    name = "recorded"

    def __init__(self, replicas: NDArray[np.int64]) -> None:
        self._replicas = replicas

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return 0 for the recorded replica and 1 for the others."""
        scores = np.ones(len(view.replicas))
        scores[self._replicas[int(view.request["id"])]] = 0.0
        return scores
