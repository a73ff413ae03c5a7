"""Make the files beside this script. It is run with Tailrace 0.1.0 installed, and only then.

    git worktree add ../v0.1.0 05b27bc
    PYTHONPATH=../v0.1.0/src python tests/data/v0_1_0/make.py

The files stand for what users of 0.1.0 have on disk; tests/test_compatibility.py holds that later
versions read them and come to the same numbers. So never make them anew with a later version. The
files in settings/ are written by hand; ``expected.json`` is what 0.1.0 read from all of them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import tailrace
from tailrace import config
from tailrace import scenario as scenarios
from tailrace.learn import settings as train_settings
from tailrace.learn.trainer import Silent, Trainer
from tailrace.router import serve_settings
from tailrace.workload import traces

HERE = Path(__file__).parent
SETTINGS = HERE / "settings"
#: Steps of the two training runs: two rounds of cloning and two updates.
STOP_AFTER = 3
STOP_S = 20.0
SCENARIO = """\
[workload]
name = "sessions-hot"
rate = 14.0

[[cluster.replicas]]
count = 2
num_blocks = 3000

[[cluster.replicas]]
speed = 0.5
num_blocks = 3000
"""
EVALUATED = """\
[workload]
name = "chat"
requests = 60
rate = 20.0
"""
STATE = """\
arrival_rate = 30.0

[request]
prompt_tokens = 6000
predicted_output = 200.0
in_session = true
turn = 4
last_replica = 1

[[replicas]]
speed = 1.5
answering = 2

[[replicas]]
queued = 3
queued_tokens = 9000
answering = 30
context_tokens = 60000
cached_tokens = 5504

