"""Small clusters and request tables full of ties, and how two runs of them are compared."""

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from tailrace.config import Cluster, Replica
from tailrace.workload.table import RequestTable


def assert_same(left, right, tolerance_s=0.0):
    for name in left.requests.dtype.names:
        a, b = left.requests[name], right.requests[name]
        if a.dtype.kind == "f":
            assert (np.isnan(a) == np.isnan(b)).all(), name
            assert np.nanmax(np.abs(a - b), initial=0.0) <= tolerance_s, name
        else:
            assert (a == b).all(), name
    for name in left.replicas.dtype.names:
        np.testing.assert_allclose(
            left.replicas[name], right.replicas[name], rtol=1e-9, err_msg=name
        )


def longest(table):
    return int((table.rows["prompt_tokens"] + table.rows["output_tokens"]).max())


@st.composite
def small_tables(draw) -> RequestTable:  # type: ignore[no-untyped-def]
    """A few requests with simultaneous arrivals, priorities, shared prefixes and turns."""
    count = draw(st.integers(1, 14))
    same = {"min_size": count, "max_size": count}
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 3.0]), **same))
    prompts = draw(st.lists(st.sampled_from([1, 15, 16, 17, 32, 33, 100, 200]), **same))
    outputs = draw(st.lists(st.sampled_from([1, 2, 16, 17, 40, 90]), **same))
    priority = draw(st.lists(st.integers(-2, 2), **same))
    private = draw(st.lists(st.booleans(), **same))
    runs: list[list[tuple[int, int]]] = []
    parent, think = np.full(count, -1), np.zeros(count)
    for i in range(count):
        if i and runs[i - 1] and draw(st.booleans()):
            parent[i], think[i] = i - 1, draw(st.sampled_from([0.0, 0.5, 2.0]))
            grown = prompts[i - 1] + outputs[i - 1] + prompts[i]
            tail = grown - sum(tokens for _, tokens in runs[i - 1][:-1])
            prompts[i] = grown
            runs.append([*runs[i - 1][:-1], (runs[i - 1][-1][0], tail)])
            continue
        shared = min(draw(st.sampled_from([0, 16, 40])), prompts[i])
        runs.append([] if private[i] else [(1000, shared), (i, prompts[i] - shared)])
    return RequestTable.build(
        np.cumsum(gaps), np.array(prompts), np.array(outputs), runs,
        parent=parent, think_s=think, priority=np.array(priority),
    )  # fmt: skip


@st.composite
def small_clusters(draw) -> Cluster:  # type: ignore[no-untyped-def]
    def replica() -> Replica:
        cap = draw(st.sampled_from([1, 3, 32]))
        return Replica(
            scheduling_policy=draw(st.sampled_from(["priority", "priority", "fcfs"])),
            batch_cap=cap,
            chunk_size=max(cap, draw(st.sampled_from([32, 64, 512]))),
            num_blocks=draw(st.sampled_from([200, 210, 4000])),
            block_size=draw(st.sampled_from([8, 16])),
            prefix_caching=draw(st.booleans()),
            preallocate_tokens=draw(st.sampled_from([0, 0, 40])),
            speed=draw(st.sampled_from([0.5, 1.0, 3.0])),
        )

    return Cluster(replicas=tuple(replica() for _ in range(draw(st.integers(1, 3)))))


@st.composite
def branching_tables(draw, longest: int = 40, sessions: bool = False) -> RequestTable:  # type: ignore[no-untyped-def]
    """Prompts that repeat, continue, cut short and branch off from earlier ones, and private ones.

    Few segments and lengths, so that prompts meet again behind different content. ``sessions``:
    some wait for an earlier request to end, and they have priorities.
    """
    count = draw(st.integers(2, 14))
    lengths = st.integers(0, 9)
    runs: list[list[tuple[int, int]]] = []
    for _ in range(count):
        before = draw(st.sampled_from(runs)) if runs else []
        kept = list(before[: draw(st.integers(0, len(before)))])
        if kept and draw(st.booleans()):
            kept[-1] = (kept[-1][0], draw(lengths))
        new = draw(st.lists(st.tuples(st.integers(1, 3), lengths), max_size=2))
        prompt = [*kept, *new]
        if prompt and sum(tokens for _, tokens in prompt) == 0:
            prompt[-1] = (prompt[-1][0], 1)
        runs.append(prompt)
    prompts = np.array([sum(t for _, t in run) or draw(st.integers(1, 12)) for run in runs])
    assume(prompts.max() <= longest)
    outputs = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.05, 3.0]), min_size=count, max_size=count))
    columns = draw(turns(count)) if sessions else {}
    return RequestTable.build(np.cumsum(gaps), prompts, np.array(outputs), runs, **columns)


def blocks_needed(table: RequestTable, size: int) -> int:
    tokens = table.rows["prompt_tokens"] + table.rows["output_tokens"]
    return int(-(-tokens.max() // size))


@st.composite
def turns(draw, count: int):  # type: ignore[no-untyped-def]
    """Columns of requests that follow earlier ones, or not, with priorities."""
    same = {"min_size": count, "max_size": count}
    follows = draw(st.lists(st.booleans(), **same))
    parents = [draw(st.integers(0, i - 1)) if i and follows[i] else -1 for i in range(count)]
    return {
        "parent": np.array(parents),
        "think_s": np.array(draw(st.lists(st.sampled_from([0.0, 0.02, 1.0]), **same))),
        "priority": np.array(draw(st.lists(st.integers(-1, 1), **same))),
    }
