"""KV blocks of a replica with prefix caching: content index, least-recently-used list, references.

A block holds the keys and values of ``block_size`` tokens. It is findable by the content of the
whole prefix up to its end (a 64-bit key), held by any number of requests, and in the free list
while no request holds it. Taking a block from the front of that list forgets what it held. Several
blocks may hold the same content; the oldest is found first and the others are chained behind it as
its twins.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit
from tailrace.view.selection import mix


class KvCache(NamedTuple):
    """KV blocks of one replica; see Fleet for shapes."""

    blocks: NDArray[np.void]
    buckets: NDArray[np.int32]
    held: NDArray[np.int32]
    rows_free: NDArray[np.int64]


class PromptContent(NamedTuple):
    """Content of the prompts of one request table; see Tables for shapes."""

    facts: NDArray[np.void]
    run_keys: NDArray[np.uint64]
    run_tokens: NDArray[np.int32]


_PRIVATE = np.uint64(0x5851F42D4C957F2D)
_STEP = np.uint64(0x9E3779B97F4A7C15)


@inner
def private_path(request):
    """Content path of a request that shares nothing."""
    return mix(np.uint64(request) ^ _PRIVATE)


@inner
def block_key(content, request, index, block_size):
    """Identity of block number ``index`` of a request: all content up to that block's end."""
    fact = content.facts[request]
    path = private_path(request)
    end = (index + 1) * block_size
    covered = 0
    for run in range(fact["run_start"], fact["run_start"] + fact["run_count"]):
        path = content.run_keys[run]
        covered += content.run_tokens[run]
        if end <= covered:
            break
    # The answer continues the last run, so a block beyond the prompt belongs to that run.
    key = mix(path + np.uint64(index + 1) * _STEP)
    return key if key != np.uint64(0) else np.uint64(1)


@inner
def is_private(content, request):
    """Whether no other request can share this one's blocks."""
    return content.facts[request]["run_count"] == 0


@jit
def clear(server, kv):
    """Empty the cache; all blocks are free, in the order of their numbers."""
    count = server["num_blocks"] if server["caching"] else 0
    kv.buckets[:] = -1
    for b in range(count):
        block = kv.blocks[b]
        block["key"] = np.uint64(0)
        block["refs"] = 0
        block["prev"] = b - 1
        block["next"] = b + 1 if b + 1 < count else -1
        block["twin"] = -1
    server["lru_head"] = 0 if count > 0 else -1
    server["lru_tail"] = count - 1
    rows = kv.rows_free.size - 1
    for row in range(rows):
        kv.rows_free[row] = row
    kv.rows_free[rows] = rows


@inner
def _home(buckets, key):
    return np.int64(key & np.uint64(buckets.size - 1))


@inner
def _bucket_of(kv, key):
    """Bucket that holds the key, or the empty one where it would go."""
    last = kv.buckets.size - 1
    at = _home(kv.buckets, key)
    while kv.buckets[at] >= 0 and kv.blocks[kv.buckets[at]]["key"] != key:
        at = (at + 1) & last
    return at


@jit
def find(kv, key):
    """Oldest block with this content, or -1."""
    return kv.buckets[_bucket_of(kv, key)]


@jit
def register(kv, block, key):
    """Make a block findable by its content."""
    kv.blocks[block]["key"] = key
    kv.blocks[block]["twin"] = -1
    at = _bucket_of(kv, key)
    eldest = kv.buckets[at]
    if eldest < 0:
        kv.buckets[at] = block
        return
    while kv.blocks[eldest]["twin"] >= 0:
        eldest = kv.blocks[eldest]["twin"]
    kv.blocks[eldest]["twin"] = block


@inner
def _unregister(kv, block):
    key = kv.blocks[block]["key"]
    at = _bucket_of(kv, key)
    twin = kv.blocks[block]["twin"]
    if kv.buckets[at] != block:
        older = kv.buckets[at]
        while kv.blocks[older]["twin"] != block:
            older = kv.blocks[older]["twin"]
        kv.blocks[older]["twin"] = twin
    elif twin >= 0:
        kv.buckets[at] = twin
    else:
        _empty_bucket(kv, at)
    kv.blocks[block]["key"] = np.uint64(0)
    kv.blocks[block]["twin"] = -1


@inner
def _empty_bucket(kv, at):
    """Linear probing without tombstones: later entries of the same run move into the gap."""
    last = kv.buckets.size - 1
    gap = at
    probe = at
    while True:
        probe = (probe + 1) & last
        block = kv.buckets[probe]
        if block < 0:
            break
        home = _home(kv.buckets, kv.blocks[block]["key"])
        if ((probe - home) & last) >= ((probe - gap) & last):
            kv.buckets[gap] = block
            gap = probe
    kv.buckets[gap] = -1


@inner
def take_free(server, kv):
    """Take the least recently used free block; what it held is forgotten."""
    block = server["lru_head"]
    _unlink(server, kv, block)
    if kv.blocks[block]["key"] != np.uint64(0):
        _unregister(kv, block)
    kv.blocks[block]["refs"] = 1
    return block


@inner
def _unlink(server, kv, block):
    before = kv.blocks[block]["prev"]
    after = kv.blocks[block]["next"]
    if before >= 0:
        kv.blocks[before]["next"] = after
    else:
        server["lru_head"] = after
    if after >= 0:
        kv.blocks[after]["prev"] = before
    else:
        server["lru_tail"] = before
    server["free_blocks"] -= 1


@inner
def reuse(server, kv, block):
    """Add a holder to a block found by its content."""
    if kv.blocks[block]["refs"] == 0:
        _unlink(server, kv, block)
    kv.blocks[block]["refs"] += 1


@jit
def release(server, kv, block):
    """Remove a holder from a block; without any, it goes to the end of the free list."""
    kv.blocks[block]["refs"] -= 1
    if kv.blocks[block]["refs"] > 0:
        return
    tail = server["lru_tail"]
    kv.blocks[block]["prev"] = tail
    kv.blocks[block]["next"] = -1
    if tail >= 0:
        kv.blocks[tail]["next"] = block
    else:
        server["lru_head"] = block
    server["lru_tail"] = block
    server["free_blocks"] += 1


@inner
def longest_prefix(kv, content, request, prompt, block_size, row):
    """Write the cached blocks of a prompt, front to back, into ``held[row]``; return how many."""
    hits = 0
    while hits < prompt // block_size:
        block = find(kv, block_key(content, request, hits, block_size))
        if block < 0:
            break
        kv.held[row, hits] = block
        hits += 1
    return hits
