"""An emulated replica is a simulated server: same arrivals, same times, to the last bit."""

import asyncio

import numpy as np
import pytest

from emulate.virtual import VirtualClock, new_replica, new_service, play
from tailrace.config import Cluster, Replica
from tailrace.emulate import tokenizer
from tailrace.sim.reference import ReferenceEngine
from tailrace.workload import library
from tailrace.workload.table import RequestTable


def simulated(config, table):
    """First token, finish and cached tokens of each row as the simulator has them."""
    result = ReferenceEngine(Cluster(replicas=(config,)), table).run(
        replicas=np.zeros(len(table), int)
    )
    done = result.requests
    return list(
        zip(
            *(done[k].tolist() for k in ("first_token_s", "finished_s", "cached_tokens")),
            strict=True,
        )
    ), result


def emulated(config, table):
    async def run():
        clock = VirtualClock()
        return play(new_service(config, clock), clock, table)

    return asyncio.run(run())


def burst(count=24, prompt=90, output=40, gap_s=0.004):
    """Requests that come faster than they can be served."""
    lengths = np.arange(count)
    return RequestTable.build(
        np.round(lengths // 3 * gap_s, 6), prompt + 17 * (lengths % 5), output + lengths % 7
    )


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        ("vllm_v1", {}),
        ("vllm_v1", {"batch_cap": 5, "chunk_size": 64}),
        ("vllm_v1", {"num_blocks": 40}),  # preempts
        ("sarathi", {"num_blocks": 40, "chunk_size": 100}),
        ("vllm", {"num_blocks": 60}),
        ("orca", {"max_request_tokens": 512, "num_blocks": 100}),
        ("faster_transformer", {"max_request_tokens": 512, "num_blocks": 100}),
        ("lightllm", {"block_size": 1, "num_blocks": 1000}),
        ("sarathi", {"num_stages": 2}),
    ],
)
def test_times_are_those_of_the_simulator(scheduler, settings):
    config = Replica(scheduler=scheduler, **settings)
    table = burst()
    expected, result = simulated(config, table)
    assert emulated(config, table) == expected
    if settings.get("num_blocks") == 40:
        assert result.replicas["preemptions"].sum() > 0


@pytest.mark.parametrize("workload", ["sessions-hot", "rag", "agents"])
def test_shared_prompts_and_sessions_hit_the_cache_as_in_the_simulator(workload):
    config = Replica(num_blocks=2000)
    table = library.make(workload, 40, 20.0, 3)
    expected, result = simulated(config, table)
    assert result.requests["cached_tokens"].sum() > 1000
    assert emulated(config, table) == expected


def test_without_prefix_caching_nothing_is_found():
    config = Replica(prefix_caching=False)
    table = library.make("rag", 12, 50.0, 3)
    expected, _ = simulated(config, table)
    assert emulated(config, table) == expected
    assert all(cached == 0 for *_, cached in expected)


def test_being_late_changes_what_the_client_sees_and_nothing_else():
    """A clock that jumps by seconds: iterations end when they should have."""
    clock = VirtualClock()
    replica = new_replica(Replica(), clock)
    told = []
    replica.submit(
        tokenizer.words(1, 0, 100),
        tokenizer.words(2, 0, 30),
        lambda job, last: told.append((job.last_s, last)),
    )
    clock._now = 50.0
    replica.catch_up()
    assert [last for _, last in told] == [False] * 29 + [True]
    table = RequestTable.build(np.zeros(1), np.array([100]), np.array([30]))
    expected, _ = simulated(Replica(), table)
    assert (told[0][0], told[-1][0]) == expected[0][:2]
    assert replica.meter.worst_lag_s > 49


def test_speed_changes_with_the_next_iteration():
    clock = VirtualClock()
    replica = new_replica(Replica(), clock)
    times = []
    replica.submit(
        tokenizer.words(1, 0, 16),
        tokenizer.words(2, 0, 8),
        lambda job, last: times.append(job.last_s),
    )
    clock.run(until=0.03)
    replica.set_speed(0.5)
    clock.run()
    gaps = np.diff(times)
    assert gaps[-1] == pytest.approx(2 * gaps[0], rel=0.01)


@pytest.mark.parametrize("scheduler", ["vllm_v1", "sarathi", "vllm", "orca"])
@pytest.mark.parametrize("moment_s", [0.0, 0.005, 0.02, 0.1])
def test_aborted_requests_leave_and_give_everything_back(scheduler, moment_s):
    clock = VirtualClock()
    config = Replica(scheduler=scheduler, batch_cap=3, num_blocks=40, max_request_tokens=200)
    replica = new_replica(config, clock)
    finished = []

    def told(job, is_last):
        if is_last:
            finished.append(job)

    jobs = [
        replica.submit(tokenizer.words(k, 0, 100), tokenizer.words(9, 0, 60), told)
        for k in range(6)
    ]
    clock.run(until=moment_s)
    for job in jobs[::2]:
        replica.abort(job)
        replica.abort(job)
    clock.run()
    assert finished == jobs[1::2]
    assert (replica.waiting, replica.running, replica.kv_used) == (0, 0, 0.0)
    assert replica.meter.success["abort"] == 3
    assert not replica.leaving
    assert not replica.content.names


def test_aborting_after_the_end_does_nothing():
    clock = VirtualClock()
    replica = new_replica(Replica(), clock)
    job = replica.submit(tokenizer.words(1, 0, 10), tokenizer.words(2, 0, 2), lambda *_: None)
    clock.run()
    replica.abort(job)
    assert replica.meter.success == {
        "length": 1,
        "stop": 0,
        "abort": 0,
        "error": 0,
        "repetition": 0,
    }


def test_clearing_loses_requests_and_cache():
    clock = VirtualClock()
    replica = new_replica(Replica(), clock)
    told = []
    replica.submit(tokenizer.words(1, 0, 64), tokenizer.words(2, 0, 50), lambda *a: told.append(a))
    clock.run(until=0.1)
    before = len(told)
    assert before > 0
    replica.clear()
    clock.run()
    assert len(told) == before
    assert (replica.waiting, replica.running, replica.kv_used) == (0, 0, 0.0)
    job = replica.submit(tokenizer.words(1, 0, 64), tokenizer.words(2, 0, 5), lambda *_: None)
    clock.run()
    assert job.cached_tokens == 0
    assert job.request.finished
