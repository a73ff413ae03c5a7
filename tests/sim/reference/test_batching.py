"""Schedulers driven by hand, where a whole run would hide the rule that is tested."""

import pytest

from reference_runs import replica_of, table_of
from tailrace.sim.reference.content import BlockNames
from tailrace.sim.reference.request import Request
from tailrace.sim.reference.server import make_scheduler


def scheduler_of(name, rows=(), compat=False, **settings):
    """Return a scheduler with the requests (arrival, prompt, output) in its queue."""
    table = table_of(rows) if rows else table_of([(0.0, 1, 1)])
    scheduler = make_scheduler(replica_of(name, **settings), compat, BlockNames(table))
    for number, (arrival, prompt, output, *_) in enumerate(rows):
        scheduler.add(Request(number, prompt, output, arrival, arrival))
    return scheduler


def step(scheduler):
    """Run one iteration and return the requests in its batch."""
    batch = scheduler.next_batch()
    for request, tokens in zip(batch.requests, batch.tokens, strict=True):
        request.advance(tokens)
    scheduler.batch_ended(batch)
    return [request.id for request in batch.requests]


def waiting(scheduler):
    return [request.id for request in scheduler.waiting]


@pytest.mark.parametrize("name", ["sarathi", "vllm"])
def test_block_is_taken_when_the_tokens_exceed_those_held(name):
    scheduler = scheduler_of(name, [(0.0, 14, 9)])
    held = []
    for _ in range(5):
        step(scheduler)
        held.append(scheduler.memory.held[0])
    # Processed before each iteration: 0, 15, 16, 17, 18.
    assert held == [1, 1, 1, 2, 2]


def test_vllm_v1_blocks_run_one_token_ahead():
    scheduler = scheduler_of("vllm_v1", [(0.0, 14, 9)])
    held = []
    for _ in range(4):
        step(scheduler)
        held.append(len(scheduler.memory.held[0]))
    assert held == [1, 1, 2, 2]


@pytest.mark.parametrize("name", ["sarathi", "vllm"])
def test_victims_come_from_the_back_and_go_to_the_head_of_the_queue(name):
    rows = [(0.0, 16, 9), (0.1, 16, 9), (0.2, 16, 9), (0.3, 8, 9)]
    scheduler = scheduler_of(name, rows, num_blocks=3)
    assert step(scheduler) == [0, 1, 2]
    # The first needs a block, which the last gives; then the second finds none and must go too.
    assert step(scheduler) == [0]
    assert waiting(scheduler) == [1, 2, 3]


def test_vllm_preempts_the_youngest_even_if_it_has_run_for_longer():
    scheduler = scheduler_of("vllm", num_blocks=5)
    for number, queued_s in ((1, 0.5), (0, 0.0)):  # the older one was readmitted later
        request = Request(number, 31, 9, queued_s, queued_s, processed=33, prefilled=True)
        scheduler.memory.take(number, 2)
        scheduler.ready.append(request)
    assert step(scheduler) == [0]
    assert waiting(scheduler) == [1]


@pytest.mark.parametrize("name", ["sarathi", "vllm", "vllm_v1", "lightllm"])
def test_no_more_requests_run_than_the_cap_allows(name):
    size = 1 if name == "lightllm" else 16
    rows = [(0.0, 8, 3)] * 3
    scheduler = scheduler_of(name, rows, batch_cap=2, block_size=size, max_waiting_iters=1)
    for _ in range(3):
        assert step(scheduler) == [0, 1]
    assert waiting(scheduler) == [2]
    assert step(scheduler) == [2]


@pytest.mark.parametrize(("compat", "admitted"), [(False, []), (True, [3])])
def test_sarathi_batch_beyond_its_limit_admits_only_in_compat(compat, admitted):
    scheduler = scheduler_of(
        "sarathi", [(0.0, 1, 1)] * 4, compat, num_stages=2, batch_cap=6, chunk_size=64
    )
    del scheduler.waiting[:3]
    begun = Request(0, 20, 9, 0.0, 0.0, processed=10)
    decodes = [Request(k, 8, 9, 0.0, 0.0, processed=9, prefilled=True) for k in (1, 2, 4)]
    scheduler.ready = [begun, *decodes]
    for request in scheduler.ready:
        scheduler.memory.take(request.id, 2)
    # Three decodes make the batch full; the begun prompt joins them all the same.
    assert step(scheduler) == [1, 2, 4, 0, *admitted]


def test_sarathi_takes_begun_prompts_only_as_far_as_the_budget_goes():
    scheduler = scheduler_of("sarathi", chunk_size=8, num_stages=2, batch_cap=8)
    scheduler.ready = [
        Request(number, 20, 9, queued_s, queued_s, processed=10)
        for number, queued_s in ((2, 0.3), (1, 0.2), (0, 0.1))
    ]
    for request in scheduler.ready:
        scheduler.memory.take(request.id, 2)
    batch = scheduler.next_batch()
    assert [request.id for request in batch.requests] == [2]
    assert [request.id for request in scheduler.ready] == [0, 1]  # the oldest is next


def test_sarathi_counts_requests_under_way_towards_the_cap():
    scheduler = scheduler_of("sarathi", [(0.0, 8, 1)], num_stages=2, batch_cap=4)
    for number in range(1, 5):
        scheduler.memory.take(number, 1)
    assert scheduler.next_batch() is None
    scheduler.memory.release(1)
    assert step(scheduler) == [0]


def test_lightllm_counts_decodes_anew_after_an_idle_start():
    rows = [(0.0, 8, 3), (0.0, 4000, 2), (0.0, 8, 4)]
    settings = {"block_size": 1, "num_blocks": 5000, "max_batch_tokens": 4000}
    scheduler = scheduler_of("lightllm", rows, max_waiting_iters=2, **settings)
    # Each prompt alone; the third waits for two decodes of the second, which has only one.
    assert [step(scheduler) for _ in range(6)] == [[0], [0], [0], [1], [1], [2]]
    scheduler.add(Request(3, 8, 1, 0.0, 0.0))
    assert [step(scheduler) for _ in range(3)] == [[2], [2], [3]]


def test_vllm_v1_tells_routers_of_all_blocks_it_has():
    scheduler = scheduler_of("vllm_v1", [(0.0, 32, 1, [(7, 32)]), (0.0, 32, 1, [(7, 32)])])
    second = scheduler.waiting.pop()
    step(scheduler)
    # It will compute the last block again, but a router that asks is told of both.
    assert scheduler.cached_tokens(second) == 32
    scheduler.add(second)
    step(scheduler)
    assert scheduler.admission_hit(second) == 16
