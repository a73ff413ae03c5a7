"""Clients share a full cluster fairly: real sockets, emulated servers."""

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from router.conftest import run
from router.emulated import Emulated, emulated

BODY = {"model": "emulated", "prompt": "words " * 40, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        monkeypatch.setenv(f"KEY_{name.upper()}", f"secret-{name}")


def clients(**of_b: Any) -> list[dict[str, Any]]:
    return [{"name": "a", "key_env": "KEY_A"}, {"name": "b", "key_env": "KEY_B", **of_b}]


async def flood(e: Emulated, key: str, connections: int, over: asyncio.Event) -> Counter[int]:
    """Ask on many connections, again and again, until it is over."""
    found: Counter[int] = Counter()

    async def one() -> None:
        client = await e.client()
        while not over.is_set():
            found[(await e.ask("/v1/completions", BODY, key, client)).status] += 1

    await asyncio.gather(*(one() for _ in range(connections)))
    return found


@pytest.mark.parametrize("queue", [10, 1000])
@pytest.mark.parametrize("connections", [60, 200])
def test_a_client_with_many_connections_does_not_push_out_one_with_one(
    queue: int, connections: int
) -> None:
    """With few places the flood is rejected, with many it waits; the other gets through."""

    async def test() -> None:
        admission = {"max_in_flight": 2, "queue": queue}
        async with emulated(replicas=2, clients=clients(), admission=admission) as e:
            over = asyncio.Event()
            flooding = asyncio.ensure_future(flood(e, "secret-a", connections, over))
            while not len(e.router.dispatcher.queue):
                await asyncio.sleep(0.001)
            statuses = [
                (await e.ask("/v1/completions", BODY, "secret-b")).status for _ in range(20)
            ]
            over.set()
            others = await flooding
            assert statuses.count(200) >= 18, Counter(statuses)
            assert set(others) <= {200, 429}
            assert others[200] > 0
            await e.quiet()

    run(test(), limit_s=200)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_are_shared_by_weight(weight: float) -> None:
    async def test() -> None:
        admission = {"max_in_flight": 2}
        async with emulated(clients=clients(weight=weight), admission=admission) as e:
            over, backends = asyncio.Event(), e.router.backends
            # Nothing is sent until all wait, so that nobody has a head start.
            backends.all[0].paused_until = math.inf
            backends.refresh(e.router.clock())
            flooding = [
                asyncio.ensure_future(flood(e, key, count, over))
                for key, count in (("secret-a", 40), ("secret-b", 20))
            ]
            while len(e.router.dispatcher.queue) < 60:
                await asyncio.sleep(0.001)
            backends.all[0].paused_until = -math.inf
            backends.refresh(e.router.clock())
            e.router.dispatcher.context.admit_waiting()
            while len(e.counts.done) < 160:
                await asyncio.sleep(0.001)
            over.set()
            await asyncio.gather(*flooding)
            served = [c.account for c in e.router.keyring.clients]
            assert len(served) == 2
            a, b = (f.result()[200] - n for f, n in zip(flooding, (40, 20), strict=True))
            # What still waited when it was over is left out; few requests, so a wide margin.
            assert b == pytest.approx(weight * a, rel=0.35), (a, b)
            await e.quiet()

    run(test(), limit_s=200)


def test_urgent_requests_go_first_for_those_who_may() -> None:
    async def test() -> None:
        admission = {"max_in_flight": 1}
        made = clients(priorities=[-1])
        async with emulated(clients=made, admission=admission) as e:
            over = asyncio.Event()
            flooding = asyncio.ensure_future(flood(e, "secret-a", 30, over))
            while len(e.router.dispatcher.queue) < 20:
                await asyncio.sleep(0.001)
            urgent, body = await e.client(), BODY | {"priority": -1}
            for _ in range(5):
                before = len(e.counts.done)
                answer = await e.ask("/v1/completions", body, "secret-b", urgent)
                assert answer.status == 200
                # Itself, the one in progress and the one that it took the place of; and what ends
                # while its bytes are on their way.
                assert len(e.counts.done) - before <= 5
            answer = await e.ask("/v1/completions", BODY | {"priority": -1}, "secret-a")
            assert answer.status == 403
            over.set()
            await flooding
            await e.quiet()

    run(test(), limit_s=200)
