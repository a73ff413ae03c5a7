import dataclasses
import io
import json
import re

import numpy as np
import pyarrow.parquet
import pytest
from rich.console import Console

from tailrace import scenario as scenarios
from tailrace.config import Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.judge import baselines, results
from tailrace.evaluate.judge.baselines import contender, gathered
from tailrace.evaluate.judge.suite import (
    EvaluationPlan,
    evaluate,
    evaluation_seeds,
    load_scenarios,
    load_suite,
    ranking_seeds,
    selection_seeds,
    suite_names,
)
from tailrace.evaluate.measure import cells
from tailrace.evaluate.measure.cells import Measure, simulator
from tailrace.evaluate.measure.contender import Contender, Role
from tailrace.evaluate.measure.metrics import summarise
from tailrace.policy import shipped
from tailrace.seeds import Purpose, purpose_of, seeds
from tailrace.terminal.evaluations import print_evaluation
from tailrace.workload import library

pytestmark = pytest.mark.compiled

SMALL = Scenario(name="small", workload=Workload(name="chat", requests=80, rate=30.0))
HOT = Scenario(name="hot", workload=Workload(name="sessions-hot", requests=80, rate=30.0))
NAMES = ("least_outstanding", "round_robin", "lmetric")


def make_plan(names=NAMES, all_scenarios=(SMALL, HOT), subject="lmetric", **changes):
    plan = EvaluationPlan(
        "custom",
        all_scenarios,
        tuple(contender(n, SMALL) for n in names),
        subject,
        ranking_seeds(2),
        selection_seeds(2),
    )
    return dataclasses.replace(plan, **changes)


class Counter:
    """A player that counts; it can be told to be interrupted."""

    def __init__(self, stop_after=None):
        self.played = []
        self.stop_after = stop_after

    def __call__(self, traffic, spec):
        if len(self.played) == self.stop_after:
            raise KeyboardInterrupt
        self.played.append((traffic.scenario.name, spec, traffic.seed))
        return simulator(traffic, spec)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return evaluate(make_plan(), tmp_path_factory.mktemp("cells"), jobs=1)


def test_suites_are_what_they_should_be():
    assert suite_names() == ["classes", "holdout", "real", "standard"]
    standard, holdout, classes = map(load_suite, ("standard", "holdout", "classes"))
    assert len(standard.scenarios) >= 12
    assert not set(standard.scenarios) & set(holdout.scenarios)
    assert all(library.classes_of(scenarios.load(n).workload.name) for n in classes.scenarios)
    for name in (*standard.scenarios, *holdout.scenarios, *classes.scenarios):
        scenario = scenarios.load(name)
        assert scenario.capacity_rps is not None
        assert scenario.workload.requests >= 10_000
        assert scenario.workload.load is not None
    assert {scenarios.load(n).cluster.size for n in standard.scenarios} >= {2, 4, 8, 32}


def test_classes_are_reported_each_by_itself(tmp_path):
    world = Scenario(name="both", workload=Workload(name="chat-and-batch", requests=80, rate=30.0))
    plan = make_plan(all_scenarios=(SMALL, world))
    evaluate(plan, tmp_path / "cells", jobs=1)
    found = evaluate(plan, tmp_path / "cells", jobs=1)  # from the files of its cells
    results.write(found, tmp_path)
    means = {(c.scenario, c.policy): c for c in results.read(tmp_path / results.JSON).cells}
    assert means["small", "lmetric"].classes == {}
    both = means["both", "lmetric"]
    assert list(both.classes) == ["interactive", "batch"]
    assert sum(one.requests for one in both.classes.values()) == both.requests
    longest = max(one.longest_ttft_s for one in both.classes.values())
    assert longest == both.longest_ttft_s
    table = pyarrow.parquet.read_table(tmp_path / results.PARQUET).to_pylist()
    cells_read = [results.cell_of(row) for row in table]
    assert [c for row in found.grid.cells for group in row for c in group] == cells_read[
        : len(NAMES) * 2 * 2
    ]
    screen = Console(width=200, record=True, file=io.StringIO())
    print_evaluation(screen, found)
    text = screen.export_text()
    assert "By class" in text
    assert re.search(r"both +interactive +[\d.]+% \([\d.]+%\)", text)


