"""KV blocks of a replica with prefix caching, kept by extents: content, free list, references.

A block holds the keys and values of ``block_size`` tokens. It is findable by the content of the
whole prefix up to its end (a chain and a number, see chains.py), held by any number of requests,
and in the free list while no request holds it. Taking a block from the front of that list forgets
what it held. Several blocks may hold the same content; the oldest is found first.

Blocks are never kept one by one. An *extent* is a number of blocks with consecutive numbers on one
chain that are held by the same requests; it is split when a request takes only its first part.
What makes this exact:

* A request gives its blocks back from the last to the first. An extent is free as a whole, so its
  blocks lie together in the free list, last one first, and eviction shortens it from its end.
* Extents of equal content (twins) always cover the same numbers: splitting one splits all. So the
  order of age is the same for all blocks of an extent.
* Blocks without content cannot be told apart. A request's are a number, and in the free list
  neighbours are one extent.

A request's row of ``held`` lists extents, not all of them: of an extent that was split since, it
names the first part, and ``rest`` leads to the others. ``rest`` may be out of date where no request
holds both parts; nothing follows it there.

A decode fills a block every ``block_size`` iterations. If its last extent is the end of its chain
and nobody else's, nothing is done for that: the extent *grows*, its true length follows from the
server's tick, and it is written down when somebody comes upon the extent (:func:`longest_prefix`,
:func:`register`) or its request gives it back. Somebody who comes upon it is the only one who could
tell the difference.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner
from tailrace.sim.chains import ENDLESS, private_chain
from tailrace.view.selection import mix

#: A row of KvCache.held: number of extents listed, blocks with content, the extent that grows (0:
#: none), tokens processed minus tick of its request, then the extents.
ROW_EXTENTS, ROW_NAMED, ROW_GROWING, ROW_OFFSET, ROW_HEAD = 0, 1, 2, 3, 4
NAMELESS = -1


class KvCache(NamedTuple):
    """KV blocks of one replica; see Fleet for shapes."""

    extents: NDArray[np.void]
    buckets: NDArray[np.int32]
    held: NDArray[np.int32]
    rows_free: NDArray[np.int64]


class PromptContent(NamedTuple):
    """Content of the prompts of one request table; see Tables for shapes."""

    facts: NDArray[np.void]
    pieces: NDArray[np.void]


_PRIVATE = np.uint64(0x5851F42D4C957F2D)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@inner
def private_path(request):
    """Content path of a request that shares nothing, for the router's prefix index."""
    return mix(np.uint64(request) ^ _PRIVATE)


@inner
def is_private(content, request):
    """Whether no other request can share this one's blocks."""
    return content.facts[request]["run_count"] == 0


@inner
def clear(server, kv):
    """Empty the cache; all blocks are free."""
    server["extents_fresh"] = 0
    server["extents_spare"] = 0
    if server["caching"]:
        kv.buckets[:] = 0
        kv.extents[0]["prev"] = 0
        kv.extents[0]["next"] = 0
        _append_nameless(server, kv, server["num_blocks"])
    rows = kv.rows_free.size - 1
    for row in range(rows):
        kv.rows_free[row] = row
    kv.rows_free[rows] = rows


# ---- requests -----------------------------------------------------------------------------------


@inner
def longest_prefix(server, kv, content, request, prompt, row):
    """List the cached extents of a prompt in ``held[row]``; return blocks found, and free ones.

    At least one prompt token is left out: it has to be computed to produce an output token. An
    extent may be longer than what the prompt has of it.
    """
    size = server["block_size"]
    limit = (prompt - 1) // size
    extents = kv.extents
    found = 0
    idle = 0
    listed = 0
    while found < limit:
        chain, end = _piece_of(content, request, found, size)
        end = min(end, limit)
        e = kv.buckets[_slot_of(kv, chain)]
        while e != 0 and found < end and extents[e]["first"] <= found:
            if extents[e]["grower"] != 0:
                _write_down(server, kv, extents[e]["grower"] - 1, 0)
            kv.held[row, ROW_HEAD + listed] = e
            listed += 1
            before = found
            found = min(extents[e]["first"] + extents[e]["count"], end)
            if extents[e]["refs"] == 0:
                idle += found - before
            e = extents[e]["after"]
        if found < end:
            break
    kv.held[row, ROW_EXTENTS] = listed
    return found, idle


@inner
def begin_row(kv, row):
    """Start the row of a request that has no cached blocks."""
    kv.held[row, ROW_EXTENTS] = 0
    kv.held[row, ROW_NAMED] = 0
    kv.held[row, ROW_GROWING] = 0


