import pytest

from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.search import capacity
from tailrace.evaluate.search.capacity import ServiceObjective, max_load

pytestmark = pytest.mark.compiled


def one_replica(workload="chat", **changes):
    return Scenario(
        cluster=Cluster(replicas=(Replica(**changes),)),
        workload=Workload(name=workload, requests=400),
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(capacity, "MIN_PROBE_REQUESTS", 100)
    monkeypatch.setattr(capacity, "PROBE_REQUESTS_PER_REPLICA", 100)


def test_max_load_brackets_the_objective(small):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    told = []
    found = max_load(
        scenario,
        "round_robin",
        [ServiceObjective("ttft_p99_s", 2.0)],
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
        max_load(
            scenario, "round_robin", [ServiceObjective("attainment", a)], tolerance=0.1
        ).rate_rps
        for a in (0.9, 0.5)
    ]
    assert rates[0] < rates[1]


def test_objectives_nothing_can_meet_and_everything_meets(small, monkeypatch):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    scenario = scenario.model_copy(update={"workload": Workload(name="chat", requests=20)})
    found = max_load(scenario, "random", [ServiceObjective("ttft_p99_s", 1e-6)])
    assert (found.rate_rps, found.load, found.bounded) == (None, None, True)
    found = max_load(scenario, "random", [ServiceObjective("ttft_p99_s", 1e6)])
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
        ServiceObjective(kind, limit)


def test_a_step_of_the_search_has_enough_requests(small):
    scenario = one_replica().model_copy(update={"capacity_rps": 7.4})
    scenario = scenario.model_copy(update={"workload": Workload(name="chat", requests=1)})
    found = max_load(scenario, "random", [ServiceObjective("ttft_p99_s", 1e-6)])
    assert {p.summary.requests for p in found.probes} == {100}


def test_max_load_needs_an_objective():
    with pytest.raises(TailraceError, match="at least one objective"):
        max_load(one_replica(), "random", [])
