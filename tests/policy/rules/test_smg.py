"""Known answers of SMG's rules, worked out by hand from the published rules."""

import numpy as np
import pytest

from policy.views import make_view, pick, scores_of
from tailrace.view.records import NEVER

EACH = ("smg_expected_wait", "smg_power_of_two", "smg_prefix_hash", "smg_cache_aware")


def reported(n: int = 3, **fields):  # type: ignore[no-untyped-def]
    """A view in which every replica has reported its load."""
    return make_view(n, **{"metrics_at": 1.0, **fields})


def test_expected_wait_counts_1024_tokens_per_request() -> None:
    view = reported(
        waiting=[2, 0, 0],
        running=[3, 4, 0],
        in_flight=[6, 6, 1],
        sent_requests=[1, 0, 1],
        sent_tokens=[9000, 0, 10],
        kv_used=[0.5, 0.0, 0.75],
    )
    # Replica 1 has two requests that neither the report nor the list of those sent since shows.
    expected = [6 * 0.512 + 0.15, 6 * 0.512, 0.512 + 0.15 * 3]
    assert scores_of("smg_expected_wait", view) == pytest.approx(expected)


def test_expected_wait_leaves_out_the_own_request_and_the_cache() -> None:
    view = reported(2, running=1, in_flight=1, cached_tokens=[0, 960])
    assert scores_of("smg_expected_wait", view) == pytest.approx([0.512, 0.512])


def test_requests_that_were_sent_and_have_ended_count_until_the_next_report() -> None:
    view = reported(2, running=[0, 1], in_flight=[0, 1], sent_requests=[2, 0])
    assert scores_of("smg_expected_wait", view) == pytest.approx([1.024, 0.512])


def test_waits_a_microsecond_apart_are_a_tie() -> None:
    view = reported(2, kv_used=[0.0, 5e-6])  # 0.75 microseconds
    assert {pick("smg_expected_wait", view) for _ in range(40)} == {0, 1}
    view = reported(2, kv_used=[0.0, 9e-6])
    assert {pick("smg_expected_wait", view) for _ in range(40)} == {0}


def test_kv_use_is_clamped() -> None:
    view = reported(2, kv_used=[1.0, -0.5])
    assert scores_of("smg_expected_wait", view, veto_kv=2.0) == pytest.approx([0.15 * 999, 0.0])


def test_a_replica_without_a_report_ranks_behind_the_best_reported_one() -> None:
    view = reported(
        metrics_at=[NEVER, 1.0, 1.0], running=[0, 2, 1], in_flight=[3, 2, 1], waiting=[99, 0, 0]
    )
    assert scores_of("smg_expected_wait", view) == pytest.approx([0.512 + 3 * 0.512, 1.024, 0.512])


def test_without_any_report_the_fewest_in_flight_win() -> None:
    view = make_view(3, in_flight=[4, 2, 3], sent_requests=[0, 9, 0])
    assert pick("smg_expected_wait", view) == 1
    assert pick("smg_cache_aware", view) == 1


@pytest.mark.parametrize("rule", EACH)
@pytest.mark.parametrize("signs", [{"waiting": [8, 0, 0]}, {"kv_used": [0.8, 0.1, 0.1]}])
def test_the_veto_comes_before_every_rule(rule: str, signs: dict[str, list[float]]) -> None:
    view = reported(running=[0, 20, 20], in_flight=[0, 20, 20], cached_tokens=[960, 0, 0], **signs)
    seen, without = set(), set()
    for prefix in range(40):
        view.request["prefix_hash"] = prefix
        seen.add(pick(rule, view))
        without.add(pick(rule, view, veto_waiting=9.0, veto_kv=0.9))
    assert seen == {1, 2}
    assert 0 in without


@pytest.mark.parametrize("rule", EACH)
def test_if_all_are_vetoed_the_fewest_in_flight_win(rule: str) -> None:
    view = reported(waiting=8, in_flight=[9, 8, 8], cached_tokens=[960, 0, 0])
    assert {pick(rule, view) for _ in range(40)} == {1, 2}


