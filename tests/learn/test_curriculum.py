import pytest

from learn.tiny import Noted, log, scenario_file, settings
from tailrace.learn.curriculum import Curriculum
from tailrace.learn.settings import Stage


def names(curriculum, scores):
    """The stage of each update, given the score after it (None: no evaluation)."""
    played = []
    for score in scores:
        played.append(curriculum.stage.name)
        curriculum.after_update(score)
    return played


STAGES = (
    Stage(name="a", updates=2),
    Stage(name="b", until_score=0.9),
    Stage(name="c", updates=3, until_score=0.8),
    Stage(name="d"),
)


def test_stages_end_by_schedule_by_score_or_by_whichever_comes_first():
    scores = [0.1, None, 1.0, 0.91, 0.9, 0.85, None, None, None, 0.1]
    assert names(Curriculum(STAGES), scores) == list("aabbbcccdd")
    early = names(Curriculum(STAGES), [None, None, 0.5, 0.79, 0.1, 0.1])
    assert early == list("aabcdd")


def test_the_last_stage_has_no_end():
    assert names(Curriculum((Stage(name="a", updates=1),)), [0.1] * 3) == list("aaa")


def test_without_stages_there_is_none():
    curriculum = Curriculum(())
    curriculum.after_update(0.5)
    assert curriculum.stage is None
    assert curriculum.first is None


def test_a_state_says_how_far_it_is():
    scores = [None, None, 1.0, 0.9, None, None]
    whole = names(Curriculum(STAGES), scores)
    for cut in range(len(scores)):
        before, after = Curriculum(STAGES), Curriculum(STAGES)
        names(before, scores[:cut])
        after.restore(before.state())
        assert names(after, scores[cut:]) == whole[cut:]
        assert after.first is STAGES[0]


@pytest.mark.compiled
def test_switches_are_logged_and_reach_the_tasks(tmp_path, monkeypatch):
    """Load, scenarios and strictness of each stage, as the roll-outs of its updates get them."""
    pytest.importorskip("torch")
    from tailrace.learn.improve import rollout_source
    from tailrace.learn.trainer import Trainer

    played = []
    real = rollout_source.collect

    def collect(task):
        played.append((task.worlds(task.episode_seeds[0]).workload.rate, task.reward.late))
        return real(task)

    monkeypatch.setattr(rollout_source, "collect", collect)
    files = [scenario_file(tmp_path, "chat", rate) for rate in (8.0, 12.0)]
    given = settings(
        tmp_path,
        {
            "scenarios": files,
            "advantage": "gae",
            "objective": "clipped",
            "updates": 3,
            "demonstrations": {"rounds": 1},
            "curriculum": [
                {"name": "easy", "load": 0.5, "scenarios": files[1:], "updates": 1},
                {"name": "strict", "late_weight": 7.0, "scenarios": files[:1], "until_score": 1e9},
                {"name": "all"},
            ],
        },
    )
    watcher = Noted()
    Trainer(tmp_path / "run", given, 1, watcher).run()
    assert played[0:4] == [(6.0, 2.0)] * 2 + [(8.0, 7.0)] * 2
    assert {late for _, late in played[4:]} == {2.0}
    rows = log(tmp_path / "run")
    assert [row["stage"] for row in rows] == ["easy", "easy", "strict", "all"]
    switches = [phase for phase in watcher.phases if phase.startswith("curriculum")]
    assert switches == ["curriculum: strict", "curriculum: all"]
    assert [told["curriculum/stage"] for told in watcher.metrics] == [0, 0, 1, 2]
