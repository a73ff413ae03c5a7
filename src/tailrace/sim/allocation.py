"""Sizes of the arrays that clusters need, and the allocation of a fleet of them."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Replica, RouterSettings
from tailrace.sim.kvcache import ROW_HEAD
from tailrace.sim.result import BATCH
from tailrace.sim.types import (
    CLUSTER,
    EVENT,
    EXTENT,
    FLOW,
    HEAP_ENTRY,
    KV_EVENT,
    NEWS,
    PIECE,
    REQUEST_FACT,
    REQUEST_STATE,
    SERVER,
    SLOT_ROWS,
    Fleet,
    Tables,
)
from tailrace.view.devices import num_blocks_of
from tailrace.view.prefix_index import new_index
from tailrace.view.records import COST, REPLICA_VIEW, REQUEST_VIEW, ROUTER
from tailrace.view.replicas import is_caching
from tailrace.workload.table import RequestTable


@dataclass(frozen=True)
class Allocation:
    """Array sizes that are enough for some clusters and request tables."""

    replicas: int = 1
    slots: int = 1
    """Requests a replica runs at once."""
    block_size: int = 1
    blocks: int = 0
    """KV blocks of a replica with prefix caching."""
    explicit_slots: int = 0
    """Requests a replica with explicit blocks runs at once."""
    blocks_per_request: int = 0
    """Most blocks a request holds there."""
    index_entries: int = 1
    requests: int = 1
    waiting: int = 0
    """Arrivals that depend on the run: follow-up turns, rerouted requests."""
    sessions: int = 0
    tenants: int = 1
    runs: int = 0
    """Content runs of a table."""
    runs_per_request: int = 1
    events: int = 0
    kv_events: int = 0
    """KV events that may be on their way to the router."""

    def joined(self, other: "Allocation") -> "Allocation":
        """Return sizes that are enough for both."""
        return Allocation(*map(max, vars(self).values(), vars(other).values()))

    def with_slack(self) -> "Allocation":
        """Return sizes 1.5 times as large where tables differ."""
        growing = (
            "blocks_per_request",
            "waiting",
            "sessions",
            "tenants",
            "runs",
            "runs_per_request",
        )
        return replace(self, **{name: getattr(self, name) * 3 // 2 for name in growing})


def is_explicit(replica: Replica) -> bool:
    """Whether a replica's blocks are tracked per request rather than counted (see batching.py)."""
    return replica.scheduler == "vllm_v1" and (
        replica.prefix_caching or replica.preallocate_tokens > 0
    )


def allocation_for(
    replicas: Sequence[Replica], table: RequestTable, router: RouterSettings, events: int = 0
) -> Allocation:
    """Return the sizes that one cluster with one table needs."""
    caching = [r for r in replicas if is_caching(r)]
    explicit = [r for r in replicas if is_explicit(r)]
    rows = table.rows
    return Allocation(
        replicas=len(replicas),
        slots=max(r.batch_cap for r in replicas),
        block_size=max(r.block_size for r in replicas),
        blocks=max((num_blocks_of(r) for r in caching), default=0),
        explicit_slots=max(r.batch_cap for r in replicas) if explicit else 0,
        blocks_per_request=_longest_row(replicas, table) if explicit else 0,
        index_entries=router.index_entries if caching else 1,
        requests=len(table),
        waiting=len(table) if events else int((rows["parent"] >= 0).sum()),
        sessions=int(rows["session"].max()) + 1,
        tenants=len(np.unique(rows["tenant"])),
        runs=len(table.runs),
        runs_per_request=max(int(rows["run_count"].max()), 1),
        events=events,
        kv_events=2 * len(table) if router.prefix_learns == "events" else 0,
    )


