import dataclasses
import json

import numpy as np
import pytest

from results import make_result
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import Latency, composite_cost_s, slo_met, summarise
from tailrace.files import dumps
from tailrace.sim.result import FAILED, FINISHED, PENDING
from tailrace.view.objective import LOST_COST_S, composite_cost


def test_latencies_of_two_requests():
    result = make_result(
        [0.0, 1.0], first=[0.5, 3.0], finished=[1.5, 8.0], scheduled=[0.1, 1.4], output=[11, 21]
    )
    s = summarise(result)
    assert s.ttft_s == Latency(1.25, 1.25, pytest.approx(1.85), pytest.approx(1.985))
    assert s.tpot_s.mean == pytest.approx((1.0 / 10 + 5.0 / 20) / 2)
    assert s.e2e_s.mean == pytest.approx((1.5 + 7.0) / 2)
    assert s.scheduling_delay_s.mean == pytest.approx((0.1 + 0.4) / 2)
    assert s.duration_s == 8.0
    assert s.requests_per_s == pytest.approx(2 / 8)
    assert s.output_tokens_per_s == pytest.approx(32 / 8)
    assert s.total_tokens_per_s == pytest.approx(232 / 8)


def cost(e2e_s: float, ttft_s: float, late_s: float = 0.0, lost: int = 0) -> float:
    """What one request costs; view/test_objective.py knows the answers."""
    return float(composite_cost(e2e_s, ttft_s, late_s, lost))


def test_composite_cost_charges_what_exceeds_the_target():
    result = make_result([0.0, 0.0], first=[0.5, 3.0], finished=[2.0, 5.0])
    np.testing.assert_allclose(
        composite_cost_s(result), [cost(2, 0.5), cost(5, 3.0, late_s=3 - 1.0)]
    )
    assert summarise(result).cost_s == pytest.approx(composite_cost_s(result).mean())


def test_slo_needs_both_targets_and_an_end():
    result = make_result(
        [0.0] * 5,
        #      in time, late, slow, failed, one token
        first=[0.9, 1.1, 0.9, 0.9, 0.9],
        finished=[1.3, 1.3, 2.0, 1.3, 0.9],
        output=[11, 11, 11, 11, 1],
        status=[FINISHED, FINISHED, FINISHED, FAILED, FINISHED],
    )
    assert slo_met(result).tolist() == [True, False, False, False, True]
    s = summarise(result)
    assert s.slo_attainment == pytest.approx(2 / 5)
    assert s.goodput_rps == pytest.approx(2 / 2.0)


def test_targets_are_those_of_the_request():
    result = make_result([0.0, 0.0], first=[0.9, 0.9], finished=[1.2, 1.2])
    result.table.rows["ttft_slo_s"][0] = 0.5
    assert slo_met(result).tolist() == [False, True]


def test_one_request_with_a_one_token_answer():
    s = summarise(make_result([2.0], first=[2.5], finished=[2.5], output=1, replicas=1))
    assert s.ttft_s.p99 == 0.5
    assert s.tpot_s == Latency(None, None, None, None)
    assert s.slo_attainment == 1.0
    assert s.imbalance == 1.0
    assert s.replica_share == (1.0,)


@pytest.mark.parametrize("status", [FAILED, PENDING])
def test_no_request_finished(status):
    times = [np.nan, np.nan] if status == PENDING else [1.0, 2.0]
    replica = -1 if status == PENDING else 0
    s = summarise(
        make_result([0.0, 0.5], first=times, finished=times, status=status, replica=replica, busy=0)
    )
    assert s.finished == 0
    assert s.failed + s.pending == 2
    assert s.cost_s > LOST_COST_S
    assert s.e2e_s.mean is None
    assert s.requests_per_s == s.goodput_rps == s.slo_attainment == 0.0
    assert s.imbalance == 1.0
    json.loads(dumps(s), parse_constant=pytest.fail)


def test_failed_requests_keep_their_first_token_but_have_no_end():
    s = summarise(
        make_result([0.0, 0.0], first=[0.5, 0.7], finished=[2.0, 9.0], status=[FINISHED, FAILED])
    )
    assert s.ttft_s.mean == pytest.approx(0.6)
    assert s.e2e_s.mean == 2.0
    assert s.cost_s == pytest.approx((cost(2, 0.5) + cost(9, 0.7, lost=1)) / 2)


def test_losing_requests_is_never_cheap():
    never = np.nan
    result = make_result(
        [0.0, 1.0, 2.0, 4.0, 5.0],
        # finished, failed, failed before its answer, never routed, never arrived
        first=[0.5, 1.5, never, never, never],
        finished=[9.0, 3.0, 5.0, never, never],
        status=[FINISHED, FAILED, FAILED, PENDING, PENDING],
        arrived_s=[0.0, 1.0, 2.0, 4.0, never],
    )
    np.testing.assert_allclose(
        composite_cost_s(result),
        [
            cost(9, 0.5),
            cost(2, 0.5, lost=1),
            cost(3, 3, late_s=3 - 1, lost=1),
            cost(5, 5, late_s=5 - 1, lost=1),
            cost(0, 0, lost=1),
        ],
    )
    assert summarise(result).cost_s == pytest.approx(composite_cost_s(result).mean())


def test_warm_up_is_left_out():
    first = [10.0, 10.0, 2.5, 3.5]
    result = make_result([0.0, 1.0, 2.0, 3.0], first=first, finished=[12.0, 12.0, 4.0, 4.0])
    s = summarise(result, warmup_fraction=0.5)
    assert s.requests == 2
    assert s.ttft_s.mean == 0.5
    assert s.duration_s == 2.0
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(TailraceError, match="warm-up"):
            summarise(result, warmup_fraction=bad)


def test_shares_imbalance_hits_and_reroutes():
    result = make_result(
        [0.0] * 4,
        first=[1.0] * 4,
        finished=[2.0] * 4,
        replica=[0, 0, 0, 1],
        busy=[3.0, 1.0],
        cached_tokens=[50, 0, 100, 0],
        reroutes=[0, 2, 0, 0],
    )
    s = summarise(result)
    assert s.replica_share == (0.75, 0.25)
    assert s.imbalance == 1.5
    assert s.prefix_hit_rate == pytest.approx(150 / 400)
    assert s.rerouted == 1


def test_percentiles_of_many_requests():
    ttft = np.arange(1, 101) / 100
    s = summarise(make_result(np.zeros(100), first=ttft, finished=ttft + 1))
    assert s.ttft_s.p50 == pytest.approx(np.percentile(ttft, 50))
    assert s.ttft_s.p90 == pytest.approx(np.percentile(ttft, 90))
    assert s.ttft_s.p99 == pytest.approx(np.percentile(ttft, 99))
    assert all(v is not None for v in dataclasses.astuple(s.e2e_s))
