"""Content of prompts as pieces of chains, so that a long prompt is a few numbers.

Two KV blocks are equal if their last tokens lie in the same run behind the same content (the run's
key) and they have the same number. In a conversation every turn may add a run, so prompts have up
to hundreds of them. All runs of a table form a tree: a run's parent is the run before it. This
module cuts the tree into *chains*, each going on from a run to the run that most prompts continue
with, and rewrites each prompt as a list of pieces: block number ``i`` of block size ``s`` belongs
to the first piece whose end is at least ``(i + 1) * s`` tokens. Blocks are equal exactly if chain
and number are. A prompt changes chains at most log2(requests) times by branching off, so a
conversation is one piece however many turns it has.

Where the text of a run goes on beyond the point where its chain leaves it (the answer to a prompt
that ends there, say), it is on a chain of its own, the run's *side chain*.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit

#: End of a request's last piece, in tokens: the answer continues it.
ENDLESS = np.int32(2**31 - 1)

#: One run of the tree.
NODE = np.dtype(
    [
        ("key", "u8"),
        ("parent", "i4"),  # run before it, -1: none
        ("start", "i4"),  # tokens before it
        ("weight", "i4"),  # prompts that contain it
        ("heir", "i4"),  # run that its chain goes on with, -1: none
        ("chain", "i4"),
        ("reserved", "i4"),
    ]
)


class Scratch(NamedTuple):
    """Working memory of :func:`cut` for ``U`` runs."""

    nodes: NDArray[np.void]  #: [U] NODE
    node_of: NDArray[np.int32]  #: [U] node of each run
    buckets: NDArray[np.int32]  #: [power of two] 1 + node of a key, 0: empty


def new_scratch(runs: int) -> Scratch:
    """Return working memory for tables of up to ``runs`` runs."""
    return Scratch(
        np.zeros(runs, NODE),
        np.zeros(runs, np.int32),
        np.zeros(1 << (2 * runs).bit_length(), np.int32),
    )


@jit
def cut(facts, run_keys, run_tokens, pieces, scratch):
    """Write the pieces of all requests to ``pieces`` (PIECE), at most two per run.

    Sets piece_start and piece_count of ``facts`` [R]. Chains are numbered from 0 to twice the
    number of runs; private requests have no pieces, see :func:`private_chain`. Linear in the number
    of runs.
    """
    nodes = scratch.nodes
    count = 0
    for r in range(facts.size):
        count = _enter_runs(facts[r], run_keys, run_tokens, scratch, count)
    for n in range(count):
        parent = nodes[n]["parent"]
        if parent >= 0:
            heir = nodes[parent]["heir"]
            if heir < 0 or nodes[n]["weight"] > nodes[heir]["weight"]:
                nodes[parent]["heir"] = n
    for n in range(count):
        parent = nodes[n]["parent"]
        inherits = parent >= 0 and nodes[parent]["heir"] == n
        nodes[n]["chain"] = nodes[parent]["chain"] if inherits else n
    used = 0
    for r in range(facts.size):
        used = _write_pieces(facts[r], run_tokens, pieces, scratch, used)


@inner
def private_chain(content, request):
    """Chain of a request that shares nothing."""
    return content.pieces.size + request


@inner
def _enter_runs(fact, run_keys, run_tokens, scratch, count):
    """Enter the runs of a request into the tree of ``count`` runs; return its new size.

    An empty run is no content, except that an answer continues the last run.
    """
    nodes = scratch.nodes
    parent = -1
    start = 0
    last = fact["run_start"] + fact["run_count"] - 1
    for run in range(fact["run_start"], last + 1):
        if run_tokens[run] == 0 and run < last:
            continue
        slot = _slot_of(nodes, scratch.buckets, run_keys[run])
        if scratch.buckets[slot] == 0:
            nodes[count]["key"] = run_keys[run]
            nodes[count]["parent"] = parent
            nodes[count]["start"] = start
            nodes[count]["weight"] = 0
            nodes[count]["heir"] = -1
            count += 1
            scratch.buckets[slot] = count
        n = scratch.buckets[slot] - 1
        nodes[n]["weight"] += 1
        scratch.node_of[run] = n
        parent = n
        start += run_tokens[run]
    return count


@inner
def _slot_of(nodes, buckets, key):
    """Bucket of a key, or the empty one where it belongs. Keys are hashes already."""
    mask = buckets.size - 1
    slot = np.int64(key & np.uint64(mask))
    while buckets[slot] != 0 and nodes[buckets[slot] - 1]["key"] != key:
        slot = (slot + 1) & mask
    return slot


@inner
def _write_pieces(fact, run_tokens, pieces, scratch, used):
    """Write the pieces of a request behind the ``used`` ones; return how many are used then."""
    nodes = scratch.nodes
    first = used
    end = np.int64(0)
    last = fact["run_start"] + fact["run_count"] - 1
    for run in range(fact["run_start"], last + 1):
        if run_tokens[run] == 0 and run < last:
            continue
        n = scratch.node_of[run]
        heir = nodes[n]["heir"]
        leaves = np.int64(nodes[heir]["start"]) if heir >= 0 else np.int64(ENDLESS)
        end = end + run_tokens[run] if run < last else np.int64(ENDLESS)
        chain = nodes[n]["chain"]
        if used > first and pieces[used - 1]["chain"] == chain:
            used -= 1
        pieces[used]["chain"] = chain
        pieces[used]["end"] = min(end, leaves)
        used += 1
        if leaves < end:
            pieces[used]["chain"] = run_tokens.size + n
            pieces[used]["end"] = end
            used += 1
    fact["piece_start"] = first
    fact["piece_count"] = used - first
    return used