def _longest_row(replicas: Sequence[Replica], table: RequestTable) -> int:
    """Return the most blocks a request can hold."""
    rows = table.rows
    tokens = int((rows["prompt_tokens"].astype(np.int64) + rows["output_tokens"]).max())
    return max(
        -(-tokens // r.block_size) + -(-r.preallocate_tokens // r.block_size) + 1 for r in replicas
    )


def new_rows(*shape: int) -> NDArray[np.int32]:
    """Return zeros that take memory page by page, where they are written to.

    There is a row for the longest request in every slot, and a run writes to few of them. NumPy
    asks for pages of 2 MB, so that the kernel would clear nearly all of it.
    """
    size = int(np.prod(shape)) * np.dtype(np.int32).itemsize
    if size == 0:
        return np.zeros(shape, np.int32)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.int32).reshape(shape)


def new_tables(room: Allocation, count: int) -> Tables:
    """Return ``count`` empty tables."""
    events = np.zeros((count, room.events), EVENT)
    events["at"] = np.inf
    return Tables(
        facts=np.zeros((count, room.requests), REQUEST_FACT),
        roots=np.zeros((count, room.requests), np.int32),
        n_roots=np.zeros(count, np.int64),
        run_keys=np.zeros((count, room.runs), np.uint64),
        run_tokens=np.zeros((count, room.runs), np.int32),
        pieces=np.zeros((count, 2 * room.runs), PIECE),
        events=events,
    )


def new_fleet(
    room: Allocation,
    count: int,
    *,
    record_batches: int = 0,
    record_news: bool = False,
    lookahead: bool = False,
) -> Fleet:
    """Return the arrays of ``count`` clusters that are not set up yet."""
    c, n, rows, slots = count, room.replicas, room.requests, room.slots
    ghosts = rows if lookahead else 0
    chains = min(room.blocks, 2 * room.runs + rows)
    buckets = 1 << max(2 * chains - 1, 1).bit_length()
    index = new_index(c * n, room.index_entries)
    return Fleet(
        clusters=np.zeros(c, CLUSTER),
        servers=np.zeros((c, n), SERVER),
        wake=np.full((c, n), np.inf),
        slots=np.zeros((c, n, SLOT_ROWS, slots), np.int64),
        phase=np.zeros((c, n, room.block_size), np.int64),
        notices=np.zeros((c, 2, slots + 1), np.int64),
        requests=np.zeros((c, rows), REQUEST_STATE),
        heap=np.zeros((c, room.waiting + 1), HEAP_ENTRY),
        extents=np.zeros((c, n, room.blocks + 1), EXTENT),
        buckets=np.zeros((c, n, buckets), np.int32),
        held=new_rows(c, n, room.explicit_slots, room.blocks_per_request + ROW_HEAD),
        rows_free=np.zeros((c, n, slots + 1), np.int64),
        batches=np.zeros((c, record_batches), BATCH),
        news=np.zeros((c, 3 * rows + 1 if record_news else 0), NEWS),
        key_scratch=np.zeros((c, room.runs_per_request), np.uint64),
        run_scratch=np.zeros((c, room.runs_per_request), np.int32),
        in_flight_scratch=np.zeros((c, rows), np.int32),
        ghost=np.zeros((c, 1), SERVER),
        ghost_slots=np.zeros((c, SLOT_ROWS, slots), np.int64),
        ghost_phase=np.zeros((c, room.block_size), np.int64),
        ghost_requests=np.zeros((c, ghosts), REQUEST_STATE),
        ghost_numbers=np.zeros((c, ghosts), np.int64),
        requests_view=np.zeros(c, REQUEST_VIEW),
        replicas_view=np.zeros((c, n), REPLICA_VIEW),
        router=np.zeros(c, ROUTER),
        costs=np.zeros((c, n), COST),
        last_replica=np.full((c, room.sessions), -1, np.int32),
        flows=np.zeros((c, room.tenants), FLOW),
        index_entries=index.entries.reshape(c, n, -1),
        index_slots=index.slots.reshape(c, n, -1),
        index_totals=index.totals.reshape(c, n),
        kv_events=np.zeros((c, room.kv_events), KV_EVENT),
        scores=np.zeros((c, n)),
    )
