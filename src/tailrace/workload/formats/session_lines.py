"""Reader of session traces: JSON lines with ``session_id``, lengths, block ids and delays.

A line has ``input_length``, ``output_length``, ``hash_ids`` and ``session_id``. The first of a
session may have a ``timestamp`` in ms; a later one follows the one before it ``delay`` ms after its
answer, or comes at its own ``timestamp``. The number of tokens per block is given, or stands in a
line of its own (``block_size``), or follows from the lengths.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.blocks import block_runs
from tailrace.workload.columns import MAX_TIME_S, MAX_TOKENS
from tailrace.workload.formats.json_text import BlockLists, lines
from tailrace.workload.formats.unpack import read_bytes
from tailrace.workload.table import RUN, RequestTable, blank_rows
from tailrace.workload.trace_formats import Imported, checked_number, session_keys

Ints = NDArray[np.int64]


def read(
    path: Path, block_tokens: int | None = None, session_gap_s: float | None = None
) -> Imported:
    """Read a session trace.

    Sessions without a ``timestamp`` begin ``session_gap_s`` after one another; without it the
    result has no arrivals.
    """
    lists = BlockLists(path, read_bytes(path))
    ids: list[Ints] = []
    numbers: list[int] = []
    columns: list[tuple[float, float, int, int, int, int, int]] = []
    last: dict[str, tuple[int, int, int]] = {}  # row, number of the session, turn
    untimed = ""  # place of the first session that does not say when it began
    timed = False
    for number, where, data in lines(path, lists.rest):
        if "input_length" not in data and "block_size" in data:
            size = int(checked_number(where, data, "block_size", 1, MAX_TOKENS, whole=True))
            block_tokens = block_tokens or size
            continue
        prompt = int(checked_number(where, data, "input_length", 1, MAX_TOKENS, whole=True))
        output = int(checked_number(where, data, "output_length", 1, MAX_TOKENS, whole=True))
        name = data.get("session_id")
        if not isinstance(name, str | int):
            raise TailraceError(f"{where}, column session_id: must be text or a number")
        before, session, turn = last.get(str(name), (-1, len(last), -1))
        last[str(name)] = (len(columns), session, turn + 1)
        arrival_s, think_s = session * (session_gap_s or 0.0), 0.0
        if data.get("timestamp") is not None:
            timed = True
            arrival_s = checked_number(where, data, "timestamp", 0, MAX_TIME_S * 1e3) / 1e3
            before = -1
        elif before >= 0:
            think_s = _delay_s(where, data)
            arrival_s = columns[before][0] + think_s
        elif not untimed:
            untimed = where
        columns.append((arrival_s, think_s, prompt, output, before, session, turn + 1))
        ids.append(lists.of(where, data))
        numbers.append(number)
    if not columns:
        raise TailraceError(f"{path} has no requests")
    if timed and untimed and session_gap_s is None:
        raise TailraceError(
            f"{untimed}, column timestamp: is missing, though other sessions have one; "
            "--session-gap SECONDS starts the untimed ones that far apart"
        )
    rows = blank_rows(len(columns))
    for name, values in zip(
        ("arrival_s", "think_s", "prompt_tokens", "output_tokens", "parent", "session", "turn"),
        zip(*columns, strict=True),
        strict=True,
    ):
        rows[name] = values
    counts = np.array([len(one) for one in ids], np.int64)
    size = block_tokens or _block_tokens(path, rows["prompt_tokens"].astype(np.int64), counts)
    _check(path, rows["prompt_tokens"].astype(np.int64), counts, size, numbers)
    runs = np.zeros(0, RUN)
    if counts.any():
        runs = block_runs(rows, np.concatenate(ids), counts, size)
    has_arrivals = timed or session_gap_s is not None or len(last) == 1
    return Imported(
        RequestTable(rows, runs),
        np.array(numbers),
        has_arrivals=has_arrivals,
        session_keys=session_keys(last)[rows["session"]],  # by number: in order of appearance
    )


def _delay_s(where: str, data: dict[str, Any]) -> float:
    if data.get("delay") is None:
        return 0.0
    return checked_number(where, data, "delay", 0, MAX_TIME_S * 1e3) / 1e3


def _block_tokens(path: Path, prompt: Ints, counts: Ints) -> int:
    """Return the block size with which every prompt has as many blocks as ids.

    If several fit, it is the only power of two among them.
    """
    has = counts > 0
    if not has.any():
        return 1
    # ceil(prompt / size) = count for size from ceil(prompt / count) to (prompt - 1) / (count - 1).
    low = int((-(-prompt[has] // counts[has])).max())
    several = counts > 1
    high = MAX_TOKENS
    if several.any():
        high = int(((prompt[several] - 1) // (counts[several] - 1)).min())
    powers = [1 << k for k in range(MAX_TOKENS.bit_length()) if low <= 1 << k <= high]
    if low == high or len(powers) == 1:
        return powers[0] if powers else low
    raise TailraceError(
        f"{path}: cannot tell the tokens per block from lengths and hash_ids; "
        "give them with --block-size"
    )


def _check(path: Path, prompt: Ints, counts: Ints, size: int, numbers: list[int]) -> None:
    full = prompt // size
    bad = (counts > 0) & (counts != full) & (counts != -(-prompt // size))
    if bad.any():
        row = int(np.argmax(bad))
        raise TailraceError(
            f"{path}, line {numbers[row]}, column hash_ids: {counts[row]} blocks of {size} tokens "
            f"do not make a prompt of {prompt[row]}"
        )
