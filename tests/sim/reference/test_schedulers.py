"""Batches of each scheduler worked out by hand; every iteration takes one second."""

from typing import get_args

import numpy as np
import pytest

from reference_runs import batches_of, play, replica_of, table_of
from tailrace.config import Cluster, Engine, SchedulerName
from tailrace.errors import TailraceError
from tailrace.sim.reference import Dispatcher, ReferenceEngine
from tailrace.sim.reference.prefill_first import peak_tokens
from tailrace.sim.result import FINISHED, PENDING

ALL = get_args(SchedulerName)


def block_size(scheduler):
    return 1 if scheduler == "lightllm" else 16


def roomy(scheduler):
    return {"block_size": block_size(scheduler), "num_blocks": 20_000}


@pytest.mark.parametrize("scheduler", ALL)
def test_prefill_gives_the_first_token_and_each_decode_one_more(scheduler):
    result = play(scheduler, [(0.5, 10, 3)], **roomy(scheduler))
    request = result.requests[0]
    assert request["scheduled_s"] == 0.5
    assert request["first_token_s"] == 1.5
    assert request["finished_s"] == 3.5
    assert batches_of(result) == [(0, 1, 10), (1, 0, 1), (1, 0, 1)]
    assert result.batches["context"].tolist() == [0, 11, 12]
    assert result.batches["prefill_work"].tolist() == [10 * 5.0, 0.0, 0.0]


