"""State of workers on other machines: told in messages, kept in rows like those of workers here.

Each worker tells the others what has changed in its ledger, prefix index and conversations, about a
hundred times a second (:meth:`Peers.collect`), and applies what it hears (:meth:`Peers.apply`).
Messages are numbered: a worker that misses one, or has just come, asks for a snapshot. A worker
that is silent is forgotten after a while. Messages contain no clock time, only how long ago
something was, so clocks need not agree. How they travel is not decided here.

A message is a msgpack array: format, router, worker, number, kind, and the kind's own fields.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.router.state import kernels
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.outbox import ENTER, EVICT, FORGET, REMOVE, SHORTEN, Outbox
from tailrace.router.state.sessions import SharedSessions
from tailrace.view import prefix_index
from tailrace.view.prefix_index import PrefixIndex
from tailrace.view.records import REPLICA_VIEW, ROUTER

#: Kinds of messages: changes; a snapshot of one replica's index; a request for snapshots.
CHANGES, SNAPSHOT, ASK = range(3)
#: Runs of one replica in a snapshot, the latest.
MOST_SNAPSHOT_RUNS = 16_384
#: Longest message that is read, bytes.
MOST_BYTES = 32 * 2**20
#: Time between two snapshots, and between two requests for one, s.
SNAPSHOT_EVERY_S = 1.0
#: How often a worker that has nothing to tell says that it is there, s.
BEAT_S = 0.25
#: Records with other fields are of another version, and are not read.
FORMAT = xxhash.xxh3_64_intdigest(repr((REPLICA_VIEW.descr, ROUTER.descr, 1)).encode()) >> 32

_TIMES = ("oldest_sent", "recent_at", "metrics_at")
#: These change with every decision, for all replicas, so they are sent only with heartbeats.
_AVERAGES = ("streamed", "recent_tokens", "recent_in_flight")


@dataclass(slots=True)
class Peer:
    """A worker on another machine."""

    row: int
    """Its row of the shared state."""
    heard_at: float
    """When it was last heard, s."""
    next_number: int = 0
    """Number of its next message."""
    asked_at: float = -math.inf
    """When it was last asked for a snapshot, s."""


class Peers:
    """What one worker tells others, and what it knows of them."""

    def __init__(
        self,
        cluster: ClusterState,
        router: int,
        *,
        receives: bool = True,
        gone_s: float = 2.0,
        present: Callable[[], list[int]] | None = None,
    ) -> None:
        """``router``: a number that no other router has, below 2**31. ``receives``: whether this
        worker enters what others say; one of a router's workers does so for all. ``present``: the
        numbers of the replicas to tell of."""
        self.cluster = cluster
        self.receives = receives
        self.gone_s = gone_s
        self.peers: dict[tuple[int, int], Peer] = {}
        self.refused = 0
        """Messages that could not be read, or came from more workers than there is room for."""
        self.missed = 0
        """Times messages of others were missing."""
        self._router, self._worker = router, cluster.worker_view.worker
        self._present = present or (lambda: list(range(len(cluster))))
        self._number = 0
        self._told = np.zeros(0, REPLICA_VIEW)
        self._beat_at = -math.inf
        self._snapshot_of: list[int] = []
        self._snapshot_at = -math.inf
        self._asks: list[tuple[int, int] | None] = [None]  # of whom a snapshot is asked for
        shared = cluster.worker_view.shared
        self._free = list(range(shared.workers, shared.data_rows))[::-1]
        if receives:
            for row in self._free:  # of a worker before this one
                shared.clear_peer(row)
        cluster.outbox = self.outbox = Outbox()
        sessions = cluster.sessions
        assert isinstance(sessions, SharedSessions)
        sessions.published = self.outbox.session
        sessions.number_from(((router << 6) + self._worker) << 24)
        self._sessions = sessions
        self._attempt: NDArray[np.void] = np.zeros(1, kernels.ATTEMPT)

    # Sending.

    def collect(self, now: float) -> list[bytes]:
        """Return the messages to send at ``now`` (s)."""
        messages = []
        if self.outbox.overflowed:
            self.outbox.overflowed = False
            self._begin_snapshot()
        changes, sessions = self.outbox.take()
        beats = now - self._beat_at >= BEAT_S
        changed = self._changed(beats)
        if beats or changed or changes or sessions:
            messages.append(self._changes(changed, changes, sessions, now))
            self._beat_at = now if beats else self._beat_at
        if self._asks:
            messages += [self._message(ASK, whom) for whom in self._asks]
            self._asks.clear()
        if self._snapshot_of:  # one replica at a time: it may be long
            replica = self._snapshot_of.pop()
            if replica < len(self.cluster):
                messages.append(self._snapshot(replica, now))
        return messages

    def _changed(self, with_averages: bool) -> list[int]:
        """Return the replicas whose records others have to be told, and note that they are."""
        rows = self.cluster.replicas
        if len(self._told) != len(rows):
            self._told = np.zeros(len(rows), REPLICA_VIEW)
        compared = rows.copy()
        if not with_averages:
            for name in _AVERAGES:
                compared[name] = self._told[name]
        different = compared.view(np.int64) != self._told.view(np.int64)
        changed = different.reshape(len(rows), -1).any(axis=1)
        self._told[changed] = rows[changed]
        return [r for r in self._present() if r < len(rows) and changed[r]]

    def _begin_snapshot(self) -> None:
        self._snapshot_of = self._present()

    def _changes(
        self,
        changed: list[int],
        changes: list[tuple[Any, ...]],
        sessions: dict[int, tuple[int, int]],
        now: float,
    ) -> bytes:
        names = [self._name(r) for r in range(len(self.cluster))]
        rows = _shifted(self.cluster.replicas[changed], -now)
        router = self.cluster.routers[kernels.MAIN : kernels.MAIN + 1].copy()
        router["looked_at"] -= now
        told = [
            (kind, names[replica], *(_packed(value) for value in more))
            for kind, replica, *more in changes
            if replica < len(names)
        ]
        talks = [(key, names[r], turns) for key, (r, turns) in sessions.items() if r < len(names)]
        return self._message(
            CHANGES, [names[r] for r in changed], rows.tobytes(), router.tobytes(), told, talks,
            self.cluster.units_per_token,
        )  # fmt: skip

    def _snapshot(self, replica: int, now: float) -> bytes:
        index = self.cluster.index
        keys = np.zeros(MOST_SNAPSHOT_RUNS, np.uint64)
        units = np.zeros(MOST_SNAPSHOT_RUNS, np.int32)
        count = kernels.latest_runs(index.entries, replica, keys, units)
        row = _shifted(self.cluster.replicas[replica : replica + 1], -now)
        return self._message(
            SNAPSHOT, self._name(replica), row.tobytes(), keys[:count].tobytes(),
            units[:count].tobytes(), self.cluster.units_per_token,
        )  # fmt: skip

    def _message(self, kind: int, *fields: Any) -> bytes:
        import msgpack  # of the extra "cluster"

        number, self._number = self._number, self._number + 1
        return bytes(msgpack.packb((FORMAT, self._router, self._worker, number, kind, *fields)))

    def _name(self, replica: int) -> int:
        """Return what a replica is called on all machines."""
        return xxhash.xxh3_64_intdigest(self.cluster.backends[replica].url.encode())

    # What others tell.

    def apply(self, message: bytes, now: float) -> None:
        """Enter a message that has come at ``now`` (s)."""
        import msgpack

        if len(message) > MOST_BYTES:
            self.refused += 1
            return
        try:
            form, router, worker, number, kind, *fields = msgpack.unpackb(message)
            if router == self._router:
                return
            if form != FORMAT:
                raise ValueError("another version")
            if kind == ASK:
                self._asked(fields[0], now)
            if self.receives:
                self._enter((router, worker), number, kind, fields, now)
        except Exception:  # whatever somebody has written into the channel
            self.refused += 1

    def _asked(self, whom: Any, now: float) -> None:
        mine = whom is None or tuple(whom) == (self._router, self._worker)
        if mine and now - self._snapshot_at >= SNAPSHOT_EVERY_S:
            self._snapshot_at = now
            self._told = np.zeros(0, REPLICA_VIEW)  # so that all rows are sent again
            self._begin_snapshot()

    def _enter(
        self, who: tuple[int, int], number: int, kind: int, fields: list[Any], now: float
    ) -> None:
        peer = self.peers.get(who)
        if peer is None:
            if not self._free:
                raise ValueError("more workers than there is room for")
            peer = self.peers[who] = Peer(self._free.pop(), now, number)
            self._ask(who, peer, now)
        peer.heard_at = now
        if number != peer.next_number:
            self.missed += 1
            self._ask(who, peer, now)
        peer.next_number = number + 1
        if kind == CHANGES:
            self._enter_changes(peer, fields, now)
        elif kind == SNAPSHOT:
            self._enter_snapshot(peer, fields, now)

    def _ask(self, who: tuple[int, int], peer: Peer, now: float) -> None:
        if now - peer.asked_at >= SNAPSHOT_EVERY_S:
            peer.asked_at = now
            self._asks.append(who)

    def _numbers(self) -> dict[int, int]:
        return {self._name(r): r for r in self._present() if r < len(self.cluster)}

    def _enter_changes(self, peer: Peer, fields: list[Any], now: float) -> None:
        names, rows_data, router_data, changes, talks, units_per_token = fields
        numbers, shared = self._numbers(), self.cluster.worker_view.shared
        rows = _shifted(np.frombuffer(rows_data, REPLICA_VIEW), now)
        if len(rows) != len(names):
            raise ValueError("rows without names")
        for name, row in zip(names, rows, strict=True):
            if name in numbers:
                shared.replicas[peer.row, numbers[name]] = row
        router = np.frombuffer(router_data, ROUTER).copy()
        router["looked_at"] += now
        shared.routers[peer.row, kernels.MAIN] = router[0]
        for kind, name, *more in changes:
            if name in numbers:
                self._enter_change(peer.row, kind, numbers[name], more, units_per_token, now)
        for key, name, turns in talks:
            if name in numbers:
                self._sessions.receive(key, numbers[name], turns)

    def _enter_snapshot(self, peer: Peer, fields: list[Any], now: float) -> None:
        name, row_data, keys_data, units_data, units_per_token = fields
        replica = self._numbers().get(name)
        if replica is None:
            return
        shared = self.cluster.worker_view.shared
        row = _shifted(np.frombuffer(row_data, REPLICA_VIEW), now)
        shared.replicas[peer.row, replica] = row[0]
        prefix_index.forget(self._index(peer.row), replica)
        keys, units = np.frombuffer(keys_data, np.uint64), np.frombuffer(units_data, np.int32)
        if keys.size != units.size:
            raise ValueError("keys without units")
        more = [
            np.append(keys, np.uint64(0)).tobytes(),
            np.append(units, np.int32(0)).tobytes(),
            -1,
        ]
        self._enter_change(peer.row, ENTER, replica, more, units_per_token, now)

    def _enter_change(
        self, row: int, kind: int, replica: int, more: list[Any], units_per_token: float, now: float
    ) -> None:
        index, cluster = self._index(row), self.cluster
        arrays = index.entries, index.slots, index.totals
        if kind == ENTER:
            keys = np.frombuffer(more[0], np.uint64)
            units = np.frombuffer(more[1], np.int32).copy()
            if keys.size != units.size or keys.size == 0 or not -1 <= more[2] < keys.size:
                raise ValueError("runs that do not fit")
            t = self._attempt[0]
            t["replica"], t["now"], t["branch_at"] = replica, now, more[2]
            t["units_per_token"] = units_per_token
            kernels.indexed(
                self._attempt, cluster.replicas, *arrays, cluster.beliefs, keys.copy(), units
            )
        elif kind == REMOVE:
            kernels.remove_runs(*arrays, replica, np.frombuffer(more[0], np.uint64).copy())
        elif kind == SHORTEN:
            kernels.shorten_run(*arrays, replica, np.uint64(more[0]), int(more[1]))
        elif kind == EVICT:
            kernels.evict_until(*arrays, replica, now - float(more[0]))
        elif kind == FORGET:
            prefix_index.forget(index, replica)

    def _index(self, row: int) -> PrefixIndex:
        shared, count = self.cluster.worker_view.shared, len(self.cluster)
        return PrefixIndex(
            shared.entries[row, :count], shared.slots[row, :count], shared.totals[row, :count]
        )

    # Who is there.

    def sweep(self, now: float) -> None:
        """Forget workers that have been silent for too long."""
        gone = [who for who, peer in self.peers.items() if now - peer.heard_at > self.gone_s]
        for who in gone:
            peer = self.peers.pop(who)
            self.cluster.worker_view.shared.clear_peer(peer.row)
            self._free.append(peer.row)

    def reconnected(self) -> None:
        """Messages may have been lost: ask all others for snapshots, and tell everything again."""
        self._asks = [None]
        self._told = np.zeros(0, REPLICA_VIEW)
        self._begin_snapshot()


def _shifted(rows: NDArray[np.void], by_s: float) -> NDArray[np.void]:
    """Return a copy of REPLICA_VIEW records with all their times moved."""
    rows = rows.copy()
    for name in _TIMES:
        rows[name] += by_s
    rows["queued_since_sum"] += rows["queued"] * by_s
    return rows


def _packed(value: Any) -> Any:
    """Return a value of a change as msgpack takes it."""
    return value.tobytes() if isinstance(value, np.ndarray) else value
