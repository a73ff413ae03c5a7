"""Training runs that take a moment: three replicas, some hundred requests, a handful of units."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.learn import settings as s
from tailrace.learn.settings import TrainSettings
from tailrace.learn.trainer import Outcome, Silent, Trainer

SCENARIO = Scenario(
    cluster=Cluster(replicas=(Replica(count=2), Replica(speed=0.5))),
    workload=Workload(name="sessions-hot", rate=14.0),
)
TOML = """
[workload]
name = "{workload}"
rate = {rate}

[[cluster.replicas]]
count = 2
num_blocks = 3000

[[cluster.replicas]]
speed = 0.5
num_blocks = 3000
"""
NETWORK = {"hidden": 8, "attention": 4, "heads": 2, "scorer_hidden": 4, "value_hidden": 4}
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "updates": 2,
    "network": NETWORK,
    "demonstrations": {
        "rounds": 2, "worlds": 2, "decisions": 60, "warmup": 30, "epochs": 8, "batch_size": 32,
        "learning_rate": 1e-2,
    },
    "branching": {
        "worlds": 2, "states": 4, "gap": 8, "warmup": 30, "max_horizon_s": 2.0, "epochs": 3,
        "minibatch": 16,
    },
    "ppo": {
        "clusters": 4, "decisions": 16, "warmup": 8, "chunk": 8, "minibatch": 32, "epochs": 2,
    },
    "evaluation": {
        "worlds": 1, "requests": 120, "baselines": ["least_outstanding", "round_robin"],
    },
    # So few requests may well all go to one replica.
    "stopping": {"collapse_share": 1.0},
}  # fmt: skip


def scenario_file(folder: Path, workload: str = "sessions-hot", rate: float = 14.0) -> str:
    """Write a scenario; returns its path."""
    path = folder / f"{workload}-{rate:g}.toml"
    path.write_text(TOML.format(workload=workload, rate=rate))
    return str(path)


def settings(folder: Path, over: Mapping[str, Any] | None = None) -> TrainSettings:
    """Settings of a tiny run, with some of them changed."""
    data = {**SETTINGS, "scenarios": [scenario_file(folder)]}
    return s.build(data, dict(over or {}))


def train(folder: Path, over: Mapping[str, Any] | None = None, **options: Any) -> Outcome:
    """Do a whole run in ``folder``/run."""
    return Trainer(folder / "run", settings(folder, over), 1, **options).run()


class Stopped(Exception):  # noqa: N818
    """Raised in the middle of a run, as Ctrl-C or a failure would be."""


class StopAfter(Silent):
    """Stops a run after so many steps, counted from 1 as the watcher is told."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        if step == self._step:
            raise Stopped


class StopIn(Silent):
    """Stops a run when a phase begins for the ``n``-th time."""

    def __init__(self, phase: str, n: int = 1) -> None:
        self._phase, self._left = phase, n

    def phase(self, name: str) -> None:
        if name == self._phase:
            self._left -= 1
            if self._left == 0:
                raise Stopped


class Noted(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.metrics: list[Mapping[str, Any]] = []
        self.notes: list[str] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        self.metrics.append(metrics)


def log(run: Path) -> list[dict[str, str]]:
    """The rows of log.csv."""
    with (run / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def content(run: Path) -> dict[str, Any]:
    """All that a run leaves, but for the times it took."""
    policies = [*run.glob("*.tailrace"), *(run / "checkpoints").iterdir()]
    found: dict[str, Any] = {str(p.relative_to(run)): p.read_bytes() for p in policies}
    for row in log(run):
        timeless = {k: v for k, v in row.items() if k not in ("seconds", "steps_per_s")}
        found[f"log {row['step']}"] = timeless
    with safe_open(run / "state.safetensors", "np") as file:
        numbers = json.loads(file.metadata()["state"])
        found |= {f"state {key}": file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118
    del numbers["seconds"]
    found["numbers"] = numbers
    found["health"] = (run / "health.json").read_text()
    return found
