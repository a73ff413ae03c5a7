"""Batches of a run as a Chrome trace, for Perfetto (ui.perfetto.dev).

One process per replica, one track in it per pipeline stage, one slice per iteration or per
fast-forwarded stretch of decode iterations, with its T, K and W. Cluster events are marks on their
replica.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.config import Event
from tailrace.errors import TailraceError
from tailrace.files import atomic_path, check_target
from tailrace.sim.result import SimResult

_MAX_STAGES = 64


def write_trace(result: SimResult, path: Path, events: Sequence[Event] = ()) -> None:
    """Write the recorded batches to ``path``, one event per line, as they are made."""
    check_target(path, (".json",))
    if result.batches is None:
        raise TailraceError("the run recorded no batches; simulate with record_batches=True")
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in _trace_events(result, events):
            file.write(separator + json.dumps(event, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def _trace_events(result: SimResult, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    batches = result.batches
    assert batches is not None
    # Numbers start at 1 and tracks are unique: Perfetto reads process or thread 0 as the idle task.
    for replica in range(len(result.replicas)):
        yield _name("process_name", f"replica {replica}", replica, 0)
        yield {
            "ph": "M", "name": "process_sort_index", "pid": replica + 1,
            "args": {"sort_index": replica},
        }  # fmt: skip
    tracks = np.unique(batches["replica"].astype(np.int64) * _MAX_STAGES + batches["stage"])
    for track in tracks.tolist():
        replica, stage = divmod(track, _MAX_STAGES)
        yield _name("thread_name", f"stage {stage}", replica, stage)
    for event in events:
        label = f"slow x{event.factor:g}" if event.kind == "slow" else event.kind
        yield {
            "ph": "i", "s": "p", "name": label, "cat": "event", "ts": event.at_s * 1e6,
            "pid": event.replica + 1, "tid": _track(event.replica, 0),
        }  # fmt: skip
    for start in range(0, len(batches), 4096):
        for row in batches[start : start + 4096].tolist():
            yield _slice(row)


def _slice(row: tuple[Any, ...]) -> dict[str, Any]:
    """One BATCH row, fields in the order of the dtype."""
    replica, stage, start_s, end_s, iterations, decodes, prefills, tokens, context, work = row
    name = "mixed" if decodes and prefills else "prefill" if prefills else "decode"
    if iterations > 1:
        name = f"{name} x{iterations}"
    return {
        "ph": "X", "name": name, "cat": "batch", "pid": replica + 1, "tid": _track(replica, stage),
        "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6,
        "args": {
            "iterations": iterations, "decodes": decodes, "prefills": prefills,
            "T": tokens, "K": context, "W": work,
        },
    }  # fmt: skip


def _track(replica: int, stage: int) -> int:
    return (replica + 1) * _MAX_STAGES + stage


def _name(kind: str, label: str, replica: int, stage: int) -> dict[str, Any]:
    tid = _track(replica, stage)
    return {"ph": "M", "name": kind, "pid": replica + 1, "tid": tid, "args": {"name": label}}
