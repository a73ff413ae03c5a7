"""Traffic drawn from recorded conversations: which ones and when they begin follows a seed.

The traffic is a window of a process that has gone on for ever: conversations begin at a constant
rate, or in the recorded rhythm scaled to it, and last as long as they were recorded to, so when the
window opens most are under way. Those join one by one during the lead-in, at the turn they have
come to, with cold caches; measure after it. Within a conversation turns keep their recorded times,
or their think times where a turn follows another. A conversation that is drawn twice becomes two
with text of their own; only what several conversations of the trace shared stays shared.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.seeds import generator
from tailrace.workload.draft import gather_runs, run_index
from tailrace.workload.recorded.conversations import conversation_keys, numbered
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Share of the window during which conversations that are under way join.
LEAD_IN = 0.2
#: Longer pauses within a conversation, s, count as this long: whatever was cached is gone by then.
LONGEST_PAUSE_S = 3600.0
#: The window is drawn this much longer than needed on average, then cut to the number of requests.
_MARGIN = 1.5
#: Most conversations that are drawn for a window.
_MOST_DRAWN = 2_000_000
#: From here on segments are numbered anew, as copies of them would not fit into 64 bits.
_LARGEST_SEGMENT = 1 << 40


@dataclass(frozen=True)
class ConversationPool:
    """Recorded conversations to draw from."""

    #: Sorted by arrival. If all conversations begin at the same time, their beginnings are unknown.
    table: RequestTable

    @cached_property
    def _conversation(self) -> Ints:
        return numbered(conversation_keys(self.table))

    @property
    def conversations(self) -> int:
        """How many there are."""
        return int(self._conversation.max()) + 1

    @cached_property
    def _order(self) -> Ints:
        """Rows conversation by conversation, each in the order of arrival."""
        return np.argsort(self._conversation, kind="stable")

    @cached_property
    def _turns(self) -> Ints:
        return np.bincount(self._conversation)

    @cached_property
    def _first(self) -> Ints:
        """Place of each conversation's first row in the order."""
        return np.cumsum(self._turns) - self._turns

    @cached_property
    def _offset_s(self) -> Floats:
        """Times from the beginning of the conversation, by place in the order."""
        arrival_s = self.table.rows["arrival_s"][self._order]
        gap_s = np.minimum(np.diff(arrival_s, prepend=0.0), LONGEST_PAUSE_S)
        gap_s[self._first] = 0.0
        total = np.cumsum(gap_s)
        return np.asarray(total - np.repeat(total[self._first], self._turns))

    @cached_property
    def _length_s(self) -> Floats:
        """How long each conversation lasts, to its last request."""
        return np.asarray(self._offset_s[self._first + self._turns - 1])

    @cached_property
    def _runs(self) -> NDArray[np.void]:
        """Runs of the table, with segments so small that every conversation drawn can have own."""
        runs = self.table.runs
        if len(runs) and int(runs["segment"].max()) >= _LARGEST_SEGMENT:
            runs = runs.copy()
            _, runs["segment"] = np.unique(runs["segment"], return_inverse=True)
        return runs

    @cached_property
    def _private(self) -> NDArray[np.bool_]:
        """Whether a run's [U] segment belongs to one conversation only."""
        owner = np.repeat(self._conversation, self.table.rows["run_count"])
        index = run_index(self.table.rows)
        segment = self.table.runs["segment"][index]
        _, number = np.unique(segment, return_inverse=True)
        low = np.full(len(segment), len(self.table), np.int64)
        high = np.full(len(segment), -1, np.int64)
        np.minimum.at(low, number, owner)
        np.maximum.at(high, number, owner)
        private = np.zeros(len(self.table.runs), bool)
        private[index] = (low == high)[number]
        return private

    def draw(self, requests: int, rate: float, seed: int) -> RequestTable:
        """Draw about ``requests`` requests, never more, at ``rate`` requests/s on average."""
        if requests < 1 or not rate > 0:
            raise TailraceError(f"cannot draw {requests} requests at {rate} requests/s")
        rng = generator(seed, "resample")
        window_s = requests / rate
        starts_rps = rate / float(self._turns.mean())
        before_s = float(self._length_s.max())
        most_s = _MOST_DRAWN / starts_rps - _MARGIN * window_s
        if most_s <= 0:
            raise TailraceError(f"{requests} requests are too many to draw from a recording")
        before_s = min(before_s, most_s)
        span_s = before_s + _MARGIN * window_s
        start_s = self._starts(max(1, round(starts_rps * span_s)), span_s, rng) - before_s
        drawn = rng.integers(self.conversations, size=len(start_s))
        join_s = np.where(start_s < 0, rng.uniform(0, LEAD_IN * window_s, len(start_s)), -np.inf)
        seen = start_s + self._length_s[drawn] >= np.maximum(join_s, 0.0)
        return self._window(requests, drawn[seen], start_s[seen], join_s[seen])

    def _starts(self, count: int, span_s: float, rng: np.random.Generator) -> Floats:
        """Return when conversations begin [count], sorted, from 0 to ``span_s``."""
        recorded_s = self.table.rows["arrival_s"][self._order[self._first]]
        if np.ptp(recorded_s) == 0:
            return np.sort(rng.uniform(0, span_s, count))
        # The recorded gaps from a random place on, again and again.
        gap_s = np.diff(np.sort(recorded_s))
        gap_s = np.append(gap_s, gap_s.mean())
        at = rng.integers(len(gap_s)) + np.arange(count)
        times = np.cumsum(gap_s[at % len(gap_s)])
        if times[-1] == 0:
            return np.sort(rng.uniform(0, span_s, count))
        return np.asarray(times * (span_s / (times[-1] + gap_s.mean())))

    def _window(self, requests: int, drawn: Ints, start_s: Floats, join_s: Floats) -> RequestTable:
        """Return the requests of conversations ``drawn`` [k] that begin at ``start_s`` [k]."""
        turns = self._turns[drawn]
        copy = np.repeat(np.arange(len(drawn)), turns)
        base = np.cumsum(turns) - turns
        place = np.repeat(self._first[drawn] - base, turns) + np.arange(len(copy))
        arrival_s = start_s[copy] + self._offset_s[place]
        kept = np.flatnonzero(arrival_s >= np.maximum(join_s[copy], 0.0))
        # Ties go by conversation, then by the recorded order, in which parents come first.
        kept = kept[np.argsort(arrival_s[kept], kind="stable")[:requests]]
        if kept.size == 0:
            raise TailraceError("the window holds no request; ask for more requests")
        source = self._order[place[kept]]
        rows = self.table.rows[source]
        rows["arrival_s"] = arrival_s[kept]
        rows["parent"] = self._parents(source, copy[kept], kept, base)
        rows["think_s"] = np.where(
            rows["parent"] >= 0, np.minimum(rows["think_s"], LONGEST_PAUSE_S), 0.0
        )
        has = rows["session"] >= 0
        rows["session"][has] = numbered(copy[kept][has].astype(np.uint64))
        private = self._private[run_index(rows)]
        runs = gather_runs(rows, self._runs)
        owner = np.repeat(copy[kept], rows["run_count"])
        if len(self._runs):
            width = int(self._runs["segment"].max()) + 1
            runs["segment"] += np.where(private, (owner + 1) * width, 0)
        found = RequestTable(rows, runs)
        found.validate()
        return found

    def _parents(self, source: Ints, copy: Ints, kept: Ints, base: Ints) -> Ints:
        """Return the row in the window that each row follows; -1 if it lies outside of it.

        ``source`` [R] rows of the recording, ``copy`` the conversation drawn, ``kept`` their place
        among all turns of all of those, which begin at ``base`` [k].
        """
        within = np.empty(len(self._order), np.int64)  # place of a row within its conversation
        within[self._order] = np.arange(len(self._order)) - np.repeat(self._first, self._turns)
        at = np.full(int((base[-1] if len(base) else 0) + self._turns.max()) + 1, -1, np.int64)
        at[kept] = np.arange(len(kept))
        parent = self.table.rows["parent"][source].astype(np.int64)
        found = np.where(parent >= 0, at[base[copy] + within[parent]], -1)
        return np.asarray(found)
