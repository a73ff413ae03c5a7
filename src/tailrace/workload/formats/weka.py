"""Reader of Claude Code sessions as Weka publishes them: a file per session, or a folder of files.

A session is a JSON object with ``requests``: time ``t`` in s from the session's start, tokens
``in`` and ``out``, and ``hash_ids``, one per block of ``block_size`` tokens, which mean something
within the session only. An entry of type ``subagent`` holds the requests of a sub-agent, which run
beside the main agent's.

Which request follows which is told by their times, see agents.py. The first ``tool_tokens +
system_tokens`` of the prompts are Claude Code's own and the same in every session; those of
sub-agents are the same for every sub-agent of a type.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.blocks import block_runs
from tailrace.workload.columns import MAX_TIME_S, MAX_TOKENS
from tailrace.workload.formats.agents import (
    ROUNDING_S,
    AgentRequest,
    AgentRows,
    Lane,
    no_runs,
)
from tailrace.workload.formats.json_text import BlockLists, lines, parse
from tailrace.workload.formats.unpack import read_bytes
from tailrace.workload.trace_formats import Imported, checked_number

Ints = NDArray[np.int64]

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_SUB_AGENT = "subagent"
_MAIN = "main"
#: Ids of shared blocks: a range for each kind of agent, below those of all sessions.
_SHARED_RANGE = 1 << 32


def is_session(start: bytes) -> bool:
    """Whether a file that begins like this is a session of this kind."""
    return start.lstrip().startswith(b"{") and all(
        key in start for key in (b'"requests"', b'"block_size"', b'"hash_ids"')
    )


def files(folder: Path) -> list[Path]:
    """Return the session files in a folder, by name; empty if it is not a folder."""
    return sorted(p for end in SUFFIXES for p in folder.glob(f"*{end}") if p.is_file())


def read(path: Path, session_gap_s: float | None = None, only: Sequence[Path] = ()) -> Imported:
    """Read a session or a folder of sessions, all files in it or those of ``only``.

    The files do not say when a session began: sessions begin ``session_gap_s`` after one another,
    and without it the result has no arrivals.
    """
    reader = _Reader(session_gap_s or 0.0)
    for file in only or (files(path) if path.is_dir() else [path]):
        reader.read_file(file)
    if not reader.rows.requests:
        raise TailraceError(f"{path} has no requests")
    imported = reader.finish()
    return imported._replace(has_arrivals=session_gap_s is not None or reader.rows.sessions == 1)


class _Numbers(NamedTuple):
    """What a session's ids, given by rank, are called among those of all sessions."""

    first: int  # number of rank 0, and so on
    known: Ints | None  # [d] instead, where ids mean the same in all sessions


class _Reader:
    """Collects the requests of many sessions."""

    def __init__(self, session_gap_s: float) -> None:
        self.rows = AgentRows(session_gap_s)
        self._ids: list[Ints] = []  # block ids of each request, the same in all sessions
        self._block = 0
        self._next_id = 0
        self._known: dict[int, int] = {}  # numbers of ids that mean the same in all sessions
        self._kinds: dict[str, int] = {}
        self._skipped = 0

    def read_file(self, path: Path) -> None:
        text = read_bytes(path)
        lists = BlockLists(path, text)
        ids = lists.rank()
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            for number, where, data in lines(path, lists.rest):
                self._read_session(where, data, lists, ids, f"{path.name} {number}")
        else:
            self._read_session(str(path), parse(str(path), lists.rest), lists, ids, path.name)

    def _read_session(
        self, where: str, data: dict[str, Any], lists: BlockLists, ids: Ints, name: str
    ) -> None:
        """Read a session; ``name`` tells it from others if it has no id of its own.

        ``ids`` [d]: what the ranks in ``lists`` stand for.
        """
        block = int(checked_number(where, data, "block_size", 1, MAX_TOKENS, whole=True))
        if self._block not in (0, block):
            raise TailraceError(
                f"{where}: blocks of {block} tokens, but other sessions have {self._block}; "
                "import them one by one"
            )
        self._block = block
        first, known = self._next_id, None
        if data.get("hash_id_scope", "local") == "local":
            self._next_id += len(ids)
        else:
            known = self._of_all_sessions(ids)
        self.rows.begin_session(str(data.get("id") or name))
        self._read_lane(where, data, lists, _Numbers(first, known), _MAIN, Lane([]))

    def _of_all_sessions(self, ids: Ints) -> Ints:
        """Return numbers [d] of ids that mean the same in every session that has them."""
        found = []
        for one in ids.tolist():
            number = self._known.get(one)
            if number is None:
                number = self._known[one] = self._next_id
                self._next_id += 1
            found.append(number)
        return np.array(found, np.int64)

    def _read_lane(
        self,
        where: str,
        data: dict[str, Any],
        lists: BlockLists,
        numbers: "_Numbers",
        kind: str,
        lane: Lane,
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
                branch = Lane([], *lane.parent_at(at_s), shift_s=_shift_s(entry, at_s))
                lane.branched = True
                agent = f"{_SUB_AGENT} {entry.get('subagent_type')}"
                self._read_lane(place, entry, lists, numbers, agent, branch)
            elif entry.get("out") == 0:
                self._skipped += 1
            else:
                self.rows.add(lane, _request(place, entry, own[k], self._block, lane.shift_s))
                self._ids.append(_global(own[k], numbers, shared))

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

    def finish(self) -> Imported:
        """Return all rows in the order of arrival."""
        rows = self.rows.rows()
        counts = np.array([len(ids) for ids in self._ids], np.int64)
        flat = np.concatenate(self._ids)
        runs = block_runs(rows, flat, counts, self._block) if flat.size else no_runs()
        return self.rows.finish(rows, runs, self._skipped)


def _global(ids: Ints, numbers: _Numbers, shared: tuple[int, Ints]) -> Ints:
    """Return ids [b] that mean the same in all sessions."""
    found = ids + numbers.first if numbers.known is None else numbers.known[ids]
    if ids.size and ids[0] == shared[0]:
        count = min(len(ids), len(shared[1]))
        found[:count] = shared[1][:count]
    return found


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
    counts_anew = isinstance(first, int | float) and first < at_s - ROUNDING_S
    return at_s if counts_anew else 0.0


def _request(
    where: str, entry: dict[str, Any], ids: Ints, block: int, shift_s: float
) -> AgentRequest:
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
    return AgentRequest(at_s, at_s + took_s, think_s, prompt, output)
