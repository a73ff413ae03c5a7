import pytest

from learn.tiny import Noted, log, scenario_file, settings
from tailrace.env.reward import RewardSettings
from tailrace.errors import TailraceError
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


def test_a_ramp_moves_load_and_reward_evenly():
    stages = (
        Stage(name="easy", load=0.5, updates=2, late_weight=1.0),
        Stage(
            name="hard", load=0.9, ramp=4, updates=5, reward={"late": 3.0, "e2e": 1.2, "bound": 9.0}
        ),
        Stage(name="last", ramp=2),
    )
    curriculum = Curriculum(stages, RewardSettings(e2e=0.4, late=2.0))
    loads, late, e2e = [], [], []
    for _ in range(10):
        stage = curriculum.stage
        loads.append(stage.load)
        late.append(stage.reward_changes.get("late", 2.0))
        e2e.append(stage.reward_changes.get("e2e", 0.4))
        if stage.name == "hard":
            assert stage.reward_changes["bound"] == 9.0  # there was none before: at once
        curriculum.after_update(None)
    assert loads == pytest.approx([0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.95, 1.0, 1.0])
    assert late == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 2.5, 2.0, 2.0])
    assert e2e == pytest.approx([0.4, 0.4, 0.6, 0.8, 1.0, 1.2, 1.2, 0.8, 0.4, 0.4])


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"name": "a", "ramp": 2}], "nothing to ramp from"),
        ([{"name": "a", "updates": 1}, {"name": "b", "updates": 2, "ramp": 3}, {"name": "c"}],
         "before its ramp of 3"),
        ([{"name": "a", "reward": {"laet": 1.0}}], "reward of stage a: unknown setting 'laet'"),
        ([{"name": "a", "reward": {"bound": -1.0}}], "reward of stage a: bound"),
    ],
)  # fmt: skip
def test_stages_that_make_no_sense(tmp_path, stages, message):
    with pytest.raises(TailraceError, match=message):
        settings(tmp_path, {"advantage": "gae", "curriculum": stages})


def test_a_stage_may_change_any_setting_of_the_reward(tmp_path):
    stage = {"name": "a", "reward": {"tpot_late": 0.5, "relative": 1.0, "reference": "round_robin"}}
    given = settings(tmp_path, {"advantage": "gae", "reward": {"e2e": 0.7}, "curriculum": [stage]})
    found = given.reward_of(given.curriculum[0])
    assert (found.tpot_late, found.rule, found.e2e) == (0.5, "round_robin", 0.7)
    assert given.reward.tpot_late == 0


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