def test_unknown_names_are_said_in_a_sentence():
    with pytest.raises(TailraceError, match=r"unknown suite 'standart'; did you mean standard"):
        load_suite("standart")
    with pytest.raises(TailraceError, match=r"unknown scenario 'agent'; did you mean agents"):
        load_scenarios(["agent"])
    with pytest.raises(TailraceError, match=r"two scenarios are called 'agents'"):
        load_scenarios(["agents", "agents"])


def test_so_many_requests_in_each_scenario():
    (scenario,) = load_scenarios(["scale-32"], 123)
    assert scenario.workload.requests == 123


def test_seeds_of_every_step_are_disjoint():
    tuned = set(seeds(Purpose.TUNING, 1000, 10_000))
    assert not tuned & set(selection_seeds(1000))
    assert not set(selection_seeds(1000)) & set(ranking_seeds(1000))
    assert {purpose_of(s) for s in evaluation_seeds(3)} == {Purpose.EVALUATION}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection_seeds": evaluation_seeds(1)}, "set aside for evaluation, not tuning"),
        ({"seeds": selection_seeds(1)}, "would choose the best rules and judge them"),
        ({"seeds": tuple(seeds(Purpose.TRAINING, 1))}, "never on training's"),
        ({"seeds": (*ranking_seeds(1), *evaluation_seeds(1))}, "seeds of one purpose"),
        ({"seeds": ()}, "needs seeds to measure on"),
    ],
)
def test_seeds_are_never_mixed(changes, message):
    with pytest.raises(TailraceError, match=message):
        make_plan(**changes)


def test_a_cell_is_the_plain_run_of_its_scenario(found):
    cell = found.grid.cells[0][1][1]
    assert (cell.scenario, cell.policy, cell.seed) == ("small", "round_robin", ranking_seeds(2)[1])
    (traffic,) = make_plan().traffics([cell.seed])[:1]
    assert cell.summary == summarise(simulator(traffic, "round_robin"), 0.1)


def test_opponents_are_chosen_on_other_seeds_than_they_are_judged_on(found):
    assert {c.seed for c in found.selection} == set(selection_seeds(2))
    cost = {}
    for c in found.selection:
        cost.setdefault((c.scenario, c.policy), []).append(c.summary.cost_s)
    means = {key: np.mean(values) for key, values in cost.items()}
    for scenario, best in zip(found.grid.scenarios, found.best_of_each, strict=True):
        assert means[scenario, best] == min(means[scenario, p] for p in NAMES)
    score = {p: means["small", p] * means["hot", p] for p in NAMES}
    assert found.best_single == min(score, key=score.get)


def test_standings_are_relative_to_least_outstanding(found):
    by_name = {s.contender.label: s for s in found.standings}
    assert by_name["least_outstanding"].score == 1.0
    values = [s.score for s in found.standings]
    assert values == sorted(values)
    assert found.subject is by_name["lmetric"]


def test_look_aheads_and_those_under_test_are_never_the_best_rule(tmp_path):
    names = ("least_outstanding", "lookahead", "lookahead_oracle")
    plan = make_plan(names, (SMALL,), None)
    mine = Contender("mine", "least_predicted_ttft", Role.SUBJECT, "x")
    plan = dataclasses.replace(plan, contenders=(*plan.contenders, mine), subject="mine")
    found = evaluate(plan, tmp_path, jobs=1)
    assert found.best_single == "least_outstanding"
    assert {c.policy for c in found.selection} == {"least_outstanding"}
    assert len(found.standings) == 4


def test_processes_give_the_same(found, tmp_path):
    assert evaluate(make_plan(), tmp_path, jobs=2).standings == found.standings


