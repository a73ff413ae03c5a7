"""Calibration from decision logs that the router's own classes wrote, with simulated times."""

import pytest

from replay.logged import write_log
from tailrace.calibrate import logs
from tailrace.calibrate.iteration_fit import predicted_ms
from tailrace.calibrate.logs import calibrate_log
from tailrace.calibrate.result import ASSUMED, MEASURED
from tailrace.config import Cluster, Replica, Workload
from tailrace.errors import TailraceError
from tailrace.replay import recorded
from tailrace.view.devices import cost_of
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled


def logged(folder, config, rate, requests=800, name="chat", **noise):
    table = from_settings(Workload(name=name, requests=requests, rate=rate, load=None), rate, 5)
    write_log(folder, Cluster(replicas=(config,)), table, **noise)
    return recorded.read(folder)


@pytest.mark.parametrize(("rate", "known"), [(3, {}), (9, {"chunk_size": 512})])
def test_the_model_comes_back(tmp_path, rate, known):
    """9 requests/s are more than the two replicas can do."""
    config = Replica(count=2)
    log = logged(tmp_path, config, rate, overhead_s=0.002, jitter_s=0.001)
    (found,) = calibrate_log(log, Replica(**known), same=True).replicas
    assert found.replica.count == 2
    assert found.replica.chunk_size == 512
    assert found.sources["chunk_size"] == ("given" if known else "measured")
    # Iterations as they occur: decodes of 1 to 64, with little and much context, and full prefills.
    shapes = ([1, 16, 64, 64, 512, 512], [900, 1e4, 4e4, 8e4, 0, 0], [0, 0, 0, 0, 131_072, 1e6])
    true, ours = (predicted_ms(m, *shapes) for m in (cost_of(config), found.replica.cost))
    assert ours == pytest.approx(true, rel=0.05)
    assert found.replica.cost.base_ms == pytest.approx(10.3, rel=0.02)
    answers = next(r for r in found.regimes if r.name == "answer, batch > 8")
    assert answers.mean_error < 0.02


def test_replicas_may_differ(tmp_path):
    slow, fast = Replica(speed=0.7, chunk_size=512), Replica(speed=1.4, chunk_size=512)
    table = from_settings(Workload(name="chat", requests=800, rate=4, load=None), 4, 5)
    write_log(tmp_path, Cluster(replicas=(slow, fast)), table, policy="round_robin")
    found = calibrate_log(recorded.read(tmp_path), Replica(chunk_size=512)).replicas
    assert [c.name for c in found] == ["replica 0", "replica 1"]
    for one, speed in zip(found, (0.7, 1.4), strict=True):
        assert one.replica.cost.base_ms == pytest.approx(10.3 / speed, rel=0.03)
        assert one.sources["chunk_size"] == "given"


def test_a_budget_that_a_log_does_not_reveal_is_that_of_the_others(tmp_path, monkeypatch):
    """A saturated server's log fits several budgets, each with another overhead."""
    table = from_settings(Workload(name="chat", requests=240, rate=4, load=None), 4, 5)
    write_log(tmp_path, Cluster(replicas=(Replica(count=3),)), table, policy="round_robin")
    seen = iter([(512, MEASURED), (2048, ASSUMED), (512, MEASURED)])
    monkeypatch.setattr(logs, "_token_budget", lambda *_: next(seen))
    monkeypatch.setattr(logs, "PASSES", 1)
    found = calibrate_log(recorded.read(tmp_path), Replica()).replicas
    assert [one.replica.chunk_size for one in found] == [512, 512, 512]
    assert [one.sources["chunk_size"] for one in found] == [MEASURED, ASSUMED, MEASURED]


def test_mistakes(tmp_path):
    log = logged(tmp_path, Replica(), 3, requests=30)
    with pytest.raises(TailraceError, match="only 30 answered requests"):
        calibrate_log(log, Replica())
    few = logged(tmp_path / "few", Replica(), 3, requests=60)
    few.outcomes["replica"][-5:] = 1
    reported = []
    with pytest.raises(TailraceError, match="replica 1 has only 5 answered requests"):
        calibrate_log(few, Replica(), progress=reported.append)
    assert not reported  # nothing was fitted in vain
    with pytest.raises(TailraceError, match="compiled engine"):
        calibrate_log(logged(tmp_path / "b", Replica(), 3, 60), Replica(scheduler="orca"))
