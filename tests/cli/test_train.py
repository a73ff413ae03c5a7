"""``tailrace train`` on runs that take a moment; what training does is tested in tests/learn."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from learn.tiny import content, log, scenario_file
from tailrace.learn.run_folder import RunFolder
from tailrace.learn.trainer import Trainer
from tailrace.policy.learned import checkpoint

pytestmark = pytest.mark.usefixtures("short_sketches")

CONFIG = """
updates = {updates}
[network]
hidden = 8
attention = 4
scorer_hidden = 4
value_hidden = 4
[demonstrations]
rounds = 2
worlds = 2
decisions = 60
warmup = 30
epochs = 8
batch_size = 32
learning_rate = 0.01
[branching]
worlds = 2
states = 4
gap = 8
warmup = 30
min_horizon_s = 1.0
max_horizon_s = 2.0
epochs = 3
minibatch = 16
[evaluation]
worlds = 1
requests = 120
baselines = ["least_outstanding", "round_robin"]
[stopping]
collapse_share = 1.0
"""


@pytest.fixture
def tiny(tmp_path):
    """Options of a tiny run; writes its files."""
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(updates=2))
    return ("--config", path, "--scenario", scenario_file(tmp_path), "-j", 1)


# ---- a run --------------------------------------------------------------------------------------


@pytest.mark.compiled
def test_one_command_from_nothing_to_a_policy(run, tiny, tmp_path):
    result = run("train", *tiny, "--seed", 3)
    folder = tmp_path / "runs" / "tiny-3"  # by default named by settings and seed
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "settings.json", "baselines.json", "state.safetensors", "checkpoints", "best.tailrace",
        "last.tailrace", "log.csv", "tensorboard", "health.json",
    }  # fmt: skip
    # Nobody looks at a terminal: a line of text per step.
    said = result.stderr.splitlines()
    lines = [line for line in said if not line.startswith("compiling, once")]
    assert len(lines) == 4
    assert re.match(r"\d:\d\d:\d\d step 1/4 clone: samples/s [\d,]+, loss \d", lines[0])
    assert re.match(r"\d:\d\d:\d\d step 4/4 branching: .*entropy .*KL .*vs best rule", lines[3])
    shown = " ".join(result.stdout.split())
    assert "best policy: runs/tiny-3/best.tailrace cost" in shown
    assert "the best rule, " in shown
    assert "neither random nor rigid" in shown
    assert "tensorboard --logdir runs/tiny-3/tensorboard" in shown
    assert log(folder)[-1]["step"] == "3"
    played = run("simulate", "--policy", folder / "best.tailrace", "--requests", 50, "--rate", 9)
    assert "best" in played.output


@pytest.mark.compiled
def test_json_is_all_there_is_on_standard_output(run, tiny, tmp_path):
    result = run("train", *tiny, "-o", "[mine]", "--json")
    assert result.stderr == ""
    told = json.loads(result.stdout, parse_constant=pytest.fail)
    assert told["best"] == "[mine]/best.tailrace"
    assert told["reference"] == "least_outstanding"
    assert told["best_score"] > 0
    assert {check["name"] for check in told["health"]} >= {"ahead of the best rule"}
    # The same run again, and quietly.
    quiet = run("train", "--resume", "[mine]", "-j", 1, "-q")
    assert quiet.stderr == ""
    assert "[mine]/best.tailrace" in quiet.stdout


@pytest.mark.compiled
def test_settings_win_over_the_file_which_wins_over_the_preset(run, tiny, tmp_path):
    run(
        "train", *tiny, "--preset", "quick", "--updates", 1,
        "--set", "advantage=gae", "--set", "objective=clipped",
        "--set", "ppo={clusters=2, decisions=8, chunk=8, minibatch=8, warmup=4}",
        "--set", "demonstrations.rounds=1", "-o", "run", "-q",
    )  # fmt: skip
    given = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert (given["name"], given["updates"]) == ("tiny", 1)
    assert (given["advantage"], given["objective"]) == ("gae", "clipped")
    assert given["demonstrations"]["rounds"] == 1
    assert given["demonstrations"]["decisions"] == 60
    assert given["branching"]["replay_updates"] == 14  # the preset's
    assert [row["phase"] for row in log(tmp_path / "run")] == ["clone", "ppo"]


@pytest.mark.compiled
def test_fine_tuning_on_a_cluster_and_requests_of_ones_own(run, tiny, tmp_path):
    run("train", *tiny, "-o", "general", "-q")
    run("workload", "write", "chat", "--requests", 400, "--rate", 12, "--out", "mine.parquet")
    (tmp_path / "mine.toml").write_text("[[cluster.replicas]]\ncount = 3\nspeed = 0.7\n")
    tuned = (
        "train", "--config", tmp_path / "tiny.toml", "--from", "general/best.tailrace",
        "--cluster", "mine.toml", "--workload", "mine.parquet", "-j", 1, "-q",
    )  # fmt: skip
    run(*tuned, "-o", "tuned", "--set", "demonstrations.rounds=0", "--set", "network={}")
    given = json.loads((tmp_path / "tuned" / "settings.json").read_text())
    assert given["network"]["hidden"] == 8  # that of the policy it started from
    (scenario,) = given["scenarios"]
    assert scenario["cluster"]["replicas"][0]["speed"] == 0.7
    assert scenario["workload"]["name"] == str(tmp_path / "mine.parquet")
    # The policy it started from was judged too: the best is never worse than that.
    start, best = (checkpoint.load(tmp_path / n / "best.tailrace") for n in ("general", "tuned"))
    moved = {k for k, v in best.tensors.items() if (v != start.tensors[k]).any()}
    assert moved or best.about["training"]["step"] == -1
    assert [row["phase"] for row in log(tmp_path / "tuned")] == ["branching"] * 2
    same = run(*tuned, "-o", "again", "--set", "demonstrations.rounds=0")
    assert same.exit_code == 0
    assert (tmp_path / "tuned" / "last.tailrace").read_bytes() == (
        tmp_path / "again" / "last.tailrace"
    ).read_bytes()


# ---- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.compiled
def test_ctrl_c_leaves_a_run_that_goes_on_as_if_nothing_had_happened(run, tmp_path):
    """Two processes, as from a terminal: all of them get the signal. Resumed by one."""
    config = tmp_path / "tiny.toml"
    config.write_text(CONFIG.format(updates=8))
    arguments = ["--config", config, "--scenario", scenario_file(tmp_path), "-j", "2", "-o", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", "train", *map(str, arguments)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Started in the background, this process may ignore the signal, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        _wait_for(tmp_path / "run" / "state.safetensors", process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "stopped; go on with: tailrace train --resume run\n" in err
    assert "Traceback" not in err
    before = checkpoint.load(tmp_path / "run" / "last.tailrace").about["training"]["step"]
    assert 0 <= before < 9
    run("train", "--resume", "run", "-j", 1, "-q")
    assert len(log(tmp_path / "run")) == 10
    Trainer(tmp_path / "whole", RunFolder(tmp_path / "run").settings(), 1).run()
    ours, whole = content(tmp_path / "run"), content(tmp_path / "whole")
    assert [name for name in whole if ours[name] != whole[name]] == []


def _wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    for _ in range(6000):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    pytest.fail(f"no {path} after two minutes")


@pytest.mark.compiled
def test_ctrl_c_before_the_first_step(run, tiny, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tailrace.learn.validation.Validation.evaluate_rules", interrupted)
        result = run("train", *tiny, "-o", "run", code=130)
        assert "go on with: tailrace train --resume run" in result.stderr
    with monkeypatch.context() as patch:
        patch.setattr("tailrace.learn.trainer.WorldSchedule", interrupted)
        result = run("train", *tiny, "-o", "whole", code=130)
        assert "give the same command again" in result.stderr
    run("train", "--resume", "run")
    run("train", *tiny, "-o", "whole")
    ours, whole = content(Path("run")), content(Path("whole"))
    assert [name for name in whole if ours[name] != whole[name]] == []


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "quik"], "unknown preset 'quik'; did you mean quick?"),
        (["--scenario", "demoo"], "unknown scenario 'demoo'; did you mean demo"),
        (["--scenario", "none.toml"], "cannot read none.toml"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--config", "mine.conf"], "cannot read mine.conf"),
        (["--set", "branching.kl_limt=1"], "did you mean branching.kl_limit"),
        (["--set", "updates"], "--set needs KEY=VALUE"),
        (["--set", "updates=many"], "updates: Input should be a valid integer"),
        (["--set", "demonstrations.teachers={oracle=1}"], "unknown teacher 'oracle'"),
        (["--set", "evaluation.baselines=['rr']"], "unknown rule 'rr'"),
        (["--set", "reward.e2e=1"], "needs advantage = 'gae' or 'grouped'"),
        (
            ["--from", "round_robin", "--scenario", "demo"],
            "training can start from a trained policy only",
        ),
        (["--from", "tailrace", "--preset", "quick"], "set demonstrations.rounds=0"),
        (["--cluster", "none.toml"], "cannot read none.toml"),
        (["--workload", "caht"], "caht"),
        (["--workload", "chat", "--scenario", "demo"], "both say what to train on"),
        (["--seed", "900"], "900 is not in the range 0<=x<=899"),
        (["--updates", "-1"], "-1 is not in the range"),
        (["-j", "0"], "0 is not in the range"),
        (["--resume", "nowhere"], "nowhere is no training run"),
        (["--resume", "nowhere", "--seed", "1"], "takes no other settings but --jobs"),
        (["--resume", "nowhere", "--preset", "quick"], "takes no other settings"),
        (["--resume", "nowhere", "-o", "elsewhere"], "takes no other settings"),
        (["--resume", "nowhere", "--set", "updates=3"], "takes no other settings"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_sentence_and_nothing_is_written(refuse, arguments, message):
    assert message in refuse("train", *arguments)


@pytest.mark.filterwarnings("default::tailrace.errors.RenamedSettingWarning")
def test_a_former_name_of_a_setting_works_and_one_line_tells_the_new_one(run, tmp_path):
    path = tmp_path / "old.toml"
    path.write_text("[branching]\nlongest_s = 8\n")
    result = run(
        "train", "--preset", "quick", "--config", path, "--set", "branching.shortest_s=9", code=2
    )
    assert result.stderr.splitlines() == [
        "warning: setting longest_s is now called max_horizon_s; the old name still works",
        "warning: setting shortest_s is now called min_horizon_s; the old name still works",
        "error: branching.min_horizon_s is above branching.max_horizon_s",
    ]


def test_a_folder_with_something_in_it_is_left_alone(refuse, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert "not an empty folder" in refuse("train", "-o", "mine")
    (tmp_path / "mine" / "settings.json").write_text("{}")
    assert "holds a training run already" in refuse("train", "-o", "mine")


def test_without_torch_it_says_what_to_install(refuse, monkeypatch):
    monkeypatch.setattr("tailrace.cli.console.find_spec", lambda name: None)
    assert "pip install 'tailrace[train]'" in refuse("train")


def test_help_names_the_presets_and_all_options(run):
    text = run("train", "--help").stdout
    for word in ("quick", "full", "--resume", "--set", "--jobs", "docs/training.md", "--json"):
        assert word in text