def test_an_interrupted_evaluation_goes_on_where_it_stopped(found, tmp_path):
    first = Counter(stop_after=7)
    with pytest.raises(KeyboardInterrupt):
        evaluate(make_plan(), tmp_path, jobs=1, player=first)
    told = []
    second = Counter()
    resumed = evaluate(
        make_plan(), tmp_path, jobs=1, player=second, progress=lambda *a: told.append(a)
    )
    assert len(first.played) == 7
    assert len(second.played) == 24 - 7
    assert not set(first.played) & set(second.played)
    assert told[0] == (7, 7)
    assert told[-1] == (24, 7)
    assert resumed.standings == found.standings
    third = Counter()
    assert evaluate(make_plan(), tmp_path, jobs=1, player=third).grid == resumed.grid
    assert third.played == []


@pytest.mark.parametrize(
    "changes",
    [
        {"measure": Measure(0.2, 30.0)},
        {"measure": Measure(0.1, 5.0)},
        {"all_scenarios": (SMALL.model_copy(update={"workload": HOT.workload}),)},
        {"names": ("least_outstanding:",), "subject": None, "expected": 0},
    ],
)
def test_other_settings_never_pick_up_old_cells(tmp_path, changes):
    base = {"names": ("least_outstanding",), "all_scenarios": (SMALL,), "subject": None}
    expected = changes.pop("expected", 4)
    evaluate(make_plan(**base), tmp_path, jobs=1, player=Counter())
    again = Counter()
    names = changes.get("names")
    plan = make_plan(**{**base, **changes})
    if names:  # another name of the same rule with the same constants
        plan = dataclasses.replace(
            plan,
            contenders=(dataclasses.replace(plan.contenders[0], label="least_outstanding"),),
        )
    evaluate(plan, tmp_path, jobs=1, player=again)
    assert len(again.played) == expected


def test_a_changed_policy_file_is_another_policy(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def scores(view):\n    return view.replicas['in_flight']\n")
    first = contender(str(path), SMALL)
    assert (first.label, first.role) == ("mine", Role.SUBJECT)
    path.write_text("def scores(view):\n    return -view.replicas['in_flight']\n")
    assert contender(str(path), SMALL).fingerprint != first.fingerprint


def test_other_sources_are_other_cells(monkeypatch):
    plan = make_plan()
    task = cells.CellTask(plan.traffics([1])[0], (), Measure(), "", simulator)
    task = dataclasses.replace(task, folder=cells.Path("x"))
    before = cells.cell_path(task, plan.contenders[0])
    monkeypatch.setattr(cells, "source_digest", lambda: "other")
    assert cells.cell_path(task, plan.contenders[0]) != before


def test_kept_baselines_of_earlier_sources_are_not_run_again(tmp_path, monkeypatch):
    mine = tmp_path / "mine.py"
    mine.write_text("def scores(view):\n    return view.replicas['in_flight']\n")
    plan = make_plan(("round_robin", "least_outstanding", str(mine)), subject="mine")
    first = evaluate(plan, tmp_path / "cells", jobs=1)
    monkeypatch.setattr(cells, "source_digest", lambda: "other")
    mine.write_text("def scores(view):\n    return -view.replicas['in_flight']\n")
    changed = make_plan(
        ("round_robin", "least_outstanding", str(mine)), subject="mine", keep_baselines=True
    )
    again = evaluate(changed, tmp_path / "cells", jobs=1)
    old, new = ({s.contender.label: s.score for s in found.standings} for found in (first, again))
    assert new["round_robin"] == old["round_robin"]
    assert new["mine"] != old["mine"]


@pytest.mark.parametrize(("keep", "expected"), [(True, 4), (False, 12)])
def test_only_kept_baselines_are_kept(tmp_path, monkeypatch, keep, expected):
    mine = tmp_path / "mine.py"
    mine.write_text("def scores(view):\n    return view.replicas['in_flight']\n")
    plan = make_plan(("least_outstanding", str(mine)), subject="mine", keep_baselines=keep)
    evaluate(plan, tmp_path / "cells", jobs=1, player=Counter())
    monkeypatch.setattr(cells, "source_digest", lambda: "other")
    again = Counter()
    evaluate(plan, tmp_path / "cells", jobs=1, player=again)
    assert len(again.played) == expected


def test_half_a_cell_is_measured_again(tmp_path):
    plan = make_plan(("least_outstanding",), (SMALL,), None)
    evaluate(plan, tmp_path, jobs=1, player=Counter())
    file = sorted(tmp_path.rglob("*.json"))[0]
    file.write_text(file.read_text()[:100])
    again = Counter()
    evaluate(plan, tmp_path, jobs=1, player=again)
    assert len(again.played) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def scores(view):\n    return 1 / 0", "mine on small, seed 2000030000: .*ZeroDivision"),
        ("def scores(view):\n    return [0.0]", "mine on small, seed 2000030000: .*one score per"),
        ("def scores(view):\n    return view.replicas['in_flight'] * float('nan')", "seed.* NaN"),
    ],
)
def test_a_policy_that_fails_is_named_with_scenario_and_seed(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    tested = [contender(str(path), SMALL)]
    plan = make_plan(("least_outstanding",), (SMALL,), "mine")
    plan = dataclasses.replace(plan, contenders=(*tested, *plan.contenders))
    with pytest.raises(TailraceError, match=message):
        evaluate(plan, tmp_path / "cells", jobs=1)


def test_two_policies_of_one_name_are_refused_or_told_apart(tmp_path):
    for folder, sign in (("a", ""), ("b", "-")):
        (tmp_path / folder).mkdir()
        text = f"def scores(view):\n    return {sign}view.replicas['in_flight']\n"
        (tmp_path / folder / "mine.py").write_text(text)
    both = [str(tmp_path / folder / "mine.py") for folder in "ab"]
    labels = [c.label for c in baselines.subjects(both, SMALL)]
    assert labels == both
    one, other = (contender(name, SMALL) for name in both)
    with pytest.raises(TailraceError, match="two different policies are called 'mine'"):
        gathered([one], [other])


def test_the_groups_of_opponents(monkeypatch, tmp_path):
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"rules": {"load_aware": {"constants": {"load_weight": 0.7}}}}))
    monkeypatch.setattr(shipped, "TUNED_FILE", tuned)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    everybody = {c.label: c for c in baselines.baselines_of(["all"], SMALL)}
    assert everybody["load_aware:tuned"].spec == "load_aware:load_weight=0.7"
    assert everybody["load_aware:tuned"].role is Role.TUNED
    assert everybody["lookahead"].role is Role.ORACLE
    assert everybody["lmetric"].role is Role.RULE
    assert "linear_es" not in everybody  # not trained here
    assert [c.label for c in baselines.baselines_of(["none"], SMALL)] == ["least_outstanding"]
    with pytest.raises(TailraceError, match="unknown tuned rule 'lmetric'"):
        contender("lmetric:tuned", SMALL)
    with pytest.raises(TailraceError, match="linear_es is not trained yet; run `tailrace tune lin"):
        contender("linear_es", SMALL)


