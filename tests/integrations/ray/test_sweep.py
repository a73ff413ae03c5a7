"""`tailrace sweep` with the real Ray Tune on runs that take a moment."""

import json
import shutil

import pytest
from click.testing import CliRunner

from learn.tiny import SETTINGS, content, scenario_file
from tailrace.cli import cli
from tailrace.integrations.ray import space
from tailrace.integrations.ray import sweep as sweeps
from tailrace.learn import settings as s
from tailrace.learn.trainer import Trainer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("cluster"),
]


def sweep(*args):
    result = CliRunner().invoke(cli, ["sweep", "--json", *map(str, args)])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_sweep_ranks_its_trials_and_goes_on_where_it_stopped(tmp_path):
    config = tmp_path / "tiny.toml"
    config.write_text(space.toml({**SETTINGS, "scenarios": [scenario_file(tmp_path)]}))
    folder = tmp_path / "sweep"
    rows = sweep(
        "--config", config, "--set", "branching.learning_rate=log(1e-4,1e-2)",
        "--set", "branching.replay_updates=choice(1,2)", "--samples", 2, "--scheduler", "all",
        "-o", folder,
    )  # fmt: skip
    assert sorted(row["trial"] for row in rows) == [0, 1, 2]
    assert {row["status"] for row in rows} == {"done"}
    assert {row["steps"] for row in rows} == {4}
    assert [row["best_score"] for row in rows] == sorted(row["best_score"] for row in rows)
    assert json.loads((folder / "results.json").read_text()) == rows

    # A trial is nothing but the run that its settings give.
    asked = sweeps.load(folder).settings(1)
    Trainer(tmp_path / "alone", asked, 1).run()
    one = sweeps.trial_folder(folder, 1)
    assert content(tmp_path / "alone") == content(one)
    best = s.build(s.read(folder / "best.toml"))
    assert best == sweeps.load(folder).settings(rows[0]["trial"])

    # One trial is lost altogether, another before its end.
    before = content(one)
    shutil.rmtree(sweeps.trial_folder(folder, 2))
    (one / "health.json").unlink()
    assert sweep("--resume", folder) == rows
    assert content(one) == before


def test_asha_gives_trials_up(tmp_path):
    config = tmp_path / "tiny.toml"
    over = {"updates": 6, "scenarios": [scenario_file(tmp_path)]}
    config.write_text(space.toml({**SETTINGS, **over}))
    rows = sweep(
        "--config", config, "--set", "branching.learning_rate=log(1e-5,0.5)", "--samples", 5,
        "-o", tmp_path / "sweep", "-j", 2,
    )  # fmt: skip
    status = [row["status"] for row in rows]
    assert status[0] == "done"
    assert "stopped" in status
    assert all(row["steps"] == 8 for row in rows if row["status"] == "done")
    assert all(row["best_score"] > 0 for row in rows)
