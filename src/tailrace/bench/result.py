"""Results of a load on a live endpoint, in the simulator's terms."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import (
    Latency,
    RequestTimes,
    composite_cost_s,
    request_times,
    slo_met,
)
from tailrace.evaluate.measure.request_results import STATUS_NAMES
from tailrace.files import atomic_path, check_target
from tailrace.sim.result import (
    FAILED,
    FINISHED,
    PENDING,
    REPLICA_RESULT,
    REQUEST_RESULT,
    SimResult,
)
from tailrace.workload.table import RequestTable

#: One request. Times are real seconds from the start of the load, NaN: never; counts -1: unknown.
LOAD_REQUEST = np.dtype(
    [
        ("due_s", "f8"),  # when it was to be sent
        ("sent_s", "f8"),  # when it was; latencies count from here
        ("first_s", "f8"),  # first token
        ("last_s", "f8"),  # last token
        ("ended_s", "f8"),  # end of the response, or of the attempt
        ("status", "i4"),  # PENDING (never sent), FINISHED or FAILED
        ("failure", "i4"),  # number in LoadResult.kinds, -1: none
        ("replica", "i4"),  # number in LoadResult.labels, -1: unknown
        ("prompt_tokens", "i4"),  # as the server counts
        ("output_tokens", "i4"),  # as the server counts, else events
        ("cached_tokens", "i4"),  # as the server says
    ]
)
#: A generator that is later than this for one request in a hundred distorts what it measures.
LATE_S = 0.02


@dataclass(frozen=True)
class LoadResult:
    """Requests [R] (LOAD_REQUEST) in the order of the table, and how it went for the generator."""

    table: RequestTable
    requests: NDArray[np.void]
    kinds: tuple[str, ...]
    """Kinds of failures."""
    labels: tuple[str, ...]
    """Replicas, as the router calls them."""
    connections: int
    """Made in all."""
    words_per_token: float
    calibration: str
    """Where ``words_per_token`` comes from."""

    @property
    def failures(self) -> dict[str, int]:
        """Number of failures by kind, most frequent first."""
        failed = self.requests["failure"]
        counts = Counter(self.kinds[k] for k in failed[failed >= 0].tolist())
        return dict(counts.most_common())

    def lateness_s(self) -> NDArray[np.float64]:
        """Seconds by which the generator sent each request late."""
        late: NDArray[np.float64] = self.requests["sent_s"] - self.requests["due_s"]
        return np.maximum(late[np.isfinite(late)], 0.0)

    def simulated(self) -> SimResult:
        """Return the run as a simulation would: what a server does not report is left empty."""
        done = self.requests
        rows = self.table.rows.copy()
        known = done["output_tokens"] > 0
        rows["output_tokens"][known] = done["output_tokens"][known]
        requests = np.zeros(len(done), REQUEST_RESULT)
        requests["arrived_s"] = done["sent_s"]
        requests["scheduled_s"] = np.nan
        requests["first_token_s"] = done["first_s"]
        finished = done["status"] == FINISHED
        requests["finished_s"] = np.where(finished, done["last_s"], done["ended_s"])
        requests["replica"] = done["replica"]
        requests["status"] = done["status"]
        requests["cached_tokens"] = np.maximum(done["cached_tokens"], 0)
        nothing = np.zeros(0, REPLICA_RESULT)
        return SimResult(RequestTable(rows, self.table.runs), requests, nothing, len(done))

    def times(self) -> RequestTimes:
        """Latencies of each request [R] in seconds."""
        return request_times(self.simulated())

    def summary(self, warmup_fraction: float = 0.0) -> dict[str, Any]:
        """Return the metrics of the run, named as in ``evaluate.measure.metrics.Summary``.

        The first ``warmup_fraction`` of the requests is left out. What is unknown is None.
        """
        if not 0.0 <= warmup_fraction < 1.0:
            raise TailraceError(f"warm-up must be a fraction in [0, 1), got {warmup_fraction}")
        kept = slice(int(warmup_fraction * len(self.requests)), None)
        result, times = self.simulated(), self.times()
        done, rows = self.requests[kept], result.table.rows[kept]
        finished = done["status"] == FINISHED
        output = int(rows["output_tokens"][finished].sum())
        prompt = np.where(done["prompt_tokens"] > 0, done["prompt_tokens"], rows["prompt_tokens"])
        met = int(slo_met(result)[kept].sum())
        span_s = _span_s(done)
        reported = finished & (done["cached_tokens"] >= 0)
        counted = finished & (done["prompt_tokens"] > 0)
        late = self.lateness_s()
        metrics: dict[str, Any] = {
            "requests": len(done),
            "finished": int(finished.sum()),
            "failed": int((done["status"] == FAILED).sum()),
            "pending": int((done["status"] == PENDING).sum()),
            "duration_s": span_s,
            **_latency("ttft_s", times.ttft_s[kept]),
            **_latency("tpot_s", times.tpot_s[kept]),
            **_latency("e2e_s", times.e2e_s[kept]),
            "requests_per_s": _share(finished.sum(), span_s) or 0.0,
            "output_tokens_per_s": _share(output, span_s) or 0.0,
            "total_tokens_per_s": _share(output + int(prompt[finished].sum()), span_s) or 0.0,
            "slo_attainment": _share(met, len(done)) or 0.0,
            "goodput_rps": _share(met, span_s) or 0.0,
            "prefix_hit_rate": _share(
                done["cached_tokens"][reported].sum(), prompt[reported].sum()
            ),
            "cost_s": float(composite_cost_s(result)[kept].mean()),
            "replica_share": self._shares(done),
            "failures": self.failures,
            "lateness_s_p50": float(np.percentile(late, 50)) if len(late) else None,
            "lateness_s_p99": float(np.percentile(late, 99)) if len(late) else None,
            "lateness_s_max": float(late.max()) if len(late) else None,
            "prompt_tokens_ratio": _share(
                done["prompt_tokens"][counted].sum(), rows["prompt_tokens"][counted].sum()
            ),
            "connections": self.connections,
        }
        return metrics

    def _shares(self, done: NDArray[np.void]) -> dict[str, float]:
        """Share of requests that went to each replica; empty if the server does not report it."""
        known = done["replica"][done["replica"] >= 0]
        counts = np.bincount(known, minlength=len(self.labels)) / max(len(known), 1)
        return dict(sorted(zip(self.labels, counts.tolist(), strict=True)))

    @property
    def is_late(self) -> bool:
        """Whether the generator itself was the bottleneck."""
        late = self.lateness_s()
        return bool(len(late)) and float(np.percentile(late, 99)) > LATE_S


def write(result: LoadResult, path: Path) -> None:
    """Write one row per request to a Parquet file; a time that does not exist is null."""
    check_target(path, (".parquet",))
    rows, done = result.table.rows, result.requests
    times = result.times()
    columns: dict[str, Any] = {
        "request": np.arange(len(rows)),
        "session": rows["session"],
        "turn": rows["turn"],
        "table_prompt_tokens": rows["prompt_tokens"],
        "table_output_tokens": rows["output_tokens"],
        "status": pa.array(STATUS_NAMES).take(pa.array(done["status"])),
        "failure": _names(result.kinds, done["failure"]),
        "replica": _names(result.labels, done["replica"]),
    }
    for name in ("due_s", "sent_s", "first_s", "last_s", "ended_s"):
        columns[name] = _nullable(done[name], np.isnan(done[name]))
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        columns[name] = _nullable(done[name], done[name] < 0)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        columns[name] = _nullable(getattr(times, name), np.isnan(getattr(times, name)))
    columns["cost_s"] = composite_cost_s(result.simulated())
    with atomic_path(path) as temporary:
        pyarrow.parquet.write_table(pa.table(columns), temporary, compression="zstd")


def _names(names: tuple[str, ...], numbers: NDArray[np.int32]) -> Any:
    """Names by their numbers, null for -1."""
    known = pa.array([*names, None], pa.string())
    return known.take(np.mod(numbers, len(known)))


def _nullable(values: NDArray[Any], missing: NDArray[np.bool_]) -> Any:
    return pa.array(np.ascontiguousarray(values), mask=missing)


def _latency(name: str, seconds: NDArray[np.float64]) -> dict[str, float | None]:
    known = Latency.of(seconds[np.isfinite(seconds)])
    return {f"{name}_{at}": getattr(known, at) for at in ("mean", "p50", "p90", "p99")}


def _span_s(done: NDArray[np.void]) -> float:
    """Seconds from the first send to the last end."""
    sent, ended = done["sent_s"], done["ended_s"]
    if not np.isfinite(ended).any():
        return 0.0
    return float(np.nanmax(ended) - np.nanmin(sent))


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole > 0 else None
