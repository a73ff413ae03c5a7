"""State of all workers of one router.

Each worker writes its own rows and reads everybody's, so nothing is locked, and nothing of a worker
that dies is left behind: its rows are cleared. What is read while it is being written is at worst a
number from a moment ago. Routers that know nothing of each other's prompts lose far more than that
(docs/router-speed.md). A router alone is one worker, and its state is ordinary memory.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.router.access.accounts import ClientAccounts
from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.settings import BackendSettings
from tailrace.router.state.server_model import SERVER_MODEL
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
#: Replicas that several workers have room for beyond twice those at the start: a reload may add
#: some.
SPARE = 16
#: Found replicas that a worker alone has room for at first; it grows.
FIRST_ROOM = 16
#: What a worker reports of itself.
WORKER = np.dtype(
    [
        ("beat_at", "f8"),  # when it last looked after its time limits, s; 0: it has not begun to
        ("version", "i8"),  # of its configuration + 1; 0: it does not run
        ("waiting_since", "f8"),  # since when requests wait there for room, s; 0: none waits
    ]
)
MAX_INDEX_ENTRIES = 1 << 18


def index_entries(capacity_tokens: NDArray[np.int64]) -> int:
    """Return how many runs the index of each replica must have room for."""
    # Runs are 64 units long but for the last of each prompt; the rest is for short prompts.
    return min(max(4096, int(capacity_tokens.max(initial=0)) // 32), MAX_INDEX_ENTRIES)


def memory_of(array: Any) -> Any:
    """Return an array's memory, which Python and ``struct`` access faster than NumPy does."""
    return memoryview(array)


def new_shared_state(
    backends: Sequence[BackendSettings],
    workers: int = 1,
    discovery: DiscoverySettings = DiscoverySettings(),  # noqa: B008
    peers: int = 0,
) -> "SharedState":
    """Return the empty state of ``workers`` workers in front of these backends.

    ``discovery``: how others are found, for which there must be room. ``peers``: most workers on
    other machines whose state is known here as well, see peers.py.
    """
    servers = [backend.server for backend in backends]
    least = 0
    if discovery.is_used:
        servers.append(discovery.backend.server)
        least = discovery.most if workers > 1 else min(discovery.most, FIRST_ROOM)
    capacity = idle_views(servers)["capacity_tokens"]
    return SharedState(workers, len(backends), index_entries(capacity), least, peers)