def test_a_replica_without_a_report_is_not_vetoed() -> None:
    view = make_view(2, metrics_at=[NEVER, 1.0], waiting=9, in_flight=[50, 1])
    assert pick("smg_expected_wait", view) == 0


def test_power_of_two_compares_expected_waits() -> None:
    view = reported(running=[1, 0, 2], in_flight=[0, 5, 0])
    # Waits of 1, 5 and 2 requests: the busiest of three wins no pair.
    chosen = [pick("smg_power_of_two", view) for _ in range(600)]
    assert np.bincount(chosen, minlength=3) / 600 == pytest.approx([2 / 3, 0, 1 / 3], abs=0.08)


def test_prefix_hash_keeps_its_owner_within_the_bound() -> None:
    view = make_view(4, request={"prefix_hash": 77})
    owner = pick("smg_prefix_hash", view)
    idle = (owner + 1) % 4
    view.replicas["in_flight"] = 0
    # total 13: a = 14/4 = 3.5 and a + 10 = 13.5; total 14: a = 3.75, bound 13.75
    view.replicas["in_flight"][owner] = 13
    assert pick("smg_prefix_hash", view) == owner
    view.replicas["in_flight"][owner] = 14
    assert pick("smg_prefix_hash", view) != owner
    # total 436: a = 109.25, 1.25 a = 136.6; total 440: 137.8
    view.replicas["in_flight"] = 100
    view.replicas["in_flight"][owner] = 136
    assert pick("smg_prefix_hash", view) == owner
    view.replicas["in_flight"][owner] = 141
    view.replicas["in_flight"][idle] = 99
    assert pick("smg_prefix_hash", view) == idle


def test_cache_aware_takes_the_holder_of_least_expected_wait() -> None:
    view = reported(4, running=[4, 2, 0, 3], in_flight=[4, 2, 0, 3], cached_tokens=[640, 640, 0, 0])
    assert pick("smg_cache_aware", view) == 1
    view.replicas["cached_tokens"] = [656, 640, 0, 0]  # holders of the longest match only
    assert pick("smg_cache_aware", view) == 0
    view.replicas["cached_tokens"] = [300, 0, 0, 0]  # 0.3 must be exceeded
    assert pick("smg_cache_aware", view) == 2
    assert pick("smg_cache_aware", view, match_rate=0.29) == 0


@pytest.mark.parametrize(
    ("in_flight", "hot"),
    [
        ([6, 1, 0, 1], False),  # mean 2: 6 is not above 2 + max(4, 3)
        ([7, 1, 0, 0], True),
        ([24, 13, 13, 14], False),  # mean 16: 24 is 1.5 times as much, not more
        ([29, 12, 12, 12], True),  # mean 16.25, bounds 24.4 and 25.25
        ([25, 12, 12, 12], True),  # mean 15.25, bounds 22.9 and 23.25
        ([22, 12, 12, 12], False),  # mean 14.5, bounds 21.75 and 22.5
    ],
)
def test_cache_aware_leaves_a_hot_holder(in_flight: list[int], hot: bool) -> None:
    view = reported(4, in_flight=in_flight, running=in_flight, cached_tokens=[960, 0, 0, 0])
    assert (pick("smg_cache_aware", view) != 0) == hot


def test_cache_aware_spreads_a_hot_prefix_over_what_is_not_hot() -> None:
    view = reported(
        5,
        in_flight=[40, 0, 2, 1, 40],
        running=[40, 3, 2, 1, 40],
        cached_tokens=[960, 0, 0, 0, 0],
    )
    assert pick("smg_cache_aware", view) == 3  # least expected wait; 0 and 4 are hot
    gap = scores_of("smg_cache_aware", view, load_gap=1.0, load_ratio=1.0)
    assert np.isinf(gap[[0, 4]]).all()
    assert np.isfinite(gap[[1, 2, 3]]).all()


def test_cache_aware_without_a_match_considers_hot_replicas_too() -> None:
    view = reported(3, in_flight=[40, 0, 0], running=[40, 50, 50])
    assert pick("smg_cache_aware", view) == 0
