"""Reader of agent sessions as a table: a line per request, shared prefixes as lengths.

The columns are ``session``, ``request`` (its number within the session), ``lane`` (``main``, or
``main/2`` for a sub-agent of it), ``t_s`` from the start of the session, ``input_tokens``,
``output_tokens``, and the prompt's beginning: its first ``lcp_blocks`` blocks are those of request
``lcp_of_request`` of the same session (-1: none). ``blocks64`` counts the blocks of a prompt, of 64
tokens by its name. ``think_s`` and ``api_s``, how long the answer took, may be empty or missing.
"""

import re

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.blocks import block_runs
from tailrace.workload.columns import MAX_TOKENS, Sheet
from tailrace.workload.formats.agents import AgentRequest, AgentRows, Lane, no_runs
from tailrace.workload.trace_formats import Imported

Ints = NDArray[np.int64]

COLUMNS = ("session", "request", "t_s", "input_tokens", "output_tokens", "lcp_blocks")
REFERENCE = "lcp_of_request"
_BLOCKS = re.compile(r"blocks([0-9]+)")
_MAIN = "main"


def parse(sheet: Sheet) -> Imported:
    """Turn the lines of a table into rows; requests without output are left out and counted."""
    block = _block_tokens(sheet)
    output = sheet.tokens("output_tokens", low=0)
    prompt = sheet.tokens("input_tokens")
    at_s = sheet.seconds("t_s")
    think_s = sheet.known_seconds("think_s")
    took_s = np.nan_to_num(sheet.known_seconds("api_s"))
    lanes = sheet.raw("lane").to_pylist() if "lane" in sheet else [_MAIN] * len(sheet)
    prefix = _Prefixes(sheet, block, prompt)
    names = [str(name) for name in sheet.raw("session").to_pylist()]
    found = AgentRows(0.0)
    parts: list[Ints] = []  # lines of each session that became rows
    for lines in _sessions(names):
        prefix.number(lines)
        found.begin_session(names[int(lines[0])])
        of_lane: dict[str, Lane] = {}
        kept = lines[output[lines] > 0]
        # In the order of time: a sub-agent's first request must find the turn that started it.
        parts.append(kept[np.argsort(at_s[kept], kind="stable")])
        for line in parts[-1].tolist():
            think = float(think_s[line]) if np.isfinite(think_s[line]) else None
            request = AgentRequest(
                float(at_s[line]), float(at_s[line] + took_s[line]), think,
                int(prompt[line]), int(output[line]),
            )  # fmt: skip
            found.add(_lane(of_lane, str(lanes[line]), request.at_s), request)
    if not found.requests:
        raise TailraceError(f"{sheet.path}: no request has output tokens")
    rows = found.rows()
    runs = prefix.runs(rows, parts)
    imported = found.finish(rows, runs, skipped=int((output == 0).sum()))
    source = np.concatenate(parts)[imported.source_row]
    return imported._replace(source_row=source, has_arrivals=found.sessions == 1)


def _sessions(names: list[str]) -> list[Ints]:
    """Return the lines of each session, in the order of the file."""
    lines: dict[str, list[int]] = {}
    for line, name in enumerate(names):
        lines.setdefault(name, []).append(line)
    return [np.array(of, np.int64) for of in lines.values()]


def _lane(known: dict[str, Lane], name: str, at_s: float) -> Lane:
    """Return the lane of a name; a new one branches off the lane that its name begins with."""
    if name not in known:
        start = name.rpartition("/")[0]
        parent = known.get(start)
        known[name] = Lane([])
        if parent is not None:
            known[name] = Lane([], *parent.parent_at(at_s))
            parent.branched = True
    return known[name]


def _block_tokens(sheet: Sheet) -> int:
    sizes = [int(m[1]) for m in map(_BLOCKS.fullmatch, sheet.columns) if m]
    if len(sizes) != 1 or not 1 <= sizes[0] <= MAX_TOKENS:
        raise TailraceError(
            f"{sheet.path}: one column must count the blocks of a prompt and name their tokens, "
            f"like blocks64; there are {', '.join(sheet.columns)}"
        )
    return sizes[0]


class _Prefixes:
    """Which blocks the prompts of a table share."""

    def __init__(self, sheet: Sheet, block: int, prompt: Ints) -> None:
        self._block = block
        self._blocks = sheet.ints(f"blocks{block}", 0, MAX_TOKENS)
        self._shared = sheet.ints("lcp_blocks", 0, MAX_TOKENS)
        self._number = sheet.ints("request", 0, 2**31 - 1)
        self._of = sheet.ints(REFERENCE, -1, 2**31 - 1)
        self._sheet = sheet
        self._ids: dict[int, Ints] = {}
        sheet.refuse(self._blocks > -(-prompt // block), f"blocks{block}", "{} exceed the prompt")
        sheet.refuse(self._shared > self._blocks, "lcp_blocks", "{} are more than the prompt has")

    def runs(self, rows: NDArray[np.void], parts: list[Ints]) -> NDArray[np.void]:
        """Give rows [R] their content, session by session (``parts``: their lines); return runs."""
        found = []
        row = run = segment = 0
        for lines in parts:
            ids = [self._ids.pop(line) for line in lines.tolist()]
            own = rows[row : row + len(lines)]
            counts = np.array([len(one) for one in ids], np.int64)
            flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
            row += len(lines)
            if not flat.size:
                continue
            runs = block_runs(own, flat, counts, self._block)
            runs["segment"] += segment
            own["run_start"] += run
            segment = int(runs["segment"].max()) + 1
            run += len(runs)
            found.append(runs)
        return np.concatenate(found) if found else no_runs()

    def number(self, lines: Ints) -> None:
        """Give the blocks of a session's prompts ids, which mean something within it.

        ``lines`` in the order of the file, also of requests that are left out.
        """
        by_number: dict[int, Ints] = {}
        fresh = 0
        for line in lines.tolist():
            shared, of = int(self._shared[line]), int(self._of[line])
            start = np.zeros(0, np.int64)
            if shared and of >= 0:
                if of not in by_number:
                    what = f"request {of} does not stand above it in its session"
                    self._sheet.fail(line, REFERENCE, what)
                start = by_number[of][:shared]
                if len(start) < shared:
                    self._sheet.fail(line, "lcp_blocks", f"request {of} has fewer blocks")
            new = int(self._blocks[line]) - len(start)
            self._ids[line] = np.concatenate([start, np.arange(fresh, fresh + new)])
            fresh += new
            by_number[int(self._number[line])] = self._ids[line]
