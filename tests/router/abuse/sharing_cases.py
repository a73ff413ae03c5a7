"""Faults beyond one machine: KV events that are cut off, clocks that are wrong, a store that goes.

Each is a coroutine that takes a :class:`Target`; ``CASES`` lists them.
"""

import asyncio
from typing import Any

from router.abuse.case import Case, Target
from router.abuse.fault_cases import wait
from router.abuse.stage import Stage
from router.processes import free_ports
from router.store_server import StoreServer
from tailrace.emulate.kv_publisher import KvPublisher
from tailrace.net.kv_events import BlocksRemoved, BlocksStored, Event

#: Tokens of a block, and blocks of a prompt.
SIZE, BLOCKS = 16, 64
_STORE_PORT = free_ports(1)[0]


def prompt(number: int) -> list[Event]:
    """Return the events of a prompt that is cached, and of one that was evicted for it."""
    names: list[int | bytes] = [number * BLOCKS + k + 1 for k in range(BLOCKS)]
    tokens = [(number * 7919 + k) % 50_000 for k in range(SIZE * BLOCKS)]
    old = [int(name) - 100 * BLOCKS for name in names if int(name) > 100 * BLOCKS]
    return [BlocksStored(names, None, tokens, SIZE), BlocksRemoved(old)]


def trusts(stage: Stage) -> set[str]:
    """How far the router trusts the caches of its replicas."""
    return {str(replica["caches"]) for replica in stage.status()["replicas"]}


async def _publishing(target: Target, publisher: KvPublisher) -> None:
    """Let the router read a publisher's events."""
    stage = target.stage
    stage.write_settings(
        events__port=publisher.port, events__replay_port=publisher.replay_port,
        events__blocks=16_384,
    )  # fmt: skip
    await asyncio.to_thread(stage.reload)
    await wait("exact caches", lambda: trusts(stage) == {"exact"})


async def cut_events(target: Target) -> str:
    """Event streams are cut, lose messages, restart: stale meanwhile, exact afterwards."""
    publisher = KvPublisher()
    stage = target.stage
    number = 0
    try:
        await _publishing(target, publisher)
        for turn in range(target.count(6, 2)):
            for _ in range(target.count(300, 20)):
                publisher.publish(prompt(number))
                number += 1
                await asyncio.sleep(0.002)
            publisher.drop = 3  # a gap without a cut
            for _ in range(6):
                publisher.publish(prompt(number))
                number += 1
            publisher.cut()
            await wait("stale caches", lambda: trusts(stage) == {"stale"})
            for _ in range(20):
                publisher.publish(prompt(number))
                number += 1
            if turn % 2:
                publisher.restart()
            else:
                publisher.open()
            await wait("exact caches", lambda: trusts(stage) == {"exact"})
    finally:
        publisher.close()
    return f"{number} messages, stale at each cut, then exact"


async def skewed_clock(target: Target) -> str:
    """A server's clock is an hour wrong, and then set right: its events stay exact."""
    publisher = KvPublisher(clock_skew_s=3600.0)
    stage, lags = target.stage, []
    number = 0
    try:
        await _publishing(target, publisher)
        for skew_s in (3600.0, 0.0, -3600.0):
            publisher.clock_skew_s = skew_s
            for _ in range(2100):  # the offset is learned anew from 2048 messages
                publisher.publish(prompt(number))
                number += 1
                await asyncio.sleep(0.001)
            await wait("exact caches", lambda: trusts(stage) == {"exact"})
            lags += [r["event_lag_s"] for r in stage.status()["replicas"]]
    finally:
        publisher.close()
    target.figures["lag_s"] = max(lags)
    assert max(lags) < 2.0, f"lag {max(lags):.1f} s"
    return "exact whatever the clock says"


async def store_gone(target: Target) -> str:
    """The store comes, is killed, hangs and comes back: no request waits for it."""
    stage = target.stage
    store = StoreServer(stage.folder, _STORE_PORT)

    def connected() -> bool:
        state: dict[str, Any] = stage.status()["store"]
        return bool(state["connected"])

    times = target.count(4, 2)
    try:
        for _ in range(times):
            store.start()
            await wait("the store", connected)
            await asyncio.sleep(1.0)
            store.freeze(True)
            await wait("no store", lambda: not connected())
            store.freeze(False)
            await wait("the store", connected)
            store.kill()
            await wait("no store", lambda: not connected())
    finally:
        store.kill()
    return f"away {2 * times} times, back each time"


CASES = (
    Case("KV events cut off", cut_events),
    Case("a server's clock an hour wrong", skewed_clock),
    Case("the shared store gone and hanging", store_gone,
         {"store__url": f"redis://127.0.0.1:{_STORE_PORT}/0"}),
)  # fmt: skip
