import numpy as np
import pytest

from tailrace.config import Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.judge.compare import averaged, compare, ratio_interval
from tailrace.evaluate.measure.metrics import Latency

SCENARIO = Scenario(workload=Workload(name="chat", requests=60, rate=20.0))
POLICIES = ("random", "round_robin", "least_outstanding")


@pytest.fixture(scope="module")
def comparison():
    return compare(SCENARIO, POLICIES, [1, 2, 3], jobs=1)


def test_every_policy_meets_the_same_requests(comparison):
    for runs in zip(*(e.runs for e in comparison.entries), strict=True):
        assert len({run.requests for run in runs}) == 1
    assert comparison.rate_rps == 20.0
    assert all(len(e.runs) == 3 for e in comparison.entries)


def test_the_cheapest_comes_first_and_the_reference_is_one(comparison):
    costs = [e.mean.cost_s for e in comparison.entries]
    assert costs == sorted(costs)
    by_name = {e.policy: e for e in comparison.entries}
    reference = by_name["least_outstanding"].versus_reference
    assert (reference.ratio, reference.low, reference.high) == (1.0, 1.0, 1.0)
    other = by_name["random"].versus_reference
    assert other.low <= other.ratio <= other.high
    own = np.mean([r.cost_s for r in by_name["random"].runs])
    base = np.mean([r.cost_s for r in by_name["least_outstanding"].runs])
    assert other.ratio == pytest.approx(own / base)


def test_processes_give_the_same_result_and_report_progress(comparison):
    told = []
    parallel = compare(SCENARIO, POLICIES, [1, 2, 3], jobs=2, progress=told.append)
    assert parallel == comparison
    assert told == list(range(1, 10))


def test_a_missing_reference_joins():
    found = compare(SCENARIO, ["random"], [1], jobs=1, reference="round_robin")
    assert {e.policy for e in found.entries} == {"random", "round_robin"}
    assert all(e.versus_reference.low is None for e in found.entries)


@pytest.mark.parametrize("jobs", [1, 2])
def test_mistakes_surface_from_any_process(jobs):
    hopeless = SCENARIO.model_copy(update={"workload": Workload(name="chatt", rate=1.0)})
    with pytest.raises(TailraceError, match="unknown workload 'chatt'"):
        compare(hopeless, ["random"], [1, 2], jobs=jobs)


def test_bad_arguments():
    with pytest.raises(TailraceError, match="unknown policy 'randum'; did you mean random"):
        compare(SCENARIO, ["randum"], [1])
    for seeds in ([], [1, 1]):
        with pytest.raises(TailraceError, match="at least one seed, and each seed once"):
            compare(SCENARIO, ["random"], seeds)


def test_paired_interval_ignores_what_the_seeds_have_in_common():
    base = np.array([1.0, 10.0, 100.0, 5.0])
    interval = ratio_interval(0.9 * base, base)
    assert interval.ratio == pytest.approx(0.9)
    assert (interval.low, interval.high) == (pytest.approx(0.9), pytest.approx(0.9))
    wide = ratio_interval(base[::-1].copy(), base)
    assert wide.low < 0.5
    assert wide.high > 2.0


def test_merging_adds_counts_and_averages_figures(comparison):
    runs = comparison.entries[0].runs
    merged = averaged(runs)
    assert merged.requests == sum(r.requests for r in runs) == 180
    assert merged.ttft_s.p99 == pytest.approx(np.mean([r.ttft_s.p99 for r in runs]))
    assert merged.replica_share == pytest.approx(np.mean([r.replica_share for r in runs], axis=0))
    nothing = [Latency(None, None, None, None)]
    assert (
        averaged([r.__class__(**{**vars(r), "tpot_s": nothing[0]}) for r in runs]).tpot_s
        == nothing[0]
    )
