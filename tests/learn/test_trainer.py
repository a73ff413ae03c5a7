from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learn.tiny import (  # noqa: E402
    NETWORK,
    Noted,
    StopAfter,
    StopIn,
    Stopped,
    content,
    log,
    settings,
    train,
)
from tailrace.errors import RenamedSettingWarning, TailraceError  # noqa: E402
from tailrace.learn import settings as s  # noqa: E402
from tailrace.learn.improve.learner import Learner  # noqa: E402
from tailrace.learn.samples import Samples, write_samples  # noqa: E402
from tailrace.learn.trainer import Trainer  # noqa: E402
from tailrace.learn.validation import Validation  # noqa: E402
from tailrace.policy.learned import checkpoint  # noqa: E402
from tailrace.policy.learned.architecture import SKETCH  # noqa: E402
from tailrace.policy.learned.network import HIDDEN_VARIANCE  # noqa: E402
from tailrace.policy.learned.observation import COLUMN  # noqa: E402

pytestmark = pytest.mark.compiled

#: Everything that has a state of its own between two updates, switched on.
BRANCHING = {
    "updates": 3,
    "branching": {
        "replay_updates": 2,
        "imitation_weight": 0.5,
        "imitation_updates": 3,
        "final_learning_rate": 1e-4,
    },
    "curriculum": [{"name": "easy", "load": 0.5, "updates": 1}, {"name": "hard"}],
}
PPO = {
    "advantage": "grouped",
    "objective": "clipped",
    "updates": 3,
    "network": {"memory": 3, "decoupled_critic": True, "prior": "load_aware"},
    "ppo": {
        "imitation_weight": 0.5, "imitation_updates": 3, "imitation_batch_size": 16,
        "start_kl_weight": 0.1, "start_kl_updates": 3, "target_kl": 0.01, "kl_penalty": True,
        "scale_rewards": True, "learning_rate_schedule": "linear", "group_size": 2,
        "learning_rate": 3e-3, "norm_updates": 2,
    },
    "exploration": {
        "entropy_start": 0.01, "entropy_end": 0.02, "entropy_updates": 3, "target_entropy": 0.5,
        "pulse_factor": 2.0, "pulse_updates": 1, "pulse_patience": 1, "pulse_min_improvement": 0.5,
        "epsilon_start": 0.1,
    },
    "curriculum": [
        {"name": "easy", "load": 0.5, "updates": 1},
        {"name": "hard", "late_weight": 4.0},
    ],
}  # fmt: skip


