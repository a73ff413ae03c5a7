import numpy as np
import pytest

from results import make_result
from tailrace import saturation
from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.saturation import middle_throughput_rps, resolve_rate, saturation_rps, with_capacity
from tailrace.seeds import Purpose, seeds

pytestmark = pytest.mark.compiled


def one_replica(workload="chat", **changes):
    return Scenario(
        cluster=Cluster(replicas=(Replica(**changes),)),
        workload=Workload(name=workload, requests=400),
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(saturation, "MIN_REQUESTS", 400)
    monkeypatch.setattr(saturation, "REQUESTS_PER_REPLICA", 400)
    monkeypatch.setattr(saturation, "SESSION_REQUESTS_PER_REPLICA", 400)


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
    assert resolve_rate(scenario) == pytest.approx(0.8 * saturation_rps(scenario))


def test_the_reference_engine_measures_with_few_requests(monkeypatch):
    calls = []

    def throughput(scenario, rate, seed):
        calls.append(scenario.workload.requests)
        return 2 * rate

    monkeypatch.setattr(saturation, "_throughput_rps", throughput)
    saturation_rps(one_replica(scheduler="orca"))
    assert calls == [400, 400, 400]


def test_a_stored_capacity_is_the_measured_one():
    scenario = scenarios.load("uniform-chat-80")
    assert saturation_rps(scenario) == pytest.approx(scenario.capacity_rps, rel=1e-3)


def test_rate_comes_before_load_and_load_before_the_own_pace():
    def rate(**workload):
        data = {"workload": workload, "capacity_rps": 20.0}
        return resolve_rate(scenarios.build(data))

    assert rate(rate=3.0, load=0.5) == 3.0
    assert rate(load=0.5) == 10.0
    assert rate() == 16.0
    assert rate(name="requests.csv") is None


def test_a_capacity_is_measured_only_where_the_rate_depends_on_it(monkeypatch):
    monkeypatch.setattr("tailrace.saturation.saturation_rps", lambda _: 10.0)

    def capacity(**workload):
        return with_capacity(scenarios.build({"workload": workload})).capacity_rps

    assert capacity(load=0.5) == 10.0
    assert capacity(rate=3.0) is None
    assert capacity(name="requests.csv") is None
