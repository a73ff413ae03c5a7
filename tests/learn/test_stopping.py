import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learn.tiny import Noted, content, log, settings, train  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.settings import StoppingSettings  # noqa: E402
from tailrace.learn.stopping import EvaluationsBehind, check_collapse, health  # noqa: E402
from tailrace.learn.trainer import Trainer  # noqa: E402
from tailrace.learn.validation import Validation, ValidationResult  # noqa: E402
from tailrace.learn.worlds import FIGURE_NAMES  # noqa: E402
from tailrace.policy.learned import checkpoint  # noqa: E402

PPO = {"advantage": "gae", "objective": "clipped"}

RULE = ("lmetric", 0.8)
#: Scores of a policy that a run is made to believe in, one after the other.
GOOD, BAD = 0.5, 2.0


def result(*shares: float, score: float = 1.0) -> ValidationResult:
    figures = dict.fromkeys(FIGURE_NAMES, 1.0)
    return ValidationResult((1.0,), score, figures, shares, np.array(shares), {})


@pytest.fixture
def scored(monkeypatch):
    """Give the evaluations of a run scores instead of playing; the rules get 1."""

    def scored(*scores):
        left = iter(scores)
        monkeypatch.setattr(Validation, "evaluate", lambda *_: result(0.4, score=next(left)))
        monkeypatch.setattr(Validation, "best_rule", ("lmetric", 1.0))

    return scored


# ---- collapse -----------------------------------------------------------------------------------


def test_collapsed_is_a_policy_that_uses_one_replica_in_every_world():
    settings = StoppingSettings(collapse_share=0.99)
    check_collapse(result(1.0, 0.98, 1.0), settings)
    check_collapse(result(), settings)
    with pytest.raises(TailraceError, match=r"collapsed.*99\.0% .*lower the learning rate"):
        check_collapse(result(1.0, 0.99, 1.0), settings)


@pytest.mark.compiled
def test_a_run_whose_policy_collapses_is_stopped_with_its_best_policy_kept(tmp_path, monkeypatch):
    verdicts = iter([result(0.4, score=0.9), result(0.4, score=0.8), result(1.0, score=2.0)])
    monkeypatch.setattr(Validation, "evaluate", lambda *_: next(verdicts))
    monkeypatch.setattr(Validation, "best_rule", ("lmetric", 1.0))
    with pytest.raises(TailraceError, match="the policy has collapsed"):
        train(tmp_path, {})
    assert checkpoint.load(tmp_path / "run" / "best.tailrace").about["training"]["step"] == 1
    assert len(log(tmp_path / "run")) == 2


# ---- behind a rule ------------------------------------------------------------------------------


def test_behind_counts_evaluations_in_a_row():
    behind = EvaluationsBehind(StoppingSettings(patience=3))
    assert behind.update(0.9, RULE)
    assert behind.update(0.9, RULE)
    assert not behind.update(0.8, RULE)  # level with it is not behind
    assert behind.update(0.81, RULE)
    assert behind.update(0.81, RULE)
    with pytest.raises(
        TailraceError, match=r"behind lmetric for 3 evaluations.*stopping\.patience = 0"
    ):
        behind.update(0.81, RULE)
    never = EvaluationsBehind(StoppingSettings(patience=0))
    assert all(never.update(9.0, RULE) for _ in range(50))


def test_a_score_that_is_no_number_is_an_error():
    with pytest.raises(TailraceError, match="score is no number"):
        EvaluationsBehind(StoppingSettings()).update(float("nan"), RULE)


@pytest.mark.compiled
def test_a_run_behind_a_rule_is_stopped_with_its_best_policy_kept(tmp_path, scored):
    scored(BAD, GOOD, BAD, BAD, BAD)  # two rounds of cloning, then updates
    with pytest.raises(TailraceError, match="behind lmetric for 3 evaluations"):
        train(tmp_path, {"updates": 9, "stopping": {"patience": 3}})
    best = checkpoint.load(tmp_path / "run" / "best.tailrace")
    assert best.about["training"]["step"] == 1
    assert best.about["scores"]["score"] == GOOD
    assert [row["red_flag"] for row in log(tmp_path / "run")] == ["0", "0", "1", "1"]


