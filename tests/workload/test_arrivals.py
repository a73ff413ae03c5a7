"""Arrival processes: long-run rate, dispersion, and what a seed promises."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from tailrace.workload import fitted
from tailrace.workload.arrivals import (
    ArrivalProcess,
    ClientPool,
    CoxLognormal,
    Diurnal,
    GammaRenewal,
    Mmpp2,
    OnOffBatch,
    Poisson,
    replay,
    warp,
    zipf_weights,
)
from tailrace.workload.stats import gap_cv, index_of_dispersion

MMPP = Mmpp2(2.0, 0.5, 60.0, 120.0)
PROCESSES: dict[str, ArrivalProcess] = {
    "poisson": Poisson(),
    "gamma": GammaRenewal(3.0),
    "regular": GammaRenewal(0.3),
    "mmpp": MMPP,
    "mmpp-gamma": fitted.BURSTY_ARRIVALS,
    "cox": fitted.CHAT_ARRIVALS,
    "onoff": fitted.CODE_ARRIVALS,
    "diurnal": Diurnal(fitted.HOURLY_SWINGING, day_s=600.0),
    "pool": ClientPool(),
}
each_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


def times(process: ArrivalProcess, rate: float, count: int, seed: int = 0) -> NDArray[np.float64]:
    return process.times(rate, count, np.random.default_rng(seed))


@each_process
def test_arrivals_are_sorted_and_as_many_as_asked_for(process: ArrivalProcess) -> None:
    for count in (1, 2, 1000):
        got = times(process, 5.0, count)
        assert got.shape == (count,)
        assert got[0] >= 0
        assert (np.diff(got) >= 0).all()


@each_process
def test_same_generator_same_times(process: ArrivalProcess) -> None:
    first, again, other = (times(process, 2.0, 500, seed) for seed in (4, 4, 5))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


@each_process
def test_a_longer_table_begins_with_the_shorter(process: ArrivalProcess) -> None:
    # The last batch of ON/OFF traffic may be cut in its middle, hence the margin.
    assert np.array_equal(times(process, 3.0, 1000)[:980], times(process, 3.0, 9000)[:980])


@each_process
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_long_run_rate(process: ArrivalProcess, rate: float) -> None:
    # Slow changes need a long time to average out: as many seconds for either rate.
    count = int(rate * 100_000)
    mean = np.mean([count / times(process, rate, count, seed)[-1] for seed in range(3)])
    assert mean == pytest.approx(rate, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(times(Poisson(), 4.0, 50_000))
    assert scipy_stats.kstest(gaps, "expon", args=(0, 0.25)).statistic < 0.01


@pytest.mark.parametrize("cv", [0.4, 1.0, 2.5])
def test_gamma_gaps_have_their_law(cv: float) -> None:
    gaps = np.diff(times(GammaRenewal(cv), 4.0, 100_000))
    law = scipy_stats.gamma(1 / cv**2, scale=cv**2 / 4)
    # Not at the smallest gaps: they vanish when they are added to a time of hours.
    level = np.linspace(0.05, 0.99, 50)
    assert [(gaps <= q).mean() for q in law.ppf(level)] == pytest.approx(level, abs=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_renewal_process_does_not_begin_with_a_burst() -> None:
    # Begun with a full gap, CV 5 would bring (25 - 1) / 2 = 12 arrivals too many.
    early = [int((times(GammaRenewal(5.0), 1.0, 400, seed) < 20).sum()) for seed in range(2000)]
    assert np.mean(early) == pytest.approx(20, rel=0.15)


def test_cox_dispersion_grows_with_the_window_as_theory_says() -> None:
    process, rate = CoxLognormal(0.3, 100.0), 5.0
    arrival_s = times(process, rate, 1_000_000)
    for window in (1, 10, 60):
        decay = 1 - 100 / window * (1 - np.exp(-window / 100))
        expected = 1 + 2 * rate * 0.3**2 * 100 * decay
        assert index_of_dispersion(arrival_s, window) == pytest.approx(expected, rel=0.12)


def test_mmpp_dispersion_as_theory_says() -> None:
    rate = 5.0
    arrival_s = times(MMPP, rate, 1_000_000)
    switch = 1 / 60 + 1 / 120
    relative_variance = (1 / 3) * (2 / 3) * (2.0 - 0.5) ** 2
    for window in (1, 10, 60):
        decay = 1 - (1 - np.exp(-switch * window)) / (switch * window)
        expected = 1 + 2 * rate * relative_variance / switch * decay
        assert index_of_dispersion(arrival_s, window) == pytest.approx(expected, rel=0.1)


def test_mmpp_begins_in_either_state() -> None:
    # High for a third of the time: the first 5 s see the mean rate on average.
    early = [int((times(MMPP, 4.0, 100, seed) < 5).sum()) for seed in range(1500)]
    assert np.mean(early) == pytest.approx(20, rel=0.06)


def test_onoff_matches_the_code_trace() -> None:
    # Medians over seeds of a trace-sized sample; the trace: CV 13.2, IDC 2.5, 13.2, 71.6.
    samples = [times(fitted.CODE_ARRIVALS, 2.567, 8819, seed) for seed in range(12)]

    def median(window: float) -> float:
        return float(np.median([index_of_dispersion(s, window) for s in samples]))

    assert 11 < np.median([gap_cv(s) for s in samples]) < 17
    assert 2.4 < median(0.1) < 3.4
    assert 11 < median(1) < 15
    assert 60 < median(10) < 90
    assert 120 < median(60) < 260
    gaps = np.diff(np.concatenate(samples))
    silent = gaps[gaps > 5].sum() / sum(s[-1] for s in samples)
    assert silent == pytest.approx(0.72, abs=0.04)


def test_onoff_rate_is_right_with_other_parameters() -> None:
    # Strong correlation of length and rate: the quadrature must take it into account.
    process = OnOffBatch(1.0, 10.0, 2.0, 0.5, 0.8, 0.9, 0.3, 1.0, 3.0, 0.01)
    mean = np.mean([60_000 / times(process, 3.0, 60_000, seed)[-1] for seed in range(6)])
    assert mean == pytest.approx(3.0, rel=0.06)


def test_onoff_batches_have_their_size_and_spread() -> None:
    process = OnOffBatch(2.0, 100.0, 0.0, 0.1, 0.0, 0.0, 0.01, 1.0, 4.0, 0.008)
    arrival_s = times(process, 1.0, 20_000)
    # Events come once in 4 s, so gaps above 8 ms lie between batches.
    batches = 1 + int((np.diff(arrival_s) > 0.008).sum())
    assert 20_000 / batches == pytest.approx(4.0, rel=0.05)


def test_diurnal_follows_its_hours() -> None:
    hourly = tuple(range(1, 25))
    day_s = 2400.0
    arrival_s = times(Diurnal(hourly, day_s), 100.0, 480_000)
    hour = (arrival_s % day_s // 100).astype(int)
    share = np.bincount(hour, minlength=24) / len(hour)
    expected = np.array(hourly) / sum(hourly)
    # Midnight is interpolated between 24 and 1; all other hours are linear.
    assert share[1:-1] == pytest.approx(expected[1:-1], rel=0.03, abs=5e-4)


def test_diurnal_start_hour_shifts_the_day() -> None:
    hourly = (1.0,) * 12 + (3.0,) * 12
    early = times(Diurnal(hourly, 240.0, start_hour=0), 50.0, 2000)
    late = times(Diurnal(hourly, 240.0, start_hour=13), 50.0, 2000)
    assert (late < 25).sum() > 2 * (early < 25).sum()


def test_client_pool_is_as_bursty_as_published() -> None:
    samples = [times(ClientPool(), 10.0, 30_000, seed) for seed in range(12)]
    cv = np.median([gap_cv(s) for s in samples])
    idc = [np.median([index_of_dispersion(s, w) for s in samples]) for w in (1, 10, 60)]
    assert cv == pytest.approx(1.23, abs=0.15)
    assert idc == pytest.approx([1.92, 2.47, 2.62], rel=0.35)


def test_a_quiet_pool_is_continued_until_enough_have_come() -> None:
    # Clients of CV 10 may all be silent for long: the first horizon is then too short.
    process = ClientPool(clients=2, cv_median=10.0, cv_sigma=0.01)
    spans = [times(process, 1.0, 50, seed)[-1] for seed in range(40)]
    assert max(spans) > 1.5 * 50


def test_bursts_fall_at_the_same_instants_at_any_rate() -> None:
    slow = times(MMPP, 10.0, 20_000)
    fast = times(MMPP, 100.0, 200_000)
    edges = np.arange(0, 1800, 20)
    counts = [np.histogram(t, edges)[0] for t in (slow, fast)]
    assert np.corrcoef(*counts)[0, 1] > 0.9


def test_warp_agrees_with_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    blocks = [(rng.random(7), rng.random(7) * rng.integers(0, 2, 7)) for _ in range(40)]
    steps = [(d, m) for durations, masses in blocks for d, m in zip(durations, masses, strict=True)]
    operational = np.sort(rng.random(50)) * sum(m for _, m in steps)

    def at(target: float) -> float:
        clock = mass = 0.0
        for duration, step in steps:
            if mass + step > target:
                return clock + duration * (target - mass) / step
            clock, mass = clock + duration, mass + step
        raise AssertionError

    assert warp(operational, blocks) == pytest.approx([at(t) for t in operational])


def test_zipf_weights() -> None:
    weights = zipf_weights(4, 2.0)
    assert weights == pytest.approx(
        np.array([1, 1 / 4, 1 / 9, 1 / 16]) / (1 + 1 / 4 + 1 / 9 + 1 / 16)
    )


def test_replay_shifts_and_scales() -> None:
    assert replay(np.array([5.0, 6.0, 9.0]), 0.5).tolist() == [0.0, 0.5, 2.0]
