"""Known answers: each rule on views small enough to work out by hand."""

import math

import numpy as np
import pytest

from policy.views import make_view, pick, scores_of
from tailrace.view.records import NEVER, RECENT_WORK_S


def shares(name: str, view, draws: int = 3000) -> np.ndarray:
    """How often each replica is chosen from the same view."""
    counts = np.zeros(len(view.replicas))
    for _ in range(draws):
        counts[pick(name, view)] += 1
    return counts / draws


# ---- counting


def test_random_is_uniform_over_the_available() -> None:
    view = make_view(4, available=[1, 0, 1, 1], in_flight=[9, 0, 0, 3], router={"rng": 5})
    assert shares("random", view) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=0.04)


def test_round_robin_takes_turns() -> None:
    view = make_view(3)
    assert [pick("round_robin", view) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_skips_the_unavailable_without_favouring_the_next() -> None:
    view = make_view(4, available=[1, 0, 0, 1])
    assert [pick("round_robin", view) for _ in range(5)] == [0, 3, 0, 3, 0]
    view.replicas["available"] = 1
    assert [pick("round_robin", view) for _ in range(4)] == [1, 2, 3, 0]


def test_round_robin_waits_when_nobody_is_available() -> None:
    view = make_view(3, available=0, router={"cursor": 2})
    assert pick("round_robin", view) == -1
    assert view.router["cursor"] == 2


def test_vidur_lor_counts_waiting_only_and_prefers_the_lowest_number() -> None:
    view = make_view(3, metrics_at=1.0, waiting=[2, 1, 1], running=[0, 50, 0], in_flight=[2, 51, 1])
    assert [pick("vidur_lor", view) for _ in range(5)] == [1] * 5
    view.replicas["sent_requests"] = [0, 1, 0]
    assert pick("vidur_lor", view) == 2


def test_least_outstanding() -> None:
    assert pick("least_outstanding", make_view(3, in_flight=[4, 2, 3], queued=[0, 2, 0])) == 1


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    view = make_view(3, in_flight=[5, 1, 3])
    # Pairs (0,1), (0,2), (1,2) are equally likely: 1 wins two of them, 2 one, 0 none.
    assert shares("power_of_two", view) == pytest.approx([0, 2 / 3, 1 / 3], abs=0.04)


def test_power_of_two_draws_among_the_available() -> None:
    view = make_view(5, in_flight=[0, 5, 5, 5, 0], available=[0, 1, 1, 1, 0])
    assert shares("power_of_two", view) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0], abs=0.04)
    view = make_view(4, in_flight=[0, 7, 0, 3], available=[0, 1, 0, 1])
    assert {pick("power_of_two", view) for _ in range(50)} == {3}
    view = make_view(4, available=[0, 0, 1, 0])
    assert {pick("power_of_two", view) for _ in range(20)} == {2}


def test_vllm_dp_weighs_waiting_four_times_and_counts_on_between_snapshots() -> None:
    view = make_view(
        3, metrics_at=1.0, waiting=[1, 0, 2], running=[0, 5, 0], sent_requests=[1, 0, 0]
    )
    assert scores_of("vllm_dp", view).tolist() == [8, 5, 8]
    assert scores_of("vllm_dp", view, waiting_weight=1.0).tolist() == [2, 5, 2]


def test_vllm_dp_falls_back_to_the_ledger() -> None:
    view = make_view(
        2, metrics_at=[NEVER, 1.0], waiting=0, running=0, in_flight=5, queued=2, sent_requests=2
    )
    assert scores_of("vllm_dp", view).tolist() == [4 * 2 + 3, 4 * 2]


def test_least_pending_prefill_counts_prompt_tokens() -> None:
    view = make_view(3, queued_tokens=[900, 300, 600], queued_uncached=[0, 300, 0])
    assert pick("least_pending_prefill", view) == 1


def test_least_pending_uncached_includes_the_own_prompt() -> None:
    view = make_view(3, queued_uncached=[500, 0, 100], cached_tokens=[960, 0, 480])
    assert scores_of("least_pending_uncached", view).tolist() == [540, 1000, 620]


# ---- sticky


def test_sticky_session_stays_at_any_load_and_falls_back_when_its_replica_is_gone() -> None:
    request = {"session": 3, "last_replica": 0}
    busy = make_view(3, request, in_flight=[99, 0, 5])
    assert {pick("sticky_session", busy) for _ in range(20)} == {0}
    gone = make_view(3, request, in_flight=[0, 7, 5], available=[0, 1, 1])
    assert pick("sticky_session", gone) == 2
    assert pick("sticky_session", make_view(3, in_flight=[9, 1, 5])) == 1


