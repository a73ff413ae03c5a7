"""Files written by 0.1.0 are still read, and still mean the same.

The files and what 0.1.0 made of them are in data/v0_1_0; make.py there says how they came about.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tailrace import scenario as scenarios
from tailrace.cli import cli
from tailrace.errors import TailraceError
from tailrace.learn import settings as train_settings
from tailrace.router import serve_settings
from tailrace.workload import traces

DATA = Path(__file__).parent / "data" / "v0_1_0"
EXPECTED = json.loads((DATA / "expected.json").read_text())

#: Settings that have another name now, by their path in 0.1.0.
TRAINING = {
    "branching.shortest_s": "branching.min_horizon_s",
    "branching.longest_s": "branching.max_horizon_s",
    "branching.reluctance": "branching.logit_margin",
    "branching.keep": "branching.replay_updates",
    "branching.imitation": "branching.imitation_weight",
    "branching.batch_size": "branching.minibatch",
    "ppo.half_life_s": "ppo.discount_half_life_s",
    "ppo.trace_s": "ppo.gae_lambda_half_life_s",
    "ppo.trace": "ppo.gae_lambda",
    "ppo.imitation_rows": "ppo.imitation_batch_size",
    "ppo.group": "ppo.group_size",
    "ppo.schedule": "ppo.learning_rate_schedule",
    "ppo.clip": "ppo.clip_range",
    "ppo.gradient_clip": "ppo.max_grad_norm",
    "ppo.advantages": "ppo.advantage_normalisation",
    "ppo.discount": "ppo.discount_by",
    "ppo.start_kl": "ppo.start_kl_weight",
    "ppo.imitation": "ppo.imitation_weight",
    "exploration.stagnation": "exploration.pulse_patience",
    "exploration.stagnation_margin": "exploration.pulse_min_improvement",
    "evaluation.checkpoints": "evaluation.checkpoint_every",
    "evaluation.average": "evaluation.average_checkpoints",
    "safety.behind": "stopping.patience",
    "safety.collapse_share": "stopping.collapse_share",
    "safety.dead_deviation": "stopping.min_reward_std",
} | {f"evaluation.rules.{n}": f"evaluation.baselines.{n}" for n in range(10)}
RENAMED: dict[str, dict[str, str]] = {
    "train.toml": TRAINING,
    "curriculum.toml": TRAINING,
    "router.toml": {},
    "scenario.toml": {},
}
pytestmark = pytest.mark.filterwarnings("ignore::tailrace.errors.RenamedSettingWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of all files; it is the working directory."""
    copy = shutil.copytree(DATA, tmp_path / "old")
    monkeypatch.chdir(copy)
    return copy


def run(*arguments: object) -> str:
    """Run a command; return what it printed."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="tailrace")
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all that is in nested data, as (dotted path, value)."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from flat(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# ---- settings -----------------------------------------------------------------------------------


def read_settings(name: str) -> Any:
    path = DATA / "settings" / name
    if name == "router.toml":
        return serve_settings.load(path, {})
    if name == "scenario.toml":
        return scenarios.load(str(path))
    return train_settings.build(train_settings.read(path))


@pytest.mark.parametrize("name", list(RENAMED))
def test_settings_keep_their_names_and_meaning(name, monkeypatch):
    monkeypatch.setenv("FIRST_KEY", "key")
    found = dict(flat(read_settings(name).model_dump(mode="json")))
    expected = dict(flat(EXPECTED["settings"][name]))
    assert len(expected) >= 20
    if method := expected.pop("method", None):  # said the estimate and the objective in one
        assert found["objective"] == {"ppo": "clipped", "branching": "kl_limited"}[method]
        assert (found["advantage"] == "branching") == (method == "branching")
    renamed = RENAMED[name]
    assert {path: found.get(renamed.get(path, path)) for path in expected} == expected


def test_a_calibrated_cluster(folder):
    found = dict(flat(scenarios.load("cluster.toml").model_dump(mode="json")))
    assert {path: found.get(path) for path, _ in flat(EXPECTED["cluster"])} == dict(
        flat(EXPECTED["cluster"])
    )
    assert found["cluster.replicas.0.device"] == "calibrated"


# ---- policies -----------------------------------------------------------------------------------


def test_a_policy_sees_and_scores_as_it_did(folder):
    (found,) = run_json("inspect", "tiny.tailrace", "--state", "state.toml")["states"]
    expected = EXPECTED["policy"]
    assert found["chosen"] == expected["chosen"]
    # Rules that came later are there too.
    assert {name: found["rules"][name] for name in expected["rules"]} == expected["rules"]
    assert len(found["options"]) == len(expected["options"]) == 3
    for option, before in zip(found["options"], expected["options"], strict=True):
        for name in ("logit", "probability"):
            assert option[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6)
        assert len(before["reasons"]) >= 3
        assert [r["name"] for r in option["reasons"]] == [r["name"] for r in before["reasons"]]
        effects = [reason["effect"] for reason in before["reasons"]]
        assert [r["effect"] for r in option["reasons"]] == pytest.approx(effects, 1e-3, 1e-5)


@pytest.mark.compiled
def test_a_policy_says_where_it_comes_from(folder):
    assert "tiny" in run("inspect", "tiny.tailrace", "--state", "state.toml")
    played = run_json(
        "simulate", "--policy", "tiny.tailrace", "--config", "scenario.toml", "--requests", 40
    )
    assert played["scenario"]["cluster"]["replicas"][1]["speed"] == 0.5


# ---- training runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["branching", "ppo"])
def test_a_run_with_fewer_features_is_refused(folder, method):
    """Its weights and its optimiser are those of a smaller network."""
    pytest.importorskip("torch")
    from tailrace.learn.trainer import Trainer

    with pytest.raises(TailraceError, match=r"with other features; .* --from"):
        Trainer(folder / "runs" / method / "interrupted", None, 1)


# ---- decision logs ------------------------------------------------------------------------------


def in_order(names):
    """Number things by their first appearance."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(int(name), len(numbers)) for name in names]


def test_a_decision_log_becomes_the_same_table(folder):
    table = traces.read(folder / "decisions").table
    for name, expected in EXPECTED["table"]["rows"].items():
        if name == "reserved":  # was padding
            continue
        np.testing.assert_array_equal(table.rows[name], expected, err_msg=name)
    runs = EXPECTED["table"]["runs"]
    np.testing.assert_array_equal(table.runs["tokens"], runs["tokens"])
    # Numbers of segments are names: the same are equal.
    np.testing.assert_array_equal(in_order(table.runs["segment"]), in_order(runs["segment"]))
    assert len(table) == 70
    assert (table.rows["parent"] >= 0).sum() == 29
    assert len(table.runs) > 100
