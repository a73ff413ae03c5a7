"""The example that does everything: record, calibrate, replay, fine-tune, prove, shadow, take over.

The whole of it takes minutes of real time: `make test-loop`. Its steps are tested in tests/assess.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "loop.py"


@pytest.fixture(scope="module")
def loop():
    spec = importlib.util.spec_from_file_location("loop_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(loop, folder, monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", ["loop.py", "-o", str(folder), *more])
    return loop.arguments()


def test_the_example_is_a_page():
    assert len(SCRIPT.read_text().splitlines()) < 100


def test_steps_need_those_before(loop, tmp_path, monkeypatch):
    _, steps, _ = planned(loop, tmp_path / "new", monkeypatch, "--steps", "train,prove")
    assert steps == ("train", "prove")
    with pytest.raises(SystemExit, match="step train needs what record makes"):
        loop.main()
    with pytest.raises(SystemExit):
        planned(loop, tmp_path, monkeypatch, "--steps", "prove,train")


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
    assert shadow["asked"] == requests
    assert 0 < shadow["differing"] < requests
    # The load also asks once how many tokens a text has, and the router counts that.
    assert 0 <= shadow["counted"]["decisions"] - requests <= 1
    assert 0 <= shadow["counted"]["disagreements"] - shadow["differing"] <= 1
    phases = found["take_over"]["phases"]
    assert phases["before"]["decided_by"] == {"load_aware": requests}
    assert 0 < phases["canary"]["decided_by"]["mine"] < requests / 2
    assert phases["after"]["decided_by"] == {"mine": requests}
    assert sum(phases["after"]["fell_back"].values()) < requests / 10
    assert all(phase["live"]["failed"] == 0 for phase in phases.values())
    assert not any(found["take_over"]["left_over"].values())
