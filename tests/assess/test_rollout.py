"""The steps from a recording to a policy in charge, without servers."""

import json

import pytest

from tailrace import scenario as scenarios
from tailrace.assess import processes, rollout
from tailrace.assess.loads import write_load
from tailrace.config import Workload
from tailrace.workload import library


def test_ranks_count_only_pairs_that_are_clearly_apart():
    predicted = {"good": 1.0, "near": 1.05, "bad": 2.0}
    found = rollout.ranks(predicted, {"good": 1.0, "near": 0.9, "bad": 1.5})
    assert {(p["better"], p["worse"]) for p in found["pairs"]} == {("good", "bad"), ("near", "bad")}
    assert (found["apart"], found["same_order"]) == (2, 2)
    wrong = rollout.ranks(predicted, {"good": 1.0, "near": 0.9, "bad": 0.95})
    assert (wrong["apart"], wrong["same_order"]) == (2, 1)


def test_disagreement_of_the_shadow_policy(tmp_path):
    head = {"tailrace": "decisions", "format": 1}
    lines = [
        {"replica": 0, "shadow": 0, "shadow_ttft_s": 0.0},
        {"replica": 0, "shadow": 1, "shadow_ttft_s": -0.3},
        {"replica": 1, "shadow": 0, "shadow_ttft_s": 0.1},
        {"replica": 1, "shadow": None, "shadow_ttft_s": None},
    ]
    text = "\n".join(json.dumps(line) for line in (head, *lines))
    (tmp_path / "decisions-1-1-1.jsonl").write_text(text + "\n")
    found = rollout.disagreement(tmp_path)
    assert (found["asked"], found["differing"]) == (3, 2)
    assert found["predicted_ttft_change_s"] == pytest.approx(-0.1)


@pytest.mark.parametrize("shrink", [1.0, 8.0])
def test_loads_are_conversations_of_the_length_asked_for(tmp_path, shrink):
    path = write_load(tmp_path / "load.parquet", 120, 12.0, 1, shrink)
    settings = Workload(name=str(path), requests=120, arrivals="trace", load=None)
    table = library.from_settings(settings, rate=None, seed=0)
    assert len(table) == 120
    assert int(table.rows["prompt_tokens"].max()) <= 8192 / shrink
    assert (table.rows["parent"] >= 0).mean() > 0.3


def test_scenario_of_the_calibrated_cluster(tmp_path):
    plan = rollout.RolloutPlan(
        tmp_path, (), 120, 12.0, 1.0, "1", "log", 10.0, (), updates=1, seeds=2, quick=True
    )
    plan.fresh("calibrate")
    plan.cluster.write_text("[[cluster.replicas]]\ncount = 2\n")
    table = write_load(tmp_path / "load.parquet", 120, 12.0, 1)
    scenario = scenarios.load(rollout.write_scenario(plan, tmp_path / "s.toml", table, 9.0))
    assert scenario.cluster.size == 2
    assert (scenario.workload.rate, scenario.workload.arrivals) == (9.0, "poisson")


def test_started_commands_are_stopped_on_failure():
    seen = []

    def fail():
        with processes.started("emulate", "--speeds", "1", "--port", "0", "--json") as process:
            seen.append(process)
            assert "urls" in processes.awaited(process, r"(\{.*\})")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert seen[0].poll() is not None
