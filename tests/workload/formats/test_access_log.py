"""Access logs of vLLM and gateways."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.workload import traces


def save(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "access.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_vllms_request_records(tmp_path: Path) -> None:
    one = {"request_id": "b", "input_toks": 30, "output_toks": 7, "queued_ts": 5.5}
    path = save(
        tmp_path,
        {**one, "arrival_time": 1777142838.5},
        {**one, "arrival_time": 1777142838.0, "input_toks": 12},
    )
    trace = traces.read(path)
    assert trace.format == "access_log"
    assert trace.table.rows["arrival_s"].tolist() == [0, 0.5]
    assert trace.table.rows["prompt_tokens"].tolist() == [12, 30]
    assert trace.table.rows["output_tokens"].tolist() == [7, 7]


def test_a_gateway_that_logs_at_the_end(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        {
            "@timestamp": "2026-11-17T10:00:05Z", "duration_ms": 4000, "status": 200,
            "usage": {"prompt_tokens": 100, "completion_tokens": 20}, "tenant": "red",
            "session_id": "x",
        },
        {
            "@timestamp": "2026-11-17T10:00:06+00:00", "duration_ms": "500", "status": "200",
            "usage": {"prompt_tokens": 50, "completion_tokens": 2}, "tenant": "blue",
        },
        {
            "@timestamp": "2026-11-17T10:00:09Z", "duration_ms": 6000, "status": 200,
            "usage": {"prompt_tokens": 130, "completion_tokens": 3}, "tenant": "red",
            "session_id": "x",
        },
        {"@timestamp": "2026-11-17T10:00:09Z", "status": 429, "tenant": "red"},
    )  # fmt: skip
    trace = traces.read(path)
    rows = trace.table.rows
    assert trace.skipped == 1
    assert rows["arrival_s"].tolist() == [0, 2, 4.5]
    assert rows["prompt_tokens"].tolist() == [100, 130, 50]
    assert rows["session"].tolist() == [0, 0, -1]
    assert rows["turn"].tolist() == [0, 1, 0]
    assert rows["tenant"].tolist() == [0, 0, 1]


def test_names_with_dots_and_times_in_milliseconds(tmp_path: Path) -> None:
    def entry(ms: int, **changes: Any) -> dict[str, Any]:
        names = {"gen_ai.usage.input_tokens": "8", "gen_ai.usage.output_tokens": "4"}
        return {"start_time": ms, "response_code": 200, **names} | changes

    path = save(
        tmp_path,
        entry(1_777_142_838_000),
        entry(1_777_142_838_250, response_code=503),
        entry(1_777_142_838_500, **{"gen_ai.usage.output_tokens": "-"}),
        entry(1_777_142_839_500),
    )
    trace = traces.read(path)
    assert trace.table.rows["arrival_s"] == pytest.approx([0, 1.5])
    assert trace.skipped == 2


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"output_tokens": 5, "time": 3}, "line 2: there is no field for prompt_tokens"),
        ({"output_tokens": 5, "prompt_tokens": 5}, "line 2: there is no time"),
        ({"output_tokens": 5, "prompt_tokens": 5, "time": "noon"}, "must be a time, got 'noon'"),
        ({"output_tokens": 5, "prompt_tokens": -5, "time": 3}, "must be between 1"),
    ],
)
def test_mistakes(bad: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    good = {"output_tokens": 5, "prompt_tokens": 5, "time": 3}
    with pytest.raises(TailraceError, match=complaint):
        traces.read(save(tmp_path, good, bad))


def test_tenants_of_our_own_files(tmp_path: Path) -> None:
    path = tmp_path / "tenants.csv"
    path.write_text("arrival_s,tenant,prompt_tokens,output_tokens\n0,13,5,6\n1,2,5,6\n2,,5,6\n")
    table = traces.read(path).table
    assert table.rows["tenant"].tolist() == [13, 2, -1]
    for name in ("again.csv", "again.parquet"):
        traces.write(table, tmp_path / name)
        assert np.array_equal(traces.read(tmp_path / name).table.rows, table.rows)
    path.write_text(
        "arrival_s,tenant,prompt_tokens,output_tokens\n0,red,5,6\n1,blue,5,6\n2,red,5,6\n"
    )
    assert traces.read(path).table.rows["tenant"].tolist() == [0, 1, 0]


def test_odd_texts(tmp_path: Path) -> None:
    one = {"time": 5, "prompt_tokens": 3, "completion_tokens": 2, "status": 200.0}
    trace = traces.read(save(tmp_path, {**one, "session_id": "\ud800", "user": "\udfff"}))
    assert trace.session_keys is not None
    with pytest.raises(TailraceError, match="column prompt_tokens: must be a number"):
        traces.read(save(tmp_path, {**one, "prompt_tokens": "²"}))


def test_times_more_than_a_thousand_years_apart(tmp_path: Path) -> None:
    one = {"prompt_tokens": 3, "completion_tokens": 2}
    lines = ({**one, "time": "2024-01-01"}, {**one, "time": "0001-01-01"})
    with pytest.raises(TailraceError, match="lines 2 and 1: more than a thousand years apart"):
        traces.read(save(tmp_path, *lines))
