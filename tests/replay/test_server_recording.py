"""Recordings of one server: names, settings, unanswered requests, and files that are wrong."""

import json

import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.replay import recorded, server_recording

LINE = {
    "request_id": "a", "input_toks": 100, "output_toks": 20, "arrival_time": 1.7e9,
    "queued_ts": 50.0, "scheduled_ts": 50.1, "first_token_ts": 50.5, "last_token_ts": 52.0,
}  # fmt: skip


def write(folder, lines, meta=None):
    folder.mkdir(exist_ok=True)
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    if meta is not None:
        (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return folder


def changed(**values):
    line = {**LINE, **values}
    return {key: value for key, value in line.items() if value is not ...}


def test_a_recording_in_the_order_of_queueing(tmp_path):
    later = changed(queued_ts=60.0, scheduled_ts=60.0, first_token_ts=60.5, last_token_ts=61)
    lines = [later, LINE, changed(first_token_ts=None, last_token_ts=None)]
    engine = {"max_num_seqs": 8, "data_parallel_size": 2, "max_model_len": None, "dtype": "auto"}
    folder = write(tmp_path / "r", lines, {"engine_kwargs": engine, "model": "m"})
    for path in (folder, folder / "requests.jsonl"):
        assert recorded.is_recorded(path)
        found = recorded.read(path)
        assert found.outcomes["sent_s"].tolist() == [0.0, 10.0]
        assert found.outcomes["scheduled_s"][0] == pytest.approx(0.1)
        assert found.outcomes["last_s"].tolist() == [2.0, 11.0]
        assert found.outcomes["cached_tokens"].tolist() == [-1, -1]
        assert found.skipped == 1
        assert found.settings == {"max_num_seqs": 8, "data_parallel_size": 2}
        assert found.replicas == 1


def test_other_names_and_no_settings(tmp_path):
    line = {"prompt_tokens": 7, "completion_tokens": 1, "cached_tokens": 3,
            "queued_time": 1, "first_token_time": 2, "finished_time": 2}  # fmt: skip
    found = server_recording.read(write(tmp_path / "r", [line]))
    assert np.isnan(found.requests["scheduled_s"]).all()
    assert found.requests["cached_tokens"].tolist() == [3]
    assert found.settings == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed(output_toks=...), "no output_toks or output_tokens"),
        (changed(queued_ts=1.7e9), "one clock"),
        (changed(queued_ts="soon"), "queued_ts: must be a number"),
        (changed(queued_ts=10**400), "between"),
        (changed(first_token_ts=float("nan")), "between"),
        (changed(input_toks=0), "between 1 and"),
        (changed(input_toks=1.5), "whole number"),
        (changed(last_token_ts=50.5), "in no time"),
        ([1], "JSON object"),
    ],
)
def test_lines_that_are_wrong(tmp_path, line, message):
    with pytest.raises(TailraceError, match=message):
        recorded.read(write(tmp_path / "r", [LINE, line]))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "max_num_seqs must be a whole number"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be"),
        ('{"a":' * 100_000, "not JSON"),
    ],
)
def test_settings_that_are_wrong(tmp_path, meta, message):
    with pytest.raises(TailraceError, match=message):
        recorded.read(write(tmp_path / "r", [LINE], meta))


def test_nothing_answered_and_something_else(tmp_path):
    none = write(tmp_path / "a", [changed(first_token_ts=None)])
    with pytest.raises(TailraceError, match="no answered requests"):
        recorded.read(none)
    other = tmp_path / "b.jsonl"
    other.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": []}\n')
    with pytest.raises(TailraceError, match=r"no decision log.*queued_ts"):
        recorded.read(other)
