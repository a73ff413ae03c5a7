"""Files of requests: public trace formats in, our own CSV and Parquet in and out.

The format is found from the content (Parquet's mark, a JSON object, the names in a CSV header, the
first line of the live router's decision log) or named explicitly. Arrivals must not go backwards.
Only Vidur's files may be unsorted, because Vidur itself sorts requests by arrival (stably) and its
files rely on it; any other unsorted file is refused unless ``sort`` is set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError, unknown_name
from tailrace.workload import decision_log, request_file, trace_formats
from tailrace.workload.columns import Sheet, header_of, read_parquet, read_text
from tailrace.workload.draft import reorder
from tailrace.workload.formats import access_log, lcp_table, session_lines, weka
from tailrace.workload.formats.unpack import head
from tailrace.workload.table import DEFAULT_TTFT_SLO_S, RequestTable, RowError
from tailrace.workload.trace_formats import Imported, Keys

AUTO = "auto"

_CSV_READERS: dict[str, tuple[Callable[[Sheet], Imported], tuple[str, ...]]] = {
    # name: reader, columns by which it is known
    "azure": (trace_formats.azure, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    "vidur": (trace_formats.vidur, ("num_prefill_tokens", "num_decode_tokens")),
    "burstgpt": (trace_formats.burstgpt, ("Timestamp", "Request tokens", "Response tokens")),
    "lcp": (lcp_table.parse, (*lcp_table.COLUMNS, lcp_table.REFERENCE)),
    "csv": (request_file.parse, request_file.REQUIRED),
}
FORMATS = (*(*_CSV_READERS, "mooncake", "sessions", "weka", "access_log", "parquet", "decisions"),)
#: Session lines stand session by session.
_MAY_BE_UNSORTED = ("vidur", "sessions")


class UnknownJsonError(TailraceError):
    """A file holds JSON of no format that is known."""


@dataclass(frozen=True)
class Trace:
    """A table read from a file, and what happened on the way."""

    table: RequestTable
    format: str
    #: Failed requests that were left out.
    skipped: int
    #: Whether rows had to be put in order of arrival.
    was_sorted: bool
    #: False: the file has lengths only, and all rows arrive at 0.
    has_arrivals: bool
    #: Whether the file has latency targets of its own.
    has_slos: bool
    #: [R] of the id of each row's session (trace_formats.session_key); None: the file has no ids.
    session_keys: Keys | None = None


def read(
    path: Path | str,
    format: str = AUTO,  # noqa: A002
    *,
    sort: bool = False,
    block_tokens: int | None = None,
    session_gap_s: float | None = None,
    only: Sequence[Path] = (),
) -> Trace:
    """Read a file of requests; a TailraceError names file, line and column of the first mistake.

    Of a folder of sessions (weka) all files are read, or those of ``only``.
    ``block_tokens``: tokens per block id of mooncake and sessions, if the file does not say it.
    ``session_gap_s``: time between the starts of sessions whose trace does not say when they began.
    """
    path = Path(path)
    if format not in (AUTO, *FORMATS):
        raise unknown_name("trace format", format, [AUTO, *FORMATS])
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise TailraceError(f"{path} is empty")
        found = detect(path) if format == AUTO else format
        sheet: Sheet | None = None
        if found == "mooncake":
            imported = trace_formats.mooncake(path, block_tokens)
        elif found == "sessions":
            imported = session_lines.read(path, block_tokens, session_gap_s)
        elif found == "weka":
            imported = weka.read(path, session_gap_s, only)
        elif found == "access_log":
            imported = access_log.read(path)
        elif found == "decisions":
            imported = decision_log.read(path)
        elif found == "parquet":
            sheet = read_parquet(path)
            imported = request_file.parse(sheet)
        else:
            sheet = read_text(path)
            imported = _CSV_READERS[found][0](sheet)
    except IsADirectoryError:
        raise TailraceError(
            f"{path} is a folder without decision logs ({decision_log.PATTERN}) or Claude Code "
            "sessions (*.json, *.jsonl); name a file"
        ) from None
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TailraceError(f"{path} is not text (UTF-8): {error}") from None
    table, order = _in_order(path, found, imported, sheet, sort=sort)
    keys = imported.session_keys
    if keys is not None and order is not None:
        keys = keys[order]
    has_slos = sheet is not None and "ttft_slo_s" in sheet and "tpot_slo_s" in sheet
    if found == "decisions":  # clients of the router may have sent some
        has_slos = bool((table.rows["ttft_slo_s"] != DEFAULT_TTFT_SLO_S).any())
    was_sorted = order is not None
    return Trace(table, found, imported.skipped, was_sorted, imported.has_arrivals, has_slos, keys)


def check_arrivals(trace: Trace, path: Path) -> None:
    """Refuse a trace that does not say when its requests arrived."""
    if not trace.has_arrivals:
        raise TailraceError(
            f"{path} has no arrival times to replay; `tailrace workload import --session-gap "
            "SECONDS` sets them for sessions whose trace has none"
        )


def write(
    table: RequestTable, path: Path | str, *, has_arrivals: bool = True, has_slos: bool = True
) -> None:
    """Write a table to a .csv or .parquet file; the file appears whole or not at all.

    ``has_arrivals`` = False leaves the arrival times out, as they mean nothing; ``has_slos`` =
    False the latency targets, so that those of the settings hold.
    """
    request_file.write(table, Path(path), has_arrivals=has_arrivals, has_slos=has_slos)


def detect(path: Path) -> str:
    """Return the format of a file, or of a folder of logs or sessions, from its content."""
    if decision_log.files(path):
        return "decisions"
    if path.is_dir() and weka.files(path):
        return "weka"
    with path.open("rb") as file:
        if decision_log.is_log(file.read(4096)):
            return "decisions"
    start = head(path)
    if start.startswith(b"PAR1"):
        return "parquet"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        return _detect_json(path, text)
    if text.startswith(b"["):
        raise TailraceError(
            f"{path} is a JSON list; write each of its objects to a line of its own"
        )
    header = header_of(path)
    for name, (_, columns) in _CSV_READERS.items():
        if all(column in header for column in columns):
            return name
    raise TailraceError(
        f"{path} has the columns {', '.join(header)[:200]}; known formats: "
        + "; ".join(f"{name} ({', '.join(columns)})" for name, (_, columns) in _CSV_READERS.items())
    )


def _detect_json(path: Path, start: bytes) -> str:
    """Return the format of a JSON file that begins like this."""
    if weka.is_session(start):
        return "weka"
    if b'"input_length"' in start:
        return "sessions" if b'"session_id"' in start else "mooncake"
    if access_log.is_log(start):
        return "access_log"
    raise UnknownJsonError(
        f"{path} has JSON of no known format: mooncake (input_length, output_length, timestamp), "
        "sessions (the same with session_id), weka (block_size, requests with hash_ids), "
        "access_log (prompt_tokens and completion_tokens, or other names of them); "
        "--format says which one it is"
    )


def _in_order(
    path: Path, found: str, imported: Imported, sheet: Sheet | None, *, sort: bool
) -> tuple[RequestTable, NDArray[np.int64] | None]:
    """Check the table and its order; return it sorted, and the order if that changed anything."""
    table = imported.table

    def where(row: int) -> str:
        source = int(imported.source_row[row])
        return f"line {source}" if sheet is None else sheet.where(source)

    arrival_s = table.rows["arrival_s"]
    backwards = np.diff(arrival_s) < 0
    order = None
    if backwards.any():
        if not (sort or found in _MAY_BE_UNSORTED):
            row = int(np.argmax(backwards)) + 1
            raise TailraceError(
                f"{path}, {where(row)}: arrives before the request above it; "
                "sort the file by arrival, or let `tailrace workload import --sort` do it"
            )
        order = np.argsort(arrival_s, kind="stable")
        outside = table.rows["parent"] >= len(table)
        if outside.any():
            row = int(np.argmax(outside))
            raise TailraceError(
                f"{path}, {where(row)}: there is no row {table.rows['parent'][row]}"
            )
        table = reorder(table, order)
    if found not in ("csv", "parquet"):
        table.rows["arrival_s"] -= table.rows["arrival_s"][0]
    try:
        table.validate()
    except RowError as error:
        place = where(error.row if order is None else int(order[error.row]))
        raise TailraceError(f"{path}, {place}: {error.what}") from None
    return table, order
