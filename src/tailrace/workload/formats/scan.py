"""Compiled loops over block ids: reading them from JSON, and the trie of all prompts.

Long prompts are lists of thousands of block ids, nearly all of them repeated from the prompt
before, so this is where an import spends its time.
"""

import numpy as np

from tailrace.compiled import inner, jit

_MINUS, _COMMA, _ZERO, _NINE = 45, 44, 48, 57
#: Digits of the largest id, 2**63 - 1.
_MOST_DIGITS = 19


@jit
def parse_ids(text, starts, ends, ids, counts):
    """Read lists of whole numbers from JSON; return the first span that is no such list, or -1.

    ``text`` uint8 [n]; list k stands between ``starts[k]`` and ``ends[k]``, without its brackets.
    Its numbers are appended to ``ids`` and counted in ``counts`` [k].
    """
    used = 0
    for k in range(starts.size):
        first = used
        at = _skip_space(text, starts[k], ends[k])
        while at < ends[k]:
            negative = text[at] == _MINUS
            at += negative
            value = np.int64(0)
            digits = 0
            while at < ends[k] and _ZERO <= text[at] <= _NINE:
                value = value * 10 + (text[at] - _ZERO)
                digits += 1
                at += 1
            if digits == 0 or digits > _MOST_DIGITS or value < 0:
                return k
            ids[used] = -value if negative else value
            used += 1
            at = _skip_space(text, at, ends[k])
            if at < ends[k]:
                if text[at] != _COMMA:
                    return k
                at = _skip_space(text, at + 1, ends[k])
                if at == ends[k]:
                    return k
        counts[k] = used - first
    return -1


@inner
def _skip_space(text, at, end):
    """Return the place of the first character from ``at`` on that is not white space."""
    while at < end and text[at] <= 32:
        at += 1
    return at


@jit
def number_nodes(ids, counts, node, parent, value, buckets):
    """Number the distinct paths of block ids: equal number = equal block after equal blocks.

    ``ids`` [B] are the blocks of all prompts, ``counts`` [R] each. Fills ``node`` [B], and parent
    (-1: none) and id of each node; returns how many there are. ``buckets`` [power of two above B]
    must be zero.
    """
    mask = buckets.size - 1
    count = 0
    at = 0
    for r in range(counts.size):
        before = np.int64(-1)
        for _ in range(counts[r]):
            wanted = ids[at]
            n = before + 1  # the blocks of a prompt are numbered one after the other
            if n >= count or parent[n] != before or value[n] != wanted:
                slot = _home(before, wanted) & mask
                while buckets[slot] != 0:
                    n = np.int64(buckets[slot]) - 1
                    if parent[n] == before and value[n] == wanted:
                        break
                    slot = (slot + 1) & mask
                if buckets[slot] == 0:
                    n = np.int64(count)
                    parent[n] = before
                    value[n] = wanted
                    count += 1
                    buckets[slot] = count
            node[at] = n
            before = n
            at += 1
    return count


@inner
def _home(before, wanted):
    """Bucket where the search for a block begins, before the mask."""
    z = np.uint64(before) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(wanted)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64(z >> np.uint64(2))


@jit
def write_runs(counts, node, joined, block_tokens, segment, tokens, run_counts):
    """Join blocks to runs: ``segment`` and ``tokens`` [U] of all, ``run_counts`` [R] per prompt.

    ``joined`` [nodes]: the block continues the run of the block before it.
    """
    used = 0
    at = 0
    for r in range(counts.size):
        first = used
        for _ in range(counts[r]):
            n = node[at]
            if joined[n]:
                tokens[used - 1] += block_tokens
            else:
                segment[used] = n
                tokens[used] = block_tokens
                used += 1
            at += 1
        run_counts[r] = used - first
