"""Two routers that share their state over a real store: it comes, goes, hangs and returns."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.clusters import chat
from router.conftest import Counts, quiet_settings, serving
from router.emulated import Emulated
from router.processes import ask, cluster, completion
from router.processes import until as until_true
from router.store_server import StoreServer
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.errors import TailraceError
from tailrace.router.app import Router
from tailrace.router.settings import StoreSettings

LONG = "word " * 800
BODY = {"model": "emulated", "messages": [{"role": "user", "content": LONG}], "max_tokens": 4}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path)
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def routers(store: StoreServer, count: int = 2) -> AsyncIterator[list[Emulated]]:
    """Routers in front of the same two servers."""
    emulator = Emulator(Cluster(replicas=(Replica(count=2),)), time_scale=0.01)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(emulator)
        made = []
        for _ in range(count):
            settings = quiet_settings(
                [{"url": url} for url in emulator.urls],
                admin={"listen": "off"}, models={}, metrics={"path": "off"},
                store={"url": store.url, "gone_s": 1.0},
            )  # fmt: skip
            router = Router(settings, events=Counts())
            found = Emulated(router, [emulator], Counts())
            await stack.enter_async_context(serving(router, found.opened))
            made.append(found)
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def members(one: Emulated) -> int:
    assert one.router.shared_store is not None
    return len(one.router.shared_store.peers.peers)


def cached(one: Emulated) -> list[int]:
    """Tokens of the prompt that this router would see cached on each replica."""
    router = one.router
    arrival = router.backends.cluster.arrive(chat(LONG, model="emulated"))
    router.backends.chooser.choose(arrival)
    return [int(n) for n in router.backends.cluster.seen["cached_tokens"]]


async def known_to(one: Emulated, other: Emulated) -> None:
    """Send a prompt through one router, and wait until the other knows where it is."""
    answer = await one.ask("/v1/chat/completions", BODY)
    assert answer.status == 200
    await until(lambda: max(cached(other)) > 500)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


@pytest.mark.store
def test_a_prompt_that_one_router_has_sent_is_known_to_the_other(store: StoreServer) -> None:
    store.start()

    async def check() -> None:
        async with routers(store) as (a, b):
            await until(lambda: members(a) == members(b) == 1)
            assert cached(b) == [0, 0]
            await known_to(a, b)
            assert cached(a) == cached(b)

    run(check)


@pytest.mark.store
def test_without_the_store_each_router_goes_on_and_with_it_they_meet_again(
    store: StoreServer,
) -> None:
    store.start()

    async def check() -> None:
        async with routers(store) as (a, b):
            await until(lambda: members(a) == members(b) == 1)
            await known_to(a, b)
            store.kill()
            await until(lambda: members(a) == members(b) == 0)
            assert cached(b) == [0, 0]  # as if it were alone
            for one in (a, b):
                assert (await one.ask("/v1/chat/completions", BODY)).status == 200
            assert a.router.shared_store is not None
            assert not a.router.shared_store.connected
            store.start()  # it has forgotten everything, the routers have not
            await until(lambda: members(a) == members(b) == 1)
            await until(lambda: max(cached(b)) > 500)
            other = {**BODY, "messages": [{"role": "user", "content": "other " * 900}]}
            assert (await a.ask("/v1/chat/completions", other)).status == 200
            assert a.router.shared_store.lost == 1

    run(check)


@pytest.mark.store
def test_no_request_waits_for_a_store_that_hangs(store: StoreServer) -> None:
    store.start()

    async def check() -> None:
        async with routers(store) as (a, b):
            await until(lambda: members(a) == 1)
            store.freeze(True)
            try:
                for _ in range(10):
                    assert (await a.ask("/v1/chat/completions", BODY)).status == 200
                await until(lambda: members(a) == members(b) == 0)
                outbox = a.router.shared_store.peers.outbox  # type: ignore[union-attr]
                assert len(outbox.changes) <= 4096
            finally:
                store.freeze(False)
            await until(lambda: members(a) == members(b) == 1)
            await until(lambda: max(cached(b)) > 500)  # by a snapshot

    run(check)


@pytest.mark.store
def test_routers_that_start_before_the_store_find_it(store: StoreServer) -> None:
    async def check() -> None:
        async with routers(store) as (a, b):
            assert (await a.ask("/v1/chat/completions", BODY)).status == 200
            assert members(a) == 0
            store.start()
            await until(lambda: members(a) == members(b) == 1)
            await known_to(b, a)

    run(check)


@pytest.mark.store
def test_workers_of_one_router_share_with_another_router(
    store: StoreServer, tmp_path: Path
) -> None:
    """A router with two processes and one with a single process, over a store."""
    store.start()
    common = {"store__url": store.url, "routing__policy": "cache_aware"}
    (tmp_path / "one").mkdir()
    with cluster(tmp_path) as two, cluster(tmp_path / "one") as one:
        two.start_emulator(3)
        one.ports = two.ports
        two.start_router(processes=2, **common)
        one.start_router(**common)

        def they_meet() -> bool:
            states = [made.status()["store"] for made in (two, one)]
            return [(s["connected"], s["members"]) for s in states] == [(True, 1), (True, 2)]

        until_true("they know each other", they_meet)
        for number, (first, second) in enumerate(((two, one), (one, two)) * 4):
            prompt = completion(2, f"{number} words " * 400)
            assert asyncio.run(ask(first.listen, prompt)).answered
            time.sleep(0.5)
            # Connections reach either process: both have to know it.
            assert asyncio.run(ask(second.listen, prompt)).answered
            assert second.status()["recent"][0]["cached_tokens"] > 500, number
        workers = {worker["pid"] for worker in two.status()["workers"]}
        os.kill(min(workers), signal.SIGKILL)
        until_true(
            "another worker", lambda: {w["pid"] for w in two.status()["workers"]} - workers != set()
        )
        until_true("they know each other again", they_meet)


def test_a_password_does_not_belong_into_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="password_env"):
        StoreSettings(url="redis://user:secret@host:6379")
    monkeypatch.delenv("STORE_SECRET", raising=False)
    with pytest.raises(TailraceError, match="STORE_SECRET is not set"):
        StoreSettings(url="redis://host", password_env="STORE_SECRET").password()
