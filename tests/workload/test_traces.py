"""Importers of public formats, on made-up samples."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TailraceError
from tailrace.workload import traces
from tailrace.workload.blocks import block_runs
from tailrace.workload.prefix import repeated_tokens
from tailrace.workload.table import RequestTable, blank_rows
from workload import naive

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51,879,55\n"
)
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,7,1.2,ChatGPT,472,18,490,Conversation log\n"
    "45,,0.1,ChatGPT,0,0,0,API log\n"
    "118,3,2.0,GPT-4,1087,230,1317,Conversation log\n"
    "119,7,2.0,GPT-4,9,23,32,Conversation log\n"
    "120,,2.0,GPT-4,417,276,693,API log\n"
)


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    trace = traces.read(write(tmp_path, AZURE))
    rows = trace.table.rows
    assert trace.format == "azure"
    assert rows["arrival_s"] == pytest.approx([0, 4.314579, 4.31941], abs=1e-9)
    assert rows["prompt_tokens"].tolist() == [374, 396, 879]
    assert rows["output_tokens"].tolist() == [44, 109, 55]
    assert (rows["session"] == -1).all()
    assert len(trace.table.runs) == 0


def test_azure_2024_has_time_zones(tmp_path: Path) -> None:
    text = AZURE.replace(",374,", "+00:00,374,").replace(",396,", "+00:00,396,")
    rows = traces.read(write(tmp_path, text)).table.rows
    assert rows["arrival_s"][1] == pytest.approx(4.314579, abs=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("2023-11-16 18:15:51", "yesterday", "line 4, column TIMESTAMP: must be a date and time"),
        ("2023-11-16 18:15:51", "", "line 4, column TIMESTAMP: is empty"),
        ("2023-11-16 18:15:51", "2023-11-16 18:15:49", "line 4: arrives before the request above"),
        (",879,", ",-879,", "line 4, column ContextTokens: must be at least 1"),
        (",55\n", ",0\n", "line 4, column GeneratedTokens: must be at least 1"),
        (",55\n", "\n", "line 4: 2 columns, but the header has 3"),
    ],
)
def test_azure_mistakes(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match=rf"trace\.csv, {complaint}"):
        traces.read(write(tmp_path, AZURE.replace(old, new)))


def test_azure_out_of_order_can_be_sorted_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE.replace("18:15:51", "18:15:40"))
    trace = traces.read(path, sort=True)
    assert trace.was_sorted
    assert trace.table.rows["prompt_tokens"].tolist() == [879, 374, 396]
    assert trace.table.rows["arrival_s"][0] == 0


def test_vidur_is_sorted_as_vidur_does(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n3.5,10,1\n1,20,2\n3.5,30,3\n"
    trace = traces.read(write(tmp_path, text))
    assert trace.format == "vidur"
    assert trace.was_sorted
    assert trace.table.rows["arrival_s"].tolist() == [0, 2.5, 2.5]
    assert trace.table.rows["prompt_tokens"].tolist() == [20, 10, 30]


def test_vidur_lengths_only(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,pd_ratio\n10,1,10.0\n20,2,10.0\n"
    trace = traces.read(write(tmp_path, text))
    assert not trace.has_arrivals
    assert not trace.was_sorted
    assert trace.table.rows["output_tokens"].tolist() == [1, 2]


def test_burstgpt_leaves_out_failed_requests_and_counts_them(tmp_path: Path) -> None:
    trace = traces.read(write(tmp_path, BURST))
    rows = trace.table.rows
    assert trace.format == "burstgpt"
    assert trace.skipped == 1
    assert rows["arrival_s"].tolist() == [0, 113, 114, 115]
    assert rows["prompt_tokens"].tolist() == [472, 1087, 9, 417]
    assert rows["session"].tolist() == [0, 1, 0, -1]
    assert rows["turn"].tolist() == [0, 0, 1, 0]
    assert (rows["parent"] == -1).all()


def test_burstgpt_without_session_columns(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,G,4,2,6,API log\n"
    )
    assert traces.read(write(tmp_path, text)).table.rows["session"].tolist() == [-1]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (",9,23,", ",0,23,", "line 5, column Request tokens: must be at least 1"),
        (",9,23,", ",9,-1,", "line 5, column Response tokens: must be at least 0"),
        ("\n119,", "\n117,", "line 5: arrives before the request above it"),
        ("\n119,", "\nsoon,", "line 5, column Timestamp: must be a number, got 'soon'"),
    ],
)
def test_burstgpt_mistakes(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match=rf"trace\.csv, {complaint}"):
        traces.read(write(tmp_path, BURST.replace(old, new)))


def test_burstgpt_of_failures_only(tmp_path: Path) -> None:
    text = "Timestamp,Request tokens,Response tokens\n5,4,0\n6,4,0\n"
    with pytest.raises(TailraceError, match="all 2 requests failed"):
        traces.read(write(tmp_path, text))


def mooncake(tmp_path: Path, *records: object) -> Path:
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records)
    return write(tmp_path, text + "\n", "trace.jsonl")


def record(stamp: float, prompt: float, ids: object, **changes: object) -> dict[str, object]:
    return {
        "timestamp": stamp,
        "input_length": prompt,
        "output_length": 9,
        "hash_ids": ids,
    } | changes


def test_mooncake_shares_equal_blocks(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path,
        record(1000, 1300, [0, 1, 2]),  # 512 + 512 + 276
        "",
        record(1000, 1500, [0, 1, 3]),
        record(4052, 2048, [0, 1, 3, 4]),
        record(5000, 600, [0, 9]),
        record(6000, 600, [9, 0]),  # the same blocks in another order are other content
        record(6000, 100, []),
        record(7000, 1100, [0, 1]),  # the last, partial block has no number
    )
    trace = traces.read(path)
    table = trace.table
    assert trace.format == "mooncake"
    assert table.rows["arrival_s"].tolist() == [0, 0, 3.052, 4, 5, 5, 6]
    # Whole blocks, except that equal partial blocks are equal as far as they go.
    assert repeated_tokens(table).tolist() == [0, 1024, 1500, 512, 0, 0, 1024]
    assert table.rows["run_count"][5] == 0


def test_mooncake_runs_are_few(tmp_path: Path) -> None:
    long = list(range(200))
    path = mooncake(
        tmp_path,
        record(0, 200 * 512, long),
        record(1, 201 * 512, [*long, 500]),
        record(2, 512, [7]),
    )
    table = traces.read(path).table
    assert table.rows["run_count"].tolist() == [1, 2, 1]
    assert repeated_tokens(table).tolist() == [0, 200 * 512, 0]
    # The first prompt's answer is not what the second goes on with: the trace does not say so.
    assert repeated_tokens(table, answers=True).tolist() == [0, 200 * 512, 0]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "must be a JSON object"),
        ({"timestamp": 0, "input_length": 5}, "column output_length: is missing"),
        (record(0, "5", []), "column input_length: must be a number, got '5'"),
        (record(0, True, []), "column input_length: must be a number, got True"),
        (record(0, 5.5, []), "column input_length: must be a whole number"),
        (record(0, 0, []), "column input_length: must be between 1 and"),
        (record(0, 2**24 + 1, []), "column input_length: must be between 1 and"),
        (record(-1, 5, []), "column timestamp: must be between 0 and"),
        (record(float("nan"), 5, []), "column timestamp: must be between"),
        (record(0, 5, [], output_length=0), "column output_length: must be between 1 and"),
        (record(0, 5, "abc"), "column hash_ids: must be a list of whole numbers"),
        (record(0, 5, [1.5]), "column hash_ids: must be a list of whole numbers"),
        (record(0, 5, [2**70]), "column hash_ids: must be a list of whole numbers"),
        (record(0, 1300, [1]), "column hash_ids: 1 blocks of 512 tokens do not make a prompt"),
        (record(0, 1300, [1, 2, 3, 4]), "column hash_ids: 4 blocks of 512 tokens do not make"),
    ],
)
def test_mooncake_mistakes(bad: object, complaint: str, tmp_path: Path) -> None:
    path = mooncake(tmp_path, record(0, 5, [1]), "", bad)
    with pytest.raises(TailraceError, match=rf"trace\.jsonl, line 3.*{complaint}"):
        traces.read(path)


def test_mooncake_out_of_order_and_empty(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match=r"trace\.jsonl, line 2: arrives before"):
        traces.read(mooncake(tmp_path, record(5, 5, [1]), record(4, 5, [1])))
    with pytest.raises(TailraceError, match="is empty"):
        traces.read(mooncake(tmp_path, ""), "mooncake")


def test_the_format_can_be_forced(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n1,2,3\n"
    assert traces.read(write(tmp_path, text), "vidur").format == "vidur"
    with pytest.raises(TailraceError, match="there is no column TIMESTAMP; it has arrived_at"):
        traces.read(write(tmp_path, text), "azure")
    with pytest.raises(TailraceError, match=r"line 1: not JSON"):
        traces.read(write(tmp_path, text), "mooncake")
    with pytest.raises(TailraceError, match="is not a Parquet file"):
        traces.read(write(tmp_path, text), "parquet")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_runs_share_exactly_what_blocks_share(prompts: list[tuple[list[int], int]]) -> None:
    block = 4
    rows = blank_rows(len(prompts))
    # ``short``: tokens missing from the last block; without blocks a private prompt.
    lengths = [len(ids) * block - short if ids else 1 + short for ids, short in prompts]
    rows["prompt_tokens"], rows["output_tokens"] = lengths, 1
    flat = np.array([i for ids, _ in prompts for i in ids], np.int64)
    counts = np.array([len(ids) for ids, _ in prompts])
    table = RequestTable(rows, block_runs(rows, flat, counts, block))
    table.validate()
    for a in range(len(prompts)):
        for b in range(a):
            tokens = [naive.content(naive.runs_of(table, row)) for row in (a, b)]
            same_blocks = naive.shared_tokens(prompts[a][0], prompts[b][0])
            expected = min(same_blocks * block, lengths[a], lengths[b]) if same_blocks else 0
            assert naive.shared_tokens(*tokens) == expected


@pytest.mark.parametrize("fake", [{"list": 99}, {"list": -1}, {"list": True}, {"list": 0}, 7])
def test_ids_that_are_no_list(fake: object, tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match="line 1, column hash_ids: must be a list of whole"):
        traces.read(mooncake(tmp_path, record(0, 1024, fake)))


@pytest.mark.parametrize("kept", [2, 11, 15, 30])
def test_a_cut_gzip_file_is_named(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode())[:kept])
    for format_ in ("auto", "azure"):
        with pytest.raises(TailraceError, match="is not a whole gzip file"):
            traces.read(path, format_)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"x" * 200_000, "is not a CSV file"),
        (b"prompt_tokens,output_tokens\r1,2\r", "is not a CSV file"),
        (b'[{"input_length": 5}]', "is a JSON list; write each of its objects to a line"),
        (b'{"conversations": []}', "has JSON of no known format: mooncake"),
        (b"a,b\n\xff\n1,2,3\n", "line 2: 1 columns, but the header has 2"),
    ],
)
def test_files_of_other_kinds(
    content: bytes, complaint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TailraceError, match=complaint):
        traces.read(path, "csv" if content.startswith(b"a,b") else "auto")
    assert "Traceback" not in capfd.readouterr().err
