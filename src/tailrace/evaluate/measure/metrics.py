"""Metrics of a run from the times of its requests: latencies, throughput, SLOs, cost."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.sim.result import FAILED, FINISHED, PENDING, SimResult
from tailrace.view.objective import composite_cost


@dataclass(frozen=True)
class Latency:
    """Distribution of one latency in seconds; None throughout if no request has it."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> "Latency":
        """Summarise the values ``[k]`` of the requests that have them."""
        if len(seconds) == 0:
            return cls(None, None, None, None)
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
        return cls(float(seconds.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True)
class RequestTimes:
    """Latencies per request ``[R]`` in seconds; NaN where a request never got so far."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]  #: NaN also for one-token answers and for failed requests
    e2e_s: NDArray[np.float64]  #: NaN also for failed requests
    scheduling_delay_s: NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """The metrics of one run. Undefined metrics are None, never NaN."""

    requests: int  #: counted here, after warm-up
    finished: int
    failed: int  #: their replica died while they were answering
    pending: int  #: never routed: no replica was there
    rerouted: int  #: sent again because their replica died before the first token
    duration_s: float  #: from the first arrival to the last end
    ttft_s: Latency
    tpot_s: Latency  #: of answers of two tokens and more
    e2e_s: Latency
    scheduling_delay_s: Latency
    requests_per_s: float  #: finished
    output_tokens_per_s: float  #: of finished requests
    total_tokens_per_s: float  #: prompt and output of finished requests
    slo_attainment: float  #: share of all requests that met both targets
    goodput_rps: float  #: requests/s that met both targets
    prefix_hit_rate: float  #: cached / prompt tokens of the requests that were scheduled
    cost_s: float  #: mean composite cost of all requests, see composite_cost_s
    mean_batch_size: float  #: requests per iteration, whole run
    preemptions: int  #: whole run
    imbalance: float  #: largest / mean busy time of the replicas, whole run
    replica_share: tuple[float, ...]  #: share of requests sent to each replica, whole run


def request_times(result: SimResult) -> RequestTimes:
    """Return the latencies of each request of a run."""
    done = result.requests
    finished = done["status"] == FINISHED
    output = result.table.rows["output_tokens"].astype(np.float64)
    e2e = np.where(finished, done["finished_s"] - done["arrived_s"], np.nan)
    answering = np.where(
        finished & (output > 1), done["finished_s"] - done["first_token_s"], np.nan
    )
    return RequestTimes(
        ttft_s=done["first_token_s"] - done["arrived_s"],
        tpot_s=answering / np.maximum(output - 1, 1),
        e2e_s=e2e,
        scheduling_delay_s=done["scheduled_s"] - done["arrived_s"],
    )


def composite_cost_s(result: SimResult) -> NDArray[np.float64]:
    """Return the latency cost [R] of each request in seconds (view/objective.py).

    A failed or unrouted request is charged until its failure or the end of the run, plus the cost
    of a lost request. A turn that never arrived because its predecessor was lost is charged only
    the latter.
    """
    done = result.requests
    end = max(np.fmax.reduce(done[name], initial=0.0) for name in ("finished_s", "arrived_s"))
    ended = np.where(np.isfinite(done["finished_s"]), done["finished_s"], end)
    answered = np.where(np.isfinite(done["first_token_s"]), done["first_token_s"], ended)
    e2e = np.nan_to_num(ended - done["arrived_s"])
    ttft = np.nan_to_num(answered - done["arrived_s"])
    late = np.maximum(ttft - result.table.rows["ttft_slo_s"], 0.0)
    cost: NDArray[np.float64] = composite_cost(e2e, ttft, late, done["status"] != FINISHED)
    return cost


def slo_met(result: SimResult) -> NDArray[np.bool_]:
    """Return for each request ``[R]`` whether it finished within both of its targets."""
    times = request_times(result)
    rows = result.table.rows
    finished = result.requests["status"] == FINISHED
    one_token = rows["output_tokens"] == 1
    with np.errstate(invalid="ignore"):
        in_time = times.ttft_s <= rows["ttft_slo_s"]
        fluent = one_token | (times.tpot_s <= rows["tpot_slo_s"])
    met: NDArray[np.bool_] = finished & in_time & fluent
    return met


def summarise(result: SimResult, warmup_fraction: float = 0.0) -> Summary:
    """Summarise a run, leaving out the first ``warmup_fraction`` of the requests.

    Totals of replicas (batch size, preemptions, imbalance, shares) cover the whole run.
    """
    if not 0.0 <= warmup_fraction < 1.0:
        raise TailraceError(f"warm-up must be a fraction in [0, 1), got {warmup_fraction}")
    kept = slice(int(warmup_fraction * len(result.requests)), None)
    done = result.requests[kept]
    rows = result.table.rows[kept]
    times = request_times(result)
    finished = done["status"] == FINISHED
    prompt = rows["prompt_tokens"].astype(np.int64)
    output = rows["output_tokens"].astype(np.int64)
    duration = _duration_s(done)
    met = int(slo_met(result)[kept].sum())
    scheduled = np.isfinite(done["scheduled_s"])
    replicas = result.replicas
    return Summary(
        requests=len(done),
        finished=int(finished.sum()),
        failed=int((done["status"] == FAILED).sum()),
        pending=int((done["status"] == PENDING).sum()),
        rerouted=int((done["reroutes"] > 0).sum()),
        duration_s=duration,
        ttft_s=_finite(times.ttft_s[kept]),
        tpot_s=_finite(times.tpot_s[kept]),
        e2e_s=_finite(times.e2e_s[kept]),
        scheduling_delay_s=_finite(times.scheduling_delay_s[kept]),
        requests_per_s=_ratio(finished.sum(), duration),
        output_tokens_per_s=_ratio(output[finished].sum(), duration),
        total_tokens_per_s=_ratio((prompt + output)[finished].sum(), duration),
        slo_attainment=_ratio(met, len(done)),
        goodput_rps=_ratio(met, duration),
        prefix_hit_rate=_ratio(done["cached_tokens"][scheduled].sum(), prompt[scheduled].sum()),
        cost_s=float(composite_cost_s(result)[kept].mean()),
        mean_batch_size=_ratio(replicas["batched"].sum(), replicas["iterations"].sum()),
        preemptions=int(replicas["preemptions"].sum()),
        imbalance=imbalance(replicas["busy_s"]),
        replica_share=tuple(_ratio(k, replicas["requests"].sum()) for k in replicas["requests"]),
    )


def imbalance(busy_s: NDArray[np.float64]) -> float:
    """Return largest / mean busy time; 1 is perfectly even, also when nothing ran."""
    mean = float(busy_s.mean())
    return float(busy_s.max()) / mean if mean > 0 else 1.0


def _duration_s(done: NDArray[np.void]) -> float:
    """Seconds from the first arrival to the last end among the requests that ended."""
    ended = done["status"] != PENDING
    if not ended.any():
        return 0.0
    return float(done["finished_s"][ended].max() - done["arrived_s"][ended].min())


def _finite(seconds: NDArray[np.float64]) -> Latency:
    return Latency.of(seconds[np.isfinite(seconds)])


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole > 0 else 0.0