@pytest.mark.parametrize(("pending", "chosen"), [(1960, 0), (1961, 1)])
def test_tolerant_sticky_yields_beyond_twice_the_least_work(pending: int, chosen: int) -> None:
    request = {"session": 3, "last_replica": 0}
    view = make_view(
        3, request, queued_uncached=[pending, 0, 500], cached_tokens=[960, 0, 0]
    )  # least: 1000; own share of replica 0: 40
    assert pick("tolerant_sticky", view) == chosen


# ---- prefix-aware


def test_cache_aware_follows_the_longest_match() -> None:
    view = make_view(3, in_flight=[60, 0, 0], cached_tokens=[480, 320, 0], index_tokens=[9, 9, 0])
    assert pick("cache_aware", view) == 0


def test_cache_aware_without_a_good_match_takes_the_smallest_tree() -> None:
    view = make_view(
        3, cached_tokens=[0, 288, 0], index_tokens=[5000, 9000, 700], in_flight=[0, 0, 9]
    )
    assert pick("cache_aware", view) == 2
    assert pick("cache_aware", view, match_rate=0.2) == 1
    assert pick("cache_aware", view, match_rate=0.288) == 2  # it must be exceeded


def test_sglang_cache_aware_without_a_good_match_takes_the_fewest_in_flight() -> None:
    view = make_view(
        3, cached_tokens=[0, 288, 0], index_tokens=[5000, 9000, 700], in_flight=[3, 4, 9]
    )
    assert pick("sglang_cache_aware", view) == 0
    assert pick("sglang_cache_aware", view, match_rate=0.2) == 1
    assert pick("sglang_cache_aware", view, match_rate=0.288) == 0  # it must be exceeded
    view.replicas["in_flight"] = [9, 4, 4]
    assert {pick("sglang_cache_aware", view) for _ in range(20)} == {1}  # lowest number


@pytest.mark.parametrize("rule", ["cache_aware", "sglang_cache_aware"])
@pytest.mark.parametrize(
    ("in_flight", "chosen"),
    [
        ([65, 1, 2], 0),  # 64 apart is not yet unbalanced
        ([66, 1, 2], 1),
        ([195, 130, 195], 0),  # 65 apart, but only 1.5 times as much
        ([196, 130, 195], 1),
    ],
)
def test_cache_aware_balances_when_both_thresholds_are_passed(rule, in_flight, chosen) -> None:
    view = make_view(3, in_flight=in_flight, cached_tokens=[800, 0, 0])
    assert pick(rule, view) == chosen


def test_cache_aware_ignores_the_load_of_a_dead_replica() -> None:
    view = make_view(3, in_flight=[500, 1, 2], available=[0, 1, 1], cached_tokens=[0, 0, 800])
    assert pick("cache_aware", view) == 2


def test_aibrix_prefers_the_longest_match_that_is_not_overloaded() -> None:
    # mean 4, deviation sqrt(10.67) = 3.27: up to 7.27 in flight counts.
    view = make_view(3, in_flight=[8, 4, 0], cached_tokens=[960, 480, 160])
    assert pick("aibrix_prefix", view) == 1
    assert pick("aibrix_prefix", view, deviations=2.0) == 0


def test_aibrix_balance_is_a_matter_of_differences() -> None:
    view = make_view(3, in_flight=[28, 20, 24], cached_tokens=[0, 0, 480])
    assert pick("aibrix_prefix", view) == 2
    view = make_view(3, in_flight=4, cached_tokens=[0, 0, 480])
    assert {pick("aibrix_prefix", view) for _ in range(20)} == {2}


def test_aibrix_equal_matches_go_to_the_less_busy() -> None:
    view = make_view(3, in_flight=[3, 2, 8], cached_tokens=[480, 480, 0])
    assert pick("aibrix_prefix", view) == 1


def test_aibrix_without_match_or_balance_takes_the_fewest_in_flight() -> None:
    assert pick("aibrix_prefix", make_view(3, in_flight=[5, 3, 4])) == 1
    view = make_view(3, in_flight=[9, 9, 0], cached_tokens=[960, 0, 0])
    assert pick("aibrix_prefix", view) == 2
    assert pick("aibrix_prefix", view, load_gap=9.0, deviations=1.0) == 0


