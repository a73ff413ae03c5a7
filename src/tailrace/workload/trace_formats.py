"""Readers of public trace formats. Times begin at 0 with the first request."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.blocks import block_runs
from tailrace.workload.columns import MAX_TIME_S, MAX_TOKENS, Sheet
from tailrace.workload.formats.json_text import BlockLists, lines
from tailrace.workload.formats.unpack import read_bytes
from tailrace.workload.table import RUN, RequestTable, blank_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: Tokens per hash in Mooncake's traces.
MOONCAKE_BLOCK = 512


class Imported(NamedTuple):
    """Rows in the order of the file, where they stood in it, and what was left out."""

    table: RequestTable
    source_row: Ints
    skipped: int = 0
    has_arrivals: bool = True
    #: [R] of the id of each row's session, see session_key; None: the file has no ids.
    session_keys: Keys | None = None


def session_key(name: str) -> int:
    """Return 64 bits that stand for a session's id, in whichever file it occurs."""
    text = name.encode(errors="surrogatepass")  # JSON can name half a character
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def session_keys(names: Collection[str]) -> Keys:
    """Return the keys [R] of rows whose sessions have these ids; an empty one is no session."""
    known = {name: session_key(name) if name else 0 for name in dict.fromkeys(names)}
    return np.array([known[name] for name in names], np.uint64)


def azure(sheet: Sheet) -> Imported:
    """Azure LLM inference 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens."""
    text = pc.replace_substring_regex(
        pc.utf8_trim_whitespace(sheet.raw("TIMESTAMP")), r"(Z|\+00:00)$", ""
    )
    stamp = sheet.cast("TIMESTAMP", text, pa.timestamp("ns"), "a date and time")
    stamp_ns = stamp.cast(pa.int64()).to_numpy(zero_copy_only=False)
    arrival_s = (stamp_ns - stamp_ns[0]) / 1e9
    return _plain(arrival_s, sheet.tokens("ContextTokens"), sheet.tokens("GeneratedTokens"))


def vidur(sheet: Sheet) -> Imported:
    """Vidur: num_prefill_tokens, num_decode_tokens and, in some files, arrived_at in s."""
    prompt = sheet.tokens("num_prefill_tokens")
    output = sheet.tokens("num_decode_tokens")
    if "arrived_at" not in sheet:
        return _plain(np.zeros(len(sheet)), prompt, output)._replace(has_arrivals=False)
    return _plain(sheet.seconds("arrived_at"), prompt, output)


def burstgpt(sheet: Sheet) -> Imported:
    """BurstGPT: Timestamp in s, Request tokens, Response tokens; in later releases Session ID.

    No response tokens mean that the request failed: such rows are left out and counted.
    """
    arrival_s = sheet.seconds("Timestamp")
    output = sheet.tokens("Response tokens", low=0)
    prompt = sheet.tokens("Request tokens", low=0)
    kept = np.flatnonzero(output > 0)
    if kept.size == 0:
        raise TailraceError(f"{sheet.path}: all {len(sheet)} requests failed (no response tokens)")
    empty = (prompt == 0) & (output > 0)
    sheet.refuse(empty, "Request tokens", "must be at least 1, got {}")
    table = _plain(arrival_s[kept], prompt[kept], output[kept]).table
    found = Imported(table, kept, skipped=len(sheet) - kept.size)
    if "Session ID" in sheet:
        ids = pc.utf8_trim_whitespace(sheet.raw("Session ID").take(pa.array(kept)))
        _number_sessions(table.rows, ids)
        return found._replace(session_keys=session_keys(ids.to_pylist()))
    return found


def mooncake(path: Path, block_tokens: int | None = None) -> Imported:
    """Mooncake: JSON lines with timestamp in ms, input_length, output_length, hash_ids.

    ``hash_ids`` has one number per block of 512 prompt tokens, or ``block_tokens``; the last block
    need not be full, and its number may be missing. Equal numbers from the start on mean an equal
    prefix.
    """
    size = block_tokens or MOONCAKE_BLOCK
    lists = BlockLists(path, read_bytes(path))
    stamps_ms: list[float] = []
    lengths: list[tuple[int, int]] = []
    ids: list[Ints] = []
    numbers: list[int] = []
    for number, where, data in lines(path, lists.rest):
        stamp_ms, prompt, output = _lengths(where, data)
        found = lists.of(where, data)
        full, partial = divmod(prompt, size)
        if found.size and len(found) not in (full, full + bool(partial)):
            raise TailraceError(
                f"{where}, column hash_ids: {len(found)} blocks of {size} tokens do not make a "
                f"prompt of {prompt}; --block-size sets another number of tokens"
            )
        stamps_ms.append(stamp_ms)
        lengths.append((prompt, output))
        ids.append(found)
        numbers.append(number)
    if not numbers:
        raise TailraceError(f"{path} is empty")
    prompts, outputs = np.array(lengths, np.int64).T
    table = _plain((np.array(stamps_ms) - stamps_ms[0]) / 1e3, prompts, outputs).table
    counts = np.array([len(one) for one in ids], np.int64)
    runs = block_runs(table.rows, np.concatenate(ids), counts, size)
    return Imported(RequestTable(table.rows, runs), np.array(numbers))


def _lengths(where: str, data: dict[str, Any]) -> tuple[float, int, int]:
    """Check one line of a Mooncake file; return time (ms), prompt and output tokens."""
    for key in ("input_length", "output_length", "timestamp"):
        if key not in data:
            raise TailraceError(f"{where}, column {key}: is missing")
    prompt = int(checked_number(where, data, "input_length", 1, MAX_TOKENS, whole=True))
    output = int(checked_number(where, data, "output_length", 1, MAX_TOKENS, whole=True))
    return checked_number(where, data, "timestamp", 0, MAX_TIME_S * 1e3), prompt, output


def checked_number(
    where: str, data: dict[str, Any], key: str, low: float, high: float, *, whole: bool = False
) -> float:
    """Return a number of a record within bounds."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TailraceError(f"{where}, column {key}: must be a number, got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        raise TailraceError(
            f"{where}, column {key}: must be between {low:g} and {high:g}, got {value}"
        )
    if whole and value != int(value):
        raise TailraceError(f"{where}, column {key}: must be a whole number, got {value}")
    return float(value)


def _plain(arrival_s: Floats, prompt: Ints, output: Ints) -> Imported:
    """Return rows without content, their times as given."""
    rows = blank_rows(len(arrival_s))
    rows["arrival_s"], rows["prompt_tokens"], rows["output_tokens"] = arrival_s, prompt, output
    return Imported(RequestTable(rows, np.zeros(0, RUN)), np.arange(len(rows)))


def _number_sessions(rows: NDArray[np.void], ids: Any) -> None:
    """Set session and turn of rows [n] from a trace's ids [n] (Arrow strings); empty: no session.

    The turns keep their recorded times: the trace does not say when an answer had been read.
    """
    encoded = ids.dictionary_encode()
    code = encoded.indices.to_numpy(zero_copy_only=False)
    member = np.flatnonzero(np.array([d != "" for d in encoded.dictionary.to_pylist()])[code])
    _, session = np.unique(code[member], return_inverse=True)
    order = np.argsort(session, kind="stable")
    first = np.flatnonzero(np.diff(session[order], prepend=-1))
    turn = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    rows["session"][member] = session
    rows["turn"][member[order]] = turn
