import json
import shutil

import pytest

from tailrace.errors import TailraceError
from tailrace.evaluate.judge.results_folder import load
from tailrace.evaluate.judge.statistics import versus_each, versus_single

pytestmark = pytest.mark.compiled


@pytest.fixture
def copy(made, tmp_path):
    """A results folder that may be damaged."""
    for name in ("results.json", "results.parquet"):
        shutil.copy(made / name, tmp_path / name)
    return tmp_path


def edit(folder, change):
    path = folder / "results.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_is_read_back_gives_the_figures_of_the_results(made, loaded):
    data = json.loads((made / "results.json").read_text())
    versus = versus_single(loaded.grid, "mine", data["best_single"])
    for name in ("cost", "p99_ttft", "mean_e2e", "throughput"):
        stated = data["vs_best_single"]
        found = getattr(versus, name)
        assert found.ratio == pytest.approx(stated[name], rel=1e-5)
        assert [found.low, found.high] == pytest.approx(stated["intervals"][name], rel=1e-5)
    each = versus_each(loaded.grid, "mine", loaded.best_of_each)
    assert each.worst.cost.ratio == pytest.approx(
        data["vs_best_per_scenario"]["worst_ratio"], rel=1e-5
    )
    for verdict in each.verdicts:
        stated = data["vs_best_per_scenario"]["scenarios"][verdict.scenario]
        assert verdict.p_holm == pytest.approx(stated["p_holm"], rel=1e-5)


def test_cells_keep_their_seeds_and_shapes(loaded):
    cells = loaded.cells("scale-8", "lmetric")
    assert [c.seed for c in cells] == list(loaded.data.seeds)
    assert len(cells[0].summary.replica_share) == 8
    assert sum(cells[0].summary.replica_share) == pytest.approx(1)
    assert isinstance(cells[0].extremes.queue_grows, bool)


def test_scenarios_are_those_that_were_played(loaded):
    scenario = loaded.scenario("scale-8")
    assert scenario.workload.requests == 240
    assert scenario.cluster.size == 8
    assert scenario.capacity_rps is not None


def test_a_scenario_of_ones_own_is_known_by_its_settings(changed):
    settings = {"workload": {"name": "chat", "rate": 7.0}}
    found = changed(requests={"mine": 50}, scenarios={"mine": settings}).scenario("mine")
    assert (found.name, found.workload.rate, found.workload.requests) == ("mine", 7.0, 50)
    assert changed(requests={"mine": 50}).scenario("mine") is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "results.json").unlink(), "is no results folder.*no results.json"),
        (lambda f: (f / "results.parquet").unlink(), "there is no results.parquet"),
        (lambda f: (f / "results.json").write_text("{"), "results.json is damaged"),
        (lambda f: (f / "results.json").write_text("[]"), "results.json is damaged"),
        (lambda f: (f / "results.json").write_bytes(b"\xff\xfe"), "results.json is damaged"),
        (lambda f: (f / "results.parquet").write_bytes(b"PAR1 no"), "results.parquet is damaged"),
        (lambda f: edit(f, lambda d: d.pop("best_single")), "best_single: Field required"),
        (lambda f: edit(f, lambda d: d.update(seeds=[])), "it holds no results"),
        (lambda f: edit(f, lambda d: d.update(seeds=[1])), "no cell of .* seed 1"),
        (
            lambda f: edit(f, lambda d: d["best_of_each"].update(other="lmetric")),
            "does not belong to the results.json beside it: it has no cell of .* on other",
        ),
    ],
)
def test_damage_is_named(copy, damage, message):
    damage(copy)
    with pytest.raises(TailraceError, match=message):
        load(copy)


def test_files_of_two_evaluations_are_not_mixed(copy):
    def shift(data):
        for policy in data["policies"]:
            policy["vs_best_single"]["cost"] *= 1.01

    edit(copy, shift)
    with pytest.raises(TailraceError, match="are of different evaluations"):
        load(copy)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(TailraceError, match=r"there is no results folder .*nowhere"):
        load(tmp_path / "nowhere")


def test_another_policy_of_the_results(made):
    assert load(made, "lmetric").subject == "lmetric"
    with pytest.raises(TailraceError, match="unknown policy in these results 'lmetrik'; did you"):
        load(made, "lmetrik")


def test_results_without_a_policy_under_test_need_a_name(copy):
    edit(copy, lambda d: d.update(subject=None))
    with pytest.raises(TailraceError, match="say with --policy which one"):
        load(copy)
    assert load(copy, "lmetric").subject == "lmetric"
