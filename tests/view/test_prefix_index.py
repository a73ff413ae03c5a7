"""The prefix index against a slow dictionary, and the properties the engines rely on."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.view.prefix_index import (
    PrefixIndex,
    forget,
    held_tokens,
    insert,
    match_tokens,
    new_index,
)

ENTRIES = 6
#: Six keys that share one home slot, two of its neighbours, and some far away.
KEYS = [k * 2**40 + 5 for k in range(1, 7)] + [6, 7, 2**63 + 5, 2**64 - 1]


class Oracle:
    """One replica's part of the index, as plainly as it can be written: oldest use first."""

    def __init__(self) -> None:
        self.known: OrderedDict[int, int] = OrderedDict()

    def match(self, runs: list[tuple[int, int]]) -> int:
        total = 0
        for key, tokens in runs:
            total += min(self.known.get(key, 0), tokens)
            if self.known.get(key, 0) < tokens:
                break
        return total

    def insert(self, runs: list[tuple[int, int]], capacity: int) -> None:
        for key, tokens in reversed(runs):
            if tokens == 0:
                continue
            if key not in self.known and len(self.known) == ENTRIES:
                self.known.popitem(last=False)
            self.known[key] = max(self.known.get(key, 0), tokens)
            self.known.move_to_end(key)
        while sum(self.known.values()) > capacity:
            self.known.popitem(last=False)


def arrays(runs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.array([key for key, _ in runs], np.uint64)
    return keys, np.array([tokens for _, tokens in runs], np.int32)


def contents(index: PrefixIndex, replica: int) -> list[tuple[int, int]]:
    """All (key, tokens) of a replica, oldest use first, read from the links alone."""
    entries = index.entries[replica]
    found = []
    entry = entries[0]["newer"]
    while entry != 0:
        found.append((int(entries[entry]["key"]), int(entries[entry]["tokens"])))
        assert entries[entries[entry]["newer"]]["older"] == entry
        entry = entries[entry]["newer"]
    return found


runs_lists = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 40)), max_size=8)
operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert"), st.integers(0, 1), runs_lists, st.sampled_from([0, 50, 10**6])
        ),
        st.tuples(st.just("forget"), st.integers(0, 1)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(operations, runs_lists)
def test_equals_a_dictionary(steps: list[tuple], probe: list[tuple[int, int]]) -> None:
    index = new_index(2, ENTRIES)
    oracles = [Oracle(), Oracle()]
    for now, step in enumerate(steps):
        replica = step[1]
        if step[0] == "forget":
            forget(index, replica)
            oracles[replica] = Oracle()
        else:
            insert(index, replica, *arrays(step[2]), step[3], float(now))
            oracles[replica].insert(step[2], step[3])
        for r, oracle in enumerate(oracles):
            assert contents(index, r) == list(oracle.known.items())
            assert held_tokens(index, r) == sum(oracle.known.values())
            assert match_tokens(index, r, *arrays(probe)) == oracle.match(probe)
            for key in KEYS:
                one = [(key, 10**6)]
                assert match_tokens(index, r, *arrays(one)) == oracle.known.get(key, 0)
    assert np.count_nonzero(index.slots) == sum(len(oracle.known) for oracle in oracles)


def test_the_walk_stops_at_the_first_run_not_fully_known() -> None:
    index = new_index(1, 8)
    keys = np.array([1, 2, 3], np.uint64)
    insert(index, 0, keys, np.array([10, 20, 30], np.int32), 1000, 0.0)
    assert match_tokens(index, 0, keys, np.array([10, 20, 99], np.int32)) == 60
    assert match_tokens(index, 0, keys, np.array([10, 21, 30], np.int32)) == 30
    assert match_tokens(index, 0, keys, np.array([5, 20, 30], np.int32)) == 55
    assert match_tokens(index, 0, keys[1:], np.array([20, 30], np.int32)) == 50
    assert match_tokens(index, 0, keys[:0], np.array([], np.int32)) == 0


def test_later_runs_are_evicted_before_earlier_ones() -> None:
    index = new_index(1, 8)
    keys = np.array([1, 2, 3], np.uint64)
    tokens = np.array([10, 20, 30], np.int32)
    insert(index, 0, keys, tokens, 1000, 0.0)
    insert(index, 0, np.array([9], np.uint64), np.array([100], np.int32), 135, 1.0)
    assert contents(index, 0) == [(2, 20), (1, 10), (9, 100)]


def test_insertion_records_when_and_never_shrinks() -> None:
    index = new_index(1, 8)
    key = np.array([7], np.uint64)
    insert(index, 0, key, np.array([50], np.int32), 1000, 1.5)
    insert(index, 0, key, np.array([20], np.int32), 1000, 2.5)
    assert contents(index, 0) == [(7, 50)]
    assert index.entries[0][1]["used_at"] == 2.5


@pytest.mark.parametrize("entries", [1, 2, 3, 17])
def test_never_holds_more_than_its_room(entries: int) -> None:
    index = new_index(1, entries)
    rng = np.random.default_rng(entries)
    for now in range(500):
        keys = rng.integers(1, 100, 3).astype(np.uint64)
        insert(index, 0, keys, np.full(3, 10, np.int32), 10**6, float(now))
        assert len(contents(index, 0)) <= entries
        assert index.totals[0]["count"] == len(contents(index, 0)) == np.count_nonzero(index.slots)


def test_a_copied_row_is_an_independent_index() -> None:
    stacked = [np.zeros((3, *part.shape), part.dtype) for part in new_index(2, 8)]
    clusters = [PrefixIndex(*(part[c] for part in stacked)) for c in range(3)]
    keys, tokens = arrays([(1, 10), (2, 20)])
    insert(clusters[0], 1, keys, tokens, 1000, 0.0)
    for part in stacked:
        part[2] = part[0]
    insert(clusters[2], 1, *arrays([(1, 15)]), 1000, 1.0)
    assert contents(clusters[0], 1) == [(2, 20), (1, 10)]
    assert contents(clusters[2], 1) == [(2, 20), (1, 15)]
    assert contents(clusters[1], 1) == contents(clusters[0], 0) == []


def test_a_forgotten_replica_starts_over() -> None:
    index = new_index(1, 4)
    for now in range(20):
        insert(index, 0, *arrays([(now + 1, 10), (now + 2, 10)]), 35, float(now))
    forget(index, 0)
    assert held_tokens(index, 0) == 0
    insert(index, 0, *arrays([(1, 10), (2, 10), (3, 10), (4, 10)]), 100, 20.0)
    assert contents(index, 0) == [(4, 10), (3, 10), (2, 10), (1, 10)]
