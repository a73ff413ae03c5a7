import json
from pathlib import Path

import pytest

from tailrace import saturation
from tailrace import scenario as scenarios
from tailrace.evaluate.search import capacity
from tailrace.seeds import Purpose, purpose_of

pytestmark = pytest.mark.compiled
QUICK = ("--requests", "60", "--rate", "20")
TWO = ("-p", "random", "-p", "round_robin")


def test_ranked_table(run):
    result = run("compare", *QUICK, *TWO, "--seeds", 2, "--jobs", 1)
    lines = result.stdout.splitlines()
    assert {line.split()[0] for line in lines[-3:]} == {
        "random",
        "round_robin",
        "least_outstanding",
    }
    costs = [float(line.split()[1]) for line in lines[-3:]]
    assert costs == sorted(costs)
    assert lines[0].startswith("60 requests at 20.0 requests/s, 2 seeds, 4 replicas.")
    assert result.stderr == ""


def test_json(run_json):
    found = run_json("compare", *QUICK, *TWO, "--seeds", 2, "--jobs", 1, "--reference", "random")
    assert found["reference"] == "random"
    assert all(purpose_of(seed) is Purpose.TUNING for seed in found["seeds"])
    assert [len(e["runs"]) for e in found["entries"]] == [2, 2]
    found = run_json("compare", *QUICK, *TWO, "--seeds", 1, "--seed", 5, "--jobs", 1)
    assert found["seeds"] == [5]


def test_all_built_in_policies_by_default(run_json):
    from tailrace.policy import registry

    found = run_json("compare", "--requests", 30, "--rate", 20, "--seeds", 1, "--jobs", 1)
    rules = {rule.name for rule in registry.rules()}
    assert {e["policy"] for e in found["entries"]} == rules | {"tailrace"}


REFERENCE = ("--scheduler", "orca", "--max-request-tokens", 20000, "--requests", 30, "--rate", 5)


def test_rules_the_reference_engine_cannot_run_are_left_out(run):
    from tailrace.policy import registry

    result = run("compare", *REFERENCE, "--seeds", 1, "--jobs", 1, "--json")
    ran = {entry["policy"] for entry in json.loads(result.stdout)["entries"]}
    rules = {rule.name for rule in registry.rules() if not rule.in_engine}
    assert ran == rules | {"tailrace"}
    left_out = ", ".join(rule.name for rule in registry.rules() if rule.in_engine)
    assert left_out.startswith("lookahead")
    assert result.stderr == f"left out on the reference engine: {left_out}\n"


@pytest.mark.parametrize("command", ["simulate", "compare", "capacity"])
def test_look_ahead_asked_for_on_the_reference_engine(refuse, command):
    args = REFERENCE[:-2] if command == "capacity" else REFERENCE
    assert refuse(command, *args, "-p", "lookahead") == (
        "lookahead needs the compiled engine: scheduler orca runs on the reference engine only"
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(saturation, "MIN_REQUESTS", 200)
    monkeypatch.setattr(saturation, "REQUESTS_PER_REPLICA", 200)
    monkeypatch.setattr(capacity, "MIN_PROBE_REQUESTS", 20)
    monkeypatch.setattr(capacity, "PROBE_REQUESTS_PER_REPLICA", 20)


def test_capacity_within_an_slo(run, run_json, small):
    args = ("capacity", "--requests", 100, "--replicas", 1, "--tolerance", 0.2, "-p", "round_robin")
    found = run_json(*args, "--attainment", 0.5)
    assert found["rate_rps"] == pytest.approx(found["load"] * found["saturation_rps"])
    assert found["objectives"] == [{"kind": "attainment", "limit": 0.5}]
    text = run(*args, "--ttft-p99-s", 3, "--e2e-p99-s", 100).stdout
    assert "round_robin holds" in text
    assert "within ttft_p99_s <= 3 and e2e_p99_s <= 100" in " ".join(text.split())


def test_an_slo_out_of_reach(run, small):
    text = run("capacity", "--requests", 20, "--replicas", 1, "--ttft-p99-s", 1e-6).stdout
    assert "Not even" in text


def test_saturation_is_measured_and_stored(run, run_json, small):
    path = Path("mine.toml")
    path.write_text('# mine\n[workload]\nname = "chat"\n')
    found = run_json("capacity", "--saturation", "--config", path, "--write")
    assert found["written_to"] == "mine.toml"
    assert path.read_text() == (
        f"capacity_rps = {found['saturation_rps']:.6g}\n".join(
            ["# mine\n", '\n[workload]\nname = "chat"\n']
        )
    )
    text = run("capacity", "--saturation", "--config", path).stdout
    assert "per replica) with chat on 4 replicas" in text


def test_a_capacity_is_stored_only_where_it_belongs(refuse):
    Path("mine.toml").write_text("")
    assert "give --saturation with it" in refuse("capacity", "--write", "--config", "mine.toml")
    assert "needs the --config" in refuse("capacity", "--saturation", "--write")
    message = refuse("capacity", "--saturation", "--write", "--scenario", "demo")
    assert "needs the --config" in message
    shipped = scenarios.find("demo")
    message = refuse("capacity", "--saturation", "--write", "--config", shipped)
    assert "is a shipped scenario" in message
    message = refuse(
        "capacity", "--saturation", "--write", "--config", "mine.toml", "--replicas", 2
    )
    assert "describes another cluster or traffic" in message


def test_maintainers_can_store_the_capacity_of_a_shipped_scenario(run_json, small, monkeypatch):
    shipped = Path("shipped")
    shipped.mkdir()
    (shipped / "tiny.toml").write_text('[workload]\nname = "chat"\n')
    monkeypatch.setattr(scenarios, "SHIPPED", shipped)
    args = ("capacity", "--saturation", "--scenario", "tiny", "--write-shipped")
    found = run_json(*args)
    assert scenarios.load("tiny").capacity_rps == pytest.approx(found["saturation_rps"], rel=1e-5)
