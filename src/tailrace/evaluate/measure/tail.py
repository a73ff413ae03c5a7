"""Worst cases of a run: starvation, hard limits, growing queues."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tailrace.sim.result import FINISHED, SimResult

#: Rates are measured until this share of requests has arrived; afterwards the cluster drains.
RUN_OUT = 0.95
#: A session needs at least this many requests for its mean to count.
LEAST_TURNS = 3
#: A queue is said to grow without bound if its mean rises from quarter to quarter of the run, at
#: least by this factor in all, to more than this many requests per replica.
GROWTH, LEAST_QUEUE_PER_REPLICA = 2.0, 4.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Extremes:
    """Extremes that means and P99 hide. Times in s, over requests after warm-up."""

    longest_ttft_s: float  #: oldest request: longest wait for a first token, or for none at all
    longest_e2e_s: float  #: longest time in the system
    worst_session_ttft_s: float | None  #: mean TTFT of the session that fared worst; None: none
    over_limit: int  #: requests that waited longer for their first token than the hard limit
    least_share: float  #: smallest share of requests of a replica / an even share, whole run
    most_share: float  #: largest one
    steady_rps: float  #: requests/s that ended while others still arrived
    last_queue: float  #: mean number of requests without a first token, last quarter of the run
    queue_grows: bool  #: alarm: the queue has no bound, see GROWTH


def extremes(result: SimResult, warmup_fraction: float, ttft_limit_s: float) -> Extremes:
    """Return the extremes of a run without its first ``warmup_fraction`` of requests."""
    kept = slice(int(warmup_fraction * len(result.requests)), None)
    arrived, answered, ended, (start, stop) = times_of(result, warmup_fraction)
    ttft, e2e = answered - arrived, ended - arrived
    done = result.requests["status"] == FINISHED
    in_time = int(((ended > start) & (ended <= stop) & done).sum())
    edges = np.linspace(start, stop, 5)
    queue = [mean_present(arrived, answered, a, b) for a, b in pairwise(edges)]
    sent = result.replicas["requests"]
    even = max(1.0, float(sent.sum())) / len(sent)
    return Extremes(
        longest_ttft_s=float(ttft[kept].max()),
        longest_e2e_s=float(e2e[kept].max()),
        worst_session_ttft_s=_worst_session_s(result.table.rows["session"][kept], ttft[kept]),
        over_limit=int((ttft[kept] > ttft_limit_s).sum()),
        least_share=float(sent.min()) / even,
        most_share=float(sent.max()) / even,
        steady_rps=in_time / float(stop - start) if stop > start else 0.0,
        last_queue=queue[-1],
        queue_grows=_grows(queue, len(sent)),
    )


def times_of(
    result: SimResult, warmup_fraction: float
) -> tuple[Array, Array, Array, tuple[float, float]]:
    """When each request [R] arrived, was answered and ended, and when rates are measured, in s.

    What never came to pass is set to the end of the run. A turn that never arrived, because what it
    follows was lost, arrives at the end as well: it waits for nothing.
    """
    done = result.requests
    end = max(np.fmax.reduce(done[name], initial=0.0) for name in ("finished_s", "arrived_s"))
    arrived, ended, first = (
        np.where(np.isfinite(done[name]), done[name], end)
        for name in ("arrived_s", "finished_s", "first_token_s")
    )
    start, stop = np.quantile(arrived, (warmup_fraction, RUN_OUT))
    return arrived, np.minimum(first, ended), ended, (float(start), float(stop))


def mean_present(entered: Array, left: Array, start: float, stop: float) -> float:
    """Return the mean number present in a stretch of time, from when each [R] entered and left."""
    if stop <= start:
        return 0.0
    present = np.minimum(left, stop) - np.maximum(entered, start)
    return float(np.maximum(present, 0.0).sum() / (stop - start))


def _worst_session_s(session: NDArray[np.integer], ttft: Array) -> float | None:
    member = session >= 0
    if not member.any():
        return None
    _, number = np.unique(session[member], return_inverse=True)
    turns = np.bincount(number)
    means = np.bincount(number, ttft[member]) / turns
    means = means[turns >= LEAST_TURNS]
    return float(means.max()) if len(means) else None


def _grows(queue: list[float], replicas: int) -> bool:
    rising = all(a < b for a, b in pairwise(queue))
    large = queue[-1] > LEAST_QUEUE_PER_REPLICA * replicas
    return rising and large and queue[-1] > GROWTH * queue[0]
