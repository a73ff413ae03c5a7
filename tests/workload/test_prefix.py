"""Content hashes against slow twins."""

import numpy as np
from hypothesis import given, settings

from tailrace.workload import library
from tailrace.workload.prefix import content_keys, mix64, prefix_hash, repeated_tokens
from tailrace.workload.table import RequestTable
from workload import naive
from workload.strategies import tables


def build(runs: list[list[tuple[int, int]]], output: int = 5) -> RequestTable:
    count = len(runs)
    prompt = np.array([sum(t for _, t in r) or 10 for r in runs])
    return RequestTable.build(np.arange(count, dtype=float), prompt, np.full(count, output), runs)


@given(tables())
@settings(max_examples=200, deadline=None)
def test_keys_are_equal_exactly_where_the_path_is(table: RequestTable) -> None:
    keys = content_keys(table)
    paths: list[tuple[object, ...]] = []
    for row in range(len(table)):
        runs = naive.runs_of(table, row)
        for j, (segment, _) in enumerate(runs):
            before = tuple(r for r in runs[:j] if r[1] > 0)  # empty runs are no content
            paths.append((before, segment))
    for i, path in enumerate(paths):
        for j, other in enumerate(paths):
            assert (keys[i] == keys[j]) == (path == other)


@given(tables())
@settings(max_examples=200, deadline=None)
def test_prefix_hash_is_equal_exactly_where_the_first_tokens_are(table: RequestTable) -> None:
    hashes = prefix_hash(table, tokens=6)
    contents = [naive.content(naive.runs_of(table, row))[:6] for row in range(len(table))]
    for i, a in enumerate(contents):
        for j, b in enumerate(contents):
            same = i == j or (a == b and a != [])
            assert (hashes[i] == hashes[j]) == same


def test_prefix_hash_looks_at_the_first_tokens_only() -> None:
    table = build([[(1, 300)], [(1, 256), (2, 9)], [(1, 255), (2, 9)], [(1, 400)], [], []])
    a, b, c, d, e, f = prefix_hash(table).tolist()
    assert a == b == d
    assert len({a, c, e, f}) == 4


def test_private_requests_never_collide_with_content() -> None:
    table = library.make("mixed", 20_000, None, 1)
    hashes = prefix_hash(table)
    private = table.rows["run_count"] == 0
    assert len(np.unique(hashes[private])) == private.sum()
    assert not np.intersect1d(hashes[private], hashes[~private]).size


@given(tables())
@settings(max_examples=200, deadline=None)
def test_repeated_tokens_agree_with_a_plain_search(table: RequestTable) -> None:
    for answers in (False, True):
        expected = naive.repeated_tokens(table, answers=answers)
        assert repeated_tokens(table, answers=answers).tolist() == expected


def test_an_infinite_cache_finds_a_conversations_history() -> None:
    table = build([[(9, 100), (1, 50)], [(9, 100), (1, 80)], [(9, 100), (2, 30)], []], output=10)
    assert repeated_tokens(table).tolist() == [0, 150, 100, 0]
    assert repeated_tokens(table, answers=True).tolist() == [0, 160, 100, 0]
    assert naive.repeated_tokens(table, answers=True) == [0, 160, 100, 0]


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    # First outputs of the public reference implementation for state 1234567.
    state = np.array([1234567], np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    assert mix64(state).tolist() == [6457827717110365317]
