"""Content runs from block hashes: a trie of blocks whose unbranched stretches are joined."""

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.table import RUN

Ints = NDArray[np.int64]


def block_runs(
    rows: NDArray[np.void], ids: Ints, counts: Ints, block_tokens: int
) -> NDArray[np.void]:
    """Give rows [R] the runs of their block ids (flat [B], ``counts`` [R] each); return the runs.

    Prompts share exactly the blocks they have in common from the start on. A segment is a stretch
    of blocks within which no prompt branches off and none ends, so a prompt of hundreds of blocks
    has a few runs, and an answer never continues into blocks of a later prompt. Tokens beyond the
    last block are private. Sets the rows' run_start and run_count.
    """
    from tailrace.workload.formats import scan  # the compiler is loaded only where it is needed

    node = np.empty(len(ids), np.int32)
    parent = np.empty(len(ids), np.int32)
    buckets = np.zeros(1 << (2 * len(ids)).bit_length(), np.int32)
    nodes = int(scan.number_nodes(ids, counts, node, parent, np.empty_like(ids), buckets))
    parent = parent[:nodes]
    has_blocks = counts > 0
    last_block = (np.cumsum(counts) - 1)[has_blocks]
    children = np.bincount(parent[parent >= 0], minlength=nodes)
    ends = np.zeros(nodes, bool)
    ends[node[last_block]] = True
    joined = (parent >= 0) & (children[parent] == 1) & ~ends[parent]
    size = int(np.count_nonzero(~joined[node]))
    segment = np.empty(size, np.int64)
    tokens = np.empty(size, np.int64)
    run_counts = np.zeros(len(rows), np.int64)
    scan.write_runs(counts, node, joined, block_tokens, segment, tokens, run_counts)
    # The last block of a prompt may be cut short; what no block covers is private.
    excess = rows["prompt_tokens"] - counts * block_tokens
    tokens[(np.cumsum(run_counts) - 1)[has_blocks]] += np.minimum(excess, 0)[has_blocks]
    private = np.where(has_blocks, np.maximum(excess, 0), 0)
    owner = np.repeat(np.arange(len(rows)), run_counts)
    return _with_private(rows, owner, segment, tokens, private, nodes)


def _with_private(
    rows: NDArray[np.void], owner: Ints, segment: Ints, tokens: Ints, private: Ints, nodes: int
) -> NDArray[np.void]:
    """Return the runs (owner, segment, tokens [U]) of rows, and private ones for text left over."""
    tail = np.flatnonzero(private)
    owner = np.concatenate([owner, tail])
    order = np.argsort(owner, kind="stable")  # a tail comes after the blocks of its row
    runs = np.zeros(len(owner), RUN)
    runs["segment"] = np.concatenate([segment, nodes + tail])[order]
    runs["tokens"] = np.concatenate([tokens, private[tail]])[order]
    count = np.bincount(owner, minlength=len(rows))
    rows["run_count"] = count
    rows["run_start"] = np.cumsum(count) - count
    return runs