class SharedState:
    """Rows of every worker: ``w`` workers, room for ``n`` replicas with ``e`` index entries each.

    Behind the workers' rows there are ``p`` for workers on other machines. Row ``w + p + i`` of
    ``replicas`` and ``routers`` holds what worker ``i`` sees: the sum of all rows as of its latest
    decision. One worker alone sees its own row.
    """

    replicas: NDArray[np.void]  #: [2 w + p or 1, n] REPLICA_VIEW
    routers: NDArray[np.void]  #: [2 w + p or 1, ROUTER_ROWS] ROUTER
    entries: NDArray[np.void]  #: [w + p, n, e + 1] ENTRY: the indexes, see view/prefix_index.py
    slots: NDArray[np.int32]  #: [w + p, n, s]
    totals: NDArray[np.void]  #: [w + p, n] TOTALS
    sessions: NDArray[np.uint64]  #: [SESSIONS * SESSION_CELLS]; empty for one worker
    in_flight: NDArray[np.int64]  #: [w, n]: requests of every kind at each backend
    freed_at: NDArray[np.float64]  #: [n]: when one of these last ended, s
    models: NDArray[np.void]  #: [w, n] SERVER_MODEL: what each has learned of the replicas' speed
    reports: NDArray[np.void]  #: [w] WORKER

    def __init__(
        self, workers: int, replicas: int, entries: int, least: int = 0, peers: int = 0
    ) -> None:
        """Make it empty; ``replicas`` at the start, ``entries`` of each one's prefix index.

        ``least``: replicas for which there is room in any case. ``peers``: most workers on other
        machines.
        """
        self.workers = workers
        self.data_rows = data_rows = workers + peers
        self.accounts = ClientAccounts(workers)
        """What clients use at present."""
        self.alone = alone = data_rows == 1  # then it can grow, see with_room
        self.room = room = max(replicas if alone else 2 * replicas + SPARE, least)
        rows = 1 if alone else data_rows + workers
        # All-zero memory is an empty index; pages that are never written take no memory.
        slots = prefix_index.new_index(1, entries).slots.shape[1]
        parts: list[tuple[Any, tuple[int, ...]]] = [
            (REPLICA_VIEW, (rows, room)),
            (ROUTER, (rows, ROUTER_ROWS)),
            (prefix_index.ENTRY, (data_rows, room, entries + 1)),
            (np.dtype(np.int32), (data_rows, room, slots)),
            (prefix_index.TOTALS, (data_rows, room)),
            (np.dtype(np.uint64), (0 if alone else SESSIONS * SESSION_CELLS,)),
            (np.dtype(np.int64), (workers, room)),
            (np.dtype(np.float64), (room,)),
            (SERVER_MODEL, (workers, room)),
            (WORKER, (workers,)),
        ]
        arrays = [np.zeros(shape, dtype) for dtype, shape in parts] if alone else _mapped(parts)
        self.replicas, self.routers, self.entries, self.slots, self.totals = arrays[:5]
        self.sessions, self.in_flight, self.freed_at, self.models, self.reports = arrays[5:]

    @property
    def index_entries(self) -> int:
        """Runs that each replica's prefix index has room for."""
        return int(self.entries.shape[2]) - 1

    def of(self, worker: int) -> "WorkerView":
        """Return the state as one worker sees it."""
        return WorkerView(self, worker)

    def clear(self, worker: int) -> None:
        """Forget everything about a worker."""
        for rows in (
            self.replicas, self.routers, self.slots, self.totals, self.in_flight, self.models,
            self.reports,
        ):  # fmt: skip
            rows[worker] = np.zeros((), rows.dtype)
        self.entries[worker, :, 0] = np.zeros((), self.entries.dtype)  # the heads of the lists
        self.accounts.clear(worker)

    def clear_peer(self, row: int) -> None:
        """Forget everything about a worker on another machine."""
        self.routers[row] = np.zeros((), ROUTER)
        used = self.totals["fresh"][row] > 0  # the others were never touched: their memory is free
        self.slots[row, used] = 0
        self.entries[row, used, 0] = np.zeros((), self.entries.dtype)
        self.totals[row] = np.zeros((), self.totals.dtype)
        self.replicas[row] = np.zeros((), REPLICA_VIEW)

    @property
    def members(self) -> int:
        """Workers that route to these replicas, those on other machines included."""
        sizes = self.replicas["block_size"][self.workers : self.data_rows]
        return self.workers + int(np.count_nonzero(sizes.any(axis=1)))

    def with_room(self, replicas: int, entries: int) -> "SharedState":
        """Return the state of one worker alone with room for more replicas or larger indexes.

        The prefix indexes start empty if their size changes; they are learned again.
        """
        grown = SharedState(1, replicas, entries)
        grown.replicas[:, : self.room] = self.replicas
        grown.routers[:] = self.routers
        grown.models[:, : self.room] = self.models
        grown.accounts = self.accounts
        if entries == self.index_entries:
            for name in ("entries", "slots", "totals"):
                getattr(grown, name)[:, : self.room] = getattr(self, name)
        return grown


def _mapped(parts: list[tuple[Any, tuple[int, ...]]]) -> list[NDArray[Any]]:
    """All-zero arrays in memory that forked processes share."""
    sizes = [-(-dtype.itemsize * int(np.prod(shape)) // 64) * 64 for dtype, shape in parts]
    memory = mmap.mmap(-1, sum(sizes))
    arrays: list[NDArray[Any]] = []
    at = 0
    for (dtype, shape), size in zip(parts, sizes, strict=True):
        flat = np.frombuffer(memory, dtype, int(np.prod(shape)), at)
        arrays.append(flat.reshape(shape))
        at += size
    return arrays


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The shared state as one worker sees it."""

    shared: SharedState
    worker: int

    @property
    def view_row(self) -> int:
        """Row of ``replicas`` and ``routers`` that holds what the worker sees."""
        return self.worker if self.shared.alone else self.shared.data_rows + self.worker

    def replicas(self, count: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Return the worker's own records of the first ``count`` replicas, and those it sees."""
        if count > self.shared.room:
            raise TailraceError(
                f"there is room for {self.shared.room} backends in all, those taken out included; "
                "restart the router to have more"
            )
        rows = self.shared.replicas
        return rows[self.worker, :count], rows[self.view_row, :count]

    def routers(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Return the worker's own router records, and those it sees."""
        rows = self.shared.routers
        return rows[self.worker], rows[self.view_row]

    def index(self, count: int) -> PrefixIndex:
        """Return the worker's own prefix index of the first ``count`` replicas."""
        s, w = self.shared, self.worker
        return PrefixIndex(s.entries[w, :count], s.slots[w, :count], s.totals[w, :count])