@pytest.mark.parametrize("scheduler", ALL)
def test_one_token_answer_ends_with_its_prefill(scheduler):
    result = play(scheduler, [(0.0, 10, 1)], **roomy(scheduler))
    assert result.requests[0]["finished_s"] == result.requests[0]["first_token_s"] == 1.0
    assert len(result.batches) == 1


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm", "vllm_v1", "orca"])
def test_arrival_at_an_iteration_end_takes_part_in_the_next_batch(scheduler):
    result = play(scheduler, [(0.0, 10, 2), (1.0, 10, 1), (1.5, 10, 1)], **roomy(scheduler))
    assert result.requests["scheduled_s"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm_v1"])
def test_chunks_fill_the_budget_behind_the_decodes(scheduler):
    rows = [(0.0, 8, 4), (0.5, 20, 1), (0.6, 3, 1)]
    result = play(scheduler, rows, chunk_size=8, batch_cap=8)
    assert batches_of(result) == [
        (0, 1, 8),  # the first prompt
        (1, 1, 8),  # its decode and 7 tokens of the second
        (1, 1, 8),  # 7 more
        (1, 2, 8),  # the last 6, and 1 of the third
        (0, 1, 2),  # the rest of the third
    ]
    assert result.requests["first_token_s"].tolist() == [1.0, 4.0, 5.0]


def test_vllm_runs_prompts_alone_and_before_decodes():
    rows = [(0.0, 8, 3), (0.5, 20, 1), (0.6, 10, 1)]
    result = play("vllm", rows)
    assert batches_of(result) == [(0, 1, 8), (0, 2, 30), (1, 0, 1), (1, 0, 1)]
    assert result.requests["finished_s"].tolist() == [4.0, 2.0, 2.0]


def test_vllm_counts_prompts_as_long_as_the_longest():
    rows = [(0.0, 10, 1), (0.0, 30, 1), (0.0, 10, 1)]
    assert batches_of(play("vllm", rows, max_batch_tokens=60)) == [(0, 2, 40), (0, 1, 10)]
    assert batches_of(play("vllm", rows, max_batch_tokens=90)) == [(0, 3, 50)]


def test_orca_mixes_whole_prompts_with_decodes():
    rows = [(0.0, 8, 3), (0.5, 20, 1), (0.6, 10, 1)]
    assert batches_of(play("orca", rows, max_request_tokens=4096)) == [
        (0, 1, 8),
        (1, 2, 31),
        (1, 0, 1),
    ]


def test_orca_reserves_memory_for_the_longest_request():
    rows = [(0.0, 8, 2), (0.0, 8, 2), (0.0, 8, 2)]
    result = play("orca", rows, max_request_tokens=160, num_blocks=25)
    assert result.requests["scheduled_s"].tolist() == [0.0, 0.0, 2.0]


def test_faster_transformer_lets_nobody_join():
    rows = [(0.0, 8, 2), (0.0, 8, 4), (0.5, 8, 1)]
    result = play("faster_transformer", rows, max_request_tokens=160, num_blocks=30)
    assert batches_of(result) == [(0, 2, 16), (2, 0, 2), (1, 0, 1), (1, 0, 1), (0, 1, 8)]


def test_faster_transformer_leaks_only_in_compat():
    rows = [(0.0, 8, 1), (0.0, 8, 2), (0.5, 8, 1), (0.5, 8, 1)]
    settings = {"max_request_tokens": 160, "num_blocks": 20}
    right = play("faster_transformer", rows, **settings)
    leaking = play("faster_transformer", rows, compat=True, **settings)
    # The first request is done one iteration before its batch, so Vidur never frees its blocks.
    assert right.requests["scheduled_s"].tolist() == [0.0, 0.0, 2.0, 2.0]
    assert leaking.requests["scheduled_s"].tolist() == [0.0, 0.0, 2.0, 3.0]


def test_lightllm_waits_some_decodes_before_it_admits():
    rows = [(0.0, 8, 9), (0.5, 8, 1), (4.5, 8, 1)]
    result = play("lightllm", rows, block_size=1, max_waiting_iters=3)
    # Three decodes, a prefill, then three decodes again.
    assert result.requests["scheduled_s"].tolist() == [0.0, 4.0, 8.0]


def test_lightllm_looks_ahead():
    assert peak_tokens([(5, 3)]) == 8
    # The second is done after 1 step, when both hold 5 + 1 and 4 + 1; then only the first grows.
    assert peak_tokens([(5, 3), (4, 1)]) == max(5 + 3, 9 + 2 * 1)
    rows = [(0.0, 10, 5), (0.0, 10, 5)]
    together = play("lightllm", rows, block_size=1, num_blocks=29)
    apart = play("lightllm", rows, block_size=1, num_blocks=28)
    assert together.requests["scheduled_s"].tolist() == [0.0, 0.0]
    assert apart.requests["scheduled_s"].tolist() == [0.0, 5.0]


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm"])
def test_watermark_stays_free_at_admission(scheduler):
    rows = [(0.0, 16, 2), (0.0, 16 * 7, 1)]
    # 10 blocks: the second prompt needs 7 of the 9 left, and the watermark wants 3.
    settings = {"num_blocks": 10, "batch_cap": 4}
    assert play(scheduler, rows, watermark=0.2, **settings).requests["scheduled_s"][1] == 0.0
    assert play(scheduler, rows, watermark=0.3, **settings).requests["scheduled_s"][1] == 2.0


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm"])
def test_last_running_request_is_preempted_when_blocks_run_out(scheduler):
    # Two blocks each, none left: before the first decode the second request has to go.
    rows = [(0.0, 32, 3), (0.0, 32, 3)]
    result = play(scheduler, rows, num_blocks=4)
    assert result.requests["restarts"].tolist() == [0, 1]
    assert result.requests["first_token_s"].tolist() == [1.0, 1.0]
    assert result.requests["finished_s"].tolist() == [3.0, 5.0]
    # The victim prefills its prompt and the token it had: 33.
    assert batches_of(result) == [(0, 2, 64), (1, 0, 1), (1, 0, 1), (0, 1, 33), (1, 0, 1)]
    assert result.replicas["preemptions"].tolist() == [1]


def test_vllm_v1_admits_nobody_in_the_iteration_of_a_preemption():
    rows = [(0.0, 32, 3), (0.0, 80, 1)]
    result = play("vllm_v1", rows, num_blocks=7, chunk_size=64, batch_cap=2, prefix_caching=False)
    # At 1 s the first takes its third block, so two are left and the second, which needs three,
    # preempts itself. Its four blocks would do for another first chunk, but only at 2 s.
    assert batches_of(result)[:3] == [(0, 2, 64), (1, 0, 1), (1, 1, 64)]
    assert result.requests["restarts"].tolist() == [0, 1]


def test_vllm_v1_victim_keeps_its_place_in_the_queue():
    rows = [(0.0, 32, 3), (0.0, 32, 3), (0.5, 8, 1)]
    result = play("vllm_v1", rows, num_blocks=4, prefix_caching=False)
    # At 2 s a block is free, enough for the third request but not for the victim before it.
    assert result.requests["scheduled_s"].tolist() == [0.0, 0.0, 3.0]


PARTIAL = [(0.0, 16, 40), (0.0, 60, 2)]


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        # The first request decodes past its blocks while the second one is half read.
        ("sarathi", {"chunk_size": 2, "batch_cap": 2, "num_blocks": 6}),
        ("vllm_v1", {"chunk_size": 4, "batch_cap": 2, "num_blocks": 4, "prefix_caching": False}),
    ],
)
def test_half_read_victim_keeps_its_prompt_except_in_compat(scheduler, settings):
    right = play(scheduler, PARTIAL, **settings)
    vidur = play(scheduler, PARTIAL, compat=True, **settings)
    assert right.replicas["partial_preemptions"][0] > 0
    assert vidur.replicas["partial_preemptions"][0] > 0
    assert right.requests["first_token_s"][1] > vidur.requests["first_token_s"][1]
    # What Vidur forgets to prefill it decodes: the request has 61 tokens to process either way,
    # but far more iterations with a context.
    assert vidur.replicas["context"][0] > right.replicas["context"][0]