@pytest.mark.compiled
def test_a_red_flag_starts_a_pulse(tmp_path, scored):
    scored(GOOD, GOOD, GOOD, BAD, GOOD, GOOD)
    over = {
        **PPO,
        "updates": 4,
        "exploration": {"pulse_factor": 3.0, "pulse_updates": 1, "pulse_decay": 0.5},
    }
    watcher = Noted()
    train(tmp_path, over, watcher=watcher)
    updates = watcher.metrics[2:]
    assert [told["red_flag"] for told in updates] == [0, 1, 0, 0]
    assert [told["pulse"] for told in updates] == [0, 0, 1, 0]
    assert [told["temperature"] for told in updates] == [1, 1, 3, 2]
    assert [row["pulse"] for row in log(tmp_path / "run")] == ["", "", "0.0", "0.0", "1.0", "0.0"]


# ---- not a number -------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("over", [{}, PPO], ids=["branching", "ppo"])
def test_weights_that_are_no_numbers_stop_the_run_and_spoil_no_file(tmp_path, over):
    class Poison(Noted):
        """Spoils the weights after cloning."""

        def step(self, step, steps, metrics):
            if step == 2:
                with torch.no_grad():
                    trainer.network.scorer.output.weight[:] = torch.nan

    trainer = Trainer(tmp_path / "run", settings(tmp_path, over), 1, Poison())
    with pytest.raises(TailraceError, match=r"not finite|no number|is nan"):
        trainer.run()
    for name in ("best", "last"):
        policy = checkpoint.load(tmp_path / "run" / f"{name}.tailrace")
        assert policy.about["training"]["step"] <= 1
    outcome = Trainer(tmp_path / "run", None, 1).run()  # from the last good state
    assert np.isfinite(outcome.best_score)


@pytest.mark.compiled
def test_an_absurd_learning_rate_is_survived_or_told(tmp_path):
    over = {**PPO, "updates": 3, "ppo": {"learning_rate": 1e30, "max_grad_norm": 1e30}}
    with pytest.raises(TailraceError, match=r"finite|runs away|nan|no number"):
        train(tmp_path, over)
    assert checkpoint.load(tmp_path / "run" / "last.tailrace").about["training"]["step"] == 1


@pytest.mark.compiled
def test_a_dead_reward_stops_the_run_at_its_first_update(tmp_path):
    with pytest.raises(TailraceError, match="the reward is dead"):
        train(tmp_path, {**PPO, "reward": {"bound": 1e-12}})
    assert len(log(tmp_path / "run")) == 2


# ---- health -------------------------------------------------------------------------------------


def found(rows=(), score=0.7, shares=()):
    return {check.name: check.ok for check in health(rows, score, RULE, shares)}


def test_the_verdict_on_a_run():
    fine = {"clip_fraction": 0.1, "entropy_fraction": 0.3, "raw_reward_deviation": 0.1}
    assert set(found([fine], shares=[(4, 0.3)]).values()) == {True}
    assert found() == {"ahead of the best rule": True}
    assert not found(score=0.8)["ahead of the best rule"]
    assert not found([fine | {"clip_fraction": 0.5}])["few clipped ratios"]
    assert not found([fine | {"entropy_fraction": 0.99}])["neither random nor rigid"]
    assert not found([fine | {"entropy_fraction": 0.001}])["neither random nor rigid"]
    assert not found([fine | {"raw_reward_deviation": 0.0}])["the reward is alive"]
    assert not found(shares=[(4, 0.3), (2, 0.8)])["no hoarding on equal replicas"]
    # The last updates count.
    assert found([fine | {"clip_fraction": 0.9}] * 9 + [fine] * 10)["few clipped ratios"]


@pytest.mark.compiled
def test_the_verdict_is_written_and_survives_resuming(tmp_path):
    outcome = train(tmp_path, {**PPO})
    written = json.loads((tmp_path / "run" / "health.json").read_text())
    assert [check["name"] for check in written] == [check.name for check in outcome.health]
    assert {"few clipped ratios", "the reward is alive"} < {check["name"] for check in written}
    before = content(tmp_path / "run")["health"]
    Trainer(tmp_path / "run", None, 1).run()
    assert content(tmp_path / "run")["health"] == before
