"""What servers report about their prefix caches, entered into the router's prefix index.

Servers speak of blocks of *tokens*, the router of runs of *text* (intake/prompt_blocks.py), and it
has no tokenizer. So each block of tokens gets a hash of our own, a chain over token ids like the
server's, and once a request is over its token ids are learned from the server (see
proxy/prompt_tokens.py): then it is known which block ends where a run ends. From there on an
evicted block takes its runs out of the index, and a stored one puts them in, whoever caused it.

How far a replica's part of the index can be trusted:

* ``exact``: all events since its cache was empty have arrived, or so many that nothing older can be
  left. Runs whose tokens are known are in the index if and only if the server has them. Runs of
  requests in progress, and those whose tokens could not be learned, are still estimates.
* ``estimated``: there are no events, or too few so far; the index is what the router has sent, less
  what should have been evicted by now.
* ``stale``: events are missing or late. The index is estimated until they are there again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.net.kv_events import AllCleared, BlockHash, BlocksRemoved, BlocksStored, Event
from tailrace.router.state import kernels
from tailrace.router.state.cluster import ClusterState
from tailrace.view import prefix_index

#: How far a replica's part of the prefix index can be trusted, best first.
TRUST_LEVELS = EXACT, ESTIMATED, STALE = ("exact", "estimated", "stale")

_hash = xxhash.xxh3_64_intdigest


#: Prompts per replica whose runs are compared with its events once these have arrived.
_MOST_UNSETTLED = 1024
#: Prompts per replica that wait for its first event, which tells how long its blocks are.
_MOST_EARLY = 16
#: Where the chain of every prompt begins.
ROOT = 0


def chain(
    token_ids: Sequence[int] | NDArray[np.int64],
    block_size: int,
    parent: int,
    extra_keys: Sequence[object] | None = None,
) -> list[int]:
    """Return our hashes of the full blocks of ``token_ids``; equal hashes mean equal prompts."""
    data = np.asarray(token_ids, np.int64).tobytes()
    size, hashes = 8 * block_size, []
    for block in range(len(token_ids) // block_size):
        parent = _hash(data[block * size : (block + 1) * size], parent)
        if extra_keys is not None and extra_keys[block]:
            parent = _hash(repr(extra_keys[block]).encode(), parent)
        hashes.append(parent)
    return hashes


class TextRun(NamedTuple):
    """A run of text that ends in a block of tokens."""

    key: int
    units: int
    last: bool
    """Whether it is the last of its prompt, which the answer continues."""


class BlockRuns:
    """Which runs of text end in which blocks of tokens: the latest ``most`` blocks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._runs: OrderedDict[int, list[TextRun]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, block: int) -> bool:
        return block in self._runs

    def put(self, block: int, runs: list[TextRun]) -> None:
        """Learn the runs that end in a block; what was known of it before stays."""
        known = self._runs.setdefault(block, [])
        keys = {run.key for run in known}
        known += [run for run in runs if run.key not in keys]
        self._runs.move_to_end(block)
        if len(self._runs) > self._most:
            self._runs.popitem(last=False)

    def of(self, block: int) -> Sequence[TextRun]:
        """Return the runs that end in a block."""
        return self._runs.get(block, ())


@dataclass(slots=True)
class CacheMirror:
    """The prefix cache of one server, by its events."""

    most: int
    """Blocks it has room for."""
    block_size: int = 0
    """Tokens per block; 0: not known yet."""
    ours: dict[BlockHash, int] = field(default_factory=dict)
    """Our hash of each block, by the server's."""
    parents: dict[int, int] = field(default_factory=dict)
    """The block before each block that is cached, by our hashes."""
    stored_since_gap: int = 0
    """Blocks stored since events were missed."""
    complete: bool = False
    """Whether no event since the cache was empty is missing."""

    def clear(self, *, complete: bool) -> None:
        """Forget everything; ``complete``: because the server's cache is empty."""
        self.ours.clear()
        self.parents.clear()
        self.stored_since_gap = 0
        self.complete = complete

    def store(self, event: BlocksStored) -> list[int]:
        """Enter stored blocks; return ours that were not there before.

        Servers also report blocks that a prompt has found cached, so nothing is counted: a block
        that a server holds twice and evicts once is taken for gone until it is reported again.
        """
        if event.block_size < self.block_size:
            return []  # a part of a block
        self.block_size = event.block_size
        before = ROOT if event.parent is None else self.ours.get(event.parent)
        if before is None:
            return []  # events are missing, or there was no room
        new: list[int] = []
        blocks = chain(event.token_ids, event.block_size, before, event.extra_keys)
        for name, block in zip(event.hashes, blocks, strict=True):
            if name not in self.ours:
                if len(self.ours) >= self.most:
                    self.complete, self.stored_since_gap = False, 0
                    break
                self.ours[name] = block
                self.stored_since_gap += 1
                new.append(block)
            self.parents[block] = before
            before = block
        return new

    def remove(self, event: BlocksRemoved) -> list[tuple[int, int]]:
        """Take evicted blocks out; return them and their parents."""
        gone = [block for name in event.hashes if (block := self.ours.pop(name, None)) is not None]
        return [(block, self.parents.pop(block)) for block in gone if block in self.parents]


