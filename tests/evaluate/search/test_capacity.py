import numpy as np
import pytest

from results import make_result
from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.search import capacity
from tailrace.evaluate.search.capacity import (
    Objective,
    max_load,
    middle_throughput_rps,
    saturation_rps,
)
from tailrace.seeds import Purpose, seeds

pytestmark = pytest.mark.compiled


def one_replica(workload="chat", **changes):
    return Scenario(
        cluster=Cluster(replicas=(Replica(**changes),)),
        workload=Workload(name=workload, requests=400),
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(capacity, "MIN_REQUESTS", 400)
    monkeypatch.setattr(capacity, "REQUESTS_PER_REPLICA", 400)
    monkeypatch.setattr(capacity, "SESSION_REQUESTS_PER_REPLICA", 400)
    monkeypatch.setattr(capacity, "MIN_PROBE_REQUESTS", 100)
    monkeypatch.setattr(capacity, "PROBE_REQUESTS_PER_REPLICA", 100)


def test_middle_throughput_looks_at_the_middle_only():
    ends = np.concatenate([[100.0, 100.1], 101 + np.arange(6) / 2.0, [200.0, 300.0]])
    result = make_result(np.zeros(10), first=ends, finished=ends)
    assert middle_throughput_rps(result) == pytest.approx(6 / (200.0 - 101.0))
    with pytest.raises(TailraceError, match="1 finished requests are too few"):
        middle_throughput_rps(make_result([0.0], [1.0], [2.0]))


def test_saturation_of_chat_is_what_arithmetic_says(small):
    # (1 160 + 210) tokens per request in iterations of 512 tokens and some 50 ms: about 7.4 /s.
    assert saturation_rps(one_replica()) == pytest.approx(7.4, rel=0.15)


def test_saturation_grows_with_the_speed(small):
    slow, fast = (saturation_rps(one_replica(speed=s)) for s in (1.0, 2.0))
    assert fast / slow == pytest.approx(2.0, rel=0.02)


def test_saturation_is_repeatable_and_ignores_what_does_not_matter(small):
    plain = one_replica()
    other = plain.model_copy(
        update={"workload": Workload(name="chat", requests=7, load=0.1, arrivals="gamma")}
    )
    assert saturation_rps(plain) == saturation_rps(other) == saturation_rps(plain)


def test_saturation_of_conversations_depends_on_the_cache(small):
    cached = saturation_rps(one_replica("sessions-hot"))
    uncached = saturation_rps(one_replica("sessions-hot", prefix_caching=False))
    assert cached > 1.2 * uncached


def test_saturation_refuses_seeds_set_aside_for_evaluation():
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        saturation_rps(one_replica(), seeds(Purpose.EVALUATION, 1)[0])


def test_load_refers_to_the_measured_capacity(small):
    scenario = one_replica()
    assert scenarios.resolve_rate(scenario) == pytest.approx(0.8 * saturation_rps(scenario))


def test_max_load_brackets_the_objective(small):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    told = []
    found = max_load(
        scenario,
        "round_robin",
        [Objective("ttft_p99_s", 2.0)],
        tolerance=0.05,
        progress=told.append,
    )
    assert found.bounded
    assert tuple(told) == found.probes
    best = [p for p in found.probes if p.met]
    assert found.rate_rps == max(p.rate_rps for p in best)
    assert min(p.rate_rps for p in found.probes if not p.met) <= found.rate_rps / 0.94
    assert all(p.summary.ttft_s.p99 <= 2.0 for p in best)
    assert found.load == pytest.approx(found.rate_rps / 7.4)


def test_a_stricter_objective_holds_less(small):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    rates = [
        max_load(scenario, "round_robin", [Objective("attainment", a)], tolerance=0.1).rate_rps
        for a in (0.9, 0.5)
    ]
    assert rates[0] < rates[1]


def test_objectives_nothing_can_meet_and_everything_meets(small, monkeypatch):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    scenario = scenario.model_copy(update={"workload": Workload(name="chat", requests=20)})
    found = max_load(scenario, "random", [Objective("ttft_p99_s", 1e-6)])
    assert (found.rate_rps, found.load, found.bounded) == (None, None, True)
    found = max_load(scenario, "random", [Objective("ttft_p99_s", 1e6)])
    assert found.load == capacity.HIGHEST_LOAD
    assert not found.bounded


@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("atainment", 0.9, "unknown objective 'atainment'; did you mean attainment"),
        ("attainment", 1.5, "attainment must be a share"),
        ("ttft_p99_s", 0.0, "must be a positive number"),
        ("ttft_p99_s", float("nan"), "must be a positive number"),
    ],
)
def test_bad_objectives(kind, limit, message):
    with pytest.raises(TailraceError, match=message):
        Objective(kind, limit)


def test_a_step_of_the_search_has_enough_requests(small):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    scenario = scenario.model_copy(update={"workload": Workload(name="chat", requests=1)})
    found = max_load(scenario, "random", [Objective("ttft_p99_s", 1e-6)])
    assert {p.summary.requests for p in found.probes} == {100}


def test_the_reference_engine_measures_with_few_requests(monkeypatch):
    calls = []

    def throughput(scenario, rate, seed):
        calls.append(scenario.workload.requests)
        return 2 * rate

    monkeypatch.setattr(capacity, "_throughput_rps", throughput)
    saturation_rps(one_replica(scheduler="orca"))
    assert calls == [400, 400, 400]


def test_max_load_needs_an_objective():
    with pytest.raises(TailraceError, match="at least one objective"):
        max_load(one_replica(), "random", [])
