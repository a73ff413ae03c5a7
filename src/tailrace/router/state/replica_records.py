"""The records of the replicas behind a live router, one row each, and how they come and go.

The rows are those of ``view/records.py``, in memory that several workers may share
(shared_state.py). A replica keeps its number for as long as it is there; a number that has become
free is given to another server.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Replica
from tailrace.router.settings import BackendSettings
from tailrace.router.state import kernels, server_model
from tailrace.router.state.active_blocks import ActiveBlocks
from tailrace.router.state.outbox import Outbox
from tailrace.router.state.shared_state import WorkerView, index_entries, memory_of
from tailrace.view import ledger, prefix_index
from tailrace.view.records import REPLICA_VIEW
from tailrace.view.replicas import idle_views, is_caching, replica_costs
from tailrace.view.selection import mix

#: Numbers per REPLICA_VIEW record, and the place of one of them.
WIDTH = REPLICA_VIEW.itemsize // 8
_AVAILABLE = list(REPLICA_VIEW.names or ()).index("available")


class ReplicaRecords:
    """The rows of all replicas: load, memory, speed, what is cached there."""

    def __init__(
        self,
        worker_view: WorkerView,
        clock: Callable[[], float],
        *,
        seed: int,
        learn_speeds: bool,
    ) -> None:
        """Start without replicas; ``learn_speeds``: learn how fast servers are that do not say."""
        self.worker_view = worker_view
        self.clock = clock
        self.routers, self.seen_routers = worker_view.routers()
        """Own router records, and those that policies see: with what other workers did."""
        with np.errstate(over="ignore"):
            for k, row in enumerate(self.routers):
                row["rng"] = mix(np.uint64(seed + k))
        self.routers["looked_at"] = clock()
        self.seen_routers[:] = self.routers
        self.backends: list[BackendSettings] = []
        self.replicas, self.seen = worker_view.replicas(0)
        """Own records of the replicas, and those that policies see: with what other workers did."""
        self.costs = replica_costs([])
        """Cost models [n] COST of the replicas: given, assumed or learned."""
        self._learn_speeds = learn_speeds
        self.lesson_at: list[float] = []
        """When the next request to each replica may teach how fast it is, s; inf: none does."""
        self.beliefs: NDArray[np.void] = np.zeros(0, kernels.BELIEF)
        self.waiting: list[dict[int, float]] = []
        self.epochs: list[int] = []
        self._next_epoch = itertools.count()
        self._members = worker_view.shared.members
        self.outbox: Outbox | None = None
        """Gathers what workers on other machines have to know; None: there are none."""
        self.active: ActiveBlocks | None = None
        """Prompt blocks in flight, counted for policies that read them (Rule.uses_active)."""
        self._misses: list[int] = []
        self._answer_share: list[float] = []

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def router(self) -> Any:
        """The ROUTER record of the cluster."""
        return self.routers[kernels.MAIN]

    def add(self, backend: BackendSettings) -> int:
        """Add a replica at run time; return its number. Numbers of others never change."""
        self._grow([backend])
        return len(self.replicas) - 1

    def replace(self, replica: int, backend: BackendSettings) -> None:
        """Give a number to another server, of which nothing is known yet.

        Attempts that are still open for the old one may be closed later; they count no more.
        """
        server = backend.server
        view = idle_views([server])
        self._make_room(len(self), view["capacity_tokens"])
        self._take_rows(len(self))
        self.forget(replica)
        self.replicas[replica] = view[0]
        self.replicas["recent_at"][replica] = self.clock()
        self.seen[replica] = self.replicas[replica]
        self.backends[replica] = backend
        self.costs[replica] = replica_costs([server])[0]
        self.models[replica] = self._new_models([server])[0]
        self.lesson_at[replica] = self._first_lesson(replica)
        self.beliefs[replica] = (self._believed(server), 1, 0)
        self._misses[replica], self._answer_share[replica] = 0, 1.0

    def shrink(self, count: int) -> None:
        """Forget the replicas from number ``count`` on; no attempt there may be open."""
        for replica in range(count, len(self)):
            self.forget(replica)
            self.replicas[replica] = np.zeros((), REPLICA_VIEW)  # other workers leave it out
        del self.backends[count:], self.waiting[count:], self.epochs[count:]
        del self._misses[count:], self._answer_share[count:], self.lesson_at[count:]
        self.costs, self.beliefs = self.costs[:count], self.beliefs[:count]
        self.caching, self.answers = self.beliefs["caching"], self.beliefs["answers"]
        self._take_rows(count)

    def _grow(self, backends: Sequence[BackendSettings]) -> None:
        servers = [backend.server for backend in backends]
        old, n = len(self.replicas), len(self.replicas) + len(servers)
        views, new = idle_views(servers), slice(old, n)
        self._make_room(n, views["capacity_tokens"])
        self._take_rows(n)
        self.replicas[new] = views
        self.replicas["recent_at"][new] = self.clock()
        self.seen[:] = self.replicas
        self.backends += backends
        self.costs = np.concatenate([self.costs, replica_costs(servers)])
        self.models[new] = self._new_models(servers)
        self.lesson_at += [self._first_lesson(replica) for replica in range(old, n)]
        believed = np.array([(self._believed(s), 1, 0) for s in servers], kernels.BELIEF)
        self.beliefs = np.concatenate([self.beliefs, believed])
        self.caching, self.answers = self.beliefs["caching"], self.beliefs["answers"]
        self.waiting += [{} for _ in servers]
        self.epochs += [next(self._next_epoch) for _ in servers]
        self._misses += [0] * len(servers)
        self._answer_share += [1.0] * len(servers)

    def _new_models(self, servers: Sequence[Replica]) -> NDArray[np.void]:
        models = server_model.new_models(servers)
        models["learns"] &= self._learn_speeds
        return models

    def _first_lesson(self, replica: int) -> float:
        return -math.inf if self.models[replica]["learns"] else math.inf

    def begin_lesson(self, replica: int, now: float) -> NDArray[np.float64]:
        """A request is about to be sent from which a replica's speed is learned."""
        self.lesson_at[replica] = now + server_model.lesson_interval_s(self.models[replica])
        lesson = np.zeros(server_model.LESSON_SHAPE)
        server_model.sent(self._all_models, self._all_views, replica, lesson, now)
        return lesson

    def follow_model(self, replica: int) -> None:
        """What is known of a replica's speed has changed: let its records follow."""
        server_model.apply(self.models[replica], self.replicas[replica], self.costs[replica])
        self.seen[replica] = self.replicas[replica]

    def _take_rows(self, count: int) -> None:
        """Use the first ``count`` rows of the shared state."""
        worker_view = self.worker_view
        self.replicas, self.seen = worker_view.replicas(count)
        self._all_views = worker_view.shared.replicas[:, :count]
        self._all_models = worker_view.shared.models[:, :count]
        self.models = self._all_models[worker_view.worker]
        self.index = worker_view.index(count)
        self.routers, self.seen_routers = worker_view.routers()
        self.cells = memory_of(self.replicas.view(np.int64))
        self.times = memory_of(self.replicas.view(np.float64))

    def _make_room(self, n: int, capacity_tokens: NDArray[np.int64]) -> None:
        """Let the state of a worker alone grow; one that several workers share cannot."""
        shared = self.worker_view.shared
        entries = max(
            index_entries(capacity_tokens),
            index_entries(self.replicas["capacity_tokens"]),
            shared.index_entries,
        )
        if shared.alone and (n > shared.room or entries > shared.index_entries):
            # Twice as many: copying everything for each of many that come would take seconds.
            room = max(n, 2 * shared.room) if n > shared.room else shared.room
            self.worker_view = shared.with_room(room, entries).of(0)

    def _believed(self, server: Replica) -> int:
        """Among how many indexes a server's memory is divided; 0: it has no cache."""
        return self._members * int(is_caching(server))

    def count_members(self) -> None:
        """Divide the servers' caches among the workers that are there now, on all machines."""
        members = self.worker_view.shared.members
        if members != self._members:
            self._members = members
            self.caching[self.caching > 0] = members

    def set_available(self, replica: int, available: bool) -> None:
        """Record whether a replica may get requests; health and drains decide that."""
        self.cells[replica * WIDTH + _AVAILABLE] = int(available)

    def hide(self, replicas: Collection[int]) -> list[int]:
        """Let replicas get no requests for a moment; return what :meth:`unhide` needs."""
        cells, hidden, size = self.cells, [], len(self)
        for r in replicas:
            if 0 <= r < size:
                at = r * WIDTH + _AVAILABLE
                if cells[at]:
                    cells[at] = 0
                    hidden.append(at)
        return hidden

    def unhide(self, hidden: Sequence[int]) -> None:
        """Undo :meth:`hide`."""
        cells = self.cells
        for at in hidden:
            cells[at] = 1

    def available(self, replica: int) -> bool:
        """Whether a replica may get requests."""
        return bool(self.cells[replica * WIDTH + _AVAILABLE])

    def forget(self, replica: int) -> None:
        """A replica died: nothing is in flight or cached there any more.

        Attempts that are still open may be closed later; they count no more.
        """
        self.epochs[replica] = next(self._next_epoch)
        self.waiting[replica].clear()
        if self.active is not None:
            self.active.forget(replica)
        ledger.lost(self.replicas[replica])
        prefix_index.forget(self.index, replica)
        if self.outbox is not None:
            self.outbox.forgotten(replica)

    def scraped(
        self, replica: int, waiting: float | None, running: float | None, kv_used: float | None
    ) -> None:
        """Enter a metrics snapshot taken now; None is unknown, and the ledger stands in for it."""
        if waiting is None and running is None and kv_used is None:
            return  # the last snapshot stays, and so does its age
        view = self.replicas[replica]
        if waiting is None:
            waiting = view["queued"]
        if running is None:
            running = view["in_flight"] - view["queued"]
        if kv_used is None:
            held = float(view["queued_tokens"] + view["context_tokens"])
            kv_used = min(1.0, held / max(1.0, float(view["capacity_tokens"])))
        ledger.scraped(view, int(waiting), int(running), float(kv_used), self.clock())

    def set_capacity(self, replica: int, kv_tokens: int, block_size: int | None) -> None:
        """The server has told its KV memory; what the settings say explicitly stays."""
        server = self.backends[replica].server
        if block_size is not None and "block_size" not in server.model_fields_set:
            self.replicas[replica]["block_size"] = block_size
        if "num_blocks" not in server.model_fields_set:
            self.replicas[replica]["capacity_tokens"] = kv_tokens
