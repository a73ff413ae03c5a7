"""Which requests of a recorded table belong together, and which half of the data they are in.

A conversation is a session of the trace. Where a trace has no session ids, it is the requests whose
prompts begin alike, beyond beginnings that very many requests have (system prompts).
"""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.prefix import content_keys, mix64
from tailrace.workload.table import RequestTable

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: A beginning that more requests than this have is a shared prompt, not a conversation.
MOST_TURNS = 64
_ROW_SALT = np.uint64(0x726571756573747C)
_SESSION_SALT = np.uint64(0x73657373696F6E7C)


class Half(StrEnum):
    """The two halves of recorded conversations, by a hash of their ids."""

    TRAIN = "train"
    JUDGE = "judge"


def conversation_keys(table: RequestTable, session_keys: Keys | None = None) -> Keys:
    """Return a key [R] that the requests of a conversation have in common, and no others.

    It is the session's key if the row has a session (``session_keys``, or else a hash of its
    number); otherwise that of the row it follows, of the beginning of its prompt, or its own.
    """
    rows = table.rows
    found = mix64(np.arange(len(rows), dtype=np.uint64) ^ _ROW_SALT)
    _by_content(table, found)
    has = rows["session"] >= 0
    numbered = mix64(rows["session"].astype(np.uint64) ^ _SESSION_SALT)
    found[has] = (numbered if session_keys is None else session_keys)[has]
    # Parents stand above their children, so one pass reaches the root.
    for row in np.flatnonzero((rows["parent"] >= 0) & ~has).tolist():
        found[row] = found[rows["parent"][row]]
    return found


def _by_content(table: RequestTable, found: Keys) -> None:
    """Set the keys [R] of rows with content to that of their first run that few requests have."""
    rows = table.rows
    keys = content_keys(table)
    live = np.flatnonzero(rows["run_count"] > 0)
    position = 0
    while live.size:
        key = keys[rows["run_start"][live] + position]
        _, number, count = np.unique(key, return_inverse=True, return_counts=True)
        rare = count[number] <= MOST_TURNS
        found[live[rare]] = key[rare]
        live = live[~rare]
        position += 1
        live = live[rows["run_count"][live] > position]


def in_half(keys: Keys, half: Half) -> NDArray[np.bool_]:
    """Return which rows [R] belong to a half, by the keys of their conversations.

    With so few conversations that one half would be empty, all belong to the judge's.
    """
    train = (mix64(keys) & np.uint64(1)).astype(bool)
    if train.all() or not train.any():
        return np.full(len(keys), half is Half.JUDGE)
    return train if half is Half.TRAIN else ~train


def numbered(keys: Keys) -> Ints:
    """Number conversations by first appearance: [R] from 0 without gaps."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def without(table: RequestTable, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows [R] stay if ``bad`` ones go, and with each all that follow it."""
    gone = bad.copy()
    for row in np.flatnonzero(table.rows["parent"] >= 0).tolist():
        gone[row] |= gone[table.rows["parent"][row]]
    return ~gone
