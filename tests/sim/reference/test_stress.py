"""Random small clusters under pressure, watched at every instant."""

from typing import get_args

import numpy as np
import pytest

from tailrace.config import (
    Cluster,
    CostModel,
    Engine,
    Event,
    Replica,
    RouterSettings,
    SchedulerName,
)
from tailrace.sim.reference import ReferenceEngine
from tailrace.sim.reference.blocks import BlockPool
from tailrace.sim.reference.routing import PolicyDispatcher
from tailrace.sim.result import FAILED, FINISHED
from tailrace.workload.table import RequestTable

ALL = get_args(SchedulerName)
ONE_STAGE = ("vllm_v1", "lightllm")
COST = CostModel(
    base_ms=10.0,
    per_token_ms=0.05,
    knots=((64, 0.02),),
    per_context_ms=1e-3,
    per_prefill_ms=1e-4,
)


class RandomChoice:
    name = "random"

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def scores(self, view):
        return self.rng.random(len(view.replicas))


class Watcher(PolicyDispatcher):
    """Checks the servers whenever time moves, and books every token."""

    def start(self, servers):
        super().start(servers)
        self.now = -np.inf
        self.ended_ids = []
        self.computed = np.zeros(len(self.table), np.int64)

    def before(self, now):
        assert now > self.now
        self.now = now
        everybody = [request.id for server in self.servers for request in server.requests()]
        assert len(everybody) == len(set(everybody))
        for server in self.servers:
            check_memory(server)
        super().before(now)

    def batch_ended(self, server, batch, now):
        for request, tokens in zip(batch.requests, batch.tokens, strict=True):
            assert tokens > 0
            self.computed[request.id] += tokens
        super().batch_ended(server, batch, now)

    def finished(self, server, request, now):
        self.ended_ids.append(request.id)
        if not server.compat:
            assert request.generated == self.table.rows["output_tokens"][request.id]
        super().finished(server, request, now)


def check_memory(server):
    memory = server.scheduler.memory
    assert 0 <= memory.used <= memory.total
    if isinstance(memory, BlockPool):
        users = np.bincount(
            [block for blocks in memory.held.values() for block in blocks], minlength=memory.total
        )
        assert users.tolist() == memory.users
        assert set(np.flatnonzero(users == 0)) == set(memory.free_list)
        for blocks in memory.held.values():
            assert len(blocks) == len(set(blocks))
    else:
        assert memory.used == sum(memory.held.values())


