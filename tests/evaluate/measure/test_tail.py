import numpy as np
import pytest

from results import make_result
from tailrace.evaluate.measure.tail import extremes, mean_present
from tailrace.sim.result import FAILED, FINISHED, PENDING


def test_mean_present_is_the_integral_over_the_stretch():
    entered, left = np.array([0.0, 1.0, 5.0]), np.array([2.0, 4.0, 9.0])
    # In [1, 3]: one second of the first, two of the second, nothing of the third.
    assert mean_present(entered, left, 1.0, 3.0) == pytest.approx(1.5)
    assert mean_present(entered, left, 3.0, 3.0) == 0.0


def test_the_oldest_request_is_found_also_if_it_never_got_an_answer():
    result = make_result(
        [0.0, 1.0, 2.0],
        first=[0.5, np.nan, 2.5],
        finished=[1.0, np.nan, 20.0],
        status=[FINISHED, PENDING, FINISHED],
    )
    found = extremes(result, 0.0, ttft_limit_s=10.0)
    assert found.longest_ttft_s == 19.0  # from 1 s to the end of the run
    assert found.longest_e2e_s == 19.0
    assert found.over_limit == 1
    assert found.worst_session_ttft_s is None


def test_a_request_that_failed_waited_until_it_failed():
    result = make_result(
        [0.0, 0.0], first=[0.5, np.nan], finished=[50.0, 7.0], status=[FINISHED, FAILED]
    )
    assert extremes(result, 0.0, 5.0).longest_ttft_s == 7.0


def test_warm_up_is_left_out_of_the_worst():
    result = make_result([0.0, 1.0, 2.0, 3.0], first=[99.0, 1.5, 2.5, 3.5], finished=[99.0] * 4)
    assert extremes(result, 0.25, 10.0).longest_ttft_s == 0.5
    assert extremes(result, 0.0, 10.0).longest_ttft_s == 99.0


def test_the_worst_session_needs_three_turns():
    arrived = np.arange(8.0)
    wait = np.array([1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 50.0, 60.0])
    result = make_result(arrived, arrived + wait, arrived + wait)
    result.table.rows["session"] = [0, 0, 0, 1, 1, 1, 2, -1]
    assert extremes(result, 0.0, 1e9).worst_session_ttft_s == pytest.approx(3.0)


def test_throughput_is_counted_while_requests_arrive():
    arrived = np.linspace(0.0, 100.0, 101)
    # Everything ends one second later but the last, which takes an hour: the run-out.
    finished = arrived + 1.0
    finished[-1] = 3700.0
    found = extremes(make_result(arrived, arrived + 0.5, finished), 0.0, 30.0)
    assert found.steady_rps == pytest.approx(1.0, rel=0.02)


def test_shares_are_relative_to_an_even_one():
    result = make_result([0.0] * 8, [1.0] * 8, [2.0] * 8, replica=[0, 0, 0, 0, 0, 0, 1, 1])
    found = extremes(result, 0.0, 30.0)
    assert (found.least_share, found.most_share) == (0.5, 1.5)


def test_a_queue_without_bound_raises_the_alarm():
    arrived = np.linspace(0.0, 100.0, 2000)
    served = np.linspace(0.0, 200.0, 2000)  # half as fast as they come
    assert extremes(make_result(arrived, served, served + 1), 0.0, 1e9).queue_grows
    steady = arrived + 2.0  # always 40 in the queue
    found = extremes(make_result(arrived, steady, steady + 1), 0.0, 1e9)
    assert not found.queue_grows
    assert found.last_queue == pytest.approx(40.0, rel=0.05)


def test_a_burst_that_is_over_is_no_alarm():
    arrived = np.linspace(0.0, 100.0, 2000)
    wait = np.where((arrived > 40) & (arrived < 60), 10.0, 0.1)
    assert not extremes(make_result(arrived, arrived + wait, arrived + wait), 0.0, 1e9).queue_grows
