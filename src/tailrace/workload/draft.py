"""Unfinished tables: rows in any order, from generators and files, on their way to a RequestTable.

A draft is what a generator makes: rows of dtype REQUEST, not yet sorted, and their runs. Drafts are
merged (segments, sessions and parents get distinct numbers) and finished: sorted by arrival, cut to
the requested number of rows, sessions and parents renumbered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.table import RUN, RequestTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Draft:
    """Rows [R] in any order, their runs [U], and how many segment and session numbers they use."""

    rows: NDArray[np.void]
    runs: NDArray[np.void]
    segments: int
    sessions: int


def set_runs(rows: NDArray[np.void], columns: Sequence[tuple[Ints, Ints]]) -> NDArray[np.void]:
    """Give each row the runs (segment [R], tokens [R]) of the columns, in order; return runs [U].

    A run of no tokens is left out.
    """
    segment = np.stack([s for s, _ in columns], axis=1)
    tokens = np.stack([t for _, t in columns], axis=1)
    present = tokens > 0
    count = present.sum(axis=1)
    rows["run_count"] = count
    rows["run_start"] = np.cumsum(count) - count
    runs = np.zeros(int(count.sum()), RUN)
    runs["segment"] = segment[present]
    runs["tokens"] = tokens[present]
    return runs


def merge(drafts: Sequence[Draft], common_segments: int = 0) -> Draft:
    """Join drafts, renumbered so that no segment, session or parent of one is taken for another's.

    Segments numbered below ``common_segments`` mean the same in all of them and keep their number.
    """
    if len(drafts) == 1:
        return drafts[0]
    rows = np.concatenate([d.rows for d in drafts])
    runs = np.concatenate([d.runs for d in drafts])
    row = run = session = 0
    segment = common_segments
    for d in drafts:
        part, part_runs = rows[row : row + len(d.rows)], runs[run : run + len(d.runs)]
        part["run_start"] += run
        part["parent"][part["parent"] >= 0] += row
        part["session"][part["session"] >= 0] += session
        own = part_runs["segment"] >= common_segments
        part_runs["segment"][own] += segment - common_segments
        row, run, session = row + len(d.rows), run + len(d.runs), session + d.sessions
        segment += d.segments - common_segments
    return Draft(rows, runs, segment, session)


def finish(draft: Draft, requests: int) -> RequestTable:
    """Return the first ``requests`` rows by arrival as a table.

    A row must arrive after its parent, so cutting never separates a row from its parent.
    """
    order = np.argsort(draft.rows["arrival_s"], kind="stable")[:requests]
    return reorder(RequestTable(draft.rows, draft.runs), order)


def reorder(table: RequestTable, order: Ints) -> RequestTable:
    """Return the given rows in the given order, parents and sessions renumbered.

    A row whose parent is left out becomes the first of its session.
    """
    rows = table.rows[order]
    place = np.full(len(table.rows) + 1, -1, np.int64)
    place[order] = np.arange(len(order))
    rows["parent"] = place[rows["parent"]]  # -1 reads the spare last place, which holds -1
    rows["session"] = _dense(rows["session"])
    runs = gather_runs(rows, table.runs)
    return RequestTable(rows, runs)


def gather_runs(rows: NDArray[np.void], runs: NDArray[np.void]) -> NDArray[np.void]:
    """Return the runs [U] of the rows in their order; the rows' run_start is set to match."""
    index = run_index(rows)
    count = rows["run_count"].astype(np.int64)
    rows["run_start"] = np.cumsum(count) - count
    return runs[index]


def run_index(rows: NDArray[np.void]) -> Ints:
    """Return for each run of each row, in the order of the rows, its place in the run list."""
    count = rows["run_count"].astype(np.int64)
    end = np.cumsum(count)
    total = int(end[-1]) if len(end) else 0
    shift = rows["run_start"] - (end - count)
    index: Ints = np.arange(total) + np.repeat(shift, count)
    return index


def retime(table: RequestTable, root_s: Floats) -> RequestTable:
    """Return the table with new arrival times for the rows that have no parent, sorted again.

    ``root_s`` holds one time per such row, in their order. A later turn keeps its nominal distance
    from the turn before: users do not think faster because more of them come.
    """
    rows = table.rows.copy()
    parent = rows["parent"].astype(np.int64)
    old_s = table.rows["arrival_s"]
    gap_s = np.where(parent >= 0, old_s - old_s[parent], 0.0)
    arrival_s = np.zeros(len(rows))
    turn = np.flatnonzero(parent < 0)
    arrival_s[turn] = root_s
    has_parent = np.flatnonzero(parent >= 0)
    by_parent = has_parent[np.argsort(parent[has_parent], kind="stable")]
    count = np.bincount(parent[has_parent], minlength=len(rows))
    first = np.cumsum(count) - count
    while turn.size:
        counts = count[turn]
        before = np.repeat(turn, counts)
        place = np.repeat(first[turn] - (np.cumsum(counts) - counts), counts)
        following = by_parent[place + np.arange(len(before))]
        arrival_s[following] = arrival_s[before] + gap_s[following]
        turn = following
    rows["arrival_s"] = arrival_s
    # Ties go by the old order, in which a parent stands above its child.
    order = np.argsort(arrival_s, kind="stable")
    return reorder(RequestTable(rows, table.runs), order)


def _dense(session: NDArray[np.int32]) -> NDArray[np.int32]:
    """Number sessions [R] by first appearance, from 0 without gaps; -1 stays."""
    dense = np.full(len(session), -1, np.int32)
    has = session >= 0
    _, first, inverse = np.unique(session[has], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    dense[has] = rank[inverse]
    return dense
