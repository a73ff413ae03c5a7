"""The parity benchmark on the recorded runs of tests/data/parity, whole and damaged."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from reference_runs import replica_of, table_of
from tailrace.config import Cluster
from tailrace.sim.reference import ReferenceEngine

FIXTURE = Path(__file__).parent / "data" / "parity"
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import vidur_parity  # noqa: E402
import vidur_routers  # noqa: E402
import vidur_runs  # noqa: E402

NAMES = vidur_runs.run_names(FIXTURE)


def test_fixture_covers_all_schedulers_and_routers():
    runs = [vidur_runs.read_run(FIXTURE, name) for name in NAMES]
    assert {run.scheduler for run in runs} == {
        "sarathi", "vllm", "vllm_v1", "orca", "faster_transformer", "lightllm",
    }  # fmt: skip
    assert {r.router for r in runs if r.branch == "main"} == set(vidur_routers.MAIN)
    assert {r.router for r in runs if r.branch == "canary"} == set(vidur_routers.CANARY)
    assert any(run.iterations for run in runs)


@pytest.mark.parametrize("name", NAMES)
def test_reference_engine_gives_the_recorded_run_to_the_last_bit(name):
    report = vidur_parity.reference_report(vidur_runs.read_run(FIXTURE, name))
    assert report.pop("engine") == "reference"
    assert report.pop("max_diff_s") == 0.0
    assert report
    assert all(report.values()), report


@pytest.fixture
def folder(tmp_path):
    """Two runs that may be damaged."""
    for name in ("orca_lor", "sarathi_pp2_random"):
        for path in FIXTURE.glob(f"{name}.*"):
            shutil.copy(path, tmp_path)
    return tmp_path


def edit_row(path, number, column, value):
    lines = path.read_text().splitlines()
    at = lines[0].split(",").index(column)
    cells = lines[number].split(",")
    cells[at] = str(value)
    lines[number] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")


def run_main(capsys, *arguments):
    code = vidur_parity.main([*map(str, arguments), "--jobs", "1"])
    return code, *capsys.readouterr()


def test_json_report(folder, capsys):
    code, out, _ = run_main(capsys, folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert list(report["runs"]) == ["orca_lor", "sarathi_pp2_random"]
    run = report["runs"]["sarathi_pp2_random"]
    assert run["engine"] == "reference"
    assert run["max_diff_s"] == 0.0
    assert run["assignment_equal"]
    assert run["iterations_equal"]
    assert run["requests"] == 40
    assert "compiled_max_diff_s" not in run
    assert report["summary"]["runs"] == report["summary"]["bit_equal"] == 2
    assert report["summary"]["failed"] == []


def test_compiled_engine_is_compared_where_it_applies():
    report = vidur_parity.check_run(FIXTURE, "v1_lop")
    assert report["engine"] == "reference+compiled"
    assert report["compiled_max_diff_s"] == 0.0
    assert report["compiled_checksums_equal"]
    assert report["fast_max_diff_s"] < 1e-9
    assert report["ok"]


def test_table_for_people(folder, capsys):
    code, out, _ = run_main(capsys, folder)
    assert code == 0
    assert "sarathi_pp2_random" in out
    assert "passed: 2" in out


def test_other_time_fails_the_run(folder, capsys):
    edit_row(folder / "orca_lor.csv", 7, "completed_at", 123.0)
    code, out, _ = run_main(capsys, folder, "--json")
    assert code == 1
    assert json.loads(out)["summary"]["failed"] == ["orca_lor"]
    code, out, _ = run_main(capsys, folder)
    assert code == 1
    assert "failed: orca_lor" in out


def test_other_replica_fails_the_run(folder, capsys):
    path = folder / "orca_lor.csv"
    recorded = int(vidur_runs.read_run(folder, "orca_lor").requests["replica"][6])
    edit_row(path, 7, "replica", 1 - recorded)
    code, out, _ = run_main(capsys, folder, "--json")
    assert code == 1
    assert json.loads(out)["runs"]["orca_lor"]["assignment_equal"] is False


def test_missing_time_is_a_difference_and_valid_json(folder, capsys):
    edit_row(folder / "orca_lor.csv", 7, "completed_at", "")
    code, out, _ = run_main(capsys, folder, "--json")
    assert code == 1
    assert json.loads(out)["runs"]["orca_lor"]["max_diff_s"] is None


def test_other_checksum_or_iteration_fails_the_run(folder, capsys):
    path = folder / "orca_lor.json"
    settings = json.loads(path.read_text())
    settings["result"]["sum_K"] += 1
    path.write_text(json.dumps(settings))
    edit_row(folder / "sarathi_pp2_random.iterations.csv", 3, "T", 999)
    code, out, _ = run_main(capsys, folder, "--json")
    report = json.loads(out)
    assert code == 1
    assert report["runs"]["orca_lor"]["checksums_equal"] is False
    assert report["runs"]["sarathi_pp2_random"]["iterations_equal"] is False


def damage_nothing(folder):
    shutil.rmtree(folder)


def damage_empty(folder):
    for path in folder.iterdir():
        path.unlink()


def damage_no_csv(folder):
    (folder / "orca_lor.csv").unlink()


def damage_json(folder):
    (folder / "orca_lor.json").write_text("{")


def damage_key(folder):
    path = folder / "orca_lor.json"
    settings = json.loads(path.read_text())
    del settings["num_blocks"]
    path.write_text(json.dumps(settings))


def damage_scheduler(folder):
    path = folder / "orca_lor.json"
    path.write_text(path.read_text().replace('"orca"', '"orka"'))


def damage_router(folder):
    path = folder / "orca_lor.json"
    path.write_text(path.read_text().replace('"lor"', '"lord"'))


def damage_speeds(folder):
    path = folder / "orca_lor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"speeds": [1.0]}))


def damage_cell(folder):
    edit_row(folder / "orca_lor.csv", 3, "prefill_tokens", "many")


def damage_column(folder):
    path = folder / "orca_lor.csv"
    path.write_text(path.read_text().replace("decode_tokens", "tokens", 1))


def damage_line(folder):
    path = folder / "orca_lor.csv"
    path.write_text(path.read_text() + "1.0,2\n")


def damage_order(folder):
    edit_row(folder / "orca_lor.csv", 9, "arrived_at", 0.0)


def damage_replica(folder):
    edit_row(folder / "orca_lor.csv", 9, "replica", 5)


def damage_log(folder):
    edit_row(folder / "sarathi_pp2_random.iterations.csv", 3, "T", "x")


def damage_bytes(folder):
    (folder / "orca_lor.csv").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_nothing, "is not a folder"),
        (damage_empty, "has no runs"),
        (damage_no_csv, "has no orca_lor.csv beside it"),
        (damage_json, "is not valid JSON"),
        (damage_key, "num_blocks"),
        (damage_scheduler, "orka"),
        (damage_router, "did you mean lor"),
        (damage_speeds, "2 replicas but 1 speeds"),
        (damage_cell, "many"),
        (damage_column, "there is no column 'decode_tokens'"),
        (damage_line, "line 42: 8 values expected, got 2"),
        (damage_order, "request 8: arrives before the request above it"),
        (damage_replica, "request 8: there is no replica 5"),
        (damage_log, "cannot be understood"),
        (damage_bytes, "is not a text file"),
    ],
)
def test_unusable_folder_is_one_sentence(damage, message, folder, capsys):
    damage(folder)
    code, out, err = run_main(capsys, folder, "--json")
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_several_processes_give_the_same_report(folder):
    alone = dict(vidur_parity.check_folder(folder, jobs=1))
    together = dict(vidur_parity.check_folder(folder, jobs=2))
    for report in (*alone.values(), *together.values()):
        del report["seconds"]
    assert alone == together


def routed(router, rows, n=3, scheduler="vllm_v1"):
    cluster = Cluster(replicas=(replica_of(scheduler, count=n),))
    result = ReferenceEngine(cluster, table_of(rows)).run(dispatcher=router)
    return result.requests["replica"].tolist()


def settings_of(sessions=(), **more):
    return vidur_routers.RouterSettings(sessions=sessions, **more)


def test_main_lor_counts_waiting_requests_only_and_prefers_low_numbers():
    router = vidur_routers.make_router("main", "lor", settings_of())
    # Three at once, one each. At 0.5 s all are running, so nobody waits: replica 0, then 1.
    rows = [(0.0, 8, 9)] * 3 + [(0.5, 8, 9), (0.6, 8, 9)]
    assert routed(router, rows) == [0, 1, 2, 0, 1]


def test_canary_lor_counts_all_and_draws_even_without_a_tie():
    router = vidur_routers.make_router("canary", "lor", settings_of(router_seed=5))
    rows = [(0.0, 8, 9)] * 3 + [(0.5, 8, 9)]
    expected, loads, draws = [], [0, 0, 0], random.Random(5)
    for _ in rows:
        replica = draws.choice([i for i in range(3) if loads[i] == min(loads)])
        loads[replica] += 1
        expected.append(replica)
    assert routed(router, rows) == expected
    assert router.own_random.getstate() == draws.getstate()


def test_lop_uncached_evens_out_the_spread_and_forgets_at_the_first_token():
    router = vidur_routers.make_router("canary", "lop_uncached", settings_of())
    rows = [(0.0, 100, 2, [(1, 100)]), (0.0, 10, 2), (5.0, 100, 1, [(1, 100)])]
    replicas = routed(router, rows, n=2)
    assert replicas[0] != replicas[1]
    # At 5 s nothing is pending. 96 tokens are cached where the first one went, so 4 are not.
    assert replicas[2] == replicas[0]
    assert router.cached[2, replicas[0]] == 96
    assert router.pending == [0, 0]


def test_sticky_routers_need_sessions(folder):
    router = vidur_routers.make_router("canary", "sticky_lor", settings_of(sessions=[-1]))
    with pytest.raises(vidur_routers.TailraceError, match="has no session"):
        routed(router, [(0.0, 8, 1)])
