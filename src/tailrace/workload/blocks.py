"""Content runs from block hashes: a trie of blocks whose unbranched stretches are joined."""

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.draft import run_index
from tailrace.workload.prefix import content_keys
from tailrace.workload.table import RUN, RequestTable, blank_rows

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
    node = _trie_nodes(ids, counts)
    owner = np.repeat(np.arange(len(rows)), counts)
    is_first = np.diff(owner, prepend=-1) > 0
    is_last = np.diff(owner, append=len(rows)) > 0
    before = np.where(is_first, -1, np.concatenate([[-1], node[:-1]]))
    nodes = int(node.max()) + 1 if node.size else 0
    parent = np.full(nodes, -1, np.int64)
    parent[node] = before
    children = np.bincount(parent[parent >= 0], minlength=nodes)
    ends = np.zeros(nodes, bool)
    ends[node[is_last]] = True
    joined = (parent >= 0) & (children[parent] == 1) & ~ends[parent]
    opens = ~joined[node]
    run_of = np.cumsum(opens) - 1
    tokens = np.bincount(run_of, minlength=int(opens.sum())) * block_tokens
    # The last block of a prompt may be cut short; what no block covers is private.
    covered = counts * block_tokens
    excess = rows["prompt_tokens"] - covered
    has_blocks = counts > 0
    tokens[run_of[is_last]] += np.minimum(excess, 0)[has_blocks]
    private = np.where(has_blocks, np.maximum(excess, 0), 0)
    return _with_private(rows, owner[opens], node[opens], tokens, private, nodes)


def _trie_nodes(ids: Ints, counts: Ints) -> Ints:
    """Number the distinct paths of block ids: equal number = equal block after equal blocks."""
    if ids.size == 0:
        return np.zeros(0, np.int64)
    rows = blank_rows(len(counts))
    rows["run_count"] = counts
    rows["run_start"] = np.cumsum(counts) - counts
    runs = np.zeros(len(ids), RUN)
    runs["segment"], runs["tokens"] = ids, 1
    key = content_keys(RequestTable(rows, runs))[run_index(rows)]
    _, node = np.unique(key, return_inverse=True)
    return node.astype(np.int64)


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
