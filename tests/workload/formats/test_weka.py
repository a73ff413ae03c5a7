"""Claude Code sessions: branches, shared beginnings, times; all samples are made up."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.workload import traces
from tailrace.workload.prefix import repeated_tokens


def request(t: float, ids: list[int], *, took: float = 2.0, **changes: Any) -> dict[str, Any]:
    return {
        "t": t, "type": "s", "model": "m", "in": 64 * len(ids), "out": 10, "hash_ids": ids,
        "api_time": took,
    } | changes  # fmt: skip


def session(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 100,
        "system_tokens": 30, "requests": list(requests),
    } | changes  # fmt: skip


def save(folder: Path, *sessions: dict[str, Any]) -> Path:
    for k, one in enumerate(sessions):
        (folder / f"trace_{k}.json").write_text(json.dumps(one))
    return folder / "trace_0.json" if len(sessions) == 1 else folder


def test_a_session_is_a_chain_of_turns(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        session(
            request(0, [1, 2, 3], took=4.2, think_time=0.0),
            request(9, [1, 2, 3, 4, 5], think_time=5.0),
            request(15, [1, 2, 3, 4, 9], **{"in": 300}),
        ),
    )
    trace = traces.read(path)
    rows = trace.table.rows
    assert trace.format == "weka"
    assert trace.has_arrivals
    assert rows["parent"].tolist() == [-1, 0, 1]
    assert rows["think_s"].tolist() == [0.0, 5.0, 4.0]  # recorded; else 15 - (9 + 2)
    assert rows["session"].tolist() == [0, 0, 0]
    assert rows["turn"].tolist() == [0, 1, 2]
    assert rows["prompt_tokens"].tolist() == [192, 320, 300]
    assert repeated_tokens(trace.table).tolist() == [0, 192, 256]


def test_sub_agents_branch_off_the_turn_that_started_them(tmp_path: Path) -> None:
    agent = {"type": "subagent", "subagent_type": "Explore", "tool_tokens": 64, "system_tokens": 0}
    path = save(
        tmp_path,
        session(
            request(0, [1, 2, 3]),
            {"t": 3.0, **agent, "requests": [request(4, [7, 8]), request(8, [7, 8, 9])]},
            {"t": 3.0, **agent, "requests": [request(5, [7, 5])]},
            request(12, [1, 2, 3, 4], think_time=0.5),
        ),
    )
    rows = traces.read(path).table.rows
    assert rows["arrival_s"].tolist() == [0, 4, 5, 8, 12]
    assert rows["parent"].tolist() == [-1, 0, 0, 1, 0]
    # The main agent comes back when its sub-agents are done, 10 s after its own answer.
    assert rows["think_s"].tolist() == [0, 2, 3, 2, 10]
    assert rows["session"].tolist() == [0] * 5
    assert rows["turn"].tolist() == [0, 1, 2, 3, 4]


def test_times_of_sub_agents_may_count_from_their_start(tmp_path: Path) -> None:
    agent = {"t": 30.0, "type": "subagent", "requests": [request(0, [7]), request(5, [7, 8])]}
    rows = traces.read(save(tmp_path, session(request(0, [1]), agent))).table.rows
    assert rows["arrival_s"].tolist() == [0, 30, 35]
    assert rows["parent"].tolist() == [-1, 0, 1]


def test_requests_side_by_side_are_branches_of_one_turn(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        session(
            request(0, [1]),
            request(5, [1, 2], took=20.0, think_time=3.0),
            request(6, [1, 3], think_time=0.0),
            request(9, [1, 3, 4], think_time=1.0),
        ),
    )
    rows = traces.read(path).table.rows
    assert rows["parent"].tolist() == [-1, 0, 0, 2]
    assert rows["think_s"].tolist() == [0, 3, 4, 1]


def test_sessions_share_the_beginning_that_is_claude_codes_own(tmp_path: Path) -> None:
    # 130 tokens of tools and system prompt are two whole blocks; ids mean nothing across sessions.
    folder = save(
        tmp_path,
        session(request(0, [1, 2, 3]), request(3, [40, 41])),
        session(request(0, [7, 8, 9]), request(3, [7, 8, 9, 1])),
        session(request(0, [5, 6, 7]), tool_tokens=64, system_tokens=10),
    )
    trace = traces.read(folder, session_gap_s=100.0)
    rows = trace.table.rows
    assert trace.has_arrivals
    assert rows["arrival_s"].tolist() == [0, 3, 100, 103, 200]
    assert rows["session"].tolist() == [0, 0, 1, 1, 2]
    assert repeated_tokens(trace.table).tolist() == [0, 0, 128, 192, 64]


def test_sub_agents_of_a_type_share_their_beginning(tmp_path: Path) -> None:
    def with_agent(kind: str, ids: list[int]) -> dict[str, Any]:
        agent = {"t": 3.0, "type": "subagent", "subagent_type": kind, "tool_tokens": 64}
        return session(request(0, [1, 2, 3]), {**agent, "requests": [request(4, ids)]})

    folder = save(
        tmp_path,
        with_agent("Explore", [7, 8]),
        with_agent("Explore", [9, 8]),
        with_agent("Plan", [5, 8]),
    )
    table = traces.read(folder, session_gap_s=10.0).table
    assert repeated_tokens(table).tolist() == [0, 0, 128, 64, 128, 0]


def test_sessions_without_starts_have_no_arrivals(tmp_path: Path) -> None:
    folder = save(tmp_path, session(request(0, [1])), session(request(0, [1])))
    assert not traces.read(folder).has_arrivals


def test_global_ids_mean_the_same_in_all_sessions(tmp_path: Path) -> None:
    plain = {"tool_tokens": 0, "system_tokens": 0, "hash_id_scope": "global"}
    folder = save(tmp_path, *[session(request(0, [1, 2]), **plain)] * 2)
    assert repeated_tokens(traces.read(folder).table).tolist() == [0, 128]


def test_packed_files_and_failed_requests(tmp_path: Path) -> None:
    text = json.dumps(session(request(0, [1]), request(3, [1, 2], out=0), request(8, [1, 2])))
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    trace = traces.read(path)
    assert (trace.format, trace.skipped, len(trace.table)) == ("weka", 1, 2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TailraceError, match="is not a whole gzip file"):
        traces.read(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"in": 0}, "request 1, column in: must be between 1"),
        ({"t": "soon"}, "request 1, column t: must be a number"),
        ({"hash_ids": [1, "x"]}, "column hash_ids: must be a list of whole numbers"),
        ({"hash_ids": [1, 2, 3], "in": 100}, "3 blocks of 64 tokens are more than a prompt of 100"),
    ],
)
def test_mistakes(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = save(tmp_path, session(request(0, [1]), request(1, [1]) | changes))
    with pytest.raises(TailraceError, match=complaint):
        traces.read(path, "weka")


def test_sessions_with_blocks_of_different_sizes_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, session(request(0, [1])), session(request(0, [1]), block_size=16))
    with pytest.raises(TailraceError, match="blocks of 16 tokens, but other sessions have 64"):
        traces.read(folder)


def test_a_table_with_branches_is_written_and_read_again(tmp_path: Path) -> None:
    path = save(tmp_path, session(request(0, [1]), request(5, [1, 2], took=9), request(6, [1, 3])))
    table = traces.read(path).table
    traces.write(table, tmp_path / "out.parquet")
    again = traces.read(tmp_path / "out.parquet").table
    assert (again.rows == table.rows).all()
    assert np.array_equal(again.runs, table.runs)


LARGE = 2**63 - 1


@pytest.mark.parametrize("ids", [[LARGE, 2, 2**62], [-1, -2, -3]])
def test_ids_of_a_session_can_be_any_numbers(ids: list[int], tmp_path: Path) -> None:
    sizes = {"tool_tokens": None, "system_tokens": None}
    one = [request(0, ids), request(9, ids)]
    path = save(tmp_path, *(session(*one, id=f"s{k}", **sizes) for k in range(3)))
    table = traces.read(path, session_gap_s=100.0).table
    assert repeated_tokens(table).tolist() == [0, 192] * 3  # sessions share nothing


def test_ids_of_all_sessions(tmp_path: Path) -> None:
    sizes = {"tool_tokens": None, "system_tokens": None}
    path = save(
        tmp_path,
        session(request(0, [1, 2, 3]), id="own", **sizes),
        session(request(0, [1, 2, LARGE]), id="a", hash_id_scope="global", **sizes),
        session(request(0, [1, 2, 9]), id="b", hash_id_scope="global", **sizes),
    )
    table = traces.read(path, session_gap_s=100.0).table
    assert repeated_tokens(table).tolist() == [0, 0, 128]


def test_an_id_with_half_a_character(tmp_path: Path) -> None:
    trace = traces.read(save(tmp_path, session(request(0, [1, 2]), id="\ud800")))
    assert trace.session_keys is not None
