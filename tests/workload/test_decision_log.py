"""From live traffic through the decision log to a request table."""

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from router.clusters import Clock, chat, new_cluster, send
from tailrace.cli import cli
from tailrace.errors import TailraceError
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.observe.decision_log import DecisionLog, DecisionLogSettings
from tailrace.router.state.attempt import Attempt
from tailrace.workload import decision_log, traces
from tailrace.workload.prefix import repeated_tokens

SYSTEM = "".join(chr(97 + i * i % 26) for i in range(4096))


class Live:
    """A cluster, its log, and a clock."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = Clock(1000.0)
        self.cluster = new_cluster(1, self.clock)
        self.log = DecisionLog(
            DecisionLogSettings(folder=folder, **settings), b"s" * 32, clock_now=1000.0
        )

    def play(
        self,
        asked: RequestBody,
        at: float,
        output: int,
        outcome: str = "done",
        lasts_s: float = 1.0,
    ) -> int:
        """Play one request; return its prompt's tokens, as the server counts: four bytes each."""
        size = len((asked.text or "").encode())
        self.clock.now = 1000.0 + at
        attempt = send(self.cluster, asked)
        attempt.tokens(output)
        attempt.usage(size // 4, output, None)
        self.clock.now += lasts_s
        attempt.close(outcome)
        self.log.write(attempt, outcome)
        return size // 4


def test_lengths_arrivals_sessions_and_prefixes_come_back(tmp_path: Path) -> None:
    live = Live(tmp_path)
    prompts = [
        live.play(chat(SYSTEM + "first " * 40, user="ada"), 0.0, 50),
        live.play(RequestBody("completion", "m", text="alone " * 30), 2.0, 5),
        live.play(chat(SYSTEM + "other " * 40, user="bob"), 3.5, 20),
        live.play(chat(SYSTEM + "first " * 40, "answer " * 28, "more " * 9, user="ada"), 4.0, 7),
    ]
    live.log.close()
    trace = traces.read(tmp_path)
    rows = trace.table.rows
    assert (trace.format, trace.skipped, trace.was_sorted) == ("decisions", 0, False)
    assert list(rows["prompt_tokens"]) == prompts
    assert list(rows["output_tokens"]) == [50, 5, 20, 7]
    np.testing.assert_allclose(rows["arrival_s"], [0.0, 2.0, 3.5, 4.0], atol=1e-5)
    assert list(rows["session"]) == [0, -1, 1, 0]
    assert list(rows["turn"]) == [0, 0, 0, 1]
    assert list(rows["parent"]) == [-1, -1, -1, 0]
    assert rows["think_s"][3] == pytest.approx(3.0, abs=1e-5)
    shared = repeated_tokens(trace.table, answers=True)
    assert shared[0] == shared[1] == 0
    assert 960 <= shared[2] <= 1024  # the system prompt, in whole blocks
    assert shared[3] == prompts[0] + 50  # all of the turn before, answer included
    trace.table.validate()


def test_turns_of_unnamed_conversations_are_recognised(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.play(chat("short"), 0.0, 10)
    live.play(chat("short", "an answer", "so?"), 5.0, 10)
    live.play(chat("short", "an answer", "so?", "well", "then?"), 9.0, 10)
    live.play(chat("short", "an answer", "no!"), 10.0, 10)  # goes on from turn 0 once more
    live.log.close()
    table = traces.read(tmp_path).table
    assert list(table.rows["session"]) == [0, 0, 0, 0]
    shared = repeated_tokens(table, answers=True)
    prompts = table.rows["prompt_tokens"]
    assert shared[1] == min(prompts[1], prompts[0] + 10)
    assert shared[2] == min(prompts[2], prompts[1] + 10)
    assert shared[3] == 0
    table.validate()


def test_only_answered_requests_become_rows_and_each_once(tmp_path: Path) -> None:
    live = Live(tmp_path)
    asked = RequestBody("completion", "m", text="retried " * 50)
    arrival = live.cluster.arrive(asked)
    from router.clusters import decided

    for outcome in ("backend_failed", "done"):
        attempt = Attempt(live.cluster, arrival, 0, decided(live.cluster, arrival, 0))
        attempt.tokens(3)
        attempt.close(outcome)
        live.log.write(attempt, outcome)
    live.play(asked, 1.0, 9, outcome="client_gone")
    live.play(asked, 2.0, 9)
    live.log.close()
    trace = traces.read(tmp_path)
    assert list(trace.table.rows["output_tokens"]) == [3, 9]
    assert trace.skipped == 1


def test_lines_are_written_by_end_but_rows_go_by_arrival(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.play(RequestBody("completion", text="b" * 99), 5.0, 2)
    live.play(RequestBody("completion", text="a" * 99), 1.0, 1)
    live.log.close()
    rows = traces.read(tmp_path).table.rows
    assert list(rows["output_tokens"]) == [1, 2]
    np.testing.assert_allclose(rows["arrival_s"], [0.0, 4.0], atol=1e-5)


def test_overlapping_turns_keep_their_times(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.play(chat("one", user="ada"), 0.0, 4, lasts_s=10.0)
    live.play(chat("two", user="ada"), 3.0, 4)
    live.log.close()
    rows = traces.read(tmp_path).table.rows
    assert list(rows["session"]) == [0, 0]
    assert list(rows["parent"]) == [-1, -1]


@pytest.mark.parametrize("content", [True, False])
def test_the_command_reads_one_compressed_file_and_what_it_writes_can_be_read(
    tmp_path: Path, content: bool
) -> None:
    live = Live(tmp_path, max_age_s=1e-9, content=content)
    live.play(chat(SYSTEM, user="ada"), 0.0, 50)
    live.log.close()
    (file,) = tmp_path.glob("*.gz")
    out = tmp_path / "table.parquet"
    result = CliRunner().invoke(cli, ["workload", "import", str(file), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "read as decisions" in result.output
    table = traces.read(out).table
    assert list(table.rows["output_tokens"]) == [50]
    assert bool(table.rows["run_count"][0]) == content


def _line(**changes: Any) -> str:
    line = {
        "id": "a-1", "outcome": "done", "arrived": 1.0, "last": 2.0, "prompt_tokens": 10,
        "output_tokens": 5, "priority": 0, "units": 10, "block_units": 64, "blocks": "",
    }  # fmt: skip
    return json.dumps(line | changes)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{", _line()], "line 2: not JSON"),
        (["[" * 9999, _line()], "line 2: nested too deeply"),
        (["[]"], "must be a JSON object"),
        ([_line(prompt_tokens="many")], "column prompt_tokens: must be a number"),
        ([_line(arrived=-1)], "column arrived: must be between"),
        ([_line(blocks="???")], "column blocks"),
        ([_line(blocks="AAAA")], "column blocks"),
        ([_line(id=7)], "column id"),
        ([_line(outcome="timeout")], r"no answered requests \(1 without an answer\)"),
        (['{"tailrace":"decisions","format":99}', _line()], "format 99"),
    ],
)
def test_what_is_wrong_with_a_log_is_said(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "decisions-x.jsonl"
    path.write_text("\n".join(['{"tailrace":"decisions","format":1}', *lines]) + "\n")
    with pytest.raises(TailraceError, match=message):
        traces.read(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_the_end_of_a_log_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    monkeypatch.setattr(decision_log, "_STRIDE", 2000)
    live = Live(tmp_path)
    for k in range(200):
        live.play(chat(f"{k} " * 40), float(k), 5, lasts_s=1.0 + k % 7)
    live.log.close()
    (file,) = decision_log.files(tmp_path)
    if compressed:
        data = file.read_bytes()
        file.unlink()
        file = tmp_path / f"{file.name}.gz"
        file.write_bytes(gzip.compress(data))
    os.utime(file, (time.time() + 1000, time.time() + 1000))
    whole = decision_log.answered(tmp_path)
    since = whole.requests[150].line.arrived
    found = decision_log.answered(tmp_path, since=since)
    assert [r.line for r in found.requests] == [r.line for r in whole.requests[150:]]
    if not compressed:
        # What was written before is not even looked at but for one stride.
        assert found.requests[0].number < 60
    last = decision_log.answered(tmp_path, since=since, most=10)
    assert [r.line for r in last.requests] == [r.line for r in whole.requests[190:]]
    with pytest.raises(TailraceError, match="no answered requests of that time"):
        decision_log.answered(tmp_path, since=since + 10_000)


def test_half_a_last_line_is_what_a_killed_router_leaves(tmp_path: Path) -> None:
    path = tmp_path / "decisions-x.jsonl"
    head = '{"tailrace":"decisions","format":1}'
    path.write_text("\n".join([head, _line(), _line(id="a-2")[:40]]))
    assert len(traces.read(path).table) == 1


def test_an_empty_folder_and_a_damaged_archive(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match="is a folder without decision logs"):
        traces.read(tmp_path)
    path = tmp_path / "decisions-x.jsonl.gz"
    path.write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(TailraceError):
        traces.read(path)
    with pytest.raises(TailraceError):
        traces.read(path, "decisions")
