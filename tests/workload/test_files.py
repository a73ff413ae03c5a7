"""Our own files: everything comes back, and mistakes are named."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from tailrace.errors import TailraceError
from tailrace.workload import library, request_file, traces
from tailrace.workload.table import RequestTable
from workload.strategies import tables

SUFFIXES = (".csv", ".parquet")


def assert_equal(a: RequestTable, b: RequestTable) -> None:
    for column in a.rows.dtype.names or ():
        assert np.array_equal(a.rows[column], b.rows[column]), column
    assert np.array_equal(a.runs, b.runs)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(table=tables())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_table_comes_back_bit_for_bit(suffix: str, table: RequestTable, tmp_path: Path) -> None:
    path = tmp_path / f"requests{suffix}"
    traces.write(table, path)
    trace = traces.read(path)
    assert_equal(trace.table, table)
    assert trace.format == suffix[1:]
    assert trace.has_arrivals
    assert trace.has_slos
    assert not trace.was_sorted
    assert trace.skipped == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["chat", "mixed", "agents"])
def test_workloads_come_back(suffix: str, name: str, tmp_path: Path) -> None:
    table = library.make(name, 3000, None, 1)
    path = tmp_path / f"requests{suffix}"
    traces.write(table, path)
    assert_equal(traces.read(path).table, table)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_many_batches_come_back(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_file, "ROWS_PER_BATCH", 7)
    table = library.make("agents", 100, None, 1)
    path = tmp_path / f"requests{suffix}"
    traces.write(table, path)
    assert_equal(traces.read(path).table, table)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(request_file.pa_csv, "write_csv", fail)
    with pytest.raises(TailraceError, match=r"cannot write .*requests.csv: No space left"):
        traces.write(library.make("chat", 5, None, 1), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_elsewhere_is_refused(tmp_path: Path) -> None:
    table = library.make("chat", 5, None, 1)
    with pytest.raises(TailraceError, match=r"must end in \.csv or \.parquet"):
        traces.write(table, tmp_path / "requests.txt")
    with pytest.raises(TailraceError, match=r"cannot write .*No such file"):
        traces.write(table, tmp_path / "missing" / "requests.csv")


def test_a_small_file_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "\ufeffarrival_s, prompt_tokens ,output_tokens,parent,think_s,session,runs\r\n"
        "0,10,5,-1,0,0,1:4 2:6\r\n"
        "\r\n"
        " 1.5 ,20.0,5,0,0.5,0,1:4 2:16\r\n"
        "2,7,1,-1,0,-1,\r\n",
        encoding="utf-8",
    )
    trace = traces.read(path)
    rows = trace.table.rows
    assert rows["arrival_s"].tolist() == [0, 1.5, 2]
    assert rows["prompt_tokens"].tolist() == [10, 20, 7]
    assert rows["parent"].tolist() == [-1, 0, -1]
    assert rows["run_count"].tolist() == [2, 2, 0]
    assert trace.table.runs["tokens"].tolist() == [4, 6, 4, 16]
    assert not trace.has_slos


def test_lengths_alone_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("prompt_tokens,output_tokens\n4,5\n6,7\n")
    trace = traces.read(path)
    assert not trace.has_arrivals
    assert trace.table.rows["arrival_s"].tolist() == [0, 0]


HEADER = "arrival_s,prompt_tokens,output_tokens,parent,runs"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["0,5,1,-1,", "1,x,1,-1,"], r"line 3, column prompt_tokens: must be a number, got 'x'"),
        (["0,5,1,-1,", "", "1,,1,-1,"], r"line 4, column prompt_tokens: is empty"),
        (["0,nan,1,-1,"], r"line 2, column prompt_tokens: must be a finite number, got 'nan'"),
        (["inf,5,1,-1,"], r"line 2, column arrival_s: must be a finite number"),
        (["-1,5,1,-1,"], r"line 2, column arrival_s: must not be negative, got '-1'"),
        (["1e12,5,1,-1,"], r"line 2, column arrival_s: .* thousand years"),
        (["0,5.5,1,-1,"], r"line 2, column prompt_tokens: must be a whole number, got '5.5'"),
        (["0,0,1,-1,"], r"line 2, column prompt_tokens: must be at least 1, got '0'"),
        (["0,5,-3,-1,"], r"line 2, column output_tokens: must be at least 1, got '-3'"),
        (["0,16777217,1,-1,"], r"line 2, column prompt_tokens: must be at most 16777216"),
        (["0,5,1,-2,"], r"line 2, column parent: must be at least -1"),
        (["0,5,1,-1,", "1,5,1,1,"], r"line 3: its parent must stand above it"),
        (["0,5,1,-1,", "", "", "1,5,1"], r"line 5: 3 columns, but the header has 5"),
        (["0,5,1,-1,1:2 2:2"], r"line 2, column runs: the runs have 4 tokens, .* says 5"),
        (["0,5,1,-1,1:2;2:3"], r"line 2, column runs: must be segment:tokens pairs"),
        (["0,5,1,-1,1:-2 2:7"], r"line 2, column runs: must be segment:tokens pairs"),
        (["0,5,1,-1,1:99999999"], r"line 2, column runs: a run of 99999999 tokens"),
        (["2,5,1,-1,", "1,5,1,-1,"], r"line 3: arrives before the request above it; sort the file"),
        ([], r"has a header but no requests"),
    ],
)
def test_mistakes_are_named_with_file_line_and_column(
    lines: list[str], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    with pytest.raises(TailraceError, match=r"bad\.csv.*" + complaint):
        traces.read(path)


def test_a_mistake_far_down_is_found(tmp_path: Path) -> None:
    lines = [f"{i},5,1" for i in range(5000)]
    lines[3210] = "3210,5,one"
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    with pytest.raises(TailraceError, match=r"line 3212, column output_tokens: .* 'one'"):
        traces.read(path)


def test_unsorted_files_are_sorted_on_request_with_their_parents(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\n5,5,1,-1,1:5\n1,6,1,-1,2:6\n9,7,1,0,1:7\n")
    trace = traces.read(path, sort=True)
    assert trace.was_sorted
    assert trace.table.rows["prompt_tokens"].tolist() == [6, 5, 7]
    assert trace.table.rows["parent"].tolist() == [-1, -1, 1]
    assert trace.table.runs["segment"].tolist() == [2, 1, 1]
    path.write_text(f"{HEADER}\n5,5,1,-1,1:5\n1,6,1,99,2:6\n")
    with pytest.raises(TailraceError, match="line 3: there is no row 99"):
        traces.read(path, sort=True)
    path.write_text(f"{HEADER}\n5,5,1,-1,1:5\n1,6,1,0,2:6\n")
    with pytest.raises(TailraceError, match="line 3: its parent must stand above it"):
        traces.read(path, sort=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,b\n1,2\n", "has the columns a, b; known formats: azure"),
        ("prompt_tokens,output_tokens,outptu\n1,2,3\n", "unknown column 'outptu'; did you mean"),
        ("prompt_tokens,output_tokens,output_tokens\n1,2,3\n", "output_tokens stands there twice"),
    ],
)
def test_files_that_make_no_sense(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TailraceError, match=r"bad\.csv.*" + complaint):
        traces.read(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"\xff\xfe\x00\x01\n\x02")
    with pytest.raises(TailraceError, match=r"bad\.csv.*not text"):
        traces.read(path)
    path.write_bytes(b"prompt_tokens,output_tokens\n1,\xff\n")
    with pytest.raises(TailraceError, match=r"bad\.csv"):
        traces.read(path)
    path.write_bytes(b'{"timestamp": 0, "input_length": 5, "x": "\xff"}\n')
    with pytest.raises(TailraceError, match=r"bad\.csv, line 1 is not text"):
        traces.read(path)


def test_missing_files_and_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match=r"cannot read .*none\.csv: No such file"):
        traces.read(tmp_path / "none.csv")
    with pytest.raises(TailraceError, match="is a folder without decision logs"):
        traces.read(tmp_path)
    with pytest.raises(TailraceError, match="unknown trace format 'azur'; did you mean azure"):
        traces.read(tmp_path / "x.csv", "azur")


def parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    lengths = {"prompt_tokens": [4, 5], "output_tokens": [1, 1]}
    for changes, complaint in (
        ({"output_tokens": [1, None]}, "row 1, column output_tokens: is empty"),
        ({"output_tokens": [1.0, float("nan")]}, "row 1, column output_tokens: must be a finite"),
        ({"output_tokens": [[1], [1]]}, "row 0, column output_tokens: must be a number"),
        ({"run_segments": [[1], [1]]}, "there is no column run_tokens"),
        ({"run_segments": [[1], [1]], "run_tokens": [1, 2]}, "column run_tokens: must be lists"),
        (
            {"run_segments": [[1], [1, 2]], "run_tokens": [[4], [5]]},
            "row 1, column run_tokens: not as many as run_segments",
        ),
        (
            {"run_segments": [[1], [1]], "run_tokens": [[4], [6]]},
            "row 1, column run_tokens: the runs have 6 tokens, prompt_tokens says 5",
        ),
        ({"run_segments": [["a"], ["b"]], "run_tokens": [[4], [5]]}, "must be lists of whole"),
        ({"colour": [1, 2]}, "unknown column 'colour'"),
    ):
        with pytest.raises(TailraceError, match=rf"bad\.parquet.*{complaint}"):
            traces.read(parquet(path, **(lengths | changes)))
    with pytest.raises(TailraceError, match="there is no column output_tokens"):
        traces.read(parquet(path, prompt_tokens=[1]))
    with pytest.raises(TailraceError, match="has no requests"):
        traces.read(parquet(path, prompt_tokens=pa.array([], pa.int32())))
    path.write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(TailraceError, match=r"bad\.parquet is not a Parquet file"):
        traces.read(path)


@pytest.mark.parametrize("tenant", ["²", "9" * 30, "9" * 5000])
def test_odd_numbers_of_tenants(tenant: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"prompt_tokens,output_tokens,tenant\n1,2,{tenant}\n")
    if tenant == "²":
        assert traces.read(path).table.rows["tenant"].tolist() == [0]  # a name
        return
    with pytest.raises(TailraceError, match="column tenant: must be a name or a number below"):
        traces.read(path)


def test_odd_columns_of_parquet_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    with pytest.raises(TailraceError, match="column tenant: must be names or numbers"):
        traces.read(parquet(path, prompt_tokens=[1], output_tokens=[1], tenant=[[1]]))
    runs = {"run_segments": [[-5]], "run_tokens": [[1]]}
    with pytest.raises(TailraceError, match="row 0, column run_segments: segments are numbers"):
        traces.read(parquet(path, prompt_tokens=[1], output_tokens=[1], **runs))


def test_a_line_of_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    runs = " ".join(f"{k}:1" for k in range(400_000))
    path.write_text(f"prompt_tokens,output_tokens,runs\n400000,2,{runs}\n1,1,5:1\n")
    assert traces.read(path).table.rows["run_count"].tolist() == [400_000, 1]
