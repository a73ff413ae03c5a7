import dataclasses

import numpy as np
import pytest

from results import make_result
from tailrace.errors import TailraceError
from tailrace.evaluate.judge import replays
from tailrace.evaluate.judge.replays import (
    LoadPoint,
    Replay,
    coarser,
    play,
    shown,
    tasks_of,
    timeline,
)

pytestmark = pytest.mark.compiled


def test_replays_give_the_cost_that_was_measured(loaded, played):
    assert played.unlike == ()
    assert {(r.scenario, r.policy) for r in played.runs} == {
        (s, p) for s in loaded.grid.scenarios for p in shown(loaded, s)
    }
    for run in played.runs:
        cell = loaded.cells(run.scenario, run.policy)[0]
        at = list(replays.SHARES).index(0.99)
        assert run.cost_s == pytest.approx(cell.summary.cost_s)
        assert run.ttft_s[at] == pytest.approx(cell.summary.ttft_s.p99)
        assert (np.diff(run.e2e_s) >= 0).all()


def test_a_replay_of_another_run_is_noticed(loaded, played):
    run = dataclasses.replace(played.runs[0], cost_s=played.runs[0].cost_s * 1.001)
    assert not replays.is_as_measured(loaded, run)
    assert replays.is_as_measured(loaded, played.runs[0])


def test_look_aheads_are_not_played_again(loaded, changed):
    names = {name for s in loaded.grid.scenarios for name in shown(loaded, s)}
    assert "lookahead" not in names
    same = changed(best_single="mine", reference="mine", best_of_each={"scale-2": "mine"})
    assert shown(same, "scale-2") == {"mine": "subject"}


def test_loads_are_varied_where_they_can_be(played):
    points = [p for p in played.loads if p.policy == "mine"]
    assert {p.scenario for p in points} == {"uniform-chat-80"}
    assert sorted(p.load for p in points) == [0.5, 0.5, 1.0, 1.0]
    mean = {load: np.mean([p.mean_e2e_s for p in points if p.load == load]) for load in (0.5, 1.0)}
    assert mean[0.5] < mean[1.0]
    assert all(isinstance(p, LoadPoint) for p in played.loads)


def test_scenarios_that_are_not_known_are_left_out(loaded, changed):
    other = changed()
    grid = dataclasses.replace(loaded.grid, scenarios=("uniform-chat-80", "scale-2", "own"))
    best = {**loaded.data.best_of_each, "own": "lmetric"}
    data = loaded.data.model_copy(update={"best_of_each": best})
    other = dataclasses.replace(other, grid=grid, data=data)
    tasks = tasks_of(other)
    assert {t.traffic.scenario.name for t in tasks} == {"uniform-chat-80", "scale-2"}
    assert play(other, [], jobs=1).left_out == ("own",)


def test_a_policy_that_is_gone_is_named_before_any_work(changed, loaded):
    policies = [
        p.model_copy(update={"spec": "gone.tailrace"}) if p.policy == "mine" else p
        for p in loaded.data.policies
    ]
    with pytest.raises(TailraceError, match=r"need mine once more.*no policy file gone.*--quick"):
        tasks_of(changed(policies=tuple(policies)))


def test_progress_counts_the_tasks(loaded):
    told = []
    tasks = [t for t in tasks_of(loaded) if t.load is None and t.question is None]
    found = play(loaded, tasks, jobs=1, progress=told.append)
    assert told == [1, 2, 3]
    assert all(isinstance(r, Replay) for r in found.runs)


def test_a_run_over_time():
    # 20 requests a second apart wait 0.5 s each; the odd ones go to replica 1.
    arrived = np.arange(20.0)
    result = make_result(arrived, arrived + 0.5, arrived + 1, replica=np.arange(20) % 2)
    time = coarser(timeline(result), 24)
    end = np.quantile(arrived, 0.95)
    assert time.edges_s[[0, -1]] == pytest.approx([0, end])
    assert time.queue.mean() == pytest.approx(9.5 / end, rel=0.05)
    assert time.arrivals_rps.mean() == pytest.approx(19 / end, rel=1e-6)
    assert np.nansum(time.shares, axis=0) == pytest.approx(1)
    assert time.shares.shape == (2, 10)
    assert time.shares[0, 0] == pytest.approx(0.5)


def test_those_that_never_got_an_answer_wait_to_the_end():
    nan = np.nan
    result = make_result(np.arange(10.0), [nan] * 10, [nan] * 10, status=0, replica=-1)
    time = timeline(result)
    assert time.queue[-1] == pytest.approx(9, abs=0.6)
    assert np.isnan(time.shares).all()
