"""Reader of the live router's decision log: recorded traffic without its text.

A file (``.jsonl`` or ``.jsonl.gz``) or a folder of them. Each completed request becomes a row; the
others are counted as skipped. Content hashes stand for blocks of text, so the rows share exactly
the prefixes that the prompts shared. A turn that continues an earlier prompt and its response
continues that row's last content run, and arrives its think time after it.
"""

import base64
import binascii
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.blocks import block_runs
from tailrace.workload.columns import MAX_TIME_S, MAX_TOKENS
from tailrace.workload.table import RUN, RequestTable, blank_rows
from tailrace.workload.trace_formats import Imported, checked_number, session_keys

Ints = NDArray[np.int64]

FORMAT = 1
_MARK = b'"tailrace":"decisions"'
_GZIP = b"\x1f\x8b"
_HASH_BYTES = 8
#: Outcomes of requests that were lost: failed by servers, or rejected while they waited (429).
LOSSES = ("backend_failed", "timeout", "shed")
#: Bytes that are read in vain at most when only the end of a file is wanted.
_STRIDE = 256 << 10


class _Line(NamedTuple):
    """One completed request."""

    request: str
    arrived: float  # s, Unix time
    ended: float
    prompt: int
    output: int
    session: str | None
    ttft_slo_s: float | None
    priority: int
    units: int  # length of the content, in units of which a block has block_units
    block_units: int
    blocks: bytes  # hashes of the whole blocks, one after the other
    end: str  # hash of the whole prompt
    continues: str | None  # hash of the earlier prompt whose response this one contains


def is_log(start: bytes) -> bool:
    """Whether a file that begins like this is a decision log."""
    if start.startswith(_GZIP):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, 4096)
        except zlib.error:
            return False
    return _MARK in start.partition(b"\n")[0].replace(b" ", b"")


#: Names of the files in a folder of logs; packed ones end in .gz too.
PATTERN = "decisions-*.jsonl"


def files(folder: Path) -> list[Path]:
    """Return the logs in a folder, oldest first; empty if it is not a folder."""
    return sorted(p for end in ("", ".gz") for p in folder.glob(f"{PATTERN}{end}"))


def read(path: Path) -> Imported:
    """Read a decision log; rows are in the order in which requests arrived."""
    return imported(answered(path))


class Answered(NamedTuple):
    """Completed requests, each with its last good attempt, in the order of arrival."""

    requests: "list[AnsweredRequest]"
    skipped: int
    """Requests that were not completed."""


class AnsweredRequest(NamedTuple):
    """A completed request, and what became of it."""

    line: _Line
    number: int
    where: str
    """File and line, for errors."""
    outcome: dict[str, Any]
    """The fields of OUTCOME, as they stand in the log."""


#: What the log says of how a request was served.
OUTCOME = (
    "arrived", "sent", "first", "last", "replica", "backend", "cached_reported", "estimated",
    "policy", "shadow",
)  # fmt: skip


def answered(path: Path, *, since: float = 0.0, most: int | None = None) -> Answered:
    """Read the completed requests of a log that arrived at Unix time ``since`` or later.

    ``most``: only the last so many; no more than half as many again are held in memory.
    """
    done: dict[str, AnsweredRequest] = {}
    unanswered: set[str] = set()
    for where, number, data in records(path, since):
        request = _text(where, data, "id")
        if data.get("outcome") != "done" or not data.get("output_tokens"):
            unanswered.add(request)
            continue
        outcome = {key: data.get(key) for key in OUTCOME}
        done[request] = AnsweredRequest(_line(where, request, data), number, where, outcome)
        if most is not None and len(done) > 1.5 * most:
            done = {r.line.request: r for r in _by_arrival(done)[-most:]}
    if not done:
        when = " of that time" * (since > 0)
        failed = f" ({len(unanswered)} without an answer)" if unanswered else ""
        raise TailraceError(f"{path} has no answered requests{when}{failed}")
    found = _by_arrival(done)
    missing = sum(request not in done for request in unanswered)
    return Answered(found if most is None else found[-most:], missing)


def _by_arrival(done: dict[str, AnsweredRequest]) -> list[AnsweredRequest]:
    return sorted(done.values(), key=lambda found: found.line.arrived)


