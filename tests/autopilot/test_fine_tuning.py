"""Candidates of the autopilot's own making: when it trains, what it keeps, when it only says so."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autopilot.conftest import CLUSTER
from flights import Router, flown
from tailrace.assess.assessment import ServerModel
from tailrace.autopilot import fine_tuning
from tailrace.autopilot.controller import SimulatedCost
from tailrace.autopilot.fine_tuning import MOST_KEPT, FineTuning
from tailrace.autopilot.pilot import Pilot
from tailrace.autopilot.twin import Twin, Window, with_order

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("known")]

#: In place of the training: leaves what it was told, and a policy.
TRAINER = """
import json, pathlib, sys
told = json.loads(sys.stdin.readline())
run = pathlib.Path(told["folder"])
run.mkdir()
(run.parent / "told.json").write_text(json.dumps(told))
(run / "best.tailrace").write_text("a policy")
"""


#: A training that takes seconds.
SHORT = {
    "updates": 1,
    "branching": {
        "worlds": 2, "states": 4, "gap": 8, "warmup": 30, "max_horizon_s": 2.0,
        "min_horizon_s": 0.5, "epochs": 1, "minibatch": 16,
    },
    "evaluation": {"worlds": 1, "requests": 120, "baselines": ["least_outstanding"]},
    "stopping": {"collapse_share": 1.0},
}  # fmt: skip


def wait_for(tuning: FineTuning, limit_s: float = 60) -> str | None:
    end = time.monotonic() + limit_s
    while (made := tuning.collect(set())) is None and time.monotonic() < end:
        time.sleep(0.02)
    return made


def test_the_best_policies_are_tried_with_order_and_queue() -> None:
    costs = [SimulatedCost(name, 1.0) for name in ("a", "b+order:w=5", "c", "d", "e")]
    plain = with_order(costs, orders=False)
    assert plain == [f"{name}+queue:max_queued=4,w=100" for name in ("a", "c", "d")]
    assert set(with_order(costs, orders=True)) == {*plain, "a+order", "c+order", "d+order"}


def begun(pilot: Pilot, monkeypatch: pytest.MonkeyPatch, gap: float) -> dict[str, Any]:
    """A round in which a look-ahead is so much better; returns what is shown."""
    monkeypatch.setattr(Twin, "gap", lambda self, window, policy: gap)
    monkeypatch.setattr(Twin, "portfolio", lambda self, named, present: [present, "load_aware"])
    pilot.round()
    shown: dict[str, Any] = json.loads(pilot._orders.file.read_text())
    return shown


def pilot_of(folder: Path, tmp_path: Path, **given: Any) -> Pilot:
    usual = {"mode": "act", "least_gain": 0.9, "policies": ()}
    return flown(folder, tmp_path / "autopilot.json", Router(), **{**usual, **given})


@pytest.mark.parametrize(
    ("gap", "torch", "said"),
    [(0.05, True, "nothing to fine-tune for"), (0.3, False, "pip install 'tailrace[train]'")],
)
def test_it_says_why_it_does_not_train(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: float, torch: bool,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(fine_tuning, "is_possible", lambda: torch)
    monkeypatch.setattr(fine_tuning, "COMMAND", ("false",))
    pilot = pilot_of(folder, tmp_path)
    shown = begun(pilot, monkeypatch, gap)
    (note,) = (s for s in shown["steps"] if s["about"] == "fine-tuning")
    assert said in note["what"]
    assert note["evidence"]["gap"] == gap
    assert not pilot._tuning.is_running
    # Not again in each round.
    monkeypatch.setattr(Twin, "gap", lambda *_: pytest.fail("looked at again"))
    pilot.round()


def test_a_fine_tuned_policy_joins_the_portfolio(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fine_tuning, "is_possible", lambda: True)
    monkeypatch.setattr(fine_tuning, "COMMAND", (sys.executable, "-c", TRAINER))
    pilot = pilot_of(folder, tmp_path, finetune_s=77)
    begun(pilot, monkeypatch, 0.3)
    assert pilot._tuning.is_running
    made = wait_for(pilot._tuning)
    assert made is not None
    assert pilot._tuning.policies() == [made]
    assert Path(made).read_text() == "a policy"
    told = json.loads((tmp_path / "autopilot" / "told.json").read_text())
    assert (told["start"], told["cpu_s"]) == ("tailrace", 77)
    assert len(told["scenario"]["cluster"]["replicas"]) == 3
    assert told["scenario"]["workload"]["rate"] == pytest.approx(14.0, rel=0.2)
    assert not (tmp_path / "autopilot" / "run").exists()


@pytest.mark.loop  # at the lowest priority: on a busy machine it takes minutes
@pytest.mark.skipif(not fine_tuning.is_possible(), reason="training needs PyTorch")
def test_a_real_training_makes_a_policy_that_is_simulated(folder: Path, tmp_path: Path) -> None:
    window, twin = Window.read(folder, 1.0, 10_000), Twin(ServerModel(CLUSTER))
    tuning = FineTuning(tmp_path / "autopilot", 300, SHORT)
    tuning.begin(twin, window, "tailrace", time.time())
    made = wait_for(tuning, 900)
    assert made, "the training has made nothing"
    assert tuning.policies() == [made]
    costs = {p.policy: p.cost_s for p in twin.prospects(window, [made, "tailrace", "round_robin"])}
    assert costs[made] < costs["round_robin"]


def test_it_trains_while_a_candidate_is_tried(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial takes hours, and there may always be one."""
    monkeypatch.setattr(fine_tuning, "is_possible", lambda: True)
    monkeypatch.setattr(fine_tuning, "COMMAND", (sys.executable, "-c", TRAINER))
    pilot = pilot_of(folder, tmp_path, least_gain=0.01)
    begun(pilot, monkeypatch, 0.3)
    assert pilot.state.stage == "shadow"
    assert pilot._tuning.is_running
    assert wait_for(pilot._tuning)


def test_a_training_that_makes_nothing_and_old_policies(tmp_path: Path) -> None:
    tuning = FineTuning(tmp_path, 5)
    assert tuning.collect(set()) is None
    names = [f"tuned-{k}.tailrace" for k in range(MOST_KEPT + 3)]
    for name in names:
        (tmp_path / name).write_text("")
    tuning._process = subprocess.Popen(["false"], stdin=subprocess.PIPE)
    tuning._process.wait()
    assert tuning.collect({str(tmp_path / names[0])}) == ""
    kept = [Path(p).name for p in tuning.policies()]
    assert kept == [names[0], *names[-MOST_KEPT:]]


def test_the_settings_policies_are_the_only_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Twin, "gap", lambda *_: pytest.fail("nothing may be trained"))
    pilot = pilot_of(folder, tmp_path, policies=("round_robin", "random"))
    pilot.round()
    shown = json.loads(pilot._orders.file.read_text())
    assert {p["policy"] for p in shown["prospects"]} == {"round_robin", "random"}