def test_aibrix_unbalanced_takes_the_longest_match_of_the_least_loaded() -> None:
    view = make_view(4, in_flight=[10, 1, 0, 0], cached_tokens=[0, 960, 0, 480])
    assert pick("aibrix_prefix", view) == 3
    view = make_view(4, in_flight=[10, 1, 0, 0], cached_tokens=[0, 960, 0, 0])
    assert {pick("aibrix_prefix", view) for _ in range(40)} == {2, 3}


def test_aibrix_compares_matches_in_whole_per_cent() -> None:
    view = make_view(2, {"prompt_tokens": 10_000}, in_flight=[3, 2], cached_tokens=[592, 528])
    assert pick("aibrix_prefix", view) == 1  # 5 per cent each
    view.replicas["cached_tokens"] = [608, 528]
    assert pick("aibrix_prefix", view) == 0


def test_preble_exploits_a_prefix_of_more_than_half_the_prompt() -> None:
    view = make_view(
        3, {"now": 10.0}, cached_tokens=[512, 512, 480], recent_work=[900, 800, 0], recent_at=10.0
    )
    assert pick("preble", view) == 1
    assert np.isinf(scores_of("preble", view)[2])
    view.replicas["cached_tokens"] = [0, 500, 480]  # half is not more than half
    assert np.isfinite(scores_of("preble", view)).all()
    assert pick("preble", view) == 2


def test_preble_explores_by_recent_work_eviction_and_missed_tokens() -> None:
    view = make_view(
        3,
        {"now": 10.0 + RECENT_WORK_S},
        cached_tokens=[480, 0, 0],
        recent_work=[0.0, math.e * 100, 0.0],
        recent_at=10.0,
        index_tokens=[15_900, 0, 16_000],
        prefill_tokens_per_s=[1000.0, 1000.0, 2000.0],
    )
    # missed 520, 1000, 1000; evicted 420, 0, 1000; recent work has faded by e.
    assert scores_of("preble", view) == pytest.approx([0.940, 1.100, 1.000])
    assert scores_of("preble", view, eviction_weight=0.0) == pytest.approx([0.52, 1.1, 0.5])


def test_llm_d_sticky_keeps_to_the_prefix_until_it_is_18_s_slower() -> None:
    # 18 s are 286 704 tokens at 15 928/s, whatever the replicas' own speed.
    request = {"prompt_tokens": 10_000}
    view = make_view(
        3, request, cached_tokens=[9_920, 0, 7_000], queued_uncached=[286_704, 0, 286_900]
    )
    assert pick("llm_d_sticky", view) == 0
    view.replicas["queued_uncached"] = [286_705, 0, 286_900]
    assert pick("llm_d_sticky", view) == 1
    assert pick("llm_d_sticky", view, max_penalty_s=20.0) == 0


def test_llm_d_sticky_takes_the_fewest_tokens_among_the_sticky_or_among_all() -> None:
    view = make_view(3, cached_tokens=[960, 800, 0], queued_uncached=[500, 300, 0])
    assert pick("llm_d_sticky", view) == 1
    view = make_view(3, cached_tokens=[480, 0, 0], queued_uncached=[500, 30, 0])
    assert pick("llm_d_sticky", view) == 2


def test_llm_d_sticky_counts_the_blocks_of_64_tokens_that_can_be_cached() -> None:
    # The last token is always computed: of 321 tokens 5 blocks can be cached, of 320 only 4.
    view = make_view(2, {"prompt_tokens": 321}, cached_tokens=[256, 0], queued_uncached=[999, 0])
    assert pick("llm_d_sticky", view) == 0  # exactly 0.8
    view.replicas["cached_tokens"] = [240, 0]
    assert pick("llm_d_sticky", view) == 1
    view.request["prompt_tokens"] = 128
    view.replicas["cached_tokens"] = [64, 0]
    assert pick("llm_d_sticky", view, match_rate=1.0) == 0


# ---- hashing


def test_prefix_hash_is_stable_and_spreads_prefixes_evenly() -> None:
    view = make_view(4)
    counts = np.zeros(4)
    for prefix in range(4000):
        view.request["prefix_hash"] = prefix
        chosen = pick("prefix_hash", view)
        counts[chosen] += 1
        assert pick("prefix_hash", view) == chosen
    assert counts / 4000 == pytest.approx([0.25] * 4, abs=0.03)