@pytest.mark.parametrize(("scheduler", "again"), [("sarathi", 1.0), ("vllm", 7.0)])
def test_request_that_must_preempt_itself_is_refused_except_in_compat(scheduler, again):
    # One block, held by the prompt: the lone request preempts itself before its decode. Vidur's
    # sarathi admits it again at once, its vllm looks again only when somebody else arrives.
    rows = [(0.0, 15, 2), (7.0, 8, 1)]
    vidur = play(scheduler, rows, compat=True, num_blocks=1)
    assert vidur.requests["restarts"].tolist() == [1, 0]
    assert vidur.batches["start_s"][1] == again
    with pytest.raises(TailraceError, match="request 0 may need 2 KV blocks"):
        play(scheduler, rows, num_blocks=1)


def test_request_that_can_never_be_admitted_stays_pending_in_compat():
    result = play("vllm", [(0.0, 40, 2), (1.0, 8, 1)], compat=True, num_blocks=2)
    assert result.requests["status"].tolist() == [PENDING, PENDING]
    assert np.isnan(result.requests["scheduled_s"]).all()


@pytest.mark.parametrize(("compat", "again"), [(False, 1.5), (True, 2.0)])
def test_server_with_room_for_its_victim_tries_again_at_once(compat, again):
    # Two stages of half a second. At 1.5 s the second request finds no free block, because the
    # first holds two of three and is under way, and gives up its own.
    rows = [(0.0, 16, 10), (0.1, 14, 3)]
    result = play("vllm", rows, compat=compat, num_blocks=3, num_stages=2, batch_cap=4)
    starts = [float(b["start_s"]) for b in result.batches if b["prefills"] and b["stage"] == 0]
    assert starts[:3] == [0.0, 0.5, again]


def test_pipeline_overlaps_batches():
    # Two stages of half a second each. The second request enters stage 0 when the first leaves it.
    rows = [(0.0, 8, 2), (0.1, 8, 2)]
    result = play("sarathi", rows, num_stages=2, batch_cap=2)
    assert result.requests["scheduled_s"].tolist() == [0.0, 0.1]
    assert result.requests["first_token_s"].tolist() == [1.0, 1.5]
    assert result.requests["finished_s"].tolist() == [2.0, 2.5]
    stages = [(int(b["stage"]), float(b["start_s"])) for b in result.batches]
    assert stages[:4] == [(0, 0.0), (0, 0.5), (1, 0.5), (0, 1.0)]
    assert result.replicas["iterations"][0] == 4
    assert result.replicas["busy_s"][0] == pytest.approx(2.0)


def test_pipeline_batches_are_capped_to_a_share_of_the_cap():
    rows = [(0.0, 8, 1)] * 4
    result = play("vllm", rows, num_stages=2, batch_cap=4)
    assert [b[1] for b in batches_of(result)] == [2, 2, 2, 2]  # two batches through two stages


def test_prefix_cache_skips_what_an_earlier_request_left():
    rows = [
        (0.0, 40, 2, [(7, 40)]),
        (5.0, 40, 1, [(7, 40)]),
        (8.0, 48, 1, [(7, 32), (8, 16)]),
    ]
    result = play("vllm_v1", rows)
    # Two full blocks of the first; then the same two, and the third block differs.
    assert result.requests["cached_tokens"].tolist() == [0, 32, 32]
    assert [b[2] for b in batches_of(result)] == [40, 1, 8, 16]
    assert result.batches["prefill_work"][2] == 8 * (32 + 4.0)


def test_fully_cached_prompt_computes_its_last_block_again():
    rows = [(0.0, 32, 1, [(7, 32)]), (5.0, 32, 1, [(7, 32)])]
    result = play("vllm_v1", rows)
    assert result.requests["cached_tokens"].tolist() == [0, 16]
    assert [b[2] for b in batches_of(result)] == [32, 16]


def test_answer_continues_the_last_run():
    # 20 + 12 tokens fill two blocks of the conversation; the next turn finds both.
    rows = [(0.0, 20, 12, [(7, 20)]), (50.0, 40, 1, [(7, 40)])]
    assert play("vllm_v1", rows).requests["cached_tokens"].tolist() == [0, 32]


def test_content_behind_different_prefixes_is_different():
    rows = [
        (0.0, 32, 1, [(1, 16), (9, 16)]),
        (5.0, 32, 1, [(2, 16), (9, 16)]),
        (10.0, 40, 1, [(1, 16), (9, 24)]),
    ]
    assert play("vllm_v1", rows).requests["cached_tokens"].tolist() == [0, 0, 32]