VARIANTS = {"branching": BRANCHING, "ppo": PPO}
#: The estimate and the objective of each, alone.
PLAIN = {
    "branching": {"advantage": "branching", "objective": "kl_limited"},
    "ppo": {"advantage": "gae", "objective": "clipped"},
    "clipped branching": {"advantage": "branching", "objective": "clipped"},
    "KL-limited rollouts": {"advantage": "gae", "objective": "kl_limited"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the scenario all runs here share: its path is in their policy files."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(place):
    """Runs without interruption, by method; each is done once."""
    done = {}

    def whole(method):
        if method not in done:
            run = place / method
            Trainer(run, settings(place, VARIANTS[method]), 1).run()
            done[method] = content(run)
        return done[method]

    return whole


def changed(a, b):
    """Names of what differs."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# ---- the same again -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", VARIANTS)
def test_the_seed_decides_every_byte(method, whole, place, tmp_path):
    Trainer(tmp_path / "same", settings(place, VARIANTS[method]), 1).run()
    assert changed(content(tmp_path / "same"), whole(method)) == []
    Trainer(tmp_path / "other", settings(place, {**VARIANTS[method], "seed": 1}), 1).run()
    other = content(tmp_path / "other")
    assert other["best.tailrace"] != whole(method)["best.tailrace"]
    weights = [name for name in other if name.startswith("state network.actor")]
    assert weights
    assert not [name for name in weights if other[name] == whole(method)[name]]


def test_processes_make_no_difference(whole, place, tmp_path):
    """Two, with work for both methods: labels, branches and evaluations; roll-outs."""
    Trainer(tmp_path / "run", settings(place, PPO), 2).run()
    assert changed(content(tmp_path / "run"), whole("ppo")) == []


@pytest.mark.parametrize("method", VARIANTS)
def test_a_run_stopped_after_every_step_and_resumed_equals_an_uninterrupted_one(
    method, whole, place, tmp_path
):
    given = settings(place, VARIANTS[method])
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        Trainer(run, given, 1, StopAfter(1)).run()
    for step in range(2, given.steps + 1):
        with pytest.raises(Stopped):
            Trainer(run, None, 1, StopAfter(step)).run()
    Trainer(run, None, 1).run()
    assert changed(content(run), whole(method)) == []


@pytest.mark.parametrize(
    ("method", "phase", "time"),
    [("branching", "cloning", 2), ("branching", "branching", 2), ("ppo", "evaluating", 4)],
)
def test_a_run_stopped_in_the_middle_of_a_step_loses_that_step_only(
    method, phase, time, whole, place, tmp_path
):
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        Trainer(run, settings(place, VARIANTS[method]), 1, StopIn(phase, time)).run()
    watcher = Noted()
    Trainer(run, None, 1, watcher).run()
    assert len(watcher.metrics) == {"cloning": 4, "branching": 2, "evaluating": 2}[phase]
    assert changed(content(run), whole(method)) == []


def test_a_finished_run_can_be_resumed_without_effect(place, whole):
    run = place / "branching"
    whole("branching")
    outcome = Trainer(run, None, 1).run()
    assert changed(content(run), whole("branching")) == []
    assert outcome.best == run / "best.tailrace"
    assert SKETCH in checkpoint.load(outcome.best).tensors


# ---- what a run does ----------------------------------------------------------------------------


@pytest.mark.parametrize("better", [True, False])
def test_the_average_of_the_last_checkpoints_is_kept_if_it_is_the_best(
    better, place, tmp_path, monkeypatch
):
    evaluate, told = Validation.evaluate, []

    def rigged(self, driver, workers):
        told.append(len(told) + 1.0)
        return replace(evaluate(self, driver, workers), score=1 / told[-1] if better else told[-1])

    monkeypatch.setattr(Validation, "evaluate", rigged)
    asked = {**BRANCHING, "evaluation": {"average_checkpoints": 2}}
    outcome = Trainer(tmp_path / "run", settings(place, asked), 1).run()
    last = sorted((tmp_path / "run" / "checkpoints").glob("*.tailrace"))[-2:]
    first, second = (checkpoint.read(path)[1] for path in last)
    best = checkpoint.read(outcome.best)[1]
    off = [name for name in first if not np.allclose(best[name], (first[name] + second[name]) / 2)]
    assert (off == []) == better
    assert outcome.best_score == (1 / told[-1] if better else 1.0)


@pytest.mark.parametrize("resumed", [True, False])
def test_a_policy_far_behind_the_best_one_is_given_up_for_it(resumed, place, tmp_path, monkeypatch):
    evaluate, scores = Validation.evaluate, [1.0, 0.9, 2.0, 0.8, 0.81, 0.9]

    def rigged(self, driver, workers):
        return replace(evaluate(self, driver, workers), score=scores.pop(0))

    monkeypatch.setattr(Validation, "evaluate", rigged)
    asked = {"advantage": "gae", "objective": "clipped", "updates": 4,
             "stopping": {"rollback_ratio": 1.1}}  # fmt: skip
    run = tmp_path / "run"
    if resumed:
        with pytest.raises(Stopped):
            Trainer(run, settings(place, asked), 1, StopAfter(3)).run()
    scores.append(1.0)  # the policy that was put back at the end is judged again
    Trainer(run, None if resumed else settings(place, asked), 1).run()
    rows = log(run)
    assert [row["rolled_back"] for row in rows] == ["0", "0", "1", "0", "0", "1"]
    rates = [float(row["learning_rate"]) for row in rows[2:]]
    assert rates == pytest.approx([3e-4, 1.5e-4, 1.5e-4, 1.5e-4])
    kept = [checkpoint.read(run / "checkpoints" / f"{k:06d}.tailrace")[1] for k in range(6)]

    def same(a, b):
        return all((a[name] == b[name]).all() for name in a)

    assert same(kept[2], kept[1])
    assert not same(kept[3], kept[2])
    assert same(kept[5], kept[3])
    assert same(checkpoint.read(run / "last.tailrace")[1], kept[3])


def test_a_run_clones_improves_and_keeps_the_best(tmp_path):
    """Cloning alone makes it better than by turns; the outcome names what is in the folder."""
    watcher = Noted()
    over = {
        "updates": 3,
        "demonstrations": {"decisions": 150, "epochs": 15},
        "branching": {"states": 8, "learning_rate": 3e-3},
        "evaluation": {"requests": 400, "baselines": ["round_robin", "least_outstanding"]},
    }
    outcome = train(tmp_path, over, watcher=watcher)
    rows = log(tmp_path / "run")
    scores = [float(row["score"]) for row in rows]
    assert outcome.best_score == min(scores) < 1
    assert outcome.reference == "round_robin"
    assert outcome.best_rule[0] == "least_outstanding"
    best = checkpoint.load(outcome.best)
    step = int(np.argmin(scores))
    assert best.about["training"]["step"] == step
    same = checkpoint.read(tmp_path / "run" / "checkpoints" / f"{step:06d}.tailrace")[1]
    assert all((best.tensors[name] == tensor).all() for name, tensor in same.items())
    # Each evaluation that is better than all before is marked.
    records = [score == min(scores[: k + 1]) for k, score in enumerate(scores)]
    assert [row["best"] == "1" for row in rows] == records
    assert watcher.phases[:4] == ["preparing", "judging rules", "demonstrations", "cloning"]
    assert watcher.phases.count("evaluating") == 5


def test_evaluations_and_checkpoints_by_their_intervals(tmp_path):
    over = {
        "updates": 5,
        "demonstrations": {"rounds": 1},
        "evaluation": {"every": 2, "checkpoint_every": 3},
    }
    train(tmp_path, over)
    rows = log(tmp_path / "run")
    assert [bool(row["score"]) for row in rows] == [True, False, True, False, True, True]
    kept = sorted(path.stem for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["000000", "000003", "000005"]


@pytest.mark.parametrize("method", PLAIN)
def test_from_random_weights_and_cloning_only(tmp_path, method):
    # Of another seed: random weights may send everything to one replica.
    over = {**PLAIN[method], "demonstrations": {"rounds": 0}, "updates": 1, "seed": 1}
    train(tmp_path, over)
    section = "branching" if "branching" in method else "ppo"
    assert [row["phase"] for row in log(tmp_path / "run")] == [section]
    other = tmp_path / "other"
    other.mkdir()
    train(other, {**PLAIN[method], "updates": 0})
    assert [row["phase"] for row in log(other / "run")] == ["clone", "clone"]


@pytest.mark.parametrize("method", VARIANTS)
def test_randomised_worlds_beside_a_scenario_and_resumed(tmp_path, method, monkeypatch):
    """Capacities are measured once: they belong to the state."""
    random = {"workloads": {"chat": 1}, "replicas": [2, 4], "share": 0.5, "failures": 1.0}
    over = {**PLAIN[method], "randomise": random, "evaluation": {"randomised": 2}}
    given = settings(tmp_path, over)
    Trainer(tmp_path / "whole", given, 1).run()
    with pytest.raises(Stopped):
        Trainer(tmp_path / "run", given, 1, StopAfter(3)).run()
    monkeypatch.setattr(
        "tailrace.learn.randomisation.saturation_rps", lambda *_: pytest.fail("measured again")
    )
    Trainer(tmp_path / "run", None, 1).run()
    assert changed(content(tmp_path / "run"), content(tmp_path / "whole")) == []


def test_imitation_fades_and_weighs(tmp_path, monkeypatch):
    """Lessons are there as long as they weigh anything, and their weight falls evenly."""
    weights = []
    real = Learner._epoch

    def epoch(learner, groups, context):
        weights.append((context.imitation_weight, sum(map(len, context.demonstrations))))
        return real(learner, groups, context)

    monkeypatch.setattr(Learner, "_epoch", epoch)
    once = {"branching": {"imitation_weight": 0.8, "imitation_updates": 2, "epochs": 1}}
    train(tmp_path, {"updates": 3, **once})
    assert weights == [(0.8, 240), (0.4, 240), (0.0, 240)]
    weights.clear()
    other = tmp_path / "other"
    other.mkdir()
    train(other, {"branching": {"epochs": 1}})
    assert weights == [(0.0, 0)] * 2


# ---- cloning from a trained policy --------------------------------------------------------------


def test_a_policy_taught_by_itself_and_others_keeps_its_norms_and_can_be_resumed(tmp_path):
    train(tmp_path)
    start = tmp_path / "run" / "last.tailrace"
    lessons = {"teachers": {"start": 1.0, "lmetric": 1.0}, "best_teacher": True}
    given = settings(tmp_path, {"start": str(start), "demonstrations": lessons})
    Trainer(tmp_path / "taught", given, 1).run()
    old, new = (checkpoint.load(p) for p in (start, tmp_path / "taught" / "last.tailrace"))
    assert (old.tensors["replica_norm.mean"] == new.tensors["replica_norm.mean"]).all()
    assert (old.tensors["actor.hidden.weight"] != new.tensors["actor.hidden.weight"]).any()
    with pytest.raises(Stopped):
        Trainer(tmp_path / "stopped", given, 1, StopAfter(1)).run()
    Trainer(tmp_path / "stopped", None, 1).run()
    assert changed(content(tmp_path / "stopped"), content(tmp_path / "taught")) == []


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_policy_older_than_some_features_learns_them_from_demonstrations(tmp_path, rounds):
    start = Path(__file__).parents[1] / "data" / "v0_1_0" / "tiny.tailrace"
    lessons = {"teachers": {"start": 1.0, "lmetric": 1.0}, "best_teacher": True, "rounds": rounds}
    given = settings(tmp_path, {"start": str(start), "demonstrations": lessons})
    Trainer(tmp_path / "run", given, 1).run()
    old, new = (checkpoint.load(p) for p in (start, tmp_path / "run" / "last.tailrace"))
    assert "own_s" in old.config.ignore
    assert ("own_s" in new.config.ignore) == (rounds == 0)
    assert not old.tensors["actor.input.weight"][:, COLUMN.own_s].any()
    # One that is ignored normalises to nothing, whatever its weights are.
    assert rounds == 0 or new.tensors["actor.input.weight"][:, COLUMN.own_s].any()
    assert new.tensors["replica_norm.var"][COLUMN.own_s] > 0.01


def test_a_run_can_hide_features_of_the_policy_it_starts_from(tmp_path):
    """On top of those that policy already ignores, and from its clone as from its last policy."""
    train(tmp_path, {"network": {**NETWORK, "ignore": ["trend"]}})
    start = tmp_path / "run" / "last.tailrace"
    over = {
        "start": str(start),
        "network": {"ignore": ["recent_work"]},
        "demonstrations": {"teachers": {"start": 1.0}, "rounds": 1},
    }
    Trainer(tmp_path / "hidden", settings(tmp_path, over), 1).run()
    old, new = (checkpoint.load(p) for p in (start, tmp_path / "hidden" / "last.tailrace"))
    assert old.config.ignore == ("trend",)
    assert new.config.ignore == ("trend", "recent_work")
    assert new.config.hidden == old.config.hidden
    for column in (COLUMN.trend, COLUMN.recent_work):
        assert new.tensors["replica_norm.var"][column] == HIDDEN_VARIANCE


def test_demonstrations_of_a_file_alone_are_cloned_and_checked(tmp_path):
    """Decisions that always take the last replica; the clone does so too."""
    rng = np.random.default_rng(3)
    made = Samples.empty(400, 3, 0)
    made.replica_obs[:] = rng.normal(size=made.replica_obs.shape)
    made.replica_obs[..., COLUMN.speed] = [0.0, 0.0, 2.0]
    made.mask[:] = made.tried[:] = True
    made.costs[:] = [1.0, 1.0, 0.0]
    path = tmp_path / "seen.npz"
    write_samples(made, path)
    only = {"rounds": 1, "worlds": 0, "files": [str(path)]}
    over = {"demonstrations": only, "updates": 0}
    train(tmp_path, over)
    (row,) = log(tmp_path / "run")
    assert row["phase"] == "clone"
    assert float(row["samples"]) == 400
    assert float(row["imitation_loss"]) < 0.2
    # Norms were taught by the file.
    tensors = checkpoint.read(tmp_path / "run" / "last.tailrace")[1]
    assert tensors["replica_norm.mean"][COLUMN.speed] == pytest.approx(2 / 3, abs=0.01)
    path.write_bytes(b"other")
    with pytest.raises(TailraceError, match=r"seen\.npz has changed since the run began"):
        Trainer(tmp_path / "run", None, 1)
    with pytest.raises(TailraceError, match=r"seen\.npz holds no demonstrations"):
        Trainer(tmp_path / "again", settings(tmp_path, over), 1)
    assert not (tmp_path / "again").exists()


def test_files_need_a_round_to_be_learnt_from(tmp_path):
    for wrong, complaint in (
        ({"rounds": 0, "files": ["a.npz"]}, "set rounds to 1"),
        ({"rounds": 1, "worlds": 0}, "name some"),
        ({"rounds": 2, "worlds": 0, "files": ["a.npz"]}, "rounds = 1"),
    ):
        with pytest.raises(TailraceError, match=complaint):
            settings(tmp_path, {"demonstrations": wrong})


def test_a_run_whose_normaliser_nothing_teaches_is_told(tmp_path):
    scratch = {"demonstrations": {"rounds": 0}, **PLAIN["ppo"]}
    (caution,) = settings(tmp_path, scratch).cautions
    assert "nothing teaches the normaliser" in caution
    assert settings(tmp_path, scratch | {"ppo": {"norm_updates": 3}}).cautions == []
    assert settings(tmp_path).cautions == []


def test_a_clone_that_prefers_nothing_is_explained(tmp_path, monkeypatch):
    """A clone of random takes the best of nearly equal choices, however bad that is."""
    monkeypatch.setattr("tailrace.learn.trainer.WORTH_EXPLAINING", 0.5)
    watcher = Noted()
    over = {
        "demonstrations": {"rounds": 1, "teachers": {"random": 1, "lookahead": 0}},
        "updates": 0,
        "stopping": {"collapse_share": 0.4},
    }
    train(tmp_path, over, watcher=watcher)
    (note,) = [note for note in watcher.notes if "clone" in note]
    assert "hardly prefers one replica" in note
    assert watcher.metrics[0]["clone_entropy_fraction"] > 0.9
    sure = Noted()
    (tmp_path / "sure").mkdir()
    train(tmp_path / "sure", {"updates": 0}, watcher=sure)
    assert sure.metrics[-1]["clone_entropy_fraction"] < 0.9
    assert sure.notes == []


@pytest.mark.parametrize("action", ["count", "warn", "end"])
def test_requests_beyond_the_latency_limit_raise_alarms(tmp_path, action):
    watcher = Noted()
    limit = {"latency_limit_s": 0.5, "latency_action": action, "latency_penalty": 3.0}
    train(
        tmp_path, {"advantage": "gae", "objective": "clipped", "stopping": limit}, watcher=watcher
    )
    rows = [row for row in log(tmp_path / "run") if row["phase"] != "clone"]
    assert all(float(row["alarms"]) > 0 for row in rows)
    assert bool([note for note in watcher.notes if "longer than 0.5 s" in note]) == (
        action == "warn"
    )


def test_the_latency_limit_may_be_called_safety(tmp_path):
    data = {}
    with pytest.warns(RenamedSettingWarning, match="stopping"):
        s.assign(data, "safety.latency_limit_s", 4.0)
    assert settings(tmp_path, data).stopping.limit.latency_limit_s == 4.0
    with pytest.raises(TailraceError, match="'end' needs env = 'sim'"):
        settings(
            tmp_path,
            {
                "advantage": "gae",
                "env": "vidur",
                "stopping": {"latency_limit_s": 4.0, "latency_action": "end"},
            },
        )