def test_prefix_hash_moves_only_the_prefixes_of_a_lost_replica() -> None:
    view = make_view(4)
    moved = 0
    for prefix in range(500):
        view.request["prefix_hash"] = prefix
        view.replicas["available"] = 1
        before = pick("prefix_hash", view)
        view.replicas["available"] = [1, 1, 0, 1]
        after = pick("prefix_hash", view)
        assert after == before or before == 2
        moved += after != before
    assert moved == pytest.approx(125, abs=40)


def test_prefix_hash_bounds_the_load() -> None:
    view = make_view(4, request={"prefix_hash": 77})
    owner = pick("prefix_hash", view)
    view.replicas["in_flight"] = 10
    idle = (owner + 1) % 4
    view.replicas["in_flight"][idle] = 9
    # mean with this request: (39 + 1)/4 = 10, bound 12.5 at 1.25 and 10 at 1.0
    assert pick("prefix_hash", view) == owner
    assert pick("prefix_hash", view, load_factor=1.0) == owner
    assert pick("prefix_hash", view, load_factor=0.99) == idle


def test_rendezvous_hash_follows_the_session_at_any_load() -> None:
    view = make_view(4, request={"session": 7, "prefix_hash": 1})
    owner = pick("rendezvous_hash", view)
    view.replicas["in_flight"][owner] = 500
    view.request["prefix_hash"] = 2
    assert pick("rendezvous_hash", view) == owner
    owners = []
    for session in range(400):
        view.request["session"] = session
        owners.append(pick("rendezvous_hash", view))
    assert np.bincount(owners) / 400 == pytest.approx([0.25] * 4, abs=0.08)


def test_rendezvous_hash_without_a_session_follows_the_whole_prompt() -> None:
    view = make_view(4, request={"prefix_hash": 1})
    owners = {}
    for content in range(40):
        view.request["content_hash"] = content
        owners[content] = pick("rendezvous_hash", view)
        assert pick("rendezvous_hash", view) == owners[content]
    assert set(owners.values()) == {0, 1, 2, 3}
    view.replicas["available"] = [1, 1, 0, 1]
    for content, before in owners.items():
        view.request["content_hash"] = content
        assert pick("rendezvous_hash", view) == before or before == 2


def dual_candidates(view) -> list[int]:
    return np.flatnonzero(np.isfinite(scores_of("dual_map", view))).tolist()


def test_dual_map_has_two_candidates_and_prefers_the_cached_one_in_time() -> None:
    view = make_view(5, request={"prefix_hash": 4711})
    first, second = dual_candidates(view)
    view.replicas["cached_tokens"][second] = 480
    view.replicas["queued_uncached"][second] = 3000
    assert pick("dual_map", view) == second  # slower, but within 1 s
    view.request["ttft_slo_s"] = 0.2
    assert pick("dual_map", view) == first
    view.request["ttft_slo_s"] = 0.1
    assert pick("dual_map", view, slo_share=10.0) == second


def test_dual_map_always_has_two_candidates_and_uses_all_replicas() -> None:
    view = make_view(3)
    pairs = set()
    for prefix in range(60):
        view.request["prefix_hash"] = prefix
        pairs.add(tuple(dual_candidates(view)))
    assert pairs == {(0, 1), (0, 2), (1, 2)}


def test_dual_map_sends_a_new_prefix_to_the_faster_candidate() -> None:
    view = make_view(5, request={"prefix_hash": 4711})
    first, second = dual_candidates(view)
    view.replicas["queued_uncached"][first] = 10
    assert pick("dual_map", view) == second


def test_dual_map_with_one_or_no_replica() -> None:
    assert pick("dual_map", make_view(3, available=[0, 1, 0])) == 1
    assert pick("dual_map", make_view(3, available=0)) == -1


# ---- scored


def test_lmetric_multiplies_work_and_requests() -> None:
    view = make_view(3, queued_uncached=[0, 100, 0], cached_tokens=[0, 800, 0], in_flight=[1, 9, 2])
    assert scores_of("lmetric", view).tolist() == [2000, 3000, 3000]


