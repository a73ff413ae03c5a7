"""Metrics pages of real servers, with old and new names, and damaged ones."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.net.engine_metrics import Snapshot, parse_metrics

DATA = Path(__file__).parent / "data"


def _text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def test_new_vllm_with_two_engines_is_summed() -> None:
    found = parse_metrics(_text("vllm_new.txt"))
    assert (found.running, found.waiting, found.kv_used) == (12.0, 21.0, 0.5)
    assert (found.kv_tokens, found.block_size) == (2 * 128 * 32, 32)


def test_old_vllm_and_sglang() -> None:
    old = parse_metrics(_text("vllm_old.txt"))
    assert (old.running, old.waiting, old.kv_used) == (2.0, 1.0, 0.125)
    assert old.kv_tokens is None
    other = parse_metrics(_text("sglang.txt"))
    assert (other.running, other.waiting, other.kv_used) == (4.0, 6.0, 0.5)
    assert (other.kv_tokens, other.block_size) == (20000, None)


def test_old_and_new_name_at_once_count_once() -> None:
    both = "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.3\n"
    assert parse_metrics(both).kv_used == 0.3


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting{",
        'vllm:num_requests_waiting{a="b"} many',
        'vllm:num_requests_waiting{a="b"} NaN',
        'vllm:num_requests_waiting{a="b"} +Inf',
        "# vllm:num_requests_waiting 3",
        "vllm:num_requests_waiting_by_reason 3",
        " ",
    ],
)
def test_what_cannot_be_read_is_unknown(line: str) -> None:
    assert parse_metrics(line + "\nvllm:num_requests_running 2 1700000000\n") == Snapshot(
        running=2.0
    )


def test_an_empty_page_says_nothing() -> None:
    assert parse_metrics("").is_empty
    assert parse_metrics("<html>vllm:</html>").is_empty


@given(st.text(alphabet='vllm:numrequestsg_{}",=.0123 \n', max_size=300))
def test_no_text_breaks_the_parser(text: str) -> None:
    parse_metrics(text)
    parse_metrics("vllm:num_requests_waiting{" + text)


def test_adapters_are_those_of_the_latest_sample() -> None:
    labels = (
        'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{}",'
        'waiting_lora_adapters="{}"}} {}\n'
    )
    page = labels.format("old", "", "1.7e9") + labels.format("sql,chat", "poems", "1.8e9")
    assert parse_metrics(page).adapters == {"sql", "chat", "poems"}
    assert parse_metrics(labels.format("", "", "1.7e9")).adapters == frozenset()
    assert parse_metrics("vllm:num_requests_running 1\n").adapters is None
    many = ",".join(f"a{number}" for number in range(1000))
    assert len(parse_metrics(labels.format(many, "x" * 300, 1)).adapters or ()) == 256
