"""Prefix caches by extents against the reference engine's blocks, one by one."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from odd_cases import blocks_needed, branching_tables
from tailrace.config import Cluster, Engine, Replica, RouterSettings
from tailrace.sim import kvcache
from tailrace.sim.build import build_fleet, build_tables
from tailrace.sim.chains import ENDLESS
from tailrace.sim.reference.blocks import BlockPool
from tailrace.sim.reference.content import BlockNames
from tailrace.sim.simulator import simulate
from tailrace.workload.table import RequestTable

EXACT = Engine(engine="compiled", exact=True)
FAST = Engine(engine="compiled")
REFERENCE = Engine(engine="reference")
HARD = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@HARD
@given(
    branching_tables(),
    st.integers(1, 5),
    st.integers(0, 12),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([0, 0, 7]),
)
def test_runs_equal_the_reference_engine(table, size, spare, cap, chunk, ahead):
    replica = Replica(
        count=2,
        scheduler="vllm_v1",
        prefix_caching=True,
        block_size=size,
        num_blocks=blocks_needed(table, size) + spare,
        batch_cap=cap,
        chunk_size=max(cap, chunk),
        preallocate_tokens=ahead,
    )
    cluster = Cluster(replicas=(replica,))
    for policy in ("round_robin", "lmetric"):
        reference, ours, fast = (
            simulate(cluster, table, policy, engine=engine, seed=4)
            for engine in (REFERENCE, EXACT, FAST)
        )
        assert reference.requests.tobytes() == ours.requests.tobytes()
        for name in ("iterations", "tokens", "preemptions", "partial_preemptions"):
            assert (reference.replicas[name] == ours.replicas[name]).all(), name
            assert (reference.replicas[name] == fast.replicas[name]).all(), name
        assert (reference.requests["cached_tokens"] == fast.requests["cached_tokens"]).all()
        late = np.abs(reference.requests["finished_s"] - fast.requests["finished_s"])
        assert late.max() < 1e-9


def conversations(sessions: int, turns: int, seed: int) -> RequestTable:
    """Conversations of tens of thousands of tokens behind one system prompt, some with branches."""
    rng = np.random.default_rng(seed)
    arrivals, prompts, outputs, runs = [], [], [], []
    segment = 1
    for s in range(sessions):
        content = [(0, 5000)]
        for t in range(turns):
            if t % 4 == 3:
                content = content[: len(content) // 2 + 1]
            content = [*content, (segment, int(rng.integers(500, 9000)))]
            segment += 1
            runs.append(content)
            prompts.append(sum(tokens for _, tokens in content))
            outputs.append(int(rng.integers(1, 300)))
            arrivals.append(3.0 * s + 11.0 * t + rng.random())
    order = np.argsort(arrivals)
    return RequestTable.build(
        np.array(arrivals)[order],
        np.array(prompts)[order],
        np.array(outputs)[order],
        [runs[i] for i in order],
    )


@pytest.mark.compiled
@pytest.mark.parametrize("blocks", [4500, 30_000])
def test_long_prompts_equal_the_reference_engine(blocks):
    table = conversations(sessions=4, turns=6, seed=1)
    replica = Replica(
        count=2, scheduler="vllm_v1", prefix_caching=True, num_blocks=blocks, chunk_size=2048
    )
    reference, ours = (
        simulate(Cluster(replicas=(replica,)), table, "least_outstanding", engine=engine)
        for engine in (REFERENCE, EXACT)
    )
    assert reference.requests.tobytes() == ours.requests.tobytes()
    assert ours.requests["cached_tokens"].max() > 10_000


def content_of(table: RequestTable) -> kvcache.PromptContent:
    tables = build_tables([table], (), RouterSettings(), 0)
    return kvcache.PromptContent(tables.facts[0], tables.pieces[0])


def chain_names(content, request: int, size: int, blocks: int) -> Iterator[tuple[int, int]]:  # type: ignore[no-untyped-def]
    """Chain and number of a request's first blocks."""
    fact = content.facts[request]
    pieces = range(int(fact["piece_start"]), int(fact["piece_start"] + fact["piece_count"]))
    for block in range(blocks):
        ends = (p for p in pieces if content.pieces[p]["end"] >= (block + 1) * size)
        chain = next((int(content.pieces[p]["chain"]) for p in ends), -1 - request)
        yield chain, block


@HARD
@given(branching_tables(), st.integers(1, 5))
def test_blocks_are_equal_exactly_if_chain_and_number_are(table, size):
    content = content_of(table)
    names = BlockNames(table)
    known: dict[tuple[int, int], tuple[int, int]] = {}
    for r in range(len(table)):
        expected = names.block_ids(r, size)
        for ours, theirs in zip(
            chain_names(content, r, size, len(expected)), expected, strict=True
        ):
            assert known.setdefault(ours, theirs) == theirs
    assert len(set(known.values())) == len(known)


