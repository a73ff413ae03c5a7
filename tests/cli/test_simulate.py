import csv
import json
from pathlib import Path

import pyarrow.parquet
import pytest

QUICK = ("--requests", "60", "--rate", "20")


def test_summary_for_people(run):
    result = run("simulate", *QUICK, "--policy", "round_robin", "--replicas", 3)
    assert result.stdout.startswith("round_robin: chat at 20 requests/s on 3 replicas\n")
    assert "60 of 60 finished" in result.stdout
    assert "33% 33% 33%" in result.stdout
    assert result.stderr == ""


def test_json_for_programs_is_the_same_every_time(run, run_json):
    found = run_json("simulate", *QUICK, "--seed", 7)
    assert found["summary"]["finished"] == 60
    assert found["rate_rps"] == 20.0
    assert found["seed"] == 7
    assert found["scenario"]["workload"]["requests"] == 60
    again, other = (run("simulate", *QUICK, "--seed", s, "--json").stdout for s in (7, 8))
    assert json.loads(again) == found
    assert json.loads(other)["summary"] != found["summary"]


def test_per_request_results_and_trace(run, tmp_path):
    run("simulate", *QUICK, "-o", "out.csv", "--trace", "trace.json", "--quiet")
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert len(rows) == 60
    assert all(float(r["finished_s"]) > float(r["first_token_s"]) > 0 for r in rows)
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {1, 2, 3, 4}
    # Every prompt token and all but the first token of each answer is computed in some batch.
    tokens = sum(e["args"]["T"] * e["args"]["iterations"] for e in slices)
    expected = sum(int(r["prompt_tokens"]) + int(r["output_tokens"]) - 1 for r in rows)
    assert tokens == expected
    run("simulate", *QUICK, "--out", "out.parquet")
    assert pyarrow.parquet.read_table("out.parquet")["finished_s"].to_pylist() == [
        pytest.approx(float(r["finished_s"])) for r in rows
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.parquet", "trace.json"]


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        ("sarathi", ()),
        ("vllm", ("--max-batch-tokens", 16384)),
        ("orca", ("--max-request-tokens", 16384)),
        ("faster_transformer", ("--max-request-tokens", 16384)),
        ("lightllm", ("--max-batch-tokens", 16384, "--block-size", 1)),
    ],
)
def test_every_scheduler(run_json, scheduler, options):
    found = run_json("simulate", *QUICK, "--scheduler", scheduler, *options)
    assert found["summary"]["finished"] == 60


def test_failures_from_a_file(run, run_json):
    Path("failure.toml").write_text(
        '[workload]\nname = "chat"\nrequests = 60\nrate = 20\n'
        '[[events]]\nat_s = 1.0\nreplica = 0\nkind = "die"\n'
    )
    found = run_json("simulate", "--config", "failure.toml")["summary"]
    assert found["failed"] > 0
    assert found["finished"] + found["failed"] == 60
    assert "failed," in run("simulate", "--config", "failure.toml").stdout


def test_a_policy_of_ones_own(run):
    Path("mine.py").write_text(
        "import numpy as np\n\n\ndef scores(view):\n"
        "    return np.arange(len(view.replicas))[::-1].astype(float)\n"
    )
    result = run("simulate", *QUICK, "--policy", "mine.py")
    assert "0% 0% 0% 100%" in result.stdout


def test_own_requests_at_their_own_pace(run, run_json):
    run("workload", "write", "chat", "--requests", 50, "--rate", 10, "--out", "mine.csv")
    found = run_json("simulate", "--workload", "mine.csv")
    assert found["rate_rps"] is None
    assert found["summary"]["requests"] == 50
    faster = run_json("simulate", "--workload", "mine.csv", "--time-scale", 0.5)
    assert faster["summary"]["duration_s"] < found["summary"]["duration_s"]


def test_warm_up(run_json):
    assert run_json("simulate", *QUICK, "--warmup", 0.5)["summary"]["requests"] == 30