def test_cache_forgets_the_least_recently_freed_first():
    conversation = [(7, 32)]
    other = [(8, 48)]
    rows = [
        (0.0, 33, 1, [(7, 33)]),
        (5.0, 16, 1, [(9, 16)]),
        (10.0, 49, 1, [*other, (10, 1)]),
        (15.0, 33, 1, [*conversation, (11, 1)]),
    ]
    # With 5 blocks the third request takes the oldest: the never used one, then the first
    # request's tail and so on, up to its head.
    assert play("vllm_v1", rows, num_blocks=8).requests["cached_tokens"][3] == 32
    assert play("vllm_v1", rows, num_blocks=5).requests["cached_tokens"][3] == 0


def test_caching_can_be_turned_off():
    rows = [(0.0, 40, 1, [(7, 40)]), (5.0, 40, 1, [(7, 40)])]
    result = play("vllm_v1", rows, prefix_caching=False)
    assert result.requests["cached_tokens"].tolist() == [0, 0]


def test_speed_and_stages_divide_the_time():
    cluster = Cluster(
        replicas=(
            replica_of("sarathi", speed=4.0),
            replica_of("sarathi", speed=0.5, num_stages=2),
        )
    )
    result = ReferenceEngine(cluster, table_of([(0.0, 8, 1), (0.0, 8, 1)])).run(replicas=[0, 1])
    assert result.requests["finished_s"].tolist() == [0.25, 2.0]


@pytest.mark.parametrize(
    ("scheduler", "settings", "message"),
    [
        ("lightllm", {"block_size": 16}, "set block_size = 1"),
        ("vllm_v1", {"num_stages": 2}, "one pipeline stage"),
        ("sarathi", {"num_stages": 4, "batch_cap": 2}, "batch_cap = 2 is less"),
        ("orca", {"max_request_tokens": 8}, "max_request_tokens = 8 is less"),
        ("orca", {"max_request_tokens": 40}, "request 1 may need 50 tokens"),
        ("orca", {"num_blocks": 2, "max_request_tokens": 64}, "request 0 may need 4 KV blocks"),
        ("vllm", {"max_batch_tokens": 48}, "request 1 may need 49 tokens in one batch"),
        ("vllm_v1", {"num_blocks": 3}, "request 1 may need 4 KV blocks"),
        ("sarathi", {"num_blocks": 4}, "request 1 may need 5 KV blocks"),
        ("lightllm", {"block_size": 1, "num_blocks": 49}, "request 1 may need 50 KV blocks"),
    ],
)
def test_what_can_never_run_is_refused_up_front(scheduler, settings, message):
    with pytest.raises(TailraceError, match=message):
        play(scheduler, [(0.0, 10, 3), (0.0, 20, 30)], **settings)


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        ("vllm_v1", {"num_blocks": 4}),
        ("sarathi", {"num_blocks": 5}),
        ("vllm", {"num_blocks": 5, "max_batch_tokens": 49}),
        ("lightllm", {"block_size": 1, "num_blocks": 50}),
        ("orca", {"num_blocks": 4, "max_request_tokens": 64}),
    ],
)
def test_what_just_fits_runs(scheduler, settings):
    result = play(scheduler, [(0.0, 10, 3), (0.0, 20, 30)], **settings)
    assert (result.requests["status"] == FINISHED).all()


def test_recorded_replicas_must_fit():
    engine = ReferenceEngine(
        Cluster(replicas=(replica_of("sarathi"),)), table_of([(0.0, 8, 1)]), engine=Engine()
    )
    with pytest.raises(TailraceError, match="2 recorded replicas were given for 1 requests"):
        engine.run(replicas=[0, 0])
    with pytest.raises(TailraceError, match="recorded on replica 1"):
        engine.run(replicas=[1])
    with pytest.raises(TailraceError, match="needs a policy"):
        engine.run()


def test_dispatcher_must_name_a_replica():
    class Nowhere(Dispatcher):
        def route(self, now, requests):
            return [-1] * len(requests)

    engine = ReferenceEngine(Cluster(replicas=(replica_of("sarathi"),)), table_of([(0.0, 8, 1)]))
    with pytest.raises(TailraceError, match="request 0 was sent to replica -1"):
        engine.run(dispatcher=Nowhere())


def test_batches_are_recorded_only_on_request():
    engine = ReferenceEngine(Cluster(replicas=(replica_of("sarathi"),)), table_of([(0.0, 8, 1)]))
    assert engine.run(replicas=np.zeros(1, int)).batches is None
