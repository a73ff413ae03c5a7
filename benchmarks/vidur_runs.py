"""Recorded Vidur runs: reading RUN.json and RUN.csv, and turning them into Tailrace's terms."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.config import Cluster, CostModel, Replica, explain
from tailrace.errors import TailraceError
from tailrace.sim.result import FINISHED, REQUEST_RESULT
from tailrace.workload.table import RequestTable
from vidur_routers import RouterSettings

#: The formula all runs were recorded with; Vidur's own predictor was replaced by it.
COST = CostModel(
    base_ms=10.3,
    per_token_ms=0.042,
    knots=((128, 0.023), (512, 0.047)),
    per_context_ms=8.8e-5,
    per_prefill_ms=4.0e-6,
)

TIMES = ("scheduled_s", "first_token_s", "finished_s")

#: Columns of RUN.csv -> fields of REQUEST_RESULT.
RECORDED = {
    "replica": "replica",
    "scheduled_at": "scheduled_s",
    "first_token_at": "first_token_s",
    "completed_at": "finished_s",
    "restarts": "restarts",
    "cached_tokens": "cached_tokens",
}

Iteration = tuple[int, int, float, int, int, float]


class Checksums(BaseModel):
    """What RUN.json says about the iterations of a run."""

    iterations: int
    sum_T: int  # noqa: N815 (names of the file format)
    sum_K: int  # noqa: N815
    sum_W: float  # noqa: N815


class Settings(BaseModel):
    """The part of RUN.json that is needed; what only some schedulers have is optional."""

    model_config = ConfigDict(allow_inf_nan=False)

    vidur: str
    replica_scheduler: str
    global_scheduler: str
    num_replicas: int = Field(ge=1)
    num_stages: int = 1
    batch_size_cap: int
    effective_max_batch_size: int | None = None
    block_size: int
    num_blocks: int
    watermark_blocks_fraction: float = 0.01
    max_request_tokens: int = 4096
    max_tokens_in_batch: int = 4096
    chunk_size: int = 512
    max_waiting_iters: int = 10
    prefix_caching: bool = False
    num_preallocate_tokens: int = 0
    speeds: list[float] | None = None
    python_seed: int = 42
    router_seed: int = 67
    top_k: int = 2
    tolerance_factor: float = 2.0
    result: Checksums


@dataclass(frozen=True)
class VidurRun:
    """A recorded run in Tailrace's terms."""

    branch: str  #: of Vidur: main or canary
    scheduler: str
    router: str
    stages: int
    cluster: Cluster
    table: RequestTable
    router_settings: RouterSettings
    requests: NDArray[np.void]  #: [R] REQUEST_RESULT as recorded
    checksums: Mapping[str, float]
    iterations: frozenset[Iteration]  #: the first few, empty if none were logged


def run_names(folder: Path) -> list[str]:
    """Names of the runs in a folder, sorted."""
    if not folder.is_dir():
        raise TailraceError(f"{folder} is not a folder")
    names = sorted(path.stem for path in folder.glob("*.json"))
    if not names:
        raise TailraceError(f"{folder} has no runs: there is no .json file in it")
    for name in names:
        if not (folder / f"{name}.csv").is_file():
            raise TailraceError(f"{folder / name}.json has no {name}.csv beside it")
    return names


