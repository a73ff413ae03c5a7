"""Scraping servers that respond, that say nothing, and that never respond."""

import asyncio

import numpy as np
import pytest

from router.clusters import Clock, new_cluster
from tailrace.router.observe.scrape import Scraper, ScrapeSettings
from tailrace.view.records import NEVER

VLLM = """\
vllm:num_requests_waiting{engine="0"} 21
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="256"} 1.0
"""


def test_one_round_enters_what_each_replica_says_and_keeps_the_age_of_the_silent() -> None:
    clock = Clock(10.0)
    cluster = new_cluster(4, clock)
    pages: dict[int, str | Exception] = {
        0: VLLM,
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
