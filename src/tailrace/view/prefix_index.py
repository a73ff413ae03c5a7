"""The router's own prefix index: what it believes each replica still has in its prefix cache.

A prompt is a list of content runs. The key of a run names everything up to and including that run's
token stream, so equal keys mean equal content from the first token on. Per replica the index maps a
key to the number of tokens of that run the replica has seen, in order of last use.

All state lies in three flat arrays whose leading dimension is the replica, and all-zero memory is
an empty index: copying a cluster is copying rows, and clusters stack by one more leading dimension
(``PrefixIndex(entries[c], slots[c], totals[c])``).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit

#: One run known to a replica. Entry 0 of a row is no run but the head of a circular list:
#: ``older`` and ``newer`` link all runs in order of use, and ``newer`` of entry 0 is the oldest.
ENTRY = np.dtype(
    [
        ("key", "u8"),  # content path, never 0
        ("used_at", "f8"),  # last insertion, s
        ("tokens", "i4"),  # tokens of the run the replica has seen
        ("older", "i4"),  # entry used just before this one, 0: none
        ("newer", "i4"),  # entry used just after this one, 0: none; next free one when unused
        ("reserved", "i4"),
    ]
)

#: Totals of one replica's part of the index.
TOTALS = np.dtype(
    [
        ("held_tokens", "i8"),  # sum of the tokens of all entries
        ("count", "i8"),  # entries in use
        ("free", "i8"),  # first entry given back, 0: none
        ("fresh", "i8"),  # entries handed out so far; those beyond need no clearing
    ]
)


class PrefixIndex(NamedTuple):
    """The index of ``n`` replicas with room for ``e`` runs each."""

    entries: NDArray[np.void]  #: [n, e + 1] ENTRY
    slots: NDArray[np.int32]  #: [n, s] open-addressing table of entry numbers, s a power of two
    totals: NDArray[np.void]  #: [n] TOTALS


def new_index(replicas: int, entries: int) -> PrefixIndex:
    """Return an empty index for ``replicas`` replicas with room for ``entries`` runs each."""
    slots = 1 << (2 * entries - 1).bit_length()  # at most half full: short probes
    return PrefixIndex(
        np.zeros((replicas, entries + 1), ENTRY),
        np.zeros((replicas, slots), np.int32),
        np.zeros(replicas, TOTALS),
    )


@jit
def match_tokens(index, replica, keys, tokens):
    """Return how many leading tokens of a prompt the replica has seen, as far as the index knows.

    ``keys`` uint64 [u] and ``tokens`` int32 [u] are the runs of the prompt in order. The walk ends
    at the first run that is not known in full.
    """
    entries = index.entries[replica]
    slots = index.slots[replica]
    entry_keys = entries["key"]
    matched = np.int64(0)
    entry = np.int32(0)
    for run in range(keys.size):
        # Runs that were inserted together are neighbours in the order of use.
        entry = entries[entry]["older"]
        if entry_keys[entry] != keys[run]:
            entry = slots[_find(entry_keys, slots, keys[run])]
        known = entries[entry]["tokens"] if entry != 0 else 0
        matched += min(known, tokens[run])
        if known < tokens[run]:
            break
    return matched


@jit
def insert(index, replica, keys, tokens, capacity_tokens, now):
    """Record that a prompt, or a prompt with its answer, has been sent to a replica at ``now`` (s).

    A run's known tokens never shrink. Runs are touched from the last to the first, so that a prefix
    outlives what follows it. Then the least recently used runs go while more than
    ``capacity_tokens`` are held.
    """
    entries = index.entries[replica]
    slots = index.slots[replica]
    totals = index.totals[replica]
    entry_keys = entries["key"]
    neighbour = np.int32(0)  # runs that were inserted together are neighbours in the order of use
    for run in range(keys.size - 1, -1, -1):
        if tokens[run] <= 0:
            continue
        entry = neighbour
        if entry_keys[entry] != keys[run]:
            slot = _find(entry_keys, slots, keys[run])
            entry = slots[slot]
            if entry == 0:
                if totals["count"] == entries.size - 1:
                    _evict_oldest(entries, slots, totals)
                    slot = _find(entry_keys, slots, keys[run])  # eviction may have moved it
                entry = _take_entry(entries, totals, keys[run])
                slots[slot] = entry
                entries[entry]["older"] = entry  # in a circle of its own
                entries[entry]["newer"] = entry
        neighbour = entries[entry]["newer"]
        _unlink(entries, entry)
        _link_newest(entries, entry)
        entries[entry]["used_at"] = now
        gained = tokens[run] - entries[entry]["tokens"]
        if gained > 0:
            entries[entry]["tokens"] += gained
            totals["held_tokens"] += gained
    while totals["held_tokens"] > capacity_tokens and totals["count"] > 0:
        _evict_oldest(entries, slots, totals)


@jit
def forget(index, replica):
    """Forget a replica's content: it died, or came back empty."""
    head = index.entries[replica][0]
    head["older"] = 0
    head["newer"] = 0
    index.slots[replica][:] = 0
    totals = index.totals[replica]
    totals["held_tokens"] = 0
    totals["count"] = 0
    totals["free"] = 0
    totals["fresh"] = 0


@jit
def held_tokens(index, replica):
    """Tokens the index holds for a replica."""
    return index.totals[replica]["held_tokens"]


@inner
def _home(key, mask):
    """Slot where the search for a key begins. Keys are hashes already: folding them is enough."""
    return np.int64((key ^ (key >> np.uint64(32))) & np.uint64(mask))


@inner
def _find(entry_keys, slots, key):
    """Return the slot that holds a key, or the empty one where it belongs."""
    mask = slots.size - 1
    wanted = np.uint64(key)
    slot = _home(wanted, mask)
    while slots[slot] != 0 and entry_keys[slots[slot]] != wanted:
        slot = (slot + 1) & mask
    return slot


@inner
def _take_entry(entries, totals, key):
    """Allocate an entry for a key, without tokens."""
    entry = totals["free"]
    if entry != 0:
        totals["free"] = entries[entry]["newer"]
    else:
        totals["fresh"] += 1
        entry = totals["fresh"]
    totals["count"] += 1
    entries[entry]["key"] = key
    entries[entry]["tokens"] = 0
    return entry


@inner
def _evict_oldest(entries, slots, totals):
    """Free the least recently used entry."""
    entry = entries[0]["newer"]
    _empty_slot(entries["key"], slots, _find(entries["key"], slots, entries[entry]["key"]))
    _unlink(entries, entry)
    totals["held_tokens"] -= entries[entry]["tokens"]
    totals["count"] -= 1
    entries[entry]["newer"] = totals["free"]
    totals["free"] = entry


@inner
def _empty_slot(entry_keys, slots, hole):
    """Empty a slot and close the gap, so that the keys behind it are still found."""
    mask = slots.size - 1
    slot = (hole + 1) & mask
    while slots[slot] != 0:
        home = _home(entry_keys[slots[slot]], mask)
        # A key may move back into the hole unless its home lies between the two.
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            slots[hole] = slots[slot]
            hole = slot
        slot = (slot + 1) & mask
    slots[hole] = 0


@inner
def _unlink(entries, entry):
    """Take an entry out of the order of use."""
    older, newer = entries[entry]["older"], entries[entry]["newer"]
    entries[older]["newer"] = newer
    entries[newer]["older"] = older


@inner
def _link_newest(entries, entry):
    """Put an entry at the recent end of the order of use."""
    newest = entries[0]["older"]
    entries[entry]["older"] = newest
    entries[entry]["newer"] = 0
    entries[newest]["newer"] = entry
    entries[0]["older"] = entry
