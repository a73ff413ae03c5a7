"""Session traces as JSON lines: delays, times, block sizes."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import TailraceError
from tailrace.workload import traces
from tailrace.workload.formats import unpack
from tailrace.workload.prefix import repeated_tokens


def line(session: str, prompt: int, ids: list[int], **changes: Any) -> dict[str, Any]:
    head = {"session_id": session, "input_length": prompt, "output_length": 9}
    return head | {"hash_ids": ids} | changes


def save(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


SESSIONS = (
    line("a", 150, [0, 1, 2]),
    line("a", 200, [0, 1, 3, 4], delay=500),
    line("b", 130, [0, 1, 9]),
    line("b", 190, [0, 1, 9], delay=1500),
    line("a", 250, [0, 1, 3, 5]),
)


def test_turns_follow_each_other_by_their_delays(tmp_path: Path) -> None:
    trace = traces.read(save(tmp_path, *SESSIONS), session_gap_s=60.0)
    rows = trace.table.rows
    assert trace.format == "sessions"
    assert trace.has_arrivals
    assert rows["arrival_s"].tolist() == [0, 0.5, 0.5, 60, 61.5]
    assert rows["session"].tolist() == [0, 0, 0, 1, 1]
    assert rows["turn"].tolist() == [0, 1, 2, 0, 1]
    assert rows["parent"].tolist() == [-1, 0, 1, -1, 3]
    assert rows["think_s"].tolist() == [0, 0.5, 0, 0, 1.5]
    # Blocks of 64 tokens follow from the lengths; partial blocks are equal as far as they go.
    assert repeated_tokens(trace.table).tolist() == [0, 128, 192, 128, 130]


def test_without_times_there_are_no_arrivals(tmp_path: Path) -> None:
    assert not traces.read(save(tmp_path, *SESSIONS)).has_arrivals


def test_times_of_first_turns_count(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        line("a", 150, [0, 1, 2], timestamp=1000),
        line("a", 200, [0, 1, 3, 4], delay=500),
        line("b", 130, [0, 1, 9], timestamp=1200),
        line("b", 130, [0, 1, 9], timestamp=9000),
    )
    trace = traces.read(path)
    assert trace.has_arrivals
    assert trace.table.rows["arrival_s"] == pytest.approx([0, 0.2, 0.5, 8.0])
    assert trace.table.rows["parent"].tolist() == [-1, -1, 0, -1]
    assert trace.table.rows["turn"].tolist() == [0, 0, 1, 1]


def test_the_block_size_comes_from_a_flag_a_line_or_the_lengths(tmp_path: Path) -> None:
    short = (line("a", 20, [0]), line("a", 40, [0, 1]))  # 20 to 39 tokens fit, so it is 32
    table = traces.read(save(tmp_path, *short)).table
    assert table.runs["tokens"].tolist() == [20, 32, 8]
    assert repeated_tokens(table).tolist() == [0, 20]
    table = traces.read(save(tmp_path, *short), block_tokens=25).table
    assert table.runs["tokens"].tolist() == [20, 25, 15]
    with pytest.raises(TailraceError, match=r"cannot tell the tokens per block.*--block-size"):
        traces.read(save(tmp_path, short[0]))
    table = traces.read(save(tmp_path, {"schema": "x", "block_size": 30}, *short), "sessions").table
    assert table.runs["tokens"].tolist() == [20, 30, 10]
    with pytest.raises(TailraceError, match="line 1, column hash_ids: 1 blocks of 16 tokens do"):
        traces.read(save(tmp_path, line("a", 40, [0]), *short), block_tokens=16)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (line("a", 5, [], session_id=None), "line 2, column session_id: must be text or a number"),
        (line("a", 5, [], delay=-1), "line 2, column delay: must be between"),
        (line("a", 0, []), "line 2, column input_length: must be between 1"),
    ],
)
def test_mistakes(bad: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match=complaint):
        traces.read(save(tmp_path, line("a", 150, [0, 1, 2]), bad), "sessions")


def test_mooncake_with_other_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(TailraceError, match=r"2 blocks of 512 tokens do not make.*--block-size"):
        traces.read(path)
    assert traces.read(path, block_tokens=64).table.rows["run_count"].tolist() == [1]


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, *SESSIONS)
    path.write_text(path.read_text() + '{"session_id": ' + "[" * 100_000 + "\n")
    with pytest.raises(TailraceError, match=r"line \d+: (nested too deeply|not JSON)"):
        traces.read(path, format="sessions")


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "MOST_UNPACKED", 10_000)
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(SESSIONS[0]).encode() + b"\n" * 1_000_000))
    with pytest.raises(TailraceError, match="more than 10000 bytes unpacked; split it"):
        traces.read(path, format="sessions")


def test_sessions_that_do_not_say_when_they_began_beside_others_that_do(tmp_path: Path) -> None:
    path = save(tmp_path, line("a", 150, [0, 1, 2], timestamp=90_000), line("b", 150, [0, 1, 2]))
    with pytest.raises(TailraceError, match="line 2, column timestamp: is missing"):
        traces.read(path)
    rows = traces.read(path, session_gap_s=30.0).table.rows
    assert rows["arrival_s"].tolist() == [0, 60]


def test_an_id_with_half_a_character(tmp_path: Path) -> None:
    trace = traces.read(save(tmp_path, line("\ud800", 150, [0, 1, 2])))
    assert trace.session_keys is not None