def read_run(folder: Path, name: str) -> VidurRun:
    """Read one run, or raise an error that names the file and what is wrong with it."""
    settings = _read_settings(folder / f"{name}.json")
    path = folder / f"{name}.csv"
    columns = _read_columns(path)
    try:
        table, sessions = _table(columns)
        cluster = _cluster(settings)
        requests = _recorded(columns, settings.num_replicas)
    except ValidationError as error:
        raise TailraceError(f"{folder / name}.json: {explain(error, Replica)}") from None
    except (KeyError, ValueError, TailraceError) as error:
        what = f"there is no column {error}" if isinstance(error, KeyError) else str(error)
        raise TailraceError(f"{path}: {what}") from None
    return VidurRun(
        branch="canary" if "canary" in settings.vidur else "main",
        scheduler=settings.replica_scheduler,
        router=settings.global_scheduler,
        stages=settings.num_stages,
        cluster=cluster,
        table=table,
        router_settings=RouterSettings(
            sessions=sessions,
            python_seed=settings.python_seed,
            router_seed=settings.router_seed,
            top_k=settings.top_k,
            tolerance_factor=settings.tolerance_factor,
        ),
        requests=requests,
        checksums=settings.result.model_dump(),
        iterations=_read_iterations(folder / f"{name}.iterations.csv"),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TailraceError(f"{path} is not a text file") from None


def _read_settings(path: Path) -> Settings:
    try:
        return Settings.model_validate(json.loads(_read_text(path)))
    except json.JSONDecodeError as error:
        raise TailraceError(f"{path} is not valid JSON: {error}") from None
    except ValidationError as error:
        raise TailraceError(f"{path}: {explain(error, Settings)}") from None


def _read_columns(path: Path) -> dict[str, list[str]]:
    rows = list(csv.reader(_read_text(path).splitlines()))
    if len(rows) < 2:
        raise TailraceError(f"{path} has no requests")
    header = rows[0]
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise TailraceError(
                f"{path}, line {number}: {len(header)} values expected, got {len(row)}"
            )
    return {name: [row[k] for row in rows[1:]] for k, name in enumerate(header)}


def _cluster(settings: Settings) -> Cluster:
    speeds = settings.speeds or [1.0] * settings.num_replicas
    if len(speeds) != settings.num_replicas:
        raise ValueError(f"{settings.num_replicas} replicas but {len(speeds)} speeds")
    cap = settings.batch_size_cap
    if settings.replica_scheduler in ("orca", "faster_transformer"):
        # These reserve memory for the longest request, and the memory planner caps their batches.
        cap = settings.effective_max_batch_size or cap
    shared: dict[str, Any] = {
        "cost": COST,
        "scheduler": settings.replica_scheduler,
        "num_blocks": settings.num_blocks,
        "block_size": settings.block_size,
        "batch_cap": cap,
        "chunk_size": settings.chunk_size,
        "max_batch_tokens": settings.max_tokens_in_batch,
        "watermark": settings.watermark_blocks_fraction,
        "prefix_caching": settings.prefix_caching,
        "preallocate_tokens": settings.num_preallocate_tokens,
        "num_stages": settings.num_stages,
        "max_request_tokens": settings.max_request_tokens,
        "max_waiting_iters": settings.max_waiting_iters,
    }
    return Cluster(replicas=tuple(Replica(speed=speed, **shared) for speed in speeds))


def _table(columns: Mapping[str, list[str]]) -> tuple[RequestTable, list[int]]:
    """The requests, and the session of each (-1: none)."""
    prompt = _integers(columns["prefill_tokens"])
    output = _integers(columns["decode_tokens"])
    arrival = np.array([float(value) for value in columns["arrived_at"]])
    if "session_id" not in columns:
        return RequestTable.build(arrival, prompt, output), [-1] * len(prompt)
    sessions = np.unique(_integers(columns["session_id"]), return_inverse=True)[1]
    groups = np.unique(_integers(columns["shared_group"]), return_inverse=True)[1]
    shared = _integers(columns["shared_prefix_tokens"])
    if (shared > prompt).any():
        raise ValueError(f"request {np.argmax(shared > prompt)}: shared prefix exceeds the prompt")
    # Streams 0, 1, .. are sessions, those behind them groups. The last run is always the
    # session's, even if it has no tokens: the answer continues it.
    first_group = int(sessions.max()) + 1
    columns_of_runs = (sessions.tolist(), groups.tolist(), shared.tolist(), prompt.tolist())
    runs = [
        [*([(first_group + group, in_common)] if in_common else []), (session, total - in_common)]
        for session, group, in_common, total in zip(*columns_of_runs, strict=True)
    ]
    table = RequestTable.build(
        arrival, prompt, output, runs, session=sessions, turn=_integers(columns["turn"])
    )
    return table, sessions.tolist()


def _recorded(columns: Mapping[str, list[str]], replicas: int) -> NDArray[np.void]:
    requests = np.zeros(len(columns["replica"]), REQUEST_RESULT)
    requests["status"] = FINISHED
    requests["arrived_s"] = [float(value) for value in columns["arrived_at"]]
    for column, field in RECORDED.items():
        if column == "cached_tokens" and column not in columns:
            continue
        if field in TIMES:
            requests[field] = [float(value) if value else np.nan for value in columns[column]]
        else:
            requests[field] = _integers(columns[column])
    bad = (requests["replica"] < 0) | (requests["replica"] >= replicas)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"request {row}: there is no replica {requests['replica'][row]}")
    return requests


def _read_iterations(path: Path) -> frozenset[Iteration]:
    if not path.is_file():
        return frozenset()
    columns = _read_columns(path)
    try:
        return frozenset(
            zip(
                [int(value) for value in columns["replica"]],
                [int(value) for value in columns["stage"]],
                [float(value) for value in columns["start"]],
                [int(value) for value in columns["T"]],
                [int(value) for value in columns["K"]],
                [float(value) for value in columns["W"]],
                strict=True,
            )
        )
    except (KeyError, ValueError) as error:
        raise TailraceError(f"{path} cannot be understood: {error}") from None


def _integers(values: list[str]) -> NDArray[np.int64]:
    return np.array([int(value) for value in values], np.int64)