def test_a_conversation_is_one_piece_and_its_answers_another():
    turns = [[(0, 50), *((10 + k, 30) for k in range(n))] for n in range(40)]
    prompts = np.array([sum(t for _, t in run) for run in turns])
    table = RequestTable.build(np.arange(40.0), prompts, np.full(40, 5), turns)
    content = content_of(table)
    facts, ends = content.facts, content.pieces["end"]
    assert facts["piece_count"].tolist() == [2] * 39 + [1]
    assert ends[facts["piece_start"][:39]].tolist() == prompts[:39].tolist()
    assert (ends[facts["piece_start"] + facts["piece_count"] - 1] == ENDLESS).all()


class Pools:
    """One server's blocks, in extents and one by one in the reference engine's pool."""

    def __init__(self, table: RequestTable, size: int, blocks: int) -> None:
        replica = Replica(
            scheduler="vllm_v1", prefix_caching=True, block_size=size, num_blocks=blocks
        )
        cluster = Cluster(replicas=(replica,))
        tables = build_tables([table], (), RouterSettings(), 0)
        fleet = build_fleet(cluster, [table], tables, RouterSettings(), Engine(), [0])
        rows = (fleet.extents, fleet.buckets, fleet.held, fleet.rows_free)
        self.kv = kvcache.KvCache(*(array[0, 0] for array in rows))
        self.content = content_of(table)
        self.server = fleet.servers[0, 0]
        self.pool = BlockPool(blocks, size, 0, True)
        self.names = BlockNames(table)
        self.table = table
        self.size = size
        self.rows: dict[int, int] = {}
        self.processed: dict[int, int] = {}

    def admit(self, r: int, row: int, chunk: int) -> None:
        """Admit a request with its first chunk, if that fits."""
        prompt = int(self.table.rows["prompt_tokens"][r])
        names = self.names.block_ids(r, self.size)
        hits = self.pool.cached_chain(names, (prompt - 1) // self.size)
        idle = sum(self.pool.users[block] == 0 for block in hits)
        kvcache.begin_row(self.kv, row)
        found = kvcache.longest_prefix(self.server, self.kv, self.content, r, prompt, row)
        assert found == (len(hits), idle)
        cached = len(hits) * self.size
        chunk = min(chunk, prompt - cached)
        if not self.pool.grow(r, names, cached, chunk, hits):
            return
        kvcache.reuse(self.server, self.kv, row, len(hits))
        self.rows[r], self.processed[r] = row, cached
        self._grown(r, chunk)

    def grow(self, r: int, tokens: int) -> None:
        """Give a request blocks for more tokens, if there are any."""
        total = int(self.table.rows["prompt_tokens"][r] + self.table.rows["output_tokens"][r])
        tokens = min(tokens, total - self.processed[r])
        names = self.names.block_ids(r, self.size)
        if tokens and self.pool.grow(r, names, self.processed[r], tokens):
            self._grown(r, tokens)

    def _grown(self, r: int, tokens: int) -> None:
        held = int(self.server["num_blocks"] - self.server["free_blocks"])
        need = self.pool.used - held
        if need > 0:
            kvcache.take(self.server, self.kv, need)
        self.processed[r] += tokens
        end = self.processed[r] // self.size
        kvcache.register(self.server, self.kv, self.content, self.rows[r], r, end)

    def release(self, r: int) -> None:
        blocks = len(self.pool.held[r])
        self.pool.release(r)
        kvcache.release(self.server, self.kv, self.rows.pop(r), blocks)

    def check(self) -> None:
        """The free blocks hold the same content in the same order."""
        extents = self.kv.extents
        ours: list[tuple[int, int] | None] = []
        e = int(extents[0]["next"])
        while e:
            first, count = int(extents[e]["first"]), int(extents[e]["count"])
            chain = int(extents[e]["chain"])
            numbers = range(first + count - 1, first - 1, -1)
            ours += [None if chain < 0 else (chain, number) for number in numbers]
            e = int(extents[e]["next"])
        theirs = [self.pool._name[block] for block in self.pool.free_list]
        assert [n is None for n in ours] == [n is None for n in theirs]
        same = dict(zip(ours, theirs, strict=True))
        assert [same[n] for n in ours] == theirs
        assert [n and n[1] for n in ours] == [n and n[1] for n in theirs]
        assert self.server["free_blocks"] == len(theirs)


@HARD
@given(branching_tables(longest=60), st.integers(1, 4), st.integers(0, 30), st.data())
def test_free_blocks_are_in_the_same_order(table, size, spare, data):
    assume((table.rows["run_count"] > 0).all())  # private blocks have no content until preempted
    pools = Pools(table, size, blocks_needed(table, size) + spare)
    rows = list(range(8))
    for _ in range(data.draw(st.integers(5, 60))):
        what = data.draw(st.sampled_from(["admit", "grow", "grow", "release"]))
        held = sorted(pools.rows)
        if what == "admit" and len(held) < len(rows):
            r = data.draw(st.sampled_from([r for r in range(len(table)) if r not in held] or held))
            if r not in held:
                row = min(set(rows) - set(pools.rows.values()))
                pools.admit(r, row, data.draw(st.integers(1, 40)))
        elif what == "grow" and held:
            pools.grow(data.draw(st.sampled_from(held)), data.draw(st.integers(1, 10)))
        elif held:
            pools.release(data.draw(st.sampled_from(held)))
        pools.check()
