"""Reader of Claude Code sessions as Weka publishes them: a file per session, or a folder of files.

A session is a JSON object with ``requests``: time ``t`` in s from the session's start, tokens
``in`` and ``out``, and ``hash_ids``, one per block of ``block_size`` tokens, which mean something
within the session only. An entry of type ``subagent`` holds the requests of a sub-agent, which run
beside the main agent's.

* A request follows the last one of its lane that had been answered when it was sent, after the
  recorded think time. So requests sent side by side are branches of one turn, and a sub-agent
  branches off the turn that started it.
* The first ``tool_tokens + system_tokens`` of the prompts are Claude Code's own and the same in
  every session; those of sub-agents are the same for every sub-agent of a type.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.blocks import block_runs
from tailrace.workload.columns import MAX_TIME_S, MAX_TOKENS
from tailrace.workload.draft import reorder
from tailrace.workload.formats.json_text import BlockLists, lines, parse, read_bytes
from tailrace.workload.table import RUN, RequestTable, blank_rows
from tailrace.workload.trace_formats import Imported, checked_number

Ints = NDArray[np.int64]

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_SUB_AGENT = "subagent"
_MAIN = "main"
#: Recorded times are whole seconds: a request may seem to begin this long before the last one's
#: answer, s.
_ROUNDING_S = 1.0
#: Ids of shared blocks: a range for each kind of agent, below those of all sessions.
_SHARED_RANGE = 1 << 32


class _Request(NamedTuple):
    at_s: float
    end_s: float
    think_s: float | None
    prompt: int
    output: int
    ids: Ints  # block ids, the same in all sessions


@dataclass
class _Lane:
    """Requests of one agent, in the order in which they were sent."""

    requests: list[tuple[int, _Request]]  # with their row
    parent: int  # row of the turn that started it, -1: none
    parent_end_s: float
    shift_s: float = 0.0  # from its times to the session's
    branched: bool = False  # a sub-agent has run since its last request

    def parent_of(self, request: _Request) -> tuple[int, float]:
        """Return row and end (s) of the turn that a request follows."""
        for row, earlier in reversed(self.requests):
            if earlier.end_s <= request.at_s + _ROUNDING_S:
                return row, earlier.end_s
        return self.parent, self.parent_end_s


def is_session(start: bytes) -> bool:
    """Whether a file that begins like this is a session of this kind."""
    return start.lstrip().startswith(b"{") and all(
        key in start for key in (b'"requests"', b'"block_size"', b'"hash_ids"')
    )


def files(folder: Path) -> list[Path]:
    """Return the session files in a folder, by name; empty if it is not a folder."""
    return sorted(p for end in SUFFIXES for p in folder.glob(f"*{end}") if p.is_file())


def read(path: Path, session_gap_s: float | None = None) -> Imported:
    """Read a session or a folder of sessions.

    The files do not say when a session began: sessions begin ``session_gap_s`` after one another,
    and without it the result has no arrivals.
    """
    reader = _Reader(session_gap_s or 0.0)
    for file in files(path) if path.is_dir() else [path]:
        reader.read_file(file)
    if not reader.requests:
        raise TailraceError(f"{path} has no requests")
    imported = reader.finish()
    return imported._replace(has_arrivals=session_gap_s is not None or reader.sessions == 1)


class _Reader:
    """Collects the requests of many sessions."""

    def __init__(self, session_gap_s: float) -> None:
        self.sessions = 0
        self.requests: list[_Request] = []
        self._columns: list[tuple[float, int, float, int]] = []  # arrival, parent, think, session
        self._gap_s = session_gap_s
        self._block = 0
        self._next_id = 0
        self._kinds: dict[str, int] = {}
        self._skipped = 0

    def read_file(self, path: Path) -> None:
        text = read_bytes(path)
        lists = BlockLists(path, text)
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            for _, where, data in lines(path, lists.rest):
                self._read_session(where, data, lists)
        else:
            self._read_session(str(path), parse(str(path), lists.rest), lists)

    def _read_session(self, where: str, data: dict[str, Any], lists: BlockLists) -> None:
        block = int(checked_number(where, data, "block_size", 1, MAX_TOKENS, whole=True))
        if self._block not in (0, block):
            raise TailraceError(
                f"{where}: blocks of {block} tokens, but other sessions have {self._block}; "
                "import them one by one"
            )
        self._block = block
        offset = self._next_id if data.get("hash_id_scope", "local") == "local" else 0
        self._read_lane(where, data, lists, offset, _MAIN, _Lane([], -1, 0.0))
        self.sessions += 1

    def _read_lane(
        self,
        where: str,
        data: dict[str, Any],
        lists: BlockLists,
        offset: int,
        kind: str,
        lane: _Lane,
    ) -> None:
        """Read the requests of one agent and, where they begin, of its sub-agents."""
        entries = data.get("requests")
        if not isinstance(entries, list):
            raise TailraceError(f"{where}, column requests: must be a list")
        own = [_ids(f"{where}, request {k}", entry, lists) for k, entry in enumerate(entries)]
        shared = self._shared(where, data, kind, own)
        for k, entry in enumerate(entries):
            place = f"{where}, request {k}"
            if entry.get("type") == _SUB_AGENT:
                at_s = checked_number(place, entry, "t", 0, MAX_TIME_S)
                at_s += lane.shift_s
                start = _Request(at_s, at_s, None, 1, 1, own[k])
                branch = _Lane([], *lane.parent_of(start), shift_s=_shift_s(entry, at_s))
                lane.branched = True
                agent = f"{_SUB_AGENT} {entry.get('subagent_type')}"
                self._read_lane(place, entry, lists, offset, agent, branch)
            elif entry.get("out") == 0:
                self._skipped += 1
            else:
                request = _request(place, entry, own[k], self._block, lane.shift_s)
                self._add(lane, request._replace(ids=self._global(own[k], offset, shared)))

    def _shared(
        self, where: str, data: dict[str, Any], kind: str, own: list[Ints]
    ) -> tuple[int, Ints]:
        """Return the block that prompts with the shared beginning start with, and shared ids [s].

        It is the first block of most prompts: a session may use several models.
        """
        tokens = sum(
            int(checked_number(where, data, name, 0, MAX_TOKENS, whole=True))
            for name in ("tool_tokens", "system_tokens")
            if data.get(name) is not None
        )
        firsts = [int(ids[0]) for ids in own if ids.size]
        if not firsts or tokens < self._block:
            return 0, np.zeros(0, np.int64)
        number = self._kinds.setdefault(kind, len(self._kinds))
        base = -1 - number * _SHARED_RANGE
        return max(set(firsts), key=firsts.count), base - np.arange(tokens // self._block)

    def _global(self, ids: Ints, offset: int, shared: tuple[int, Ints]) -> Ints:
        """Return ids [b] that mean the same in all sessions."""
        if ids.size == 0:
            return ids
        self._next_id = max(self._next_id, offset + int(ids.max()) + 1)
        found = ids + offset
        if ids[0] == shared[0]:
            count = min(len(ids), len(shared[1]))
            found[:count] = shared[1][:count]
        return found

    def _add(self, lane: _Lane, request: _Request) -> None:
        row = len(self.requests)
        parent, parent_end_s = lane.parent_of(request)
        think_s = 0.0
        if parent >= 0:
            think_s = max(0.0, request.at_s - parent_end_s)
            # The recorded one counts from the request before, unless sub-agents ran in between.
            follows_last = bool(lane.requests) and lane.requests[-1][0] == parent
            if request.think_s is not None and follows_last and not lane.branched:
                think_s = request.think_s
        lane.branched = False
        arrival_s = self.sessions * self._gap_s + request.at_s
        self.requests.append(request)
        self._columns.append((arrival_s, parent, think_s, self.sessions))
        lane.requests.append((row, request))

    def finish(self) -> Imported:
        """Return all rows in the order of arrival."""
        rows = blank_rows(len(self.requests))
        arrival_s, parent, think_s, session = map(np.array, zip(*self._columns, strict=True))
        rows["arrival_s"], rows["think_s"] = _not_before(arrival_s, parent), think_s
        rows["parent"], rows["session"] = parent, session
        rows["prompt_tokens"] = [r.prompt for r in self.requests]
        rows["output_tokens"] = [r.output for r in self.requests]
        counts = np.array([len(r.ids) for r in self.requests], np.int64)
        flat = np.concatenate([r.ids for r in self.requests])
        runs = block_runs(rows, flat, counts, self._block) if flat.size else np.zeros(0, RUN)
        # Parents have lower numbers than what follows them, so ties keep the order that is valid.
        order = np.argsort(rows["arrival_s"], kind="stable")
        table = reorder(RequestTable(rows, runs), order)
        _number_turns(table.rows)
        return Imported(table, order, skipped=self._skipped)


def _ids(where: str, entry: Any, lists: BlockLists) -> Ints:
    if not isinstance(entry, dict):
        raise TailraceError(f"{where}: must be a JSON object")
    return lists.of(where, entry)


def _shift_s(entry: dict[str, Any], at_s: float) -> float:
    """Return what to add to a sub-agent's times: some traces count them from its own start."""
    inner = entry.get("requests")
    if not isinstance(inner, list) or not inner or not isinstance(inner[0], dict):
        return 0.0
    first = inner[0].get("t")
    counts_anew = isinstance(first, int | float) and first < at_s - _ROUNDING_S
    return at_s if counts_anew else 0.0


def _request(where: str, entry: dict[str, Any], ids: Ints, block: int, shift_s: float) -> _Request:
    """Check one request."""
    at_s = checked_number(where, entry, "t", 0, MAX_TIME_S) + shift_s
    prompt = int(checked_number(where, entry, "in", 1, MAX_TOKENS, whole=True))
    output = int(checked_number(where, entry, "out", 1, MAX_TOKENS, whole=True))
    took_s = 0.0
    if entry.get("api_time") is not None:
        took_s = checked_number(where, entry, "api_time", 0, MAX_TIME_S)
    think_s = None
    if entry.get("think_time") is not None:
        think_s = checked_number(where, entry, "think_time", 0, MAX_TIME_S)
    # Prompts are recorded to the token, blocks as whole ones; more blocks than text is a mistake.
    if len(ids) > -(-prompt // block):
        raise TailraceError(
            f"{where}, column hash_ids: {len(ids)} blocks of {block} tokens are more than a prompt "
            f"of {prompt}"
        )
    return _Request(at_s, at_s + took_s, think_s, prompt, output, ids)


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