def random_replica(rng, scheduler):
    tight = rng.random() < 0.7
    size = 1 if scheduler == "lightllm" else int(rng.choice([4, 16]))
    tokens = int(rng.integers(140, 260)) if tight else 2000
    stages = 1 if scheduler in ONE_STAGE else int(rng.choice([1, 1, 2, 3]))
    return Replica(
        cost=COST,
        scheduler=scheduler,
        speed=float(rng.choice([0.5, 1.0, 2.0])),
        block_size=size,
        num_blocks=max(tokens // size, 130 // size + 3),
        batch_cap=int(rng.integers(stages, 9)),
        chunk_size=int(rng.choice([3, 16, 64])),
        max_batch_tokens=int(rng.choice([120, 300])),
        max_request_tokens=128,
        watermark=float(rng.choice([0.0, 0.05])),
        prefix_caching=bool(rng.random() < 0.7),
        preallocate_tokens=int(rng.choice([0, 20])),
        num_stages=stages,
        max_waiting_iters=int(rng.integers(1, 6)),
    )


def random_table(rng, count=30):
    prompt = rng.integers(1, 80, count)
    output = rng.integers(1, 40, count)
    arrival = np.sort(rng.choice(np.arange(12) * 0.05, count) + rng.integers(0, 2, count))
    parent = np.full(count, -1)
    for child in rng.choice(np.arange(1, count), 8, replace=False):
        candidate = int(rng.integers(0, child))
        if candidate not in parent:
            parent[child] = candidate
    runs = []
    for k in range(count):
        shared = int(rng.integers(0, prompt[k] + 1))
        tail = int(rng.choice([100 + k, 200]))
        runs.append([(int(rng.integers(0, 3)), shared), (tail, int(prompt[k]) - shared)])
        if rng.random() < 0.2:
            runs[-1] = []
    return RequestTable.build(
        arrival,
        prompt,
        output,
        runs,
        parent=parent,
        think_s=np.where(parent >= 0, rng.choice([0.0, 0.3], count), 0.0),
        session=rng.integers(-1, 5, count),
    )


def random_events(rng, n):
    events = []
    for _ in range(int(rng.integers(0, 5))):
        kind = str(rng.choice(["slow", "die", "drain"]))
        replica, at_s = int(rng.integers(0, n)), float(rng.integers(0, 40)) * 0.05
        events.append(Event(at_s=at_s, replica=replica, kind=kind, factor=0.5))
        events.append(Event(at_s=at_s + 0.35, replica=replica, kind="return"))
    return events


def run(rng, scheduler, compat=False, with_events=True):
    n = int(rng.integers(1, 4))
    cluster = Cluster(replicas=tuple(random_replica(rng, scheduler) for _ in range(n)))
    table = random_table(rng)
    events = random_events(rng, n) if with_events else []
    router = RouterSettings(staleness_s=float(rng.choice([0.0, 0.1])), index_entries=16)
    engine = ReferenceEngine(
        cluster, table, router=router, engine=Engine(vidur_compat=compat), events=events, seed=1
    )
    watcher = Watcher(RandomChoice(5), table, engine.replicas, router, seed=1)
    return engine.run(dispatcher=watcher, record_batches=True), watcher


def check_result(result, watcher):
    rows, requests, batches = result.table.rows, result.requests, result.batches
    finished = requests["status"] == FINISHED
    assert ((requests["status"] == FAILED) | finished).all()
    assert sorted(watcher.ended_ids) == np.flatnonzero(finished).tolist()
    begun = requests[~np.isnan(requests["first_token_s"])]
    assert (begun["arrived_s"] <= begun["scheduled_s"]).all()
    assert (begun["scheduled_s"] < begun["first_token_s"]).all()
    assert (begun["first_token_s"] <= begun["finished_s"]).all()
    assert np.isnan(requests["first_token_s"][~finished]).sum() == 0
    plain = finished & (requests["restarts"] == 0) & (requests["reroutes"] == 0)
    wanted = rows["prompt_tokens"] + rows["output_tokens"] - 1 - requests["cached_tokens"]
    assert (watcher.computed[plain] == wanted[plain]).all()
    assert (watcher.computed[finished] >= wanted[finished]).all()
    assert watcher.computed.sum() == result.replicas["tokens"].sum()
    for replica in range(len(result.replicas)):
        mine = batches[batches["replica"] == replica]
        assert result.replicas["iterations"][replica] <= (mine["stage"] == 0).sum()
        for stage in np.unique(mine["stage"]):
            track = mine[mine["stage"] == stage]
            assert (track["start_s"][1:] >= track["end_s"][:-1]).all()


@pytest.mark.parametrize("scheduler", ALL)
@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_lost_or_done_twice(scheduler, seed):
    result, watcher = run(np.random.default_rng([seed, ALL.index(scheduler)]), scheduler)
    check_result(result, watcher)


@pytest.mark.parametrize("scheduler", ALL)
@pytest.mark.parametrize("seed", range(8))
def test_vidurs_defects_lose_no_tokens_either(scheduler, seed):
    rng = np.random.default_rng([seed, 77, ALL.index(scheduler)])
    result, watcher = run(rng, scheduler, compat=True, with_events=False)
    total = result.table.rows["prompt_tokens"] + result.table.rows["output_tokens"] - 1
    finished = result.requests["status"] == FINISHED
    plain = finished & (result.requests["restarts"] == 0)
    wanted = total - result.requests["cached_tokens"]
    assert (watcher.computed[plain] == wanted[plain]).all()
    assert sorted(watcher.ended_ids) == np.flatnonzero(finished).tolist()


def test_pressure_is_real():
    """The random clusters do preempt, also half-read prompts, and do find cached blocks."""
    totals = {scheduler: np.zeros(3, int) for scheduler in ALL}
    for scheduler in ("sarathi", "vllm", "vllm_v1"):
        for seed in range(10):
            result, _ = run(np.random.default_rng([seed, ALL.index(scheduler)]), scheduler)
            totals[scheduler] += [
                result.replicas["preemptions"].sum(),
                result.replicas["partial_preemptions"].sum(),
                (result.requests["cached_tokens"] > 0).sum(),
            ]
    assert all(totals[scheduler][0] > 10 for scheduler in ("sarathi", "vllm", "vllm_v1"))
    assert totals["sarathi"][1] > 0
    assert totals["vllm_v1"][1] > 0
    assert totals["vllm_v1"][2] > 10


@pytest.mark.parametrize("scheduler", ALL)
def test_same_seed_same_run(scheduler):
    first, _ = run(np.random.default_rng(3), scheduler)
    second, _ = run(np.random.default_rng(3), scheduler)
    assert first.requests.tobytes() == second.requests.tobytes()
    assert first.replicas.tobytes() == second.replicas.tobytes()
    assert first.batches.tobytes() == second.batches.tobytes()