class ExactCaches:
    """Enters the events of all servers into one worker's prefix index."""

    def __init__(self, cluster: ClusterState, most_blocks: int) -> None:
        """``most_blocks``: remembered per server, and with known text in all."""
        self.cluster = cluster
        self._most_blocks = most_blocks
        self.runs = BlockRuns(most_blocks)
        self.mirrors: dict[int, CacheMirror] = {}
        self.trust: dict[int, str] = {}
        # Runs of prompts that were learned while events were missing, and the blocks they end in.
        self._unsettled: dict[int, deque[tuple[NDArray[np.uint64], list[int]]]] = {}
        self._early: dict[int, deque[tuple[Any, ...]]] = {}  # arguments of ``learn``
        self.learned = 0
        """Prompts whose tokens were learned."""
        none = np.zeros(0, np.uint64)  # compiled now, not when the first event comes
        self._enter(0, none, np.zeros(0, np.int32))
        self._remove(0, none)
        self._shorten(0, 1, 0)

    def begin(self, replica: int) -> None:
        """Expect events of a replica from now on."""
        self.mirrors[replica] = CacheMirror(self._most_blocks)
        self.set_trust(replica, STALE)

    def end(self, replica: int) -> None:
        """Expect no more events of a replica."""
        self._unsettled.pop(replica, None)
        self._early.pop(replica, None)
        if self.mirrors.pop(replica, None) is not None:
            self.set_trust(replica, ESTIMATED)
            del self.trust[replica]

    def trust_of(self, replica: int) -> str:
        """How far the index of a replica can be trusted."""
        return self.trust.get(replica, ESTIMATED)

    def set_trust(self, replica: int, trust: str) -> None:
        """Let events, or the router's own estimate, say what a replica evicts."""
        self.trust[replica] = trust
        self.cluster.beliefs["exact"][replica] = trust == EXACT

    def restarted(self, replica: int) -> None:
        """A server has begun anew, or its whole history is about to be replayed."""
        self.mirrors[replica].clear(complete=True)
        prefix_index.forget(self.cluster.index, replica)
        if self.cluster.outbox is not None:
            self.cluster.outbox.forgotten(replica)

    def missed(self, replica: int) -> None:
        """Events of a replica are lost for good."""
        self.mirrors[replica].clear(complete=False)

    def current(self, replica: int) -> None:
        """All events that the server still has are applied."""
        mirror = self.mirrors[replica]
        if not mirror.complete:
            view = self.cluster.replicas[replica]
            held = int(view["capacity_tokens"]) // max(1, mirror.block_size)
            # Whatever was cached before has been evicted, unless it was used again meanwhile.
            mirror.complete = mirror.block_size > 0 and mirror.stored_since_gap >= 2 * held
        trust = EXACT if mirror.complete else ESTIMATED
        if self.trust_of(replica) != trust:
            self.set_trust(replica, trust)
            for keys, ended_in in self._unsettled.pop(replica, ()) if trust == EXACT else ():
                self._settle(replica, keys, ended_in)

    def apply(self, replica: int, events: Iterable[Event]) -> None:
        """Enter events of a replica, in order."""
        mirror, runs_of = self.mirrors[replica], self.runs.of
        for event in events:
            match event:
                case BlocksStored():
                    found = [run for block in mirror.store(event) for run in runs_of(block)]
                    if found:
                        self._enter(replica, *_arrays(found))
                    for prompt in self._early.pop(replica, ()) if self._early else ():
                        self.learn(replica, *prompt)
                case BlocksRemoved():
                    gone: list[TextRun] = []
                    for block, parent in mirror.remove(event):
                        gone += runs_of(block)
                        for run in runs_of(parent):
                            if run.last:  # a part of the answer after it is gone
                                self._shorten(replica, run.key, run.units)
                    if gone:
                        self._remove(replica, _arrays(gone)[0])
                case AllCleared():
                    self.restarted(replica)

    def learn(
        self,
        replica: int,
        model: str,
        keys: NDArray[np.uint64],
        units: NDArray[np.int32],
        token_ids: Sequence[int] | NDArray[np.int64],
        ends: NDArray[np.float64],
    ) -> int | None:
        """Learn the tokens of a prompt that a replica has answered; None: it has not been learned.

        ``keys`` and ``units`` [u] are its runs; ``ends`` [t] says which share of the text has been
        read after each token, 0 to 1. Return the block in which it ends, ``ROOT`` if it has none.
        """
        mirror = self.mirrors.get(replica)
        if mirror is None or not len(token_ids):
            return None
        if not mirror.block_size:
            early = self._early.setdefault(replica, deque(maxlen=_MOST_EARLY))
            early.append((model, keys, units, token_ids, ends))
            return None
        self.learned += 1
        size = mirror.block_size
        blocks = chain(token_ids, size, ROOT)
        if blocks and blocks[0] not in mirror.parents:
            of_adapter = chain(token_ids, size, ROOT, [[model]] * len(blocks))
            if of_adapter[0] in mirror.parents:
                blocks = of_adapter
        # Tokens until the end of each run, and the block that is nearest to it.
        shares = np.cumsum(units) / max(1, int(units.sum()))
        tokens = np.searchsorted(ends, shares, side="right")
        tokens[-1] = len(token_ids)
        places = np.clip(np.rint(tokens / size).astype(np.int64) - 1, 0, max(0, len(blocks) - 1))
        ended_in = [blocks[place] for place in places.tolist()] if blocks else []
        by_block: dict[int, list[TextRun]] = {}
        last = keys.size - 1
        for j, block in enumerate(ended_in):
            by_block.setdefault(block, []).append(TextRun(int(keys[j]), int(units[j]), j == last))
        for block, runs in by_block.items():
            self.runs.put(block, runs)
        if self.trust_of(replica) == EXACT:
            self._settle(replica, keys, ended_in)
        else:
            waiting = self._unsettled.setdefault(replica, deque(maxlen=_MOST_UNSETTLED))
            waiting.append((keys, ended_in))
        return ended_in[-1] if ended_in else ROOT

    def _settle(self, replica: int, keys: NDArray[np.uint64], ended_in: Sequence[int]) -> None:
        """Take runs out of the index whose blocks have been evicted already.

        ``ended_in``: the block in which each run of ``keys`` ends; empty: there is no full block.
        """
        cached = self.mirrors[replica].parents
        there = 0
        while there < len(ended_in) and ended_in[there] in cached:
            there += 1
        if there < keys.size:
            self._remove(replica, keys[there:])

    # The prefix index.

    def _enter(self, replica: int, keys: NDArray[np.uint64], units: NDArray[np.int32]) -> None:
        c, index = self.cluster, self.cluster.index
        kernels.enter_runs(
            c.replicas, index.entries, index.slots, index.totals, c.beliefs, replica, keys, units,
            c.units_per_token, c.clock(),
        )  # fmt: skip
        if c.outbox is not None and keys.size:
            c.outbox.stored(replica, keys, units)

    def _remove(self, replica: int, keys: NDArray[np.uint64]) -> None:
        index = self.cluster.index
        kernels.remove_runs(index.entries, index.slots, index.totals, replica, keys)
        if self.cluster.outbox is not None and keys.size:
            self.cluster.outbox.removed(replica, keys)

    def _shorten(self, replica: int, key: int, units: int) -> None:
        index = self.cluster.index
        kernels.shorten_run(
            index.entries, index.slots, index.totals, replica, np.uint64(key), units
        )
        if self.cluster.outbox is not None and units:
            self.cluster.outbox.shortened(replica, key, units)


def _arrays(runs: Sequence[TextRun]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    keys = np.array([run.key for run in runs], np.uint64)
    return keys, np.array([run.units for run in runs], np.int32)
