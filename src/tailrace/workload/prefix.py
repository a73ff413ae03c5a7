"""Hashes of prompt content: two prompts agree as far as their keys agree."""

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.draft import run_index
from tailrace.workload.table import RequestTable

Hashes = NDArray[np.uint64]

_CONTENT_SALT = np.uint64(0x7461696C72616365)
_PRIVATE_SALT = np.uint64(0x70726976617465FF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: Hashes) -> Hashes:
    """Scramble 64-bit numbers [n] (the finaliser of SplitMix64)."""
    z = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def content_keys(table: RequestTable) -> Hashes:
    """Return the keys [U] of all runs; one pass per run position, not per request.

    A key is the hash of all earlier runs (segment, tokens) of the request and of this run's
    segment. Equal keys mean the same stream behind the same prefix, so the shorter of two such runs
    is a prefix of the longer.
    """
    rows, runs = table.rows, table.runs
    key = np.zeros(len(runs), np.uint64)
    start = rows["run_start"]
    live = np.flatnonzero(rows["run_count"] > 0)
    path = np.full(len(rows), _CONTENT_SALT)
    position = 0
    while live.size:
        at = start[live] + position
        key[at] = _step(path[live], runs["segment"][at])
        tokens = runs["tokens"][at]
        # An empty run is no content: it must not change what follows.
        path[live] = np.where(tokens > 0, _step(key[at], tokens), path[live])
        position += 1
        live = live[rows["run_count"][live] > position]
    return key


def prefix_hash(table: RequestTable, tokens: int = 256) -> Hashes:
    """Return a hash [R] of the first ``tokens`` tokens of each prompt.

    Equal content has equal hashes. A request without runs shares nothing, so it is hashed by its
    row number; a prompt shorter than ``tokens`` by all it has.
    """
    rows, runs = table.rows, table.runs
    path = np.full(len(rows), _CONTENT_SALT)
    left = np.full(len(rows), tokens, np.int64)
    position = 0
    live = np.flatnonzero(rows["run_count"] > 0)
    private = rows["run_count"] == 0
    while live.size:
        at = rows["run_start"][live] + position
        used = np.minimum(runs["tokens"][at], left[live])
        step = _step(_step(path[live], runs["segment"][at]), used)
        path[live] = np.where(used > 0, step, path[live])
        left[live] -= used
        position += 1
        live = live[(rows["run_count"][live] > position) & (left[live] > 0)]
    ids = np.arange(len(rows), dtype=np.uint64)
    path[private] = _step(np.full(len(rows), _PRIVATE_SALT), ids)[private]
    return path


def content_hash(table: RequestTable) -> Hashes:
    """Return a hash [R] of the whole of each prompt."""
    return prefix_hash(table, int(np.iinfo(np.int64).max))


def repeated_tokens(table: RequestTable, *, answers: bool = False) -> NDArray[np.int64]:
    """Return how many prompt tokens [R] repeat the beginning of an earlier row's prompt.

    It is what a cache of infinite size would find, if rows came one after another. With ``answers``
    the cache holds the earlier rows' answers too, which continue their last run.
    """
    rows = table.rows
    index = run_index(rows)
    count = rows["run_count"].astype(np.int64)
    if index.size == 0:
        return np.zeros(len(rows), np.int64)
    owner = np.repeat(np.arange(len(rows)), count)
    key = content_keys(table)[index]
    tokens = table.runs["tokens"][index].astype(np.int64)
    extent = tokens.copy()
    if answers:
        last = (np.cumsum(count) - 1)[count > 0]
        extent[last] += rows["output_tokens"][count > 0]
    # Runs of equal key, in the order of rows: each repeats as much as the longest before it has.
    order = np.argsort(key, kind="stable")
    group = np.cumsum(np.diff(key[order], prepend=key[order[:1]]) != 0)
    longest = np.maximum.accumulate((group << 32) | extent[order]) & 0xFFFFFFFF
    earlier = np.concatenate([[0], longest[:-1]])
    earlier[np.diff(group, prepend=-1) != 0] = 0
    repeated = np.minimum(tokens[order], earlier)
    total = np.zeros(len(rows), np.int64)
    np.add.at(total, owner[order], repeated)
    return total


def _step(path: Hashes, value: NDArray[np.generic]) -> Hashes:
    """Fold a number [n] into path hashes [n]."""
    return mix64(path * np.uint64(3) + value.astype(np.uint64) * _GOLDEN + np.uint64(1))
