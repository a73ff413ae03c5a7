"""Trials of a sweep: ordinary runs that tell their scores, and go on where they stopped."""

import pytest

pytest.importorskip("torch")

from learn.tiny import Stopped, content, settings
from tailrace.integrations.ray import sweep as sweeps
from tailrace.integrations.ray import trial as trials
from tailrace.integrations.ray.space import Varied
from tailrace.integrations.ray.sweep import Result, Sweep
from tailrace.integrations.ray.trial import run_trial
from tailrace.learn import trainer
from tailrace.seeds import Purpose, purpose_of

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("short_sketches")]


def test_a_trial_tells_every_evaluation_and_goes_on_where_it_stopped(tmp_path):
    asked = settings(tmp_path)
    whole = []
    assert run_trial(tmp_path / "whole", asked, lambda *told: whole.append(told))
    assert [step for step, _, _ in whole] == [1, 2, 3, 4]
    assert [best for _, _, best in whole] == [
        min(s for _, s, _ in whole[: k + 1]) for k in range(4)
    ]

    told = []

    def stop_at(step, score, best):
        told.append((step, score, best))
        if step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        run_trial(tmp_path / "parts", asked, stop_at)
    assert told == whole[:3]
    told.clear()
    assert run_trial(tmp_path / "parts", asked, lambda *t: told.append(t))
    assert told == whole
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    told.clear()
    run_trial(tmp_path / "parts", asked, lambda *t: told.append(t))  # all is done
    assert told == whole


def test_a_trial_that_ended_before_its_first_step_begins_again(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.json").write_text("{}")
    told = []
    run_trial(run, settings(tmp_path), lambda *t: told.append(t))
    assert len(told) == 4


def test_a_trial_that_fails_says_why(tmp_path):
    asked = settings(tmp_path, {"stopping": {"collapse_share": 0.01}})
    sweep = Sweep(over=asked.model_dump(mode="json"), trials=({}, {}))
    assert sweeps.result(tmp_path, sweep, 0).status == "open"
    run = sweeps.trial_folder(tmp_path, 0)
    assert not run_trial(run, asked, lambda *told: None)
    assert "one replica" in trials.failure(run)
    found = sweeps.result(tmp_path, sweep, 0)
    assert (found.status, found.error) == ("failed", trials.failure(run))
    dead = sweeps.result(tmp_path, sweep, 1, "its process died")
    assert (dead.status, dead.error, dead.best_score) == ("failed", "its process died", None)


def test_trials_play_and_are_judged_on_training_seeds_only(tmp_path, monkeypatch):
    seen = []
    original = trainer.WorldSchedule.validation

    def validation(self):
        found = original(self)
        seen.extend(world.seed for world in found)
        seen.extend(world.seed for world in self.worlds(0, 50, 1, None))
        return found

    monkeypatch.setattr(trainer.WorldSchedule, "validation", validation)
    run_trial(tmp_path / "run", settings(tmp_path), lambda *t: None)
    assert {purpose_of(seed) for seed in seen} == {Purpose.TRAINING}


def test_a_sweep_keeps_its_settings_and_writes_the_best(tmp_path):
    over = {"scenarios": ["uniform-chat-80"], "randomise": None, "updates": 3}
    varied = {"branching.replay_updates": Varied("choice", (2, 4))}
    sweep = Sweep.of("quick", over, varied, 2, 0, "asha")
    assert sweep.trials[0] == {}
    assert sweep.settings(0).branching.replay_updates == 14
    assert sweep.settings(1).branching.replay_updates in (2, 4)
    assert sweep.settings(1).updates == 3
    sweeps.begin(tmp_path / "s", sweep)
    assert sweeps.load(tmp_path / "s") == sweep
    with pytest.raises(sweeps.TailraceError, match="not empty"):
        sweeps.begin(tmp_path / "s", sweep)
    results = [Result(1, dict(sweep.trials[1]), "done", 5, 0.7, None)]
    sweeps.write(tmp_path / "s", sweep, results)
    from tailrace.learn import settings as s

    again = s.build(s.read("quick"), s.read(tmp_path / "s" / "best.toml"))
    assert again.model_copy(update={"name": "quick"}) == sweep.settings(1)


def test_scores_of_a_folder_that_is_none(tmp_path):
    assert trials.scores(tmp_path) == []
    (tmp_path / "log.csv").write_text("step\n1\n")
    assert trials.scores(tmp_path) == []
