"""KV memory: counting, and blocks with content."""

import pytest

from tailrace.sim.reference.blocks import BlockCounter, BlockPool
from tailrace.sim.reference.content import BlockNames
from tailrace.sim.reference.request import Batch, Request
from tailrace.workload.table import RequestTable


def names(path, count):
    return [(path, block) for block in range(count)]


def pool_of(total=6, extra_blocks=0, caching=True):
    return BlockPool(total, 4, extra_blocks, caching)


def test_counter_refuses_what_it_does_not_have():
    memory = BlockCounter(3)
    memory.take(1, 2)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 free"):
        memory.take(2, 2)
    memory.take(1, 1)
    assert (memory.free, memory.held) == (0, {1: 3})
    memory.release(1)
    assert (memory.free, memory.held) == (3, {})


def test_blocks_grow_with_the_tokens():
    pool = pool_of()
    assert pool.grow(1, names(1, 9), 0, 6)
    assert pool.held[1] == [0, 1]
    assert pool.grow(1, names(1, 9), 6, 2)
    assert pool.held[1] == [0, 1]
    assert pool.grow(1, names(1, 9), 8, 1)
    assert pool.held[1] == [0, 1, 2]
    assert not pool.grow(1, names(1, 9), 9, 16)
    assert (pool.held[1], pool.used) == ([0, 1, 2], 3)


def test_extra_blocks_come_only_with_new_ones_and_as_far_as_there_are_any():
    pool = pool_of(total=6, extra_blocks=2)
    assert pool.grow(1, names(1, 9), 0, 4)
    assert pool.held[1] == [0, 1, 2]
    assert pool.grow(1, names(1, 9), 4, 8)
    assert pool.used == 3
    assert pool.grow(1, names(1, 9), 12, 5)
    assert pool.used == 6


def test_only_full_blocks_are_findable_and_at_once():
    pool = pool_of()
    pool.grow(1, names(1, 9), 0, 7)
    assert pool.cached_chain(names(1, 9), 9) == [0]
    pool.grow(1, names(1, 9), 7, 1)
    assert pool.cached_chain(names(1, 9), 9) == [0, 1]
    assert pool.cached_chain(names(1, 9), 1) == [0]
    assert pool.cached_chain([(2, 0), (1, 1)], 9) == []


def test_tail_is_reused_first_and_content_survives_until_then():
    pool = pool_of(total=4)
    pool.grow(1, names(1, 3), 0, 12)
    pool.release(1)
    # Free: 3 (never used), then the tail 2, 1 and the head 0.
    assert pool.grow(2, names(2, 2), 0, 8)
    assert pool.held[2] == [3, 2]
    assert pool.cached_chain(names(1, 3), 3) == [0, 1]


def test_without_caching_the_head_is_reused_first():
    pool = pool_of(total=3, caching=False)
    pool.grow(1, names(1, 3), 0, 12)
    pool.release(1)
    pool.grow(2, names(2, 1), 0, 4)
    assert pool.held[2] == [0]
    assert pool.cached_chain(names(1, 3), 3) == []


def test_hits_are_shared_and_released_by_the_last_user():
    pool = pool_of(total=4)
    pool.grow(1, names(1, 2), 0, 8)
    hits = pool.cached_chain(names(1, 2), 2)
    assert pool.grow(2, names(1, 2), 8, 1, hits)
    assert pool.held[2] == [0, 1, 2]
    assert pool.used == 3
    pool.release(1)
    assert pool.used == 3
    pool.release(2)
    assert pool.used == 0


def test_idle_hits_do_not_count_as_free_blocks():
    pool = pool_of(total=3)
    pool.grow(1, names(1, 2), 0, 8)
    pool.release(1)
    hits = pool.cached_chain(names(1, 2), 2)
    # Three blocks are free, two of them the hits: one more can be had, two cannot.
    assert not pool.grow(2, names(1, 4), 8, 8, hits)
    assert pool.used == 0
    assert pool.grow(2, names(1, 4), 8, 4, hits)


def test_of_equal_content_the_first_named_block_is_used():
    pool = pool_of()
    pool.grow(1, names(1, 1), 0, 4)
    pool.grow(2, names(1, 1), 0, 4)
    assert pool.cached_chain(names(1, 1), 1) == [0]
    pool.release(1)
    pool.release(2)
    pool.grow(3, names(3, 5), 0, 20)  # takes 2, 3, 4, 5 and then block 0
    assert pool.cached_chain(names(1, 1), 1) == [1]


def table(*prompts):
    """Table of (prompt tokens, output tokens, runs)."""
    return RequestTable.build([0.0] * len(prompts), *zip(*prompts, strict=True))


def test_blocks_are_named_by_the_run_of_their_last_token():
    content = BlockNames(
        table(
            (10, 3, [(1, 6), (2, 4)]),
            (12, 1, [(1, 6), (2, 6)]),
            (10, 3, [(1, 7), (2, 3)]),
            (10, 3, []),
            (6, 7, [(1, 6), (2, 0)]),
        )
    )
    first, second, third, private, empty_run = (content.block_ids(k, 4) for k in range(5))
    assert len(first) == 3  # 13 tokens of prompt and output
    assert first == second
    assert first[0] == third[0]  # four tokens of stream 1
    assert first[1] != third[1]  # stream 2 begins elsewhere
    assert not set(private) & set(first)
    assert first == empty_run  # the answer continues stream 2 in both


def test_block_belongs_to_the_run_it_ends_in():
    content = BlockNames(table((6, 1, [(1, 5), (2, 1)]), (6, 1, [(1, 6)])))
    ends_in_stream_2, ends_in_stream_1 = content.block_ids(0, 3), content.block_ids(1, 3)
    assert ends_in_stream_2[0] == ends_in_stream_1[0]
    assert ends_in_stream_2[1] != ends_in_stream_1[1]


def test_empty_runs_are_no_content():
    content = BlockNames(table((8, 1, [(1, 4), (2, 4)]), (8, 1, [(1, 4), (9, 0), (2, 4)])))
    assert content.block_ids(0, 4) == content.block_ids(1, 4)


def test_request_counts_the_token_that_comes_with_its_prompt():
    request = Request(0, prompt=5, output=3, arrived_s=0.0, queued_s=0.0)
    assert request.next_tokens(4) == 4
    assert not request.advance(4)
    assert request.advance(1)
    assert (request.processed, request.generated, request.finished) == (6, 1, False)
    assert request.next_tokens(4) == 1
    request.advance(1)
    request.restart(shrink_partial=False)
    assert (request.prompt, request.output, request.processed) == (7, 1, 0)
    request.advance(7)
    assert (request.generated, request.finished) == (3, True)


@pytest.mark.parametrize(("shrink", "expected"), [(False, (5, 3)), (True, (2, 6))])
def test_restart_of_a_half_read_prompt(shrink, expected):
    request = Request(0, prompt=5, output=3, arrived_s=0.0, queued_s=0.0)
    request.advance(2)
    request.restart(shrink_partial=shrink)
    assert (request.prompt, request.output) == expected


def test_batch_sums_up_its_work():
    decode = Request(0, 5, 3, 0.0, 0.0, processed=6, prefilled=True)
    prefill = Request(1, 9, 3, 0.0, 0.0, processed=4)
    batch = Batch([decode, prefill], [1, 5])
    assert (batch.decodes, batch.prefills, batch.prefill_tokens) == (1, 1, 5)
    assert (batch.total_tokens, batch.context, batch.prefill_work) == (6, 6, 5 * (4 + 2.5))
