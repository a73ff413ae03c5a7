"""Tailrace's own files of requests: CSV and Parquet, with everything a table holds.

Columns are those of the request table; only ``prompt_tokens`` and ``output_tokens`` must be there.
``parent`` is a row number counted from 0. Content runs are written ``segment:tokens`` with spaces
between them in CSV, and as two lists, ``run_segments`` and ``run_tokens``, in Parquet.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tailrace.errors import TailraceError, unknown_name
from tailrace.files import atomic_path
from tailrace.workload.columns import MAX_TOKENS, Sheet
from tailrace.workload.draft import gather_runs
from tailrace.workload.table import RUN, RequestTable, blank_rows
from tailrace.workload.trace_formats import Imported

Ints = NDArray[np.int64]

REQUIRED = ("prompt_tokens", "output_tokens")
_SECONDS = ("arrival_s", "think_s", "ttft_slo_s", "tpot_slo_s")
_WHOLE = {
    "prompt_tokens": (1, MAX_TOKENS),
    "output_tokens": (1, MAX_TOKENS),
    "session": (-1, 2**31 - 1),
    "turn": (0, 2**31 - 1),
    "parent": (-1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
#: Largest number of a segment of content.
_LAST_SEGMENT = 10**18 - 1
#: Number of the customer, or a name for it, which is numbered by first appearance.
_TENANT = "tenant"
#: Order in which columns are written.
COLUMNS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "session",
    "turn",
    "parent",
    "think_s",
    "ttft_slo_s",
    "tpot_slo_s",
    "priority",
    "tenant",
)
#: Rows that are converted at a time, to bound the memory of long tables.
ROWS_PER_BATCH = 262_144

# The published stubs know fewer argument types than Arrow takes.
_compute: Any = pyarrow.compute


def parse(sheet: Sheet) -> Imported:
    """Turn the columns of one of our files into rows."""
    known = {*COLUMNS, *(("runs",) if sheet.is_text else ("run_segments", "run_tokens"))}
    for column in sheet.columns:
        if column not in known:
            raise TailraceError(f"{sheet.path}: {unknown_name('column', column, known)}")
    rows = blank_rows(len(sheet))
    for column in _SECONDS:
        if column in sheet:
            rows[column] = sheet.seconds(column)
    for column, (low, high) in _WHOLE.items():
        if column in sheet or column in REQUIRED:
            rows[column] = sheet.ints(column, low, high)
    if _TENANT in sheet:
        rows[_TENANT] = _tenants(sheet)
    runs = _parse_runs(sheet, rows)
    table = RequestTable(rows, runs)
    return Imported(table, np.arange(len(rows)), has_arrivals="arrival_s" in sheet)


def write(
    table: RequestTable, path: Path, *, has_arrivals: bool = True, has_slos: bool = True
) -> None:
    """Write a table to a CSV or Parquet file, by its suffix, all of it or nothing.

    Without arrivals the file has lengths only, so that it cannot be replayed by mistake; without
    SLOs those of the settings hold when it is played.
    """
    left_out = {"arrival_s": not has_arrivals, "ttft_slo_s": not has_slos}
    left_out["tpot_slo_s"] = not has_slos
    left_out[_TENANT] = not (table.rows[_TENANT] >= 0).any()
    names = tuple(c for c in COLUMNS if not left_out.get(c))
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise TailraceError(f"cannot write {path}: the name must end in .csv or .parquet")
    with atomic_path(path) as temporary:
        writers[path.suffix](table, temporary, names)


def _write_csv(table: RequestTable, path: Path, names: tuple[str, ...]) -> None:
    header = ",".join([*names, "runs"]) + "\n"
    options = pa_csv.WriteOptions(include_header=False, quoting_style="needed")
    with path.open("wb") as file:
        file.write(header.encode())
        for columns, offsets, segment, tokens in _batches(table, names):
            pairs = _compute.binary_join_element_wise(
                pa.array(segment).cast(pa.string()), pa.array(tokens).cast(pa.string()), ":"
            )
            joined = _compute.binary_join(_lists(offsets, pairs), " ")
            # No runs: an empty cell.
            columns["runs"] = _compute.if_else(pa.array(np.diff(offsets) > 0), joined, None)
            pa_csv.write_csv(pa.table(columns), file, options)


def _write_parquet(table: RequestTable, path: Path, names: tuple[str, ...]) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        for columns, offsets, segment, tokens in _batches(table, names):
            columns["run_segments"] = _lists(offsets, pa.array(segment))
            columns["run_tokens"] = _lists(offsets, pa.array(tokens))
            batch = pa.table(columns)
            if writer is None:
                writer = pq.ParquetWriter(path, batch.schema, compression="zstd")
            writer.write_table(batch)
    finally:
        if writer is not None:
            writer.close()


def _batches(
    table: RequestTable, names: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], Ints, Ints, NDArray[np.int32]]]:
    """Yield columns, run offsets [n + 1], segments [u] and tokens [u] of a few rows at a time."""
    for first in range(0, len(table), ROWS_PER_BATCH):
        rows = table.rows[first : first + ROWS_PER_BATCH].copy()
        runs = gather_runs(rows, table.runs)
        columns = {name: pa.array(np.ascontiguousarray(rows[name])) for name in names}
        offsets = np.concatenate([[0], np.cumsum(rows["run_count"], dtype=np.int64)])
        segment = np.ascontiguousarray(runs["segment"])
        yield columns, offsets, segment, np.ascontiguousarray(runs["tokens"])


def _lists(offsets: Ints, values: Any) -> Any:
    """Cut an Arrow array [u] into lists [n] at offsets [n + 1]."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _tenants(sheet: Sheet) -> Ints:
    """Return the number of each row's tenant [n], -1: unknown."""
    try:
        raw = sheet.raw(_TENANT).cast(pa.string()).fill_null("")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise TailraceError(f"{sheet.path}, column {_TENANT}: must be names or numbers") from None
    texts = [text.strip() for text in raw.to_pylist()]
    if all(text in ("", "-1") or (text.isascii() and text.isdigit()) for text in texts):
        short = (text.lstrip("0")[:11] or "0" if text else "-1" for text in texts)
        numbers = np.array([int(text) for text in short], np.int64)
        sheet.refuse(numbers >= 2**31, _TENANT, "must be a name or a number below 2**31, got {}")
        return numbers
    known: dict[str, int] = {}
    return np.array([known.setdefault(t, len(known)) if t else -1 for t in texts], np.int64)


