"""What one worker has entered into its prefix index and sessions since it last told other machines.

Everything is appended as it happens and read a hundred times a second (peers.py). Nothing is copied
here: the arrays of a prompt do not change.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.router.intake.prompt_blocks import PromptBlocks

#: Kinds of changes to the prefix index.
ENTER, REMOVE, SHORTEN, EVICT, FORGET = range(5)
#: Changes that wait; beyond it all are dropped, and a snapshot is sent instead.
MOST_CHANGES = 4096
#: Conversations that wait; beyond it the oldest are dropped.
MOST_SESSIONS = 4096


class Outbox:
    """Changes that other machines have not been told of."""

    def __init__(self) -> None:
        self.changes: list[tuple[Any, ...]] = []
        """(kind, replica, ...): see the methods below."""
        self.sessions: dict[int, tuple[int, int]] = {}
        """Last replica and turns of conversations, by key."""
        self.overflowed = False
        """Whether changes were dropped."""

    def entered(self, replica: int, runs: PromptBlocks) -> None:
        """A replica has a prompt, as far as the index knows."""
        self._append(ENTER, replica, runs.keys, runs.units, runs.branch_at)

    def answered(self, replica: int, runs: PromptBlocks, more: int) -> None:
        """An answer of ``more`` units continues the last run of a prompt."""
        last = len(runs.keys) - 2
        units = np.array([int(runs.units[last]) + more, 0], np.int32)
        keys = np.array([runs.keys[last], 0], np.uint64)
        self._append(ENTER, replica, keys, units, -1)

    def stored(self, replica: int, keys: NDArray[np.uint64], units: NDArray[np.int32]) -> None:
        """A server has reported runs as cached."""
        self._append(ENTER, replica, _with_branch(keys), _with_branch(units), -1)

    def removed(self, replica: int, keys: NDArray[np.uint64]) -> None:
        """A server has reported runs as evicted."""
        self._append(REMOVE, replica, keys)

    def shortened(self, replica: int, key: int, units: int) -> None:
        """A server has evicted the end of a run."""
        self._append(SHORTEN, replica, key, units)

    def evicted(self, replica: int, age_s: float) -> None:
        """A replica has evicted what it last used this long ago, or before."""
        self._append(EVICT, replica, age_s)

    def forgotten(self, replica: int) -> None:
        """Nothing is cached on a replica any more."""
        self._append(FORGET, replica)

    def session(self, key: int, replica: int, turns: int) -> None:
        """A conversation has gone on at a replica."""
        self.sessions[key] = replica, turns
        if len(self.sessions) > MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]

    def take(self) -> tuple[list[tuple[Any, ...]], dict[int, tuple[int, int]]]:
        """Return what has gathered, and begin anew."""
        changes, sessions = self.changes, self.sessions
        self.changes, self.sessions = [], {}
        return changes, sessions

    def _append(self, *change: Any) -> None:
        if len(self.changes) >= MOST_CHANGES:
            self.changes.clear()
            self.overflowed = True
        self.changes.append(change)


def _with_branch(runs: NDArray[Any]) -> NDArray[Any]:
    """Return keys or units of runs with those of a branch behind, as of a prompt without one."""
    return np.append(runs, np.zeros(1, runs.dtype))
