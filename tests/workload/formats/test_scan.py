"""The compiled loops over block ids against plain Python."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.workload.formats import scan

PROMPTS = st.lists(st.lists(st.integers(-3, 3), max_size=9), min_size=1, max_size=9)
IDS = st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=5)


@given(PROMPTS)
@settings(max_examples=200, deadline=None)
def test_nodes_are_the_distinct_beginnings(prompts: list[list[int]]) -> None:
    ids = np.array([i for prompt in prompts for i in prompt], np.int64)
    counts = np.array([len(prompt) for prompt in prompts], np.int64)
    node, parent = np.empty(len(ids), np.int32), np.empty(len(ids), np.int32)
    buckets = np.zeros(1 << (2 * len(ids)).bit_length(), np.int32)
    found = scan.number_nodes(ids, counts, node, parent, np.empty_like(ids), buckets)
    beginnings = [tuple(p[: k + 1]) for p in prompts for k in range(len(p))]
    numbers = dict(zip(beginnings, node.tolist(), strict=True))
    assert [numbers[b] for b in beginnings] == node.tolist()
    assert found == len(set(beginnings)) == len(set(node.tolist()))
    for beginning, number in numbers.items():
        assert parent[number] == (numbers[beginning[:-1]] if len(beginning) > 1 else -1)


def parsed(*spans: str) -> tuple[int, list[int], list[int]]:
    text = "".join(spans)
    ends = np.cumsum([len(span) for span in spans])
    starts = ends - [len(span) for span in spans]
    ids, counts = np.zeros(len(text) + 1, np.int64), np.zeros(len(spans), np.int64)
    letters = np.frombuffer(text.encode(), np.uint8)
    bad = scan.parse_ids(letters, starts, ends, ids, counts)
    return bad, ids[: counts.sum()].tolist(), counts.tolist()


@given(st.lists(IDS, min_size=1, max_size=4), st.sampled_from([None, 1]))
@settings(max_examples=200, deadline=None)
def test_numbers_are_read_as_json_reads_them(lists: list[list[int]], indent: int | None) -> None:
    spans = [json.dumps(one, indent=indent)[1:-1] for one in lists]
    flat = [i for one in lists for i in one]
    assert parsed(*spans) == (-1, flat, [len(one) for one in lists])


def test_what_is_no_list_of_numbers_is_found() -> None:
    for bad in ("1,,2", "1 2", "1.5", "-", "x", ",1", "1,", str(2**63), "1" * 30):
        assert parsed("1,2", bad, "3")[0] == 1, bad
