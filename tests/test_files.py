import csv
import json

import numpy as np
import pyarrow.parquet
import pytest

from results import make_batches, make_result
from tailrace.config import Event
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.chrome_trace import write_trace
from tailrace.evaluate.measure.request_results import SUFFIXES, write_requests
from tailrace.files import atomic_path, check_target
from tailrace.sim.result import FINISHED, PENDING
from tailrace.view.objective import LOST_COST_S


@pytest.fixture
def result():
    return make_result(
        [0.0, 1.0],
        first=[0.5, np.nan],
        finished=[1.5, np.nan],
        scheduled=[0.25, np.nan],
        status=[FINISHED, PENDING],
        replica=[1, -1],
        batches=make_batches(
            (0, 0, 0.0, 0.5, 1, 0, 2, 200, 0, 5e3), (1, 1, 0.5, 1.5, 37, 3, 0, 3, 400, 0.0)
        ),
    )


def test_csv_has_a_row_per_request_and_blanks_for_what_never_came(result, tmp_path):
    path = tmp_path / "out.csv"
    write_requests(result, path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [r["status"] for r in rows] == ["finished", "pending"]
    assert rows[0]["ttft_s"] == "0.5"
    assert rows[0]["replica"] == "1"
    assert float(rows[0]["cost_s"]) == pytest.approx(0.2 * 1.5 + 0.5)
    assert rows[1]["first_token_s"] == rows[1]["e2e_s"] == ""
    assert float(rows[1]["cost_s"]) > LOST_COST_S
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_parquet_has_the_same_columns(result, tmp_path):
    write_requests(result, tmp_path / "out.parquet")
    write_requests(result, tmp_path / "out.csv")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    assert header.replace('"', "").split(",") == table.column_names
    assert table["finished_s"].to_pylist() == [1.5, None]
    assert table["slo_met"].to_pylist() == [False, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.txt", "must end in .csv or .parquet"),
        ("missing/out.csv", "there is no folder"),
        ("folder.csv", "it is a folder"),
    ],
)
def test_impossible_targets_are_refused_before_any_work(tmp_path, name, message):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TailraceError, match=message):
        check_target(tmp_path / name, SUFFIXES)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text("old")

    def fail_half_way():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_in_a_sentence(tmp_path):
    with (
        pytest.raises(TailraceError, match=r"cannot write .*No space left"),
        atomic_path(tmp_path / "file.csv"),
    ):
        raise OSError(28, "No space left on device")


def test_chrome_trace(result, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(result, path, [Event(at_s=1.0, replica=1, kind="slow", factor=0.5)])
    events = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("prefill", 0.0, 5e5),
        ("decode x37", 5e5, 1e6),
    ]
    assert slices[0]["args"]["T"] == 200
    assert slices[1]["args"]["K"] == 400
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[e["pid"], e["tid"]] for e in slices] == ["stage 0", "stage 1"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes[slices[1]["pid"]] == "replica 1"
    assert 0 not in processes
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert (mark["name"], mark["pid"], mark["ts"]) == ("slow x0.5", slices[1]["pid"], 1e6)


def test_a_trace_needs_recorded_batches(tmp_path):
    result = make_result([0.0], first=[1.0], finished=[2.0])
    with pytest.raises(TailraceError, match="recorded no batches"):
        write_trace(result, tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