def test_dynamo_adds_blocks_to_prefill_and_prompt_blocks_in_use() -> None:
    view = make_view(
        3,
        {"prompt_tokens": 1600},
        queued_uncached=[160, 0, 8],
        active_blocks=[20, 100, 50],
        new_blocks=[100, 0, 60],
        cached_tokens=[1280, 0, 0],
    )
    # (160 + 1600 - 1280)/16 + 20 + 100 and so on; a block in flight is not counted again
    assert scores_of("dynamo", view).tolist() == [30 + 120, 100 + 100, 100.5 + 110]
    assert scores_of("dynamo", view, overlap_weight=0.0).tolist() == [120, 100, 110]


def test_dynamo_does_not_count_output_blocks_and_draws_lots_for_ties() -> None:
    # A worker with a long answer is preferred to one with a long prompt.
    view = make_view(2, active_blocks=[10, 300], context_tokens=[9600, 4800])
    assert pick("dynamo", view) == 0
    view = make_view(3, index_tokens=[100, 40, 300], context_tokens=[0, 50, 0])
    assert shares("dynamo", view) == pytest.approx([1 / 3] * 3, abs=0.04)


def test_llm_d_weighs_queue_memory_and_prefix() -> None:
    view = make_view(
        3, metrics_at=1.0, waiting=[7, 3, 4], kv_used=[0.0, 0.5, 1.0], cached_tokens=[500, 0, 250]
    )
    # 1000 tokens have 15 blocks of 64 that can be cached; 500 are 7 of them, 250 are 3.
    expected = [2 * 0 + 2 * 1 + 3 * 7 / 15, 2 * 1 + 2 * 0.5, 2 * 0.75 + 3 * 3 / 15]
    assert scores_of("llm_d", view) == pytest.approx([-value for value in expected])


def test_llm_d_indexes_the_first_131072_tokens() -> None:
    view = make_view(2, {"prompt_tokens": 200_000}, metrics_at=1.0, cached_tokens=[150_000, 65_536])
    assert scores_of("llm_d", view) == pytest.approx([-2 - 2 - 3, -2 - 2 - 3 * 1024 / 2047])


def test_llm_d_equal_queues_all_get_the_full_mark() -> None:
    view = make_view(2, metrics_at=1.0, waiting=[3, 3], kv_used=[0.25, 0.5])
    assert scores_of("llm_d", view) == pytest.approx([-3.5, -3.0])


def test_llm_d_without_metrics_reads_the_ledger() -> None:
    view = make_view(
        2, queued=[2, 0], queued_tokens=[4000, 0], context_tokens=[0, 8000], waiting=0, kv_used=0.0
    )
    assert scores_of("llm_d", view) == pytest.approx([-1.5, -3.0])


def test_load_aware_docks_the_excess_over_the_mean() -> None:
    view = make_view(
        4, in_flight=[8, 4, 0, 100], available=[1, 1, 1, 0], cached_tokens=[500, 0, 0, 0]
    )
    assert scores_of("load_aware", view)[:3] == pytest.approx([1.0 - 0.5, 0.0, -1.0])
    assert scores_of("load_aware", view, load_weight=0.25)[:3] == pytest.approx([-0.25, 0.0, -0.25])


def test_load_aware_with_less_than_one_request_each() -> None:
    view = make_view(2, in_flight=[1, 0])
    assert scores_of("load_aware", view) == pytest.approx([0.5, -0.5])


def test_least_load_adds_drain_time_and_memory_pressure() -> None:
    view = make_view(
        3,
        metrics_at=1.0,
        queued_uncached=[5000, 0, 0],
        kv_used=[0.5, 0.9, 1.0],
        prefill_tokens_per_s=[10_000.0, 10_000.0, 5_000.0],
    )
    expected = [0.5 + 0.15, 0.15 * 9, 0.15 * 999]
    assert scores_of("least_load", view) == pytest.approx(expected)


def test_llumnix_prefers_idle_replicas_then_free_blocks_per_request() -> None:
    view = make_view(
        3, metrics_at=1.0, kv_used=[0.5, 0.2, 0.9], queued_tokens=[0, 1600, 0], in_flight=[2, 4, 0]
    )
    # 500/2 and (800 - 100)/4 free blocks per request
    assert scores_of("llumnix", view) == pytest.approx([-250, -175, -np.inf])
    assert pick("llumnix", view) == 2


def test_llumnix_without_metrics_reads_the_ledger() -> None:
    view = make_view(1, context_tokens=8000, queued_tokens=1600, in_flight=5, kv_used=0.0)
    # 8000 of 16000 tokens are held and 1600 will be: 6400/16/5
    assert scores_of("llumnix", view) == pytest.approx([-80])
