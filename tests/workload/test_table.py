"""The request table refuses what later stages could not stand."""

import pickle

import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.workload.draft import Draft, finish, merge, reorder, retime
from tailrace.workload.table import RequestTable, RowError, scale_prompts
from workload import naive


def table(**columns: object) -> RequestTable:
    base = {
        "arrival_s": np.array([0.0, 1.0, 2.0]),
        "prompt_tokens": np.array([5, 6, 7]),
        "output_tokens": np.array([1, 2, 3]),
    }
    return RequestTable.build(**(base | columns))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"arrival_s": np.array([0.0, np.nan, 2.0])}, "request 1: arrival_s is not a finite"),
        ({"arrival_s": np.array([-1.0, 0.0, 2.0])}, "request 0: arrival_s is negative"),
        ({"arrival_s": np.array([0.0, 3.0, 2.0])}, "request 2: arrives before"),
        ({"think_s": np.array([0.0, -1.0, 0.0])}, "request 1: think_s is negative"),
        ({"ttft_slo_s": np.array([0.0, 1.0, np.inf])}, "request 2: ttft_slo_s is not a finite"),
        ({"prompt_tokens": np.array([5, 0, 7])}, "request 1: prompt_tokens must be at least 1"),
        ({"output_tokens": np.array([5, 1, 0])}, "request 2: output_tokens must be at least 1"),
        ({"parent": np.array([-1, 1, -1])}, "request 1: its parent must stand above it"),
        ({"parent": np.array([-1, -2, -1])}, "request 1: parent must be a row number"),
        ({"runs": [[(1, 5)], [(1, 7)], []]}, "request 1: its content runs do not add up"),
        ({"run_count": np.array([0, 1, 0])}, "request 1: its content runs lie outside"),
        ({"run_start": np.array([0, -1, 0])}, "request 1: its content runs lie outside"),
        ({"runs": [[(1, 8), (2, -3)], [], []]}, "negative number of tokens"),
    ],
)
def test_bad_tables_are_refused(columns: dict[str, object], complaint: str) -> None:
    with pytest.raises(TailraceError, match=complaint):
        table(**columns)


def test_an_empty_table_is_refused() -> None:
    nothing = np.zeros(0)
    with pytest.raises(TailraceError, match="empty"):
        RequestTable.build(nothing, nothing.astype(int), nothing.astype(int))


def test_row_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RowError(3, "is odd")))
    assert (error.row, error.what, str(error)) == (3, "is odd", "request 3: is odd")


def test_merge_keeps_drafts_apart_and_common_segments_together() -> None:
    one = table(
        runs=[[(0, 5)], [(0, 2), (1, 4)], []],
        session=np.array([0, 0, -1]),
        parent=np.array([-1, 0, -1]),
    )
    drafts = [Draft(one.rows.copy(), one.runs.copy(), 2, 1) for _ in range(2)]
    merged = merge(drafts)
    assert merged.runs["segment"].tolist() == [0, 0, 1, 2, 2, 3]
    assert merged.rows["session"].tolist() == [0, 0, -1, 1, 1, -1]
    assert merged.rows["parent"].tolist() == [-1, 0, -1, -1, 3, -1]
    assert (merged.segments, merged.sessions) == (4, 2)
    common = merge(drafts, common_segments=1)
    assert common.runs["segment"].tolist() == [0, 0, 1, 0, 0, 2]
    finished = finish(merged, 4)
    finished.validate()
    assert finished.rows["arrival_s"].tolist() == [0, 0, 1, 1]
    assert finished.rows["parent"].tolist() == [-1, -1, 0, 1]
    assert naive.runs_of(finished, 3) == [(2, 2), (3, 4)]


def test_reorder_renumbers_sessions_by_first_appearance() -> None:
    one = table(session=np.array([7, 3, 7]), parent=np.array([-1, -1, 0]))
    got = reorder(one, np.array([1, 0, 2]))
    assert got.rows["session"].tolist() == [0, 1, 1]
    assert got.rows["parent"].tolist() == [-1, -1, 1]
    alone = reorder(one, np.array([1, 2]))
    assert alone.rows["parent"].tolist() == [-1, -1]


def test_retime_moves_beginnings_and_keeps_distances() -> None:
    one = table(
        arrival_s=np.array([0.0, 1.0, 10.0]),
        parent=np.array([-1, -1, 0]),
        session=np.array([0, -1, 0]),
        runs=[[(1, 5)], [(2, 6)], [(1, 7)]],
    )
    got = retime(one, np.array([4.0, 100.0]))
    assert got.rows["arrival_s"].tolist() == [4.0, 14.0, 100.0]
    assert got.rows["parent"].tolist() == [-1, 0, -1]
    assert got.rows["prompt_tokens"].tolist() == [5, 7, 6]
    assert [naive.runs_of(got, row) for row in range(3)] == [[(1, 5)], [(1, 7)], [(2, 6)]]


def test_scaled_prompts_share_what_they_shared() -> None:
    """The common prefix of two prompts scales with them; answers keep their lengths."""
    runs = [[(0, 100), (1, 40)], [(0, 100), (1, 90)], [(0, 30), (2, 7)], []]
    prompts = np.array([140, 190, 37, 55])
    table = RequestTable.build(np.arange(4.0), prompts, np.full(4, 9), runs)
    scaled = scale_prompts(table, 2.5)
    scaled.validate()
    assert scaled.rows["prompt_tokens"].tolist() == [350, 475, 93, 138]
    assert scaled.rows["output_tokens"].tolist() == [9] * 4
    assert scaled.runs["segment"].tolist() == table.runs["segment"].tolist()
    assert scaled.runs["tokens"].tolist() == [250, 100, 250, 225, 75, 18]
    assert scale_prompts(table, 1.0) is table
    tiny = scale_prompts(table, 1e-3)
    tiny.validate()
    assert tiny.rows["prompt_tokens"].min() >= 1
    with pytest.raises(TailraceError, match="prompt_scale = 1e"):
        scale_prompts(table, 1e8)
