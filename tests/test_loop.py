"""The example that does everything: record, calibrate, replay, fine-tune, prove, shadow, take over.

The whole of it takes minutes of real time: `make test-loop`.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace import scenario as scenarios

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "loop.py"


@pytest.fixture(scope="module")
def loop():
    spec = importlib.util.spec_from_file_location("loop_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def planned(loop, folder, monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", ["loop.py", "-o", str(folder), *more])
    return loop.asked()


# ---- parts --------------------------------------------------------------------------------------


def test_ranks_count_only_pairs_that_are_clearly_apart(loop):
    predicted = {"good": 1.0, "near": 1.05, "bad": 2.0}
    found = loop.ranks(predicted, {"good": 1.0, "near": 0.9, "bad": 1.5})
    assert {(p["better"], p["worse"]) for p in found["pairs"]} == {("good", "bad"), ("near", "bad")}
    assert (found["apart"], found["same_order"]) == (2, 2)
    wrong = loop.ranks(predicted, {"good": 1.0, "near": 0.9, "bad": 0.95})
    assert (wrong["apart"], wrong["same_order"]) == (2, 1)


def test_disagreement_of_the_shadow_policy(loop, tmp_path):
    head = {"tailrace": "decisions", "format": 1}
    lines = [
        {"replica": 0, "shadow": 0, "shadow_ttft_s": 0.0},
        {"replica": 0, "shadow": 1, "shadow_ttft_s": -0.3},
        {"replica": 1, "shadow": 0, "shadow_ttft_s": 0.1},
        {"replica": 1, "shadow": None, "shadow_ttft_s": None},
    ]
    text = "\n".join(json.dumps(line) for line in (head, *lines))
    (tmp_path / "decisions-1-1-1.jsonl").write_text(text + "\n")
    found = loop.disagreement(tmp_path)
    assert (found["asked"], found["differing"]) == (3, 2)
    assert found["predicted_ttft_change_s"] == pytest.approx(-0.1)


@pytest.mark.parametrize("shrink", [1.0, 8.0])
def test_loads_are_conversations_of_the_length_asked_for(loop, tmp_path, monkeypatch, shrink):
    plan, _, _ = planned(loop, tmp_path, monkeypatch, "--quick", "--shrink", str(shrink))
    path = loop.write_load(plan, tmp_path / "load.parquet", 1, plan.rate)
    table = loop.library.from_settings(loop_workload(path, plan.requests), rate=None, seed=0)
    assert len(table) == plan.requests
    assert int(table.rows["prompt_tokens"].max()) <= 8192 / shrink
    assert (table.rows["parent"] >= 0).mean() > 0.3


def loop_workload(path, requests):
    from tailrace.config import Workload

    return Workload(name=str(path), requests=requests, arrivals="trace", load=None)


def test_scenario_of_the_calibrated_cluster(loop, tmp_path, monkeypatch):
    plan, _, _ = planned(loop, tmp_path, monkeypatch, "--quick")
    plan.fresh("calibrate")
    plan.cluster.write_text("[[cluster.replicas]]\ncount = 2\n")
    table = loop.write_load(plan, tmp_path / "load.parquet", 1, plan.rate)
    scenario = scenarios.load(loop.write_scenario(plan, tmp_path / "s.toml", table, 9.0))
    assert scenario.cluster.size == 2
    assert (scenario.workload.rate, scenario.workload.arrivals) == (9.0, "poisson")


def test_steps_need_those_before(loop, tmp_path, monkeypatch):
    plan, steps, _ = planned(loop, tmp_path / "new", monkeypatch, "--steps", "train,prove")
    assert steps == ("train", "prove")
    with pytest.raises(SystemExit, match="step train needs what record makes"):
        loop.loop(plan, steps)
    with pytest.raises(SystemExit):
        planned(loop, tmp_path, monkeypatch, "--steps", "prove,train")


def test_started_commands_are_stopped_on_failure(loop):
    seen = []

    def fail():
        with loop.started("emulate", "--speeds", "1", "--port", "0", "--json") as process:
            seen.append(process)
            assert "urls" in loop.awaited(process, r"(\{.*\})")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert seen[0].poll() is not None


# ---- the whole ----------------------------------------------------------------------------------


@pytest.mark.loop
def test_the_whole_loop_on_emulated_servers(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "-o", str(tmp_path / "loop"), "--quick", "--json"],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert json.loads((tmp_path / "loop" / "loop.json").read_text()) == found
    requests = found["plan"]["requests"]
    assert found["record"]["imported"]["requests"] == requests
    # Emulated servers share the machine with everything else: a busy one makes them late.
    for load in ("recorded", "held_out"):
        assert abs(found["replay"][load]["e2e"]["mean_error"]) < 0.25
        assert abs(found["replay"][load]["ttft"]["mean_error"]) < 0.4
    assert found["replay"]["ranks"]["same_order"] == found["replay"]["ranks"]["apart"]
    proven = {policy["policy"]: policy["cost_ratio"] for policy in found["prove"]["policies"]}
    assert proven["mine"] < proven["round_robin"]
    shadow = found["shadow"]
    assert shadow["asked"] == shadow["counted"]["decisions"] == requests
    assert 0 < shadow["differing"] == shadow["counted"]["disagreements"] < requests
    phases = found["take_over"]["phases"]
    assert phases["before"]["decided_by"] == {"load_aware": requests}
    assert 0 < phases["canary"]["decided_by"]["mine"] < requests / 2
    assert phases["after"]["decided_by"] == {"mine": requests}
    assert sum(phases["after"]["fell_back"].values()) < requests / 10
    assert all(phase["live"]["failed"] == 0 for phase in phases.values())
    assert not any(found["take_over"]["left_over"].values())
