"""Agent sessions as a table: prefixes given as lengths; all samples are made up."""

import gzip
from pathlib import Path

import pytest

from tailrace.errors import TailraceError
from tailrace.workload import traces
from tailrace.workload.prefix import repeated_tokens

HEAD = (
    "session,request,lane,t_s,model,input_tokens,output_tokens,blocks64,lcp_blocks,"
    "lcp_of_request,think_s,api_s,stop\n"
)
LINES = (
    "a,0,main,0,m,200,10,3,0,-1,0.0,2.0,tool_use\n"
    "a,1,main,5,m,330,10,5,3,0,3.0,2.0,tool_use\n"
    "a,2,main/1,6,m,130,10,2,0,-1,,1.0,\n"
    "a,3,main,20,m,460,0,7,5,1,,2.0,\n"
    "a,4,main,30,m,400,10,6,4,1,9.0,2.0,end_turn\n"
    "b,0,main,0,m,200,7,3,0,-1,,,\n"
)


def save(folder: Path, text: str) -> Path:
    path = folder / "sessions.csv"
    path.write_text(text)
    return path


def test_prompts_share_what_the_table_says(tmp_path: Path) -> None:
    trace = traces.read(save(tmp_path, HEAD + LINES), sort=True)
    rows = trace.table.rows
    assert trace.format == "lcp"
    assert trace.skipped == 1  # no output
    assert not trace.has_arrivals
    by_prompt = dict(
        zip(rows["prompt_tokens"].tolist(), repeated_tokens(trace.table), strict=False)
    )
    assert by_prompt[330] == 3 * 64
    assert by_prompt[400] == 4 * 64
    assert by_prompt[130] == 0
    firsts = rows["prompt_tokens"] == 200
    assert repeated_tokens(trace.table)[firsts].tolist() == [0, 0]  # ids mean nothing elsewhere


def test_turns_and_sub_agents_follow_as_in_the_raw_files(tmp_path: Path) -> None:
    rows = traces.read(save(tmp_path, HEAD + LINES), sort=True).table.rows
    at = {int(p): i for i, p in enumerate(rows["prompt_tokens"]) if p != 200}
    first = next(i for i in range(len(rows)) if rows["session"][i] == rows["session"][at[330]])
    assert rows["parent"][at[330]] == first
    assert rows["think_s"][at[330]] == 3.0
    assert rows["parent"][at[130]] == at[330] or rows["parent"][at[130]] == first
    assert rows["parent"][at[400]] == at[330]
    assert rows["think_s"][at[400]] == 30 - 7  # a sub-agent ran in between


def test_a_think_time_longer_than_the_time_since_the_turn_before_is_not_from_its_end(
    tmp_path: Path,
) -> None:
    lines = "a,0,main,0,m,200,10,3,0,-1,,2.0,\na,1,main,9,m,330,10,5,3,0,700.0,2.0,\n"
    rows = traces.read(save(tmp_path, HEAD + lines), sort=True).table.rows
    assert rows["think_s"].tolist() == [0, 9 - 2]


def test_a_packed_table_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "sessions.csv.gz"
    path.write_bytes(gzip.compress((HEAD + LINES).encode()))
    plain = traces.read(save(tmp_path, HEAD + LINES), sort=True)
    packed = traces.read(path, sort=True)
    assert (packed.table.rows == plain.table.rows).all()
    assert (packed.session_keys == plain.session_keys).all()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("a,0,main,0,m,100,10,3,0,-1,,,\n", "exceed the prompt"),
        ("a,0,main,0,m,200,10,3,4,-1,,,\n", "more than the prompt"),
        ("a,0,main,0,m,200,10,3,0,-1,,,\na,1,main,1,m,500,10,7,5,0,,,\n", "fewer blocks"),
        ("a,0,main,0,m,200,10,3,0,-1,-1,,\n", "negative"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(TailraceError, match=what):
        traces.read(save(tmp_path, HEAD + line))


def test_prompts_share_through_a_request_that_was_left_out(tmp_path: Path) -> None:
    lines = (
        "a,0,main,0,m,192,10,3,0,-1,,1,\n"
        "a,1,main,5,m,320,0,5,3,0,,,\n"  # no output
        "a,2,main,9,m,384,10,6,5,1,,,\n"
        "a,3,main,12,m,384,10,6,5,1,,,\n"
    )
    table = traces.read(save(tmp_path, HEAD + lines)).table
    assert repeated_tokens(table).tolist() == [0, 3 * 64, 5 * 64]


def test_prompts_share_with_a_request_above_that_was_sent_later(tmp_path: Path) -> None:
    lines = (
        "a,0,main,0,m,192,10,3,0,-1,,1,\n"
        "a,1,main/1,9,m,320,10,5,3,0,,,\n"
        "a,2,main,7,m,384,10,6,5,1,,,\n"
    )
    table = traces.read(save(tmp_path, HEAD + lines)).table
    assert table.rows["prompt_tokens"].tolist() == [192, 384, 320]
    assert repeated_tokens(table).tolist() == [0, 3 * 64, 5 * 64]


@pytest.mark.parametrize("of", [0, 7])
def test_prompts_refer_to_requests_above(of: int, tmp_path: Path) -> None:
    line = f"a,0,main,0,m,192,10,3,3,{of},,1,\n"
    complaint = f"line 2, column lcp_of_request: request {of} does not stand above it"
    with pytest.raises(TailraceError, match=complaint):
        traces.read(save(tmp_path, HEAD + line))
