"""Metrics of real servers, with old and new names, and servers that do not say."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.clusters import Clock, new_cluster
from tailrace.net.engine_metrics import Snapshot, parse_metrics
from tailrace.router.observe.scrape import Scraper, ScrapeSettings
from tailrace.view.records import NEVER

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


def test_one_round_enters_what_each_replica_says_and_keeps_the_age_of_the_silent() -> None:
    clock = Clock(10.0)
    cluster = new_cluster(4, clock)
    pages: dict[int, str | Exception] = {
        0: _text("vllm_new.txt"),
        1: OSError("gone"),
        2: "no metrics here",
        3: "vllm:num_requests_waiting 5\n",
    }

    async def fetch(replica: int, path: str) -> bytes:
        assert path == "/metrics"
        page = pages[replica]
        if isinstance(page, Exception):
            raise page
        return page.encode()

    scraper = Scraper(cluster, fetch)
    asyncio.run(scraper.scrape())
    assert list(cluster.replicas["metrics_at"]) == [10.0, NEVER, NEVER, 10.0]
    assert list(cluster.replicas["waiting"]) == [21, 0, 0, 5]
    assert cluster.replicas[0]["capacity_tokens"] == 8192
    assert scraper.failures == {1: 1, 2: 1}
    pages[0] = OSError("gone too")
    clock.now = 20.0
    asyncio.run(scraper.scrape())
    assert cluster.replicas[0]["metrics_at"] == 10.0
    assert cluster.replicas[0]["waiting"] == 21


def test_a_replica_that_never_answers_delays_no_other_and_is_given_up() -> None:
    cluster = new_cluster(2, Clock(1.0))
    rounds = 0

    async def play() -> None:
        nonlocal rounds
        enough = asyncio.Event()

        async def fetch(replica: int, path: str) -> bytes:
            nonlocal rounds
            if replica == 0:
                await asyncio.Event().wait()
            rounds += 1
            if rounds >= 3 and scraper.failures.get(0):
                enough.set()
            return b"vllm:num_requests_running 1\n"

        scraper = Scraper(cluster, fetch, ScrapeSettings(interval_s=0.005, timeout_s=0.02))
        task = asyncio.create_task(scraper.run())
        await asyncio.wait_for(enough.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert rounds >= 3
    assert cluster.replicas[1]["running"] == 1
    assert np.isneginf(cluster.replicas[0]["metrics_at"])


def test_only_replicas_that_are_present_are_asked() -> None:
    asked = []

    async def fetch(replica: int, path: str) -> bytes:
        asked.append(replica)
        return b"vllm:num_requests_running 1\n"

    asyncio.run(Scraper(new_cluster(3), fetch, present=lambda: (0, 2)).scrape())
    assert asked == [0, 2]


def test_off_means_never() -> None:
    async def fetch(replica: int, path: str) -> bytes:
        raise AssertionError

    asyncio.run(Scraper(new_cluster(1), fetch, ScrapeSettings(path="off")).run())
