"""Statistics and predicted outputs of hand-made tables."""

import json

import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.workload import library
from tailrace.workload.predict import predicted_output
from tailrace.workload.stats import gap_cv, index_of_dispersion, statistics
from tailrace.workload.table import RequestTable


def outputs(*tokens: int) -> RequestTable:
    count = len(tokens)
    return RequestTable.build(np.arange(count, dtype=float), np.full(count, 8), np.array(tokens))


def test_statistics_of_a_small_table() -> None:
    table = RequestTable.build(
        np.array([0.0, 1.0, 4.0]),
        np.array([10, 20, 5]),
        np.array([3, 4, 5]),
        [[(1, 10)], [(1, 20)], []],
        session=np.array([0, 0, -1]),
        turn=np.array([0, 1, 0]),
        parent=np.array([-1, 0, -1]),
        think_s=np.array([0.0, 0.7, 0.0]),
    )
    got = statistics(table)
    assert got["requests"] == 3
    assert got["rate_rps"] == pytest.approx(0.5)
    assert got["gap_cv"] == pytest.approx(0.5)
    assert got["idc"] == {"1s": None, "10s": None, "60s": None}
    assert got["prompt_tokens"]["mean"] == pytest.approx(35 / 3)
    assert got["prompt_tokens"]["quantiles"]["p50"] == 10
    assert got["output_tokens"]["max"] == 5
    assert got["sessions"] == {
        "count": 1,
        "requests": 2,
        "turns_mean": 2.0,
        "turns_max": 2,
        "think_s_median": 0.7,
        "think_s_p90": 0.7,
    }
    assert got["distinct_prompt_tokens"] == 25
    assert got["repeated_share"] == pytest.approx(10 / 35)
    assert got["repeated_share_with_answers"] == pytest.approx(13 / 35)


def test_statistics_exist_for_every_workload_and_are_json() -> None:
    for name in library.names():
        got = statistics(library.make(name, 2000, None, 1))
        assert json.loads(json.dumps(got)) == got


def test_one_request_has_no_rate() -> None:
    got = statistics(outputs(4))
    assert got["rate_rps"] is None
    assert got["gap_cv"] is None
    assert got["sessions"] is None


def test_index_of_dispersion() -> None:
    assert index_of_dispersion(np.arange(0.5, 100), 1) == pytest.approx(0.0)
    pairs = np.repeat(np.arange(0, 200, 2.0), 2)
    # Windows of 1 s hold 2, 0, 2, 0, ...: mean 1, variance 1.
    assert index_of_dispersion(pairs, 1) == pytest.approx(1.0, abs=0.02)
    assert index_of_dispersion(np.arange(5.0), 1) is None
    poisson = np.cumsum(np.random.default_rng(1).exponential(0.1, 100_000))
    assert index_of_dispersion(poisson, 1) == pytest.approx(1.0, abs=0.05)


def test_gap_cv_of_equal_times() -> None:
    assert gap_cv(np.zeros(5)) is None


def test_exact_and_bucket_predictions() -> None:
    table = outputs(1, 2, 3, 4, 5, 128, 129, 2**20, 2**20 + 1)
    exact = predicted_output(table, "exact", 0.5, 1)
    bucket = predicted_output(table, "bucket", 0.5, 1)
    assert exact is not None
    assert bucket is not None
    assert exact.tolist() == [1, 2, 3, 4, 5, 128, 129, 2**20, 2**20 + 1]
    assert bucket.tolist() == [1, 2, 4, 4, 8, 128, 256, 2**20, 2**21]
    assert exact.dtype == bucket.dtype == np.float64


def test_noisy_predictions_are_right_in_the_median() -> None:
    table = outputs(*[200] * 20_000)
    noisy = predicted_output(table, "noisy", 0.5, 1)
    again = predicted_output(table, "noisy", 0.5, 1)
    other = predicted_output(table, "noisy", 0.5, 2)
    assert noisy is not None
    assert again is not None
    assert np.median(noisy) == pytest.approx(200, rel=0.02)
    assert np.log(noisy).std() == pytest.approx(0.5, rel=0.02)
    assert np.array_equal(noisy, again)
    assert not np.array_equal(noisy, other)
    tiny = predicted_output(outputs(*[1] * 100), "noisy", 3.0, 1)
    assert tiny is not None
    assert tiny.min() >= 1


def test_the_mean_is_left_to_the_router() -> None:
    assert predicted_output(outputs(3), "mean", 0.5, 1) is None
    with pytest.raises(TailraceError, match="unknown predictor 'oracle'"):
        predicted_output(outputs(3), "oracle", 0.5, 1)  # type: ignore[arg-type]