[[replicas]]
speed = 0.7
answering = 5
"""
TINY = {
    "name": "tiny",
    "scenarios": ["scenario.toml"],
    "updates": 2,
    "network": {"hidden": 8, "attention": 4, "heads": 2, "scorer_hidden": 4, "value_hidden": 4},
    "demonstrations": {
        "rounds": 2, "worlds": 2, "decisions": 60, "warmup": 30, "epochs": 8, "batch_size": 32,
        "learning_rate": 1e-2,
    },
    "branching": {
        "worlds": 2, "states": 4, "gap": 8, "warmup": 30, "longest_s": 2.0, "epochs": 3,
        "batch_size": 16, "imitation": 0.5,
    },
    "ppo": {
        "clusters": 4, "decisions": 16, "warmup": 8, "chunk": 8, "minibatch": 32, "epochs": 2,
        "imitation": 0.5, "start_kl": 0.1, "scale_rewards": True,
    },
    "evaluation": {"worlds": 3, "requests": 80, "rules": ["least_outstanding", "round_robin"]},
    "safety": {"collapse_share": 1.0},
}  # fmt: skip
PPO = {
    "name": "tiny-ppo",
    "method": "ppo",
    "network": {"memory": 4},
    "exploration": {"entropy_start": 0.02, "entropy_end": 0.01, "target_entropy": 0.5},
    "reward": {"balance": 0.1, "throughput": 0.1},
}


class Stopped(Exception):  # noqa: N818
    """Raised in the middle of a run, as Ctrl-C would be."""


class StopAfter(Silent):
    def step(self, step, steps, figures):
        if step == STOP_AFTER:
            raise Stopped


def command(*arguments):
    """Start a tailrace command."""
    return subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", *map(str, arguments)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_json(*arguments):
    process = command(*arguments, "--json")
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, arguments
    return json.loads(printed)


@contextlib.contextmanager
def started(*arguments):
    """Run a command meanwhile; it is stopped in the end whatever happens."""
    process = command(*arguments)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def awaited(process, pattern):
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise SystemExit(f"{process.args} ended before it was ready")


# ---- the files ----------------------------------------------------------------------------------


def make_runs(work):
    """Two runs stopped after their first update, and what became of them when they went on."""
    (work / "scenario.toml").write_text(SCENARIO)
    for name, over in (("branching", {}), ("ppo", PPO)):
        run = work / "runs" / name / "interrupted"
        with contextlib.suppress(Stopped):
            settings = train_settings.build(TINY, over)
            Trainer(run, settings, 1, watcher=StopAfter()).run()
        finished = shutil.copytree(run, run.with_name("finished"))
        Trainer(finished, None, 1).run()
        shutil.rmtree(run / "tensorboard")
        shutil.rmtree(finished / "tensorboard")
        shutil.rmtree(finished / "checkpoints")
        (finished / "best.tailrace").unlink()


def make_policy(work):
    """A policy, and what it does in a state."""
    shutil.copy(work / "runs" / "branching" / "finished" / "last.tailrace", work / "tiny.tailrace")
    (work / "state.toml").write_text(STATE)
    found = run_json("inspect", "tiny.tailrace", "--state", "state.toml")
    return found["states"][0]


def make_decisions(work):
    """The decision log of a router before two emulated servers, and the table it becomes."""
    folder = work / "log"
    with started("emulate", "--speeds", "1,1", "--port", 0, "--time-scale", 0.1, "--json") as up:
        backends = [w for url in json.loads(awaited(up, r"(\{.*\})"))["urls"] for w in ("-b", url)]
        with started(
            "serve", *backends, "-p", "load_aware", "--listen", "127.0.0.1:0",
            "--admin", "off", "--set", f"decisions.folder={folder}", "--log-level", "error",
            "--set", "routing.shadow=round_robin", "--set", "decisions.max_mb=0.04",
        ) as router:  # fmt: skip
            url = awaited(router, r"listening on (http://[^/]+)")
            run_json(
                "bench", "--url", url, "--workload", "sessions-hot", "--rate", 2, "--requests", 70,
                "--stretch", 0.1, "--api", "chat",
            )  # fmt: skip
    # Files that are full are compressed; the last one is not. The salt stays out.
    (work / "decisions").mkdir()
    for number, log in enumerate(sorted(folder.glob("decisions-*.jsonl*")), start=1):
        shutil.copy(log, work / "decisions" / "".join((f"decisions-{number}", *log.suffixes)))
    table = traces.read(work / "decisions").table
    shutil.rmtree(folder)
    return {
        "rows": {n: table.rows[n].tolist() for n in table.rows.dtype.names},
        "runs": {n: table.runs[n].tolist() for n in table.runs.dtype.names},
    }


def make_results(work):
    """The results of an evaluation, with its cells."""
    (work / "chat.toml").write_text(EVALUATED)
    run_json(
        "evaluate", "--scenario", "chat.toml", "--against", "round_robin", "--seeds", 2,
        "--selection-seeds", 1, "--purpose", "tuning", "-j", 1, "-p", "lmetric", "-o", "results",
    )  # fmt: skip


def make_cluster(work):
    """The cluster that a calibration by the decision log finds."""
    found = run_json(
        "calibrate", "--log", "decisions", "--same", "--chunk-size", 512, "--num-blocks", 30208,
        "-o", "cluster.toml",
    )  # fmt: skip
    assert found["replicas"]
    return scenarios.load("cluster.toml").model_dump(mode="json")


def read_settings():
    """All settings as 0.1.0 read them; refuses a file in settings/ that leaves one out."""
    os.environ["FIRST_KEY"] = "key"
    models = {
        "train.toml": train_settings.build(train_settings.read(SETTINGS / "train.toml")),
        "curriculum.toml": train_settings.build(train_settings.read(SETTINGS / "curriculum.toml")),
        "router.toml": serve_settings.load(SETTINGS / "router.toml", {}),
        "scenario.toml": scenarios.load(str(SETTINGS / "scenario.toml")),
    }
    for name, model in models.items():
        left_out = [key for key in unset(model) if not key.startswith(LEFT_OUT[name])]
        assert not left_out, f"{name} leaves out {left_out}"
    return {name: model.model_dump(mode="json") for name, model in models.items()}


#: What a file may leave out: because another has it, or because the list's other entry has it.
LEFT_OUT = {
    "train.toml": ("curriculum",),
    "curriculum.toml": (
        "name", "seed", "start", "method", "env", "serve", "updates", "randomise", "network",
        "demonstrations", "branching", "ppo", "reward", "exploration", "evaluation", "safety",
        "curriculum.1.",
    ),
    "router.toml": ("backends.",),
    "scenario.toml": ("cluster.replicas.0.cost", "cluster.replicas.1.", "name"),
}  # fmt: skip


def unset(model, prefix=""):
    """Yield the paths of all fields that were not given."""
    for name in type(model).model_fields:
        value, path = getattr(model, name), f"{prefix}{name}"
        if name not in model.model_fields_set:
            yield path
            continue
        for key, part in enumerate(value) if isinstance(value, tuple) else [("", value)]:
            if isinstance(part, config.Settings):
                yield from unset(part, f"{path}.{key}." if isinstance(value, tuple) else f"{path}.")


class Plain(json.JSONEncoder):
    def default(self, value):
        return value.item() if isinstance(value, np.generic) else super().default(value)


def main():
    assert tailrace.__version__ == "0.1.0"
    expected = {"settings": read_settings()}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        work = Path(folder)
        make_runs(work)
        expected["policy"] = make_policy(work)
        expected["table"] = make_decisions(work)
        expected["cluster"] = make_cluster(work)
        make_results(work)
        for path in work.iterdir():
            target = HERE / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(path, target)
            else:
                shutil.copy(path, target)
    text = json.dumps(expected, cls=Plain, separators=(",", ":"), sort_keys=True)
    (HERE / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
