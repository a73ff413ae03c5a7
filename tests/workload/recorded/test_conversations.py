"""Conversations of recorded traffic and their halves."""

import numpy as np

from tailrace.workload.recorded.conversations import (
    MOST_TURNS,
    Half,
    conversation_keys,
    in_half,
    numbered,
    without,
)
from tailrace.workload.table import RequestTable
from tailrace.workload.trace_formats import session_keys


def table(runs: list[list[tuple[int, int]]], **columns: list[int]) -> RequestTable:
    prompt = np.array([sum(t for _, t in r) or 5 for r in runs])
    arrays = {name: np.array(values) for name, values in columns.items()}
    n = len(runs)
    return RequestTable.build(np.arange(float(n)), prompt, np.full(n, 3), runs, **arrays)


def test_prompts_that_begin_alike_are_a_conversation_beyond_what_all_share() -> None:
    others = [[(0, 64), (100 + k, 64)] for k in range(MOST_TURNS)]
    found = table([[(0, 64), (1, 64)], [(0, 64), (1, 64), (2, 64)], [(0, 64), (3, 9)], [], *others])
    group = numbered(conversation_keys(found))
    assert group[0] == group[1]
    assert len(set(group.tolist())) == len(found) - 1


def test_a_session_id_decides_and_follow_ups_belong_to_what_they_follow() -> None:
    found = table([[(0, 64)], [(0, 64)], [], []], session=[0, 1, -1, -1], parent=[-1, -1, -1, 2])
    keys = conversation_keys(found, session_keys(["a", "b", "", ""]))
    assert keys[0] != keys[1]
    assert keys[2] == keys[3]
    # The same id is in the same half, in whichever file and at whichever place it stands.
    again = table([[], [(5, 7)]], session=[0, 1])
    assert conversation_keys(again, session_keys(["b", "a"])).tolist() == [keys[1], keys[0]]


def test_halves_are_disjoint_whole_and_about_even() -> None:
    keys = session_keys([f"session {k}" for k in range(2000)])
    train, judge = in_half(keys, Half.TRAIN), in_half(keys, Half.JUDGE)
    assert (train ^ judge).all()
    assert 900 < train.sum() < 1100


def test_what_cannot_be_split_is_the_judges() -> None:
    keys = session_keys(["only"] * 5)
    assert in_half(keys, Half.JUDGE).all()
    assert not in_half(keys, Half.TRAIN).any()


def test_what_follows_a_request_that_goes_goes_too() -> None:
    found = table([[]] * 5, parent=[-1, 0, 1, 0, -1])
    assert without(found, np.array([False, True, False, False, False])).tolist() == [
        *(True, False, False, True, True)
    ]
