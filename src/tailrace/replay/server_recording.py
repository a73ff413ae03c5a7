"""Recordings of one server: when it queued, began and answered each request, and its settings.

JSON lines, one request each, in a file or in a folder as ``requests.jsonl``; beside it there may be
a ``meta.json`` with the engine's settings. Benchmarks of vLLM write such files. All times of a line
are seconds of one clock, whichever. Names differ between tools, so several are known for each.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.columns import MAX_TOKENS
from tailrace.workload.trace_formats import checked_number

FILE, META = "requests.jsonl", "meta.json"
#: Names of each column; the first is vLLM's.
NAMES = {
    "prompt_tokens": ("input_toks", "input_tokens", "prompt_tokens", "num_prompt_tokens",
                      "prompt_len", "input_len"),
    "output_tokens": ("output_toks", "output_tokens", "completion_tokens", "num_output_tokens",
                      "num_generation_tokens", "output_len"),
    "queued_s": ("queued_ts", "queued_time", "queued_s"),
    "scheduled_s": ("scheduled_ts", "scheduled_time", "scheduled_s"),
    "first_s": ("first_token_ts", "first_token_time", "first_token_s"),
    "last_s": ("last_token_ts", "last_token_time", "last_token_s", "finished_ts", "finished_time"),
    "cached_tokens": ("cached_toks", "cached_tokens", "num_cached_tokens"),
}  # fmt: skip
REQUIRED = ("prompt_tokens", "output_tokens", "queued_s", "first_s", "last_s")
_TIMES = ("queued_s", "scheduled_s", "first_s", "last_s")

#: One request. Times in s of the recording's clock; scheduled_s may be NaN, cached_tokens -1.
RECORD = np.dtype(
    [(name, "f8") for name in _TIMES]
    + [(name, "i4") for name in ("prompt_tokens", "output_tokens", "cached_tokens")]
)

#: Settings of the engine that matter, by vLLM's name, and the most they can be.
_SETTINGS = {
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**24,
    "data_parallel_size": 1024,
    "block_size": 4096,
    "num_gpu_blocks": 2**26,
}
_SAMPLE_BYTES = 65_536
#: Beyond this a clock's seconds lose their microseconds.
_MOST_S = 1e10


@dataclass(frozen=True)
class ServerRecording:
    """Answered requests [R] (RECORD) in the order they were queued."""

    requests: NDArray[np.void]
    settings: Mapping[str, int]
    """Settings of the engine as the recording states them, by vLLM's names."""
    skipped: int
    """Requests without a first and last token."""


def is_recording(path: Path) -> bool:
    """Whether a file, or a folder with one, is a recording of a server, by its first line."""
    file = _file(path)
    if not file.is_file():
        return False
    with file.open("rb") as source:
        line = source.readline(_SAMPLE_BYTES)
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and all(
        any(name in first for name in NAMES[column]) for column in ("queued_s", "first_s")
    )


def read(path: Path) -> ServerRecording:
    """Read a recording; a TailraceError names the file and line of the first mistake."""
    file = _file(path)
    rows: list[tuple[float, ...]] = []
    skipped = 0
    try:
        with file.open("rb") as source:
            for number, line in enumerate(source, start=1):
                if not line.strip():
                    continue
                row = _row(f"{file}, line {number}", line)
                if row is None:
                    skipped += 1
                else:
                    rows.append(row)
    except OSError as error:
        raise TailraceError(f"cannot read {file}: {error.strerror or error}") from None
    if not rows:
        raise TailraceError(f"{file} has no answered requests")
    found = np.array(rows, RECORD)
    found = found[np.argsort(found["queued_s"], kind="stable")]
    return ServerRecording(found, _settings(file.parent / META), skipped)


def _file(path: Path) -> Path:
    return path / FILE if path.is_dir() else path


def _row(where: str, line: bytes) -> tuple[float, ...] | None:
    """Return one line as a RECORD; None if the request was not answered."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TailraceError(f"{where}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise TailraceError(f"{where}: must be a JSON object")
    keys = {
        column: next((name for name in names if data.get(name) is not None), None)
        for column, names in NAMES.items()
    }
    if keys["first_s"] is None or keys["last_s"] is None:
        return None
    for column in REQUIRED:
        if keys[column] is None:
            raise TailraceError(f"{where}: no {' or '.join(NAMES[column][:3])}")

    def number(column: str, low: float, high: float, missing: float) -> float:
        key, whole = keys[column], column not in _TIMES
        return missing if key is None else checked_number(where, data, key, low, high, whole=whole)

    times = [number(name, -_MOST_S, _MOST_S, np.nan) for name in _TIMES]
    queued_s, scheduled_s, first_s, last_s = times
    known = queued_s if np.isnan(scheduled_s) else scheduled_s
    if not queued_s <= known <= first_s <= last_s or queued_s == first_s:
        raise TailraceError(
            f"{where}: the times are not in the order queued, scheduled, first token, last token; "
            "they must be of one clock"
        )
    prompt, output = (number(name, 1, MAX_TOKENS, 0) for name in ("prompt_tokens", "output_tokens"))
    if output > 1 and first_s == last_s:
        raise TailraceError(f"{where}: {output:g} output tokens in no time")
    return (*times, prompt, output, number("cached_tokens", 0, MAX_TOKENS, -1))


def _settings(file: Path) -> dict[str, int]:
    """Return the engine's settings from a meta.json; none if there is no such file."""
    if not file.is_file():
        return {}
    try:
        data: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise TailraceError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise TailraceError(f"{file}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise TailraceError(f"{file}: must be a JSON object")
    inner: Any = next((data[k] for k in ("engine_kwargs", "engine_args") if k in data), {})
    merged = {**data, **(inner if isinstance(inner, dict) else {})}
    found = {}
    for name, most in _SETTINGS.items():
        value = merged.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise TailraceError(f"{file}: {name} must be a whole number from 1 to {most}")
        found[name] = value
    return found