def _parse_runs(sheet: Sheet, rows: NDArray[np.void]) -> NDArray[np.void]:
    """Set the run columns of rows [n]; return the runs."""
    if "runs" in sheet:
        count, segment, tokens = _runs_from_text(sheet)
        column = "runs"
    elif "run_segments" in sheet or "run_tokens" in sheet:
        count, segment, tokens = _runs_from_lists(sheet)
        column = "run_tokens"
    else:
        return np.zeros(0, RUN)
    owner = np.repeat(np.arange(len(rows)), count)
    bad = (tokens < 0) | (tokens > MAX_TOKENS)
    if bad.any():
        at = int(np.argmax(bad))
        sheet.fail(int(owner[at]), column, f"a run of {tokens[at]} tokens")
    bad = (segment < 0) | (segment > _LAST_SEGMENT)
    if bad.any():
        at = int(np.argmax(bad))
        what = f"segments are numbers from 0 to {_LAST_SEGMENT}, got {segment[at]}"
        sheet.fail(int(owner[at]), "runs" if sheet.is_text else "run_segments", what)
    total = np.bincount(owner, weights=tokens, minlength=len(rows))
    wrong = (count > 0) & (total != rows["prompt_tokens"])
    if wrong.any():
        at = int(np.argmax(wrong))
        prompt = rows["prompt_tokens"][at]
        sheet.fail(at, column, f"the runs have {total[at]:.0f} tokens, prompt_tokens says {prompt}")
    rows["run_count"] = count
    rows["run_start"] = np.cumsum(count) - count
    runs = np.zeros(len(owner), RUN)
    runs["segment"], runs["tokens"] = segment, tokens
    return runs


def _runs_from_text(sheet: Sheet) -> tuple[Ints, Ints, Ints]:
    """Return count [n], and segment and tokens [u] of runs written segment:tokens."""
    text = _compute.utf8_trim_whitespace(sheet.raw("runs"))
    good = _compute.match_substring_regex(
        text, r"^([0-9]{1,18}:[0-9]{1,9}( [0-9]{1,18}:[0-9]{1,9})*)?$"
    )
    sheet.refuse(
        ~good.to_numpy(zero_copy_only=False), "runs", "must be segment:tokens pairs, got {}"
    )
    has = _compute.not_equal(text, "")
    pairs = _compute.split_pattern(text.filter(has), " ")
    count = np.zeros(len(sheet), np.int64)
    count[has.to_numpy(zero_copy_only=False)] = _compute.list_value_length(pairs).to_numpy()
    parts = _compute.list_flatten(_compute.split_pattern(_compute.list_flatten(pairs), ":"))
    numbers = parts.cast(pa.int64()).to_numpy(zero_copy_only=False).reshape(-1, 2)
    return count, numbers[:, 0], numbers[:, 1]


def _runs_from_lists(sheet: Sheet) -> tuple[Ints, Ints, Ints]:
    """Return count [n], and segment and tokens [u] of runs in two list columns."""
    counts, values = [], []
    for column in ("run_segments", "run_tokens"):
        lists = sheet.raw(column)
        if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
            raise TailraceError(f"{sheet.path}, column {column}: must be lists of whole numbers")
        flat = _compute.list_flatten(lists)
        if not pa.types.is_integer(flat.type) or flat.null_count:
            raise TailraceError(f"{sheet.path}, column {column}: must be lists of whole numbers")
        length = _compute.fill_null(_compute.list_value_length(lists), 0).to_numpy(
            zero_copy_only=False
        )
        counts.append(length.astype(np.int64))
        values.append(flat.to_numpy(zero_copy_only=False).astype(np.int64))
    sheet.refuse(counts[0] != counts[1], "run_tokens", "not as many as run_segments: {}")
    return counts[0], values[0], values[1]