def test_rows_do_not_depend_on_the_order_in_which_cells_were_finished(found):
    turned = dataclasses.replace(found, selection=found.selection[::-1])
    assert results.table(turned).equals(results.table(found))


def test_results_as_parquet_and_json(found, tmp_path):
    results.write(found, tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / results.PARQUET)
    assert table.num_rows == 24
    rows = {(r["scenario"], r["policy"], r["seed"]): r for r in table.to_pylist()}
    cell = found.grid.cells[1][0][0]
    row = rows[cell.scenario, cell.policy, cell.seed]
    assert row["ttft_s_p99"] == cell.summary.ttft_s.p99
    assert row["longest_ttft_s"] == cell.extremes.longest_ttft_s
    assert row["purpose"] == "tuning"
    data = json.loads((tmp_path / results.JSON).read_text(), parse_constant=pytest.fail)
    assert set(data["vs_best_single"]) >= {"p99_ttft", "mean_e2e", "throughput"}
    assert set(data["vs_best_per_scenario"]) >= {"share_better", "worst_ratio"}
    versus = found.subject.versus.p99_ttft
    assert data["vs_best_single"]["p99_ttft"] == pytest.approx(versus.ratio, rel=1e-5)
    assert len(data["cells"]) == 6
    assert data["vs_best_per_scenario"]["worst_ratio"] == pytest.approx(
        max(v["cost"] for v in data["vs_best_per_scenario"]["scenarios"].values())
    )
    assert len((tmp_path / results.JSON).read_text().splitlines()) < 400
