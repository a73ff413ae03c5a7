"""The records of all workers of one router, in memory they share.

Each worker writes its own rows and reads everybody's, so nothing is locked and nothing of a worker
that dies is left behind: its rows are cleared. What is read while it is being written is at worst a
figure from a moment ago. Routers that know nothing of each other's prompts lose far more than that
(docs/router-speed.md).
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.router.settings import BackendSettings
from tailrace.view import prefix_index
from tailrace.view.prefix_index import PrefixIndex
from tailrace.view.records import REPLICA_VIEW, ROUTER
from tailrace.view.replicas import idle_views

#: Router records per worker; see kernels.py.
ROUTER_ROWS = 4
#: Conversations that all workers remember together, a power of two.
SESSIONS = 1 << 16
#: Key, number, last replica + 1, turns.
SESSION_CELLS = 4
#: Replicas there is room for beyond twice those at the start: a reload may add some.
SPARE = 16
MAX_INDEX_ENTRIES = 1 << 18


def index_entries(capacity_tokens: NDArray[np.int64]) -> int:
    """Return how many runs the index of each replica must have room for."""
    # Runs are 64 units long but for the last of each prompt; the rest is for short prompts.
    return min(max(4096, int(capacity_tokens.max(initial=0)) // 32), MAX_INDEX_ENTRIES)


def new_shared_state(backends: Sequence[BackendSettings], workers: int) -> "SharedState":
    """Return an empty state for this many workers in front of these backends."""
    capacity = idle_views([backend.server for backend in backends])["capacity_tokens"]
    return SharedState(workers, len(backends), index_entries(capacity))


class SharedState:
    """Rows of every worker."""

    def __init__(self, workers: int, replicas: int, entries: int) -> None:
        """Make it empty; ``replicas`` at the start, ``entries`` of each one's prefix index."""
        self.workers = workers
        self.room = room = 2 * replicas + SPARE
        # All-zero memory is an empty index; pages that are never written take no memory.
        like = prefix_index.new_index(1, entries)
        slots = like.slots.shape[1]
        parts: list[tuple[Any, tuple[int, ...]]] = [
            (REPLICA_VIEW, (workers, room)),
            (ROUTER, (workers, ROUTER_ROWS)),
            (prefix_index.ENTRY, (workers, room, entries + 1)),
            (np.dtype(np.int32), (workers, room, slots)),
            (prefix_index.TOTALS, (workers, room)),
            (np.dtype(np.uint64), (SESSIONS * SESSION_CELLS,)),
        ]
        sizes = [-(-dtype.itemsize * int(np.prod(shape)) // 64) * 64 for dtype, shape in parts]
        self._memory = mmap.mmap(-1, sum(sizes))
        arrays: list[NDArray[Any]] = []
        at = 0
        for (dtype, shape), size in zip(parts, sizes, strict=True):
            flat = np.frombuffer(self._memory, dtype, int(np.prod(shape)), at)
            arrays.append(flat.reshape(shape))
            at += size
        self.replicas, self.routers, self.entries, self.slots, self.totals, self.sessions = arrays

    def of(self, worker: int) -> "WorkerView":
        """Return one worker's place."""
        return WorkerView(self, worker)

    def clear(self, worker: int) -> None:
        """Forget all about a worker."""
        for rows in (self.replicas, self.routers, self.slots, self.totals):
            rows[worker] = np.zeros((), rows.dtype)
        self.entries[worker, :, 0] = np.zeros((), self.entries.dtype)  # the heads of the lists


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The shared state as one worker sees it."""

    shared: SharedState
    worker: int

    @property
    def own_routers(self) -> NDArray[np.void]:
        """Its own router records."""
        rows: NDArray[np.void] = self.shared.routers[self.worker]
        return rows

    def own_replicas(self, count: int) -> NDArray[np.void]:
        """Return its own records of the first ``count`` replicas."""
        if count > self.shared.room:
            raise TailraceError(
                f"there is room for {self.shared.room} backends in all, those taken out included; "
                "restart the router to have more"
            )
        return self.shared.replicas[self.worker, :count]

    def own_index(self, count: int) -> PrefixIndex:
        """Return its own prefix index of the first ``count`` replicas."""
        b, w = self.shared, self.worker
        return PrefixIndex(b.entries[w, :count], b.slots[w, :count], b.totals[w, :count])