@inner
def reuse(server, kv, row, found):
    """Add a holder to the first ``found`` blocks of the extents listed in ``held[row]``."""
    extents = kv.extents
    listed = kv.held[row, ROW_EXTENTS]
    for k in range(listed):
        e = kv.held[row, ROW_HEAD + k]
        end = extents[kv.held[row, ROW_HEAD + k + 1]]["first"] if k + 1 < listed else found
        if extents[e]["grower"] != 0:
            _stop_by_other(server, kv, extents[e]["grower"] - 1)
        if extents[e]["first"] + extents[e]["count"] > end:
            _split(server, kv, e, end)
        if extents[e]["refs"] == 0:
            _unlink(kv, e)
            server["free_blocks"] -= extents[e]["count"]
        extents[e]["refs"] += 1
    kv.held[row, ROW_NAMED] = found


@inner
def next_full(server, kv, row):
    """Tokens with which a request fills its first block that is not findable yet."""
    return (kv.held[row, ROW_NAMED] + 1) * server["block_size"]


@inner
def register(server, kv, content, row, request, end):
    """Make the blocks of a request before number ``end`` findable by their content."""
    size = server["block_size"]
    at = kv.held[row, ROW_NAMED]
    while at < end:
        chain, until = _piece_of(content, request, at, size)
        at = _register_on(server, kv, row, chain, at, min(until, end))
        kv.held[row, ROW_NAMED] = at


@inner
def release(server, kv, row, blocks):
    """Remove a request from its ``blocks`` blocks, the last one first; free ones are queued."""
    stop_growing(server, kv, row, 0)
    nameless = blocks - kv.held[row, ROW_NAMED]
    if nameless > 0:
        server["free_blocks"] += nameless
        _append_nameless(server, kv, nameless)
    _list_all(kv, row)
    extents = kv.extents
    for k in range(kv.held[row, ROW_EXTENTS] - 1, -1, -1):
        e = kv.held[row, ROW_HEAD + k]
        extents[e]["refs"] -= 1
        if extents[e]["refs"] == 0:
            server["free_blocks"] += extents[e]["count"]
            _append(kv, e)
            _join(server, kv, e)
    begin_row(kv, row)


@inner
def take(server, kv, count):
    """Take the least recently used free blocks; what they held is forgotten."""
    server["free_blocks"] -= count
    extents = kv.extents
    while count > 0:
        e = extents[0]["next"]
        taken = min(extents[e]["count"], count)
        count -= taken
        if taken < extents[e]["count"]:
            if extents[e]["chain"] == NAMELESS or _is_single(kv, e):
                extents[e]["count"] -= taken
                return
            _split(server, kv, _oldest(kv, e), extents[e]["first"] + extents[e]["count"] - taken)
            e = extents[0]["next"]
        _unlink(kv, e)
        if extents[e]["chain"] != NAMELESS:
            _forget(kv, e)
        _give_back(server, kv, e)


# ---- growing extents ----------------------------------------------------------------------------


@inner
def is_growing(kv, row):
    """Whether the blocks that a decode fills need no registering."""
    return kv.held[row, ROW_GROWING] != 0


@inner
def grow(kv, content, row, request, offset):
    """Let the last extent of a decode grow by itself, if it can; return whether it does.

    ``offset``: tokens processed minus the server's tick.
    """
    e = _last_extent(kv, row)
    extents = kv.extents
    fact = content.facts[request]
    if (
        e == 0
        or extents[e]["refs"] != 1
        or extents[e]["after"] != 0
        or not _is_single(kv, e)
        or extents[e]["chain"]
        != content.pieces[fact["piece_start"] + fact["piece_count"] - 1]["chain"]
    ):
        return False
    extents[e]["grower"] = row + 1
    kv.held[row, ROW_GROWING] = e
    kv.held[row, ROW_OFFSET] = offset
    return True


@inner
def stop_growing(server, kv, row, behind):
    """Write down how long the extent of a row has grown, if any, and let it grow no more.

    ``behind``: 1: without the token computed last.
    """
    e = kv.held[row, ROW_GROWING]
    if e != 0:
        _write_down(server, kv, row, behind)
        kv.extents[e]["grower"] = 0
        kv.held[row, ROW_GROWING] = 0


@inner
def _stop_by_other(server, kv, row):
    """Let an extent grow no more because another request comes upon it."""
    stop_growing(server, kv, row, 0)
    server["next_fill"] = server["tick"]  # from now on its blocks are registered as they fill


