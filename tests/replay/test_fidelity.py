"""Simulated against recorded, and what could have been."""

import numpy as np
import pytest

from replay.logged import write_log
from tailrace.config import Cluster, Replica, Workload
from tailrace.errors import TailraceError
from tailrace.replay import recorded
from tailrace.replay.fidelity import agreement, fidelity
from tailrace.replay.what_if import resized, what_if
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled
CLUSTER = Cluster(replicas=(Replica(), Replica(speed=0.6)))


def logged(folder, name="chat", rate=4, requests=600, **noise):
    table = from_settings(Workload(name=name, requests=requests, rate=rate, load=None), rate, 5)
    return write_log(folder, CLUSTER, table, **noise)


def test_the_true_cluster_gives_back_the_record(tmp_path):
    result = logged(tmp_path)
    log = recorded.read(tmp_path)
    found = fidelity(log, CLUSTER)
    assert [a.name for a in found.latencies] == ["TTFT", "E2E"]
    for a in found.latencies:
        assert a.requests == len(result.requests)
        # Times in the log are Unix times, of which microseconds are lost.
        assert abs(a.mean_error) < 0.01
        assert abs(a.p99_error) < 0.01
        assert a.typical_error < 0.001
        assert a.correlation > 0.99


def test_shared_prefixes_are_simulated_too(tmp_path):
    logged(tmp_path, name="sessions-hot", rate=3)
    found = fidelity(recorded.read(tmp_path), CLUSTER)
    assert found.recorded_hit_rate > 0.3
    assert found.simulated_hit_rate == pytest.approx(found.recorded_hit_rate, abs=0.03)
    for a in found.latencies:
        assert abs(a.p50_error) < 0.05
        assert a.correlation > 0.95


def test_overhead_of_requests_is_added(tmp_path):
    logged(tmp_path, overhead_s=0.03)
    log = recorded.read(tmp_path)
    without, with_it = (fidelity(log, CLUSTER, overhead_ms=ms) for ms in ((0.0,), (30.0, 30.0)))
    for plain, added in zip(without.latencies, with_it.latencies, strict=True):
        assert added.simulated_mean_s == pytest.approx(plain.simulated_mean_s + 0.03)
    assert without.latencies[0].mean_error < -0.05
    assert abs(with_it.latencies[0].mean_error) < 0.01
    plain, added = (
        what_if(log.table, CLUSTER, ["load_aware"], [3], overhead_ms=ms, jobs=1)[0].summary
        for ms in ((0.0,), (30.0, 60.0))
    )
    later_s = added.e2e_s.mean - plain.e2e_s.mean
    assert 0.03 < later_s < 0.06
    assert added.ttft_s.mean - plain.ttft_s.mean == pytest.approx(later_s)


def test_a_wrong_cluster_shows(tmp_path):
    logged(tmp_path)
    slow = Cluster(replicas=(Replica(speed=0.8), Replica(speed=0.48)))
    found = fidelity(recorded.read(tmp_path), slow)
    assert found.latencies[1].p50_error > 0.2
    with pytest.raises(TailraceError, match="names 2 replicas and the cluster file has 1"):
        fidelity(recorded.read(tmp_path), Cluster(replicas=(Replica(),)))


def test_both_engines_agree(tmp_path):
    logged(tmp_path, requests=60)
    log = recorded.read(tmp_path)
    from tailrace.config import Engine

    fast, slow = (fidelity(log, CLUSTER, Engine(engine=e)) for e in ("compiled", "reference"))
    np.testing.assert_allclose(fast.simulated_s["E2E"], slow.simulated_s["E2E"], rtol=1e-6)


def test_the_recorded_policy_gives_the_recorded_figures(tmp_path):
    result = logged(tmp_path)
    log = recorded.read(tmp_path)
    outcomes = what_if(log.table, CLUSTER, ["least_outstanding", "random"], [2, 3], jobs=1)
    assert [o.replicas for o in outcomes] == [2, 2, 3, 3]
    by = {(o.policy, o.replicas): o.summary for o in outcomes}
    e2e = result.requests["finished_s"] - result.requests["arrived_s"]
    assert by["least_outstanding", 2].e2e_s.mean == pytest.approx(e2e.mean(), rel=0.01)
    assert by["least_outstanding", 3].e2e_s.mean < by["least_outstanding", 2].e2e_s.mean
    assert by["least_outstanding", 2].cost_s < by["random", 2].cost_s
    assert outcomes[0].policy == "least_outstanding"


def test_sizes_take_replicas_in_turn():
    assert [r.speed for r in resized(CLUSTER, 5).expanded()] == [1.0, 0.6, 1.0, 0.6, 1.0]
    assert resized(Cluster(replicas=(Replica(count=2),)), 6).replicas == (Replica(count=6),)
    with pytest.raises(TailraceError, match="1 to 1024"):
        resized(CLUSTER, 0)


def test_agreement_by_hand():
    a = agreement("x", np.array([1.0, 2.0, 4.0]), np.array([1.1, 2.2, 4.4]))
    assert a.p50_error == pytest.approx(0.1)
    assert a.typical_error == pytest.approx(0.1)
    assert a.correlation == pytest.approx(1.0)
    assert agreement("x", np.ones(5), np.ones(5)).correlation is None
