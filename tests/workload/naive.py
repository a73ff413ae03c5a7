"""Slow, obvious twins of the vectorised content functions."""

from collections.abc import Sequence

import numpy as np

from tailrace.workload.table import RequestTable

Runs = list[tuple[int, int]]


def runs_of(table: RequestTable, row: int) -> Runs:
    """Runs (segment, tokens) of one request."""
    start, count = int(table.rows["run_start"][row]), int(table.rows["run_count"][row])
    return [(int(s), int(t)) for s, t, _ in table.runs[start : start + count].tolist()]


def content(runs: Runs) -> list[tuple[int, int]]:
    """Every token of a prompt, as (segment, position in it)."""
    return [(segment, i) for segment, tokens in runs for i in range(tokens)]


def shared_tokens(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common beginning of two sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def repeated_tokens(table: RequestTable, *, answers: bool) -> list[int]:
    """Longest beginning of each prompt that an earlier prompt (and answer) has."""
    seen: list[list[tuple[int, int]]] = []
    repeated = []
    for row in range(len(table)):
        runs = runs_of(table, row)
        repeated.append(max((shared_tokens(content(runs), old) for old in seen), default=0))
        if answers and runs:
            segment, tokens = runs[-1]
            runs[-1] = (segment, tokens + int(table.rows["output_tokens"][row]))
        if runs:
            seen.append(content(runs))
    return repeated


def block_hit_rate(table: RequestTable, block: int) -> float:
    """Share of prompt blocks, the last one not full, that an earlier prompt had."""
    seen: set[int] = set()
    hits = blocks = 0
    for row in range(len(table)):
        ends = np.cumsum([0] + [tokens for _, tokens in runs_of(table, row)])
        prompt = int(table.rows["prompt_tokens"][row])
        if ends[-1] == 0:
            blocks += -(-prompt // block)
            continue
        path, hit = 0, True
        pieces = runs_of(table, row)
        for start in range(0, prompt, block):
            end = min(start + block, prompt)
            first = int(np.searchsorted(ends, start, side="right")) - 1
            last = int(np.searchsorted(ends, end, side="left")) - 1
            inside = tuple(
                (
                    pieces[k][0],
                    max(start - int(ends[k]), 0),
                    min(end, int(ends[k + 1])) - int(ends[k]),
                )
                for k in range(first, last + 1)
            )
            path = hash((path, inside))
            hit = hit and path in seen
            seen.add(path)
            hits += hit
            blocks += 1
    return hits / blocks
