import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tailrace.cli import evaluate as cli_evaluate
from tailrace.evaluate.judge import baselines
from tailrace.evaluate.measure import cells
from tailrace.evaluate.search import linear
from tailrace.policy import registry, shipped
from tailrace.policy.learned import checkpoint
from tailrace.seeds import Purpose, purpose_of
from tailrace.view.ordering import Order

pytestmark = pytest.mark.compiled

MINE = """
[workload]
name = "chat"
requests = 60
rate = 20.0
"""
QUICK = (
    "evaluate", "--scenario", "mine.toml", "--against", "none", "--seeds", 2, "--selection-seeds",
    1, "--purpose", "tuning", "--jobs", 1,
)  # fmt: skip


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)


@pytest.fixture
def training_run(tmp_path):
    """The folder of a training run with three checkpoints, the second of them the best."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in (10, 20, 30):
        weights = rng.normal(size=len(linear.COLUMNS))
        path = run / "checkpoints" / f"update-{number:06}.tailrace"
        checkpoint.save(path, linear.CONFIG, linear.tensors_of(weights))
    shutil.copy(run / "checkpoints" / "update-000020.tailrace", run / "best.tailrace")
    (tmp_path / "mine.toml").write_text(MINE)
    (run / "settings.json").write_text(json.dumps({"scenarios": ["mine.toml"]}))
    return run


def test_json_of_a_policy_against_a_rule(run_json, mine):
    found = run_json(*QUICK, "-p", "lmetric")
    assert found["subject"] == "lmetric"
    assert found["suite"] == "custom"
    assert [purpose_of(s) for s in found["seeds"]] == [Purpose.TUNING] * 2
    assert {c["policy"] for c in found["cells"]} == {"lmetric", "least_outstanding"}
    assert found["vs_best_single"]["policy"] in {"lmetric", "least_outstanding"}
    assert set(found["vs_best_per_scenario"]["scenarios"]) == {"mine"}


def test_tables_and_files(run, mine, tmp_path):
    (tmp_path / "own.py").write_text("def scores(view):\n    return view.replicas['in_flight']\n")
    result = run(*QUICK, "-p", "own.py", "-o", "out")
    assert "own against least_outstanding, the best single rule" in result.stdout
    assert "lower cost in" in result.stdout
    assert "written to out/results.parquet and out/results.json" in result.stderr
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    # The same rule as least_outstanding, on the same requests: only ties differ.
    assert data["vs_best_single"]["cost"] == pytest.approx(1.0, rel=0.2)


def test_the_same_command_measures_nothing_twice(run, mine, monkeypatch):
    run(*QUICK, "-p", "lmetric", "-o", "out")
    monkeypatch.setattr(cells, "measured", lambda *_: pytest.fail("measured again"))
    result = run(*QUICK, "-p", "lmetric", "-o", "out")
    assert "6 cells are in out already" in result.stderr


def test_ctrl_c_says_what_is_kept(run, mine, monkeypatch):
    measured, done = cells.measured, []

    def interrupted(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return measured(*args)

    monkeypatch.setattr(cells, "measured", interrupted)
    monkeypatch.setattr(cells, "POLICIES_PER_TASK", 1)
    result = run(*QUICK, "-p", "lmetric", "-o", "out", code=130)
    assert (
        "at least 2 of 6 cells are kept in out; the same command goes on from there"
        in result.stderr
    )


def test_every_checkpoint_of_a_run_is_ranked(run_json, training_run):
    args = ("evaluate", "run", "--all-checkpoints", "--against", "lmetric", "--seeds", 2)
    found = run_json(*args, "--selection-seeds", 1, "--jobs", 1)
    ranked = {p["policy"]: p for p in found["policies"]}
    tested = {name for name, p in ranked.items() if p["role"] == "subject"}
    assert tested == {"update-000010", "update-000020 (best)", "update-000030"}
    assert {"lmetric", "least_outstanding"} < set(ranked)
    assert [purpose_of(s) for s in found["seeds"]] == [Purpose.TUNING] * 2
    scores = [p["score"] for p in found["policies"]]
    assert scores == sorted(scores)
    # None of them was picked yet, so there is no headline.
    assert found["vs_best_single"] is None


def test_checkpoints_as_a_table(run, training_run):
    args = ("evaluate", "run", "--all-checkpoints", "--against", "none", "--seeds", 1)
    text = run(*args, "--selection-seeds", 1, "--jobs", 1).stdout
    assert "update-000020 (best)" in text
    assert "against" not in text.splitlines()[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scenario", "agent"], "unknown scenario 'agent'; did you mean agents"),
        (["--suite", "standart"], "unknown suite 'standart'; did you mean standard"),
        (["--suite", "standard", "--scenario", "agents"], "--suite and --scenario both say"),
        (["-p", "lmetrik"], "unknown policy 'lmetrik'; did you mean lmetric"),
        (["-p", "none.tailrace"], "there is no policy file none.tailrace"),
        (["--against", "lmetrik"], "unknown policy 'lmetrik'"),
        (["--against", "lmetric:tuned"], "unknown tuned rule 'lmetric'|no rule has tuned const"),
        (["--all-checkpoints"], "give its folder and --all-checkpoints"),
        (["nowhere"], "give its folder and --all-checkpoints"),
        (["nowhere", "--all-checkpoints"], "there is no training run nowhere"),
    ],
)
def test_mistakes(refuse, args, message):
    import re

    assert re.search(message, refuse("evaluate", *args))


def test_a_folder_that_is_no_run(refuse, tmp_path):
    (tmp_path / "run").mkdir()
    assert "is no training run: cannot read" in refuse("evaluate", "run", "--all-checkpoints")
    (tmp_path / "run" / "settings.json").write_text("{}")
    text = refuse("evaluate", "run", "--all-checkpoints")
    assert "does not say which scenarios" in text
    (tmp_path / "run" / "settings.json").write_text('{"scenarios": ["agents"]}')
    assert "holds no checkpoints" in refuse("evaluate", "run", "--all-checkpoints")


def test_a_policy_that_raises(run, mine, tmp_path):
    (tmp_path / "own.py").write_text("def scores(view):\n    raise KeyError('x')\n")
    result = run(*QUICK, "-p", "own.py", code=2)
    assert "own on mine, seed 2000030000: policy own failed: KeyError: 'x' (own.py, line 2)" in (
        result.stderr
    )


def test_a_folder_that_cannot_be_made(run, mine, tmp_path):
    (tmp_path / "out").write_text("")
    assert "cannot write to folder out" in run(*QUICK, "-o", "out", code=2).stderr


def test_by_default_evaluation_seeds_and_all_baselines():
    plan = cli_evaluate.plan_of(
        None, False, None, (), ("lmetric",), (), None, 0, 5, None, None, 0.1, 30.0
    )
    assert plan.suite == "standard"
    assert len(plan.seeds) == 20
    assert {purpose_of(s) for s in plan.seeds} == {Purpose.EVALUATION}
    assert {purpose_of(s) for s in plan.selection_seeds} == {Purpose.TUNING}
    assert min(s.workload.requests for s in plan.scenarios) >= 10_000
    assert {"lookahead", "lookahead_oracle", "lmetric"} <= {c.label for c in plan.contenders}


def test_tuned_constants_are_recorded_once(run_json, run, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    args = ("tune", "load_aware", "--scenario", "mine.toml", "--seeds", 1, "--requests", 60)
    found = run_json(*args, "--jobs", 1, "-o", "tuned.json")
    assert found == json.loads((tmp_path / "tuned.json").read_text())
    rule = found["rules"]["load_aware"]
    assert rule["score"] <= rule["default_score"]
    assert all(purpose_of(s) is Purpose.TUNING for s in rule["on"]["seeds"])
    assert "load_aware:load_weight=" in run(*args, "--jobs", 1).stdout


def test_what_is_tuned_about_an_order_or_a_queue_is_a_policy(run_json, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    args = ("tune", "load_aware+order", "lmetric+queue", "--scenario", "mine.toml", "--seeds", 1)
    args = (*args, "--requests", 60, "--budget", 4, "--jobs", 1, "-o", "tuned.json")
    found = run_json(*args)["rules"]
    specs = [found[name]["spec"] for name in ("load_aware+order", "lmetric+queue")]
    assert specs[0].startswith("load_aware+order:w=")
    assert specs[1].startswith("lmetric+queue:max_in_flight=")
    compare = ("compare", "--scenario", "mine.toml", "-p", specs[0], "-p", specs[1])
    entries = run_json(*compare, "--seeds", 1, "--requests", 60, "--jobs", 1)["entries"]
    assert {*specs, "least_outstanding"} == {entry["policy"] for entry in entries}


def test_a_trained_policy_is_written_with_its_tuned_order(run_json, run, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    args = ("--scenario", "mine.toml", "--seeds", 1, "--requests", 60, "--budget", 4, "--jobs", 1)
    out = tmp_path / "mine.tailrace"
    found = run_json("tune", "linear_es+order", *args, "-o", out)["rules"]["linear_es+order"]
    made = registry.get(str(out))
    assert made.own_order == Order.of(found["constants"])
    assert registry.get(f"{out}+order").name == f"mine{made.own_order.suffix}"
    for names in (["load_aware+order"], ["linear_es+queue"], ["linear_es+order", "lmetric+order"]):
        answer = run("tune", *names, *args, "-o", out, code=2)
        assert "one trained policy with its order" in answer.stderr


def test_shipped_baselines_can_be_used():
    documented = Path(__file__).parents[2] / "docs" / "results" / "tuned.json"
    assert documented.read_bytes() == shipped.TUNED_FILE.read_bytes()
    from tailrace.evaluate.judge.suite import load_scenarios

    (scenario,) = load_scenarios(["agents"])
    found = {c.label: c.role for c in baselines.baselines_of(["tuned", "learned"], scenario)}
    assert {"linear_es", "predict_greedy", "load_aware:tuned"} <= set(found)
    assert not any("+" in label for label in found)
    assert not any("+" in name for name in baselines.members("all"))
    ordered = baselines.baselines_of(["ordered"], scenario)
    assert {"tailrace+order:tuned", "linear_es+order:tuned"} <= {c.label for c in ordered}
    specs = {c.label: c.spec for c in ordered}
    assert specs["linear_es+order:tuned"].startswith("linear_es+order:w=")
    assert all(c.is_candidate for c in ordered)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["lmetric"], "unknown name to tune 'lmetric'"),
        (["linear_es", "load_aware"], "linear_es is tuned by itself"),
        (["linear_es"], "say with -o FILE.tailrace where to put linear_es"),
        (["load_aware", "-o", "x.toml"], "its name must end in .json"),
        (["linear_es", "-o", "x.json"], "its name must end in .tailrace"),
    ],
)
def test_mistakes_in_tuning(refuse, args, message):
    assert message in refuse("tune", *args)


def test_one_scenario_is_run_against_the_best_rules_on_record(
    run_json, mine, monkeypatch, tmp_path
):
    monkeypatch.setattr(baselines, "BEST_FILE", tmp_path / "best.json")
    args = [arg for arg in QUICK if arg not in ("--against", "none")]
    baselines.record_best("other", "random", {"not-mine": "random"})
    assert baselines.recorded_best(["mine.toml"]) is None
    baselines.record_best("custom", "preble", {"mine.toml": "dynamo"})
    found = run_json(*args, "-p", "lmetric")
    assert {c["policy"] for c in found["cells"]} == {
        "lmetric", "least_outstanding", "preble", "dynamo",
    }  # fmt: skip
    run_json(*QUICK, "-p", "lmetric", "--write-shipped")
    assert set(json.loads((tmp_path / "best.json").read_text())) == {"custom", "other"}


@pytest.mark.compiled
def test_other_seeds_of_the_same_purpose(run_json):
    asked = (
        "evaluate",
        "--scenario",
        "scale-2",
        "--requests",
        60,
        "--against",
        "none",
        "--seeds",
        2,
    )
    found = [run_json(*asked, "--first-seed", n)["seeds"] for n in (0, 2)]
    assert found[0][1] + 1 == found[1][0]