@inner
def _write_down(server, kv, row, behind):
    """Write down how long the extent of a row has grown."""
    e = kv.held[row, ROW_GROWING]
    tokens = kv.held[row, ROW_OFFSET] + server["reached"] - behind
    named = max(tokens // server["block_size"], kv.held[row, ROW_NAMED])
    kv.extents[e]["count"] = named - kv.extents[e]["first"]
    kv.held[row, ROW_NAMED] = named


# ---- content ------------------------------------------------------------------------------------


@inner
def _piece_of(content, request, block, size):
    """Chain of a request's block, and the number of the first block beyond that piece of it."""
    fact = content.facts[request]
    if fact["piece_count"] == 0:
        return private_chain(content, request), np.int64(ENDLESS)
    at = fact["piece_start"]
    while (block + 1) * size > content.pieces[at]["end"]:
        at += 1
    piece = content.pieces[at]
    if piece["end"] == ENDLESS:
        return np.int64(piece["chain"]), np.int64(ENDLESS)
    return np.int64(piece["chain"]), np.int64(piece["end"] // size)


@inner
def _register_on(server, kv, row, chain, at, end):
    """Make blocks from ``at`` on findable, up to ``end`` or a change of twins; return how far."""
    extents = kv.extents
    last = _last_extent(kv, row)
    before = 0
    if last != 0 and extents[last]["chain"] == chain:
        before = _oldest(kv, last)
        after = extents[before]["after"]
    else:
        after = kv.buckets[_slot_of(kv, chain)]
    while after != 0:
        if extents[after]["grower"] != 0:
            _stop_by_other(server, kv, extents[after]["grower"] - 1)
        if extents[after]["first"] + extents[after]["count"] > at:
            break
        before = after
        after = extents[before]["after"]
    if after == 0 or extents[after]["first"] > at:
        if after != 0:
            end = min(end, extents[after]["first"])
        if before == last and last != 0 and extents[last]["refs"] == 1 and _is_single(kv, last):
            extents[last]["count"] += end - at
            return end
        new = _new_extent(server, kv, chain, at, end - at)
        _insert(kv, new, before, after)
    else:
        older = after
        if extents[older]["first"] < at:
            _split(server, kv, older, at)
            older = extents[older]["after"]
        if extents[older]["first"] + extents[older]["count"] > end:
            _split(server, kv, older, end)
        end = extents[older]["first"] + extents[older]["count"]
        new = _new_extent(server, kv, chain, at, end - at)
        while extents[older]["younger"] != 0:
            older = extents[older]["younger"]
        extents[older]["younger"] = new
        extents[new]["older"] = older
    extents[new]["refs"] = 1
    kv.held[row, ROW_HEAD + kv.held[row, ROW_EXTENTS]] = new
    kv.held[row, ROW_EXTENTS] += 1
    return end


@inner
def _last_extent(kv, row):
    """Extent of a request's last block with content, 0: it has none."""
    listed = kv.held[row, ROW_EXTENTS]
    if listed == 0:
        return 0
    extents = kv.extents
    e = kv.held[row, ROW_HEAD + listed - 1]
    while extents[e]["first"] + extents[e]["count"] < kv.held[row, ROW_NAMED]:
        e = extents[e]["rest"]
    return e


@inner
def _list_all(kv, row):
    """List the later parts of extents that were split while the request held them."""
    extents = kv.extents
    listed = kv.held[row, ROW_EXTENTS]
    end = kv.held[row, ROW_NAMED]
    missing = 0
    for k in range(listed - 1, -1, -1):
        e = kv.held[row, ROW_HEAD + k]
        begin = extents[e]["first"]
        while extents[e]["first"] + extents[e]["count"] < end:
            e = extents[e]["rest"]
            missing += 1
        end = begin
    if missing == 0:
        return
    kv.held[row, ROW_EXTENTS] += missing
    end = kv.held[row, ROW_NAMED]
    for k in range(listed - 1, -1, -1):
        e = kv.held[row, ROW_HEAD + k]
        begin = extents[e]["first"]
        parts = 0
        part = e
        while extents[part]["first"] + extents[part]["count"] < end:
            part = extents[part]["rest"]
            parts += 1
        missing -= parts
        for j in range(parts + 1):
            kv.held[row, ROW_HEAD + k + missing + j] = e
            e = extents[e]["rest"]
        end = begin


@inner
def _split(server, kv, oldest, at):
    """Split an extent and its twins before block number ``at``; the first parts keep their place.

    The last parts of free extents come before the first ones in the free list.
    """
    extents = kv.extents
    e = oldest
    older = 0
    while e != 0:
        new = _new_extent(
            server,
            kv,
            extents[e]["chain"],
            at,
            extents[e]["first"] + extents[e]["count"] - at,
        )
        extents[e]["count"] = at - extents[e]["first"]
        extents[new]["refs"] = extents[e]["refs"]
        extents[new]["rest"] = extents[e]["rest"]
        extents[e]["rest"] = new
        if extents[e]["refs"] == 0:
            _link_before(kv, new, e)
        if older == 0:
            _insert(kv, new, e, extents[e]["after"])
        else:
            extents[older]["younger"] = new
            extents[new]["older"] = older
        older = new
        e = extents[e]["younger"]


@inner
def _join(server, kv, e):
    """Join an extent at the end of the free list with its continuation, if that stands before."""
    extents = kv.extents
    rest = extents[e]["prev"]
    if (
        rest == 0
        or extents[rest]["chain"] != extents[e]["chain"]
        or extents[rest]["first"] != extents[e]["first"] + extents[e]["count"]
        or not _is_single(kv, rest)
        or not _is_single(kv, e)
    ):
        return
    extents[e]["count"] += extents[rest]["count"]
    _unlink(kv, rest)
    _forget(kv, rest)
    _give_back(server, kv, rest)


@inner
def _is_single(kv, e):
    """Whether an extent has no twin."""
    return kv.extents[e]["older"] == 0 and kv.extents[e]["younger"] == 0


@inner
def _oldest(kv, e):
    """Oldest twin of an extent."""
    while kv.extents[e]["older"] != 0:
        e = kv.extents[e]["older"]
    return e


@inner
def _insert(kv, e, before, after):
    """Put an extent between two neighbours of its chain, 0: none."""
    extents = kv.extents
    extents[e]["before"] = before
    extents[e]["after"] = after
    if after != 0:
        extents[after]["before"] = e
    if before != 0:
        extents[before]["after"] = e
    else:
        kv.buckets[_slot_of(kv, extents[e]["chain"])] = e


@inner
def _forget(kv, e):
    """Make an extent unfindable: its oldest twin, if any, takes its place."""
    extents = kv.extents
    older, younger = extents[e]["older"], extents[e]["younger"]
    if younger != 0:
        extents[younger]["older"] = older
    if older != 0:
        extents[older]["younger"] = younger
        return
    before, after = extents[e]["before"], extents[e]["after"]
    if younger != 0:
        _insert(kv, younger, before, after)
        return
    if after != 0:
        extents[after]["before"] = before
    if before != 0:
        extents[before]["after"] = after
    elif after != 0:
        kv.buckets[_slot_of(kv, extents[e]["chain"])] = after
    else:
        _empty_bucket(kv, _slot_of(kv, extents[e]["chain"]))


@inner
def _home(buckets, chain):
    spread = np.uint64(chain) * _SPREAD
    return np.int64((spread >> np.uint64(32)) & np.uint64(buckets.size - 1))


@inner
def _slot_of(kv, chain):
    """Bucket with the first extent of a chain, or the empty one where it would go."""
    last = kv.buckets.size - 1
    at = _home(kv.buckets, chain)
    while kv.buckets[at] != 0 and kv.extents[kv.buckets[at]]["chain"] != chain:
        at = (at + 1) & last
    return at


@inner
def _empty_bucket(kv, at):
    """Linear probing without tombstones: later entries of the same run move into the gap."""
    last = kv.buckets.size - 1
    gap = at
    probe = at
    while True:
        probe = (probe + 1) & last
        e = kv.buckets[probe]
        if e == 0:
            break
        home = _home(kv.buckets, kv.extents[e]["chain"])
        if ((probe - home) & last) >= ((probe - gap) & last):
            kv.buckets[gap] = e
            gap = probe
    kv.buckets[gap] = 0


# ---- extents and the free list ------------------------------------------------------------------


@inner
def _new_extent(server, kv, chain, first, count):
    """Return an extent that is in no list."""
    e = server["extents_spare"]
    if e != 0:
        server["extents_spare"] = kv.extents[e]["next"]
    else:
        server["extents_fresh"] += 1
        e = server["extents_fresh"]
    extent = kv.extents[e]
    extent["chain"] = chain
    extent["first"] = first
    extent["count"] = count
    extent["refs"] = 0
    extent["before"] = 0
    extent["after"] = 0
    extent["older"] = 0
    extent["younger"] = 0
    extent["rest"] = 0
    extent["grower"] = 0
    return e


@inner
def _give_back(server, kv, e):
    kv.extents[e]["next"] = server["extents_spare"]
    server["extents_spare"] = e


@inner
def _unlink(kv, e):
    """Take an extent out of the free list."""
    before, after = kv.extents[e]["prev"], kv.extents[e]["next"]
    kv.extents[before]["next"] = after
    kv.extents[after]["prev"] = before


@inner
def _link_before(kv, e, after):
    """Put an extent into the free list, before another one; 0: at its end."""
    before = kv.extents[after]["prev"]
    kv.extents[e]["prev"] = before
    kv.extents[e]["next"] = after
    kv.extents[before]["next"] = e
    kv.extents[after]["prev"] = e


@inner
def _append(kv, e):
    """Put an extent at the end of the free list."""
    _link_before(kv, e, 0)


@inner
def _append_nameless(server, kv, count):
    """Put blocks without content at the end of the free list."""
    last = kv.extents[0]["prev"]
    if last != 0 and kv.extents[last]["chain"] == NAMELESS:
        kv.extents[last]["count"] += count
        return
    _append(kv, _new_extent(server, kv, NAMELESS, 0, count))
