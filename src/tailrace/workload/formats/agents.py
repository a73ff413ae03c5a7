"""Requests of agent sessions on their way to a table: who follows whom, and after which think time.

A request follows the last one of its lane that had been answered when it was sent. So requests sent
side by side are branches of one turn, and a sub-agent, which is a lane of its own, branches off the
turn that started it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.draft import reorder
from tailrace.workload.table import RUN, RequestTable, blank_rows
from tailrace.workload.trace_formats import Imported, session_key

Ints = NDArray[np.int64]

#: Recorded times are whole seconds: a request may seem to begin this long before the last one's
#: answer, s.
ROUNDING_S = 1.0


class AgentRequest(NamedTuple):
    """One recorded request; times in s from the start of its session."""

    at_s: float
    end_s: float
    think_s: float | None  # None: not recorded
    prompt: int
    output: int


@dataclass
class Lane:
    """Requests of one agent, in the order in which they were sent."""

    requests: list[tuple[int, AgentRequest]]  # with their row
    parent: int = -1  # row of the turn that started it, -1: none
    parent_end_s: float = 0.0
    shift_s: float = 0.0  # from its times to the session's
    branched: bool = False  # a sub-agent has run since its last request

    def parent_at(self, at_s: float) -> tuple[int, float]:
        """Return row and end (s) of the turn that a request sent at ``at_s`` follows."""
        for row, earlier in reversed(self.requests):
            if earlier.end_s <= at_s + ROUNDING_S:
                return row, earlier.end_s
        return self.parent, self.parent_end_s


class AgentRows:
    """Collects the requests of many sessions, session by session."""

    def __init__(self, session_gap_s: float) -> None:
        self.requests: list[AgentRequest] = []
        self._columns: list[tuple[float, int, float, int]] = []  # arrival, parent, think, session
        self._keys: list[int] = []  # of each session
        self._gap_s = session_gap_s

    @property
    def sessions(self) -> int:
        """Number of sessions so far."""
        return len(self._keys)

    def begin_session(self, name: str) -> None:
        """Let the requests that follow belong to a new session."""
        self._keys.append(session_key(name))

    def add(self, lane: Lane, request: AgentRequest) -> None:
        """Add a request to a lane of the current session."""
        row = len(self.requests)
        session = self.sessions - 1
        parent, parent_end_s = lane.parent_at(request.at_s)
        think_s = 0.0
        if parent >= 0:
            think_s = max(0.0, request.at_s - parent_end_s)
            # The recorded one counts from the request before, unless sub-agents ran in between.
            # Where it exceeds the time since that request was sent, it counts from an earlier one.
            follows_last = bool(lane.requests) and lane.requests[-1][0] == parent
            if request.think_s is not None and follows_last and not lane.branched:
                since_s = request.at_s - lane.requests[-1][1].at_s
                if request.think_s <= since_s + ROUNDING_S:
                    think_s = request.think_s
        lane.branched = False
        self.requests.append(request)
        self._columns.append((session * self._gap_s + request.at_s, parent, think_s, session))
        lane.requests.append((row, request))

    def rows(self) -> NDArray[np.void]:
        """Return the rows in the order in which they were added, without content."""
        rows = blank_rows(len(self.requests))
        arrival_s, parent, think_s, session = map(np.array, zip(*self._columns, strict=True))
        rows["arrival_s"], rows["think_s"] = _not_before(arrival_s, parent), think_s
        rows["parent"], rows["session"] = parent, session
        rows["prompt_tokens"] = [r.prompt for r in self.requests]
        rows["output_tokens"] = [r.output for r in self.requests]
        return rows

    def finish(self, rows: NDArray[np.void], runs: NDArray[np.void], skipped: int) -> Imported:
        """Return :meth:`rows`, by now with content, in the order of arrival."""
        # Parents have lower numbers than what follows them, so ties keep the order that is valid.
        order = np.argsort(rows["arrival_s"], kind="stable")
        keys = np.array(self._keys, np.uint64)[rows["session"]][order]
        table = reorder(RequestTable(rows, runs), order)
        _number_turns(table.rows)
        return Imported(table, order, skipped=skipped, session_keys=keys)


def no_runs() -> NDArray[np.void]:
    """Return the runs of rows without content."""
    return np.zeros(0, RUN)


def _not_before(arrival_s: NDArray[np.float64], parent: Ints) -> NDArray[np.float64]:
    """Return arrivals [R] no earlier than those of the parents, which have lower numbers."""
    found = arrival_s.copy()
    for row in np.flatnonzero((parent >= 0) & (arrival_s < arrival_s[parent])).tolist():
        found[row] = max(found[row], found[parent[row]])
    return found


def _number_turns(rows: NDArray[np.void]) -> None:
    """Number the requests of each session in the order of arrival."""
    order = np.argsort(rows["session"], kind="stable")
    session = rows["session"][order]
    first = np.flatnonzero(np.diff(session, prepend=-1))
    rows["turn"][order] = np.arange(len(rows)) - np.repeat(first, np.diff(first, append=len(rows)))