def imported(found: Answered) -> Imported:
    """Return completed requests as a table."""
    lines = [request.line for request in found.requests]
    rows = blank_rows(len(lines))
    first = lines[0].arrived
    rows["arrival_s"] = [line.arrived - first for line in lines]
    rows["prompt_tokens"] = [line.prompt for line in lines]
    rows["output_tokens"] = [line.output for line in lines]
    rows["priority"] = [-line.priority for line in lines]  # here higher is more urgent
    for row, line in zip(rows, lines, strict=True):
        if line.ttft_slo_s is not None:
            row["ttft_slo_s"] = line.ttft_slo_s
    continued = _link_sessions(rows, lines)
    runs = _content(rows, lines, continued)
    numbers = np.array([request.number for request in found.requests])
    keys = session_keys([line.session or "" for line in lines])
    return Imported(RequestTable(rows, runs), numbers, skipped=found.skipped, session_keys=keys)


# ---- lines --------------------------------------------------------------------------------------


def records(path: Path, since: float = 0.0) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the place of each record (file and line), its line number, and the record.

    Only of requests that arrived at Unix time ``since`` or later. Of a file that is not compressed,
    what was written before is not even read, and lines count from where reading begins.
    """
    if not path.exists():
        raise TailraceError(f"{path} does not exist")
    for file in files(path) or [path] * path.is_file():
        if since and file.stat().st_mtime < since:
            continue
        last_error: str | None = None
        for number, line in enumerate(_lines(file, since), start=1):
            if last_error is not None:
                raise TailraceError(last_error)
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                data = json.loads(line)
            except ValueError as error:
                # A router that was killed leaves half a line, but only as the last one.
                last_error = f"{where}: not JSON ({error})"
                continue
            except RecursionError:
                raise TailraceError(f"{where}: nested too deeply") from None
            if not isinstance(data, dict):
                raise TailraceError(f"{where}: must be a JSON object")
            if data.get("tailrace") == "decisions":
                if data.get("format") != FORMAT:
                    raise TailraceError(
                        f"{where}: a decision log of format {data.get('format')}, this version "
                        f"reads format {FORMAT}; use the version of Tailrace that wrote it"
                    )
                continue
            if since and not _time(data, "arrived") >= since:
                continue
            yield where, number, data


def _time(data: Any, key: str) -> float:
    """Return a Unix time of a record; NaN: it has none."""
    value = data.get(key) if isinstance(data, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def _lines(file: Path, since: float) -> Iterator[bytes]:
    with file.open("rb") as raw:
        zipped = raw.read(2) == _GZIP
    try:
        with gzip.open(file, "rb") if zipped else file.open("rb") as source:
            if since and not zipped:
                yield source.readline()  # says what format it is
                _skip_to(source, file.stat().st_size, since)
            yield from source
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TailraceError(f"{file} is damaged: {error}") from None


def _skip_to(source: Any, size: int, since: float) -> None:
    """Go to the beginning of a line at most _STRIDE before the first that ended at ``since``.

    Lines are written as requests end, so this is a search by halves.
    """
    low, high = source.tell(), size
    start = low
    while high - low > _STRIDE:
        middle = (low + high) // 2
        source.seek(middle)
        source.readline()  # the rest of a line
        try:
            ended = _time(json.loads(source.readline()), "last")
        except ValueError:
            ended = math.inf  # half a line at the end
        if ended < since:
            low = middle
        else:
            high = middle
    source.seek(low)
    if low > start:
        source.readline()


def _line(where: str, request: str, data: dict[str, Any]) -> _Line:
    slo_s = data.get("ttft_slo_s")
    session = data.get("session")
    blocks = _decoded(where, data.get("blocks") or "")
    continues = data.get("continues")
    return _Line(
        request,
        checked_number(where, data, "arrived", 0, MAX_TIME_S),
        checked_number(where, data, "last", 0, MAX_TIME_S),
        int(checked_number(where, data, "prompt_tokens", 1, MAX_TOKENS)),
        int(checked_number(where, data, "output_tokens", 1, MAX_TOKENS)),
        session if isinstance(session, str) else None,
        None if slo_s is None else checked_number(where, data, "ttft_slo_s", 1e-9, 1e9),
        int(checked_number(where, data, "priority", -(2**31) + 1, 2**31 - 1)),
        int(checked_number(where, data, "units", 1, 2**40)) if blocks else 1,
        int(checked_number(where, data, "block_units", 1, 2**20)) if blocks else 1,
        blocks,
        str(data.get("end", "")),
        continues if isinstance(continues, str) else None,
    )


def _text(where: str, data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise TailraceError(f"{where}, column {key}: must be a text, got {value!r}")
    return value


def _decoded(where: str, text: Any) -> bytes:
    try:
        blocks = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        blocks = b"?"
    if len(blocks) % _HASH_BYTES:
        raise TailraceError(f"{where}, column blocks: must be hashes in base64")
    return blocks


# ---- sessions and content -----------------------------------------------------------------------


def _link_sessions(rows: NDArray[np.void], lines: list[_Line]) -> Ints:
    """Number sessions and turns and set parents; return the row whose content each [R] continues.

    -1: none. A turn that arrived before the response to the last one had ended has no parent, and
    keeps its recorded time.
    """
    numbers: dict[str, int] = {}
    latest: dict[str, int] = {}
    turns: dict[str, int] = {}
    ends: dict[str, int] = {}
    continued = np.full(len(rows), -1, np.int64)
    for at, line in enumerate(lines):
        if line.continues is not None:
            # Only the first continuation can be the conversation's own stream; a second one forks.
            before = ends.pop(line.continues, -1)
            if before >= 0 and lines[before].prompt < line.prompt:
                continued[at] = before
        if line.end:
            ends[line.end] = at
        session = line.session
        if session is None:
            continue
        rows["session"][at] = numbers.setdefault(session, len(numbers))
        rows["turn"][at] = turns.get(session, 0)
        turns[session] = turns.get(session, 0) + 1
        before = latest.get(session, -1)
        if before >= 0 and lines[before].ended <= line.arrived:
            rows["parent"][at] = before
            rows["think_s"][at] = line.arrived - lines[before].ended
        latest[session] = at
    return continued


def _content(rows: NDArray[np.void], lines: list[_Line], continued: Ints) -> NDArray[np.void]:
    """Give rows their content runs; return the runs [U]."""
    block_tokens = _block_tokens(lines)
    known: dict[bytes, int] = {}
    ids: list[int] = []
    counts = np.zeros(len(rows), np.int64)
    for at, line in enumerate(lines):
        if continued[at] >= 0:
            continue
        # The last token is always private, so that no response continues a shared block.
        count = min(len(line.blocks) // _HASH_BYTES, (line.prompt - 1) // block_tokens)
        for k in range(count):
            key = line.blocks[k * _HASH_BYTES : (k + 1) * _HASH_BYTES]
            ids.append(known.setdefault(key, len(known)))
        counts[at] = count
    base = block_runs(rows, np.array(ids, np.int64), counts, block_tokens)
    return _continue_runs(rows, _own_runs(rows, base, counts, continued), continued)


def _block_tokens(lines: list[_Line]) -> int:
    """Tokens of a block of text, the same for all rows: by the mean of prompts that have blocks."""
    units = sum(line.units for line in lines if line.blocks)
    tokens = sum(line.prompt for line in lines if line.blocks)
    sizes = {line.block_units for line in lines if line.blocks}
    if len(sizes) > 1:
        raise TailraceError(
            "the log's files have content blocks of different sizes; import them one by one"
        )
    return max(1, round(max(sizes, default=1) * tokens / max(1, units)))


def _own_runs(
    rows: NDArray[np.void], runs: NDArray[np.void], counts: Ints, continued: Ints
) -> NDArray[np.void]:
    """Give rows without blocks that others continue a run of their own; return all runs.

    A row without runs shares nothing, so nothing could continue it.
    """
    spare = int(runs["segment"].max(initial=-1)) + 1
    bare = np.flatnonzero((counts == 0) & (continued < 0))
    wanted = np.intersect1d(bare, continued)
    extra = np.zeros(len(wanted), RUN)
    extra["segment"] = spare + np.arange(len(wanted))
    extra["tokens"] = rows["prompt_tokens"][wanted]
    rows["run_start"][wanted] = len(runs) + np.arange(len(wanted))
    rows["run_count"][wanted] = 1
    return np.concatenate([runs, extra])


def _continue_runs(
    rows: NDArray[np.void], runs: NDArray[np.void], continued: Ints
) -> NDArray[np.void]:
    """Give rows that continue another that row's runs, the last one longer."""
    more: list[tuple[int, int, int]] = []
    start = len(runs)
    made: dict[int, list[tuple[int, int, int]]] = {}
    for at in np.flatnonzero(continued >= 0).tolist():
        before = int(continued[at])
        theirs = made.get(before)
        if theirs is None:
            first, count = int(rows["run_start"][before]), int(rows["run_count"][before])
            theirs = [tuple(run) for run in runs[first : first + count].tolist()]
        longer = int(rows["prompt_tokens"][at]) - int(rows["prompt_tokens"][before])
        segment, tokens, _ = theirs[-1]
        mine = [*theirs[:-1], (segment, tokens + longer, 0)]
        made[at] = mine
        rows["run_start"][at] = start + len(more)
        rows["run_count"][at] = len(mine)
        more += mine
    return np.concatenate([runs, np.array(more, RUN)]) if more else runs
