"""The request table: the one description of traffic that every later stage reads.

A request is a row; its id is its row number. What a prompt *contains* matters only for prefix
caching, so content is kept as runs: run ``(segment, tokens)`` stands for the first ``tokens``
tokens of the endless token stream named ``segment``. Two prompts share a prefix as far as their
runs agree. The answer continues the stream of the last run, so a conversation is one segment of
which every turn uses a longer prefix, however many turns it has. A request without runs shares
nothing with any other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError

DEFAULT_TTFT_SLO_S = 1.0
DEFAULT_TPOT_SLO_S = 0.05

#: One request. ``arrival_s`` of a row with a parent is nominal: it orders the table and feeds
#: statistics, while the simulated arrival is ``think_s`` after the parent finished.
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),  # s from the start of the run
        ("think_s", "f8"),  # s between the parent's end and this arrival; 0 without a parent
        ("ttft_slo_s", "f8"),  # target for the time to first token
        ("tpot_slo_s", "f8"),  # target for the time per output token
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("session", "i4"),  # dense number of the conversation, -1: none
        ("turn", "i4"),  # 0 for the first request of a session
        ("parent", "i4"),  # row of the turn before, which may have several; -1: none
        ("priority", "i4"),  # higher is more urgent; carried, not used by the engines
        ("run_start", "i8"),  # first of its runs in RequestTable.runs
        ("run_count", "i4"),
        (
            "tenant",
            "i4",
        ),  # number of the customer, -1: unknown; clients share fairly where they wait
    ]
)

#: One run of prompt content.
RUN = np.dtype([("segment", "i8"), ("tokens", "i4"), ("reserved", "i4")])


def blank_rows(count: int) -> NDArray[np.void]:
    """Return rows [count] with every column at its default; lengths are left at 0."""
    rows = np.zeros(count, REQUEST)
    rows["session"] = rows["parent"] = rows["tenant"] = -1
    rows["ttft_slo_s"] = DEFAULT_TTFT_SLO_S
    rows["tpot_slo_s"] = DEFAULT_TPOT_SLO_S
    return rows


class RowError(TailraceError):
    """What is wrong with one row; ``row`` is its number, ``what`` the error."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(row, what)  # both, so that it survives the way between processes
        self.row = row
        self.what = what

    def __str__(self) -> str:
        return f"request {self.row}: {self.what}"


@dataclass(frozen=True)
class RequestTable:
    """Requests [R] (dtype REQUEST) and the runs [U] (dtype RUN) their prompts consist of."""

    rows: NDArray[np.void]
    runs: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def build(
        cls,
        arrival_s: NDArray[np.float64],
        prompt_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        runs: list[list[tuple[int, int]]] | None = None,
        **columns: NDArray[np.generic] | float,
    ) -> "RequestTable":
        """Build and validate a table from columns; what is left out gets its default."""
        rows = blank_rows(len(arrival_s))
        rows["arrival_s"] = arrival_s
        rows["prompt_tokens"] = prompt_tokens
        rows["output_tokens"] = output_tokens
        for name, values in columns.items():
            rows[name] = values
        flat = np.zeros(0, RUN)
        if runs is not None:
            counts = np.array([len(r) for r in runs], np.int64)
            rows["run_count"] = counts
            rows["run_start"] = np.cumsum(counts) - counts
            flat = np.zeros(int(counts.sum()), RUN)
            pairs = [pair for request in runs for pair in request]
            if pairs:
                flat["segment"], flat["tokens"] = np.array(pairs, np.int64).T
        table = cls(rows, flat)
        table.validate()
        return table

    def validate(self) -> None:
        """Raise a RowError (a TailraceError) that names the first bad row, if there is one."""
        rows = self.rows
        if len(rows) == 0:
            raise TailraceError("the request table is empty")

        def refuse(bad: NDArray[np.bool_], what: str) -> None:
            if bad.any():
                raise RowError(int(np.argmax(bad)), what)

        for name in ("arrival_s", "think_s", "ttft_slo_s", "tpot_slo_s"):
            values = rows[name]
            if not (values.min() >= 0 and values.max() < np.inf):  # NaN is neither
                refuse(~np.isfinite(values), f"{name} is not a finite number")
                refuse(values < 0, f"{name} is negative")
        refuse(rows["prompt_tokens"] < 1, "prompt_tokens must be at least 1")
        refuse(rows["output_tokens"] < 1, "output_tokens must be at least 1")
        refuse(
            np.diff(rows["arrival_s"], prepend=-np.inf) < 0,
            "arrives before the request above it; sort the table by arrival",
        )
        ids = np.arange(len(rows))
        refuse(rows["parent"] >= ids, "its parent must stand above it")
        refuse(rows["parent"] < -1, "parent must be a row number, or -1")
        self._validate_runs(refuse)

    def follow_ups(self) -> dict[int, list[int]]:
        """Return the rows that follow each row which has any."""
        found: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.rows["parent"] >= 0).tolist():
            found.setdefault(int(self.rows["parent"][row]), []).append(row)
        return found

    def _validate_runs(self, refuse: Callable[[NDArray[np.bool_], str], None]) -> None:
        rows, runs = self.rows, self.runs
        if (runs["tokens"] < 0).any():
            raise TailraceError("a content run has a negative number of tokens")
        total = np.concatenate([[0], np.cumsum(runs["tokens"], dtype=np.int64)])
        start = rows["run_start"]
        end = start + rows["run_count"]
        outside = (start < 0) | (end < start) | (end > len(runs))
        refuse(outside, "its content runs lie outside the run list")
        refuse(
            (rows["run_count"] > 0) & (total[end] - total[start] != rows["prompt_tokens"]),
            "its content runs do not add up to prompt_tokens",
        )


def scale_prompts(table: RequestTable, scale: float) -> RequestTable:
    """Return a table whose prompts are ``scale`` times as long, at least one token each.

    Runs are scaled one by one, so that prompts share what they shared before. Answers keep their
    lengths.
    """
    if scale == 1.0:
        return table
    rows, runs = table.rows.copy(), table.runs.copy()
    largest = np.iinfo(rows["prompt_tokens"].dtype).max

    def scaled(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = np.clip(np.rint(tokens * scale), 1, largest).astype(np.int64)
        return found

    runs["tokens"] = np.where(runs["tokens"] > 0, scaled(runs["tokens"]), 0)
    total = np.concatenate([[0], np.cumsum(runs["tokens"], dtype=np.int64)])
    start = rows["run_start"]
    shared = rows["run_count"] > 0
    by_runs = total[start + rows["run_count"]] - total[start]
    prompt = np.where(shared, by_runs, scaled(rows["prompt_tokens"]))
    if (prompt > largest).any():
        raise TailraceError(f"prompt_scale = {scale:g} makes prompts of over {largest} tokens")
    rows["prompt_tokens"] = prompt
    return RequestTable(rows, runs)
