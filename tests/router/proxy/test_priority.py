"""Priorities on their way to servers: who is told one, and what arrives there."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from policy.networks import random_policy
from router.conftest import (
    Backend,
    Clock,
    Counts,
    World,
    quiet_settings,
    reply,
    run,
    serving,
    settings_for,
)
from router.emulated import Emulated
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.policy.learned.checkpoint import save
from tailrace.router.app import Router
from tailrace.view.ordering import Order

BY_PRIORITY = {"scheduling_policy": "priority"}
ORDERED = {"policy": "load_aware+order:w=5"}
CHAT = "/v1/chat/completions"


class Serving:
    """A router in front of two backends, of which the first serves by priority."""

    def __init__(self, *, both: bool = False, **over: Any) -> None:
        self.both, self.over = both, over

    async def __aenter__(self) -> World:
        self.backends = [Backend(), Backend()]
        for backend in self.backends:
            backend.default = reply(b'{"usage":{}}')
            await backend.start()
        kinds = [BY_PRIORITY, BY_PRIORITY if self.both else {}]
        over = {
            "routing": ORDERED,
            **self.over,
            "backends": [
                {"url": b.url, "server": kind} for b, kind in zip(self.backends, kinds, strict=True)
            ],
        }
        counts, clock = Counts(), Clock()
        self.router = Router(settings_for(self.backends, **over), events=counts, clock=clock)
        await self.router.start()
        self.world = World(self.router, self.backends, counts, clock)
        return self.world

    async def __aexit__(self, *_: object) -> None:
        for one in self.world.opened:
            one.writer.close()
        await self.router.stop()
        for backend in self.backends:
            await backend.kill()


def request(body: bytes, *headers: str, path: str = CHAT, chunked: bool = False) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
    if chunked:
        half = len(body) // 2
        lines.append("transfer-encoding: chunked")
        data = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:half], body[half:]) if p)
        return "\r\n".join([*lines, "", ""]).encode() + data + b"0\r\n\r\n"
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chat(text: str = "hello", **more: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": text}], **more})


async def ask(world: World, sent: bytes) -> Any:
    client = await world.client()
    client.send(sent)
    return await client.answer()


def only(world: World) -> Any:
    """The one request that the backends have seen, and its backend's number."""
    seen = [(k, one) for k, b in enumerate(world.backends) for one in b.seen]
    assert len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        chat(),
        chat("x" * 300_000),
        b' \n{ "messages" : [] }\r\n',
        b"{}",
        chat(metadata={"priority": 3}),
        '{"messages":[{"role":"user","content":"Größe \\ud83d\\ude00"}]}'.encode(),
    ],
)
def test_the_server_gets_the_clients_bytes_and_a_priority(body: bytes, chunked: bool) -> None:
    async def test() -> None:
        async with Serving(both=True) as world:
            answer = await ask(world, request(body, chunked=chunked))
            assert answer.status == 200
            _, seen = only(world)
            data = orjson.loads(seen.body)
            priority = data.pop("priority")
            assert data == orjson.loads(body)
            assert int(seen.headers["content-length"]) == len(seen.body)
            assert b'"priority":%d' % priority in seen.body
            assert seen.body.endswith(body[body.index(b"{") + 1 :])
            assert int(answer.headers["x-tailrace-priority"]) == priority

    run(test())


def test_only_servers_that_go_by_priorities_are_told_one() -> None:
    async def test() -> None:
        async with Serving() as world:
            for _ in range(12):
                assert (await ask(world, request(chat()))).status == 200
            first, second = world.backends
            assert first.seen
            assert second.seen
            assert all("priority" in orjson.loads(one.body) for one in first.seen)
            assert all(one.body == chat() for one in second.seen)
            shown = world.router.snapshot().backends
            assert [b.takes_priorities for b in shown] == [True, False]

    run(test())


@pytest.mark.parametrize("own", [0, 5, -7, "3", None])
@pytest.mark.parametrize("replace", [False, True])
def test_a_clients_own_priority_is_replaced_only_if_allowed(own: Any, replace: bool) -> None:
    async def test() -> None:
        admission = {"replace_priority": replace}
        async with Serving(both=True, admission=admission) as world:
            body = chat(priority=own)
            answer = await ask(world, request(body))
            _, seen = only(world)
            if replace:
                assert orjson.loads(seen.body)["priority"] == int(
                    answer.headers["x-tailrace-priority"]
                )
            else:
                assert seen.body == body
                assert "x-tailrace-priority" not in answer.headers

    run(test())


@pytest.mark.parametrize(
    "body", [b'{"messages":[],"priority":1,"priority":2}', b'{"messages":[],"priorit\\u0079":1}']
)
def test_what_is_unclear_is_left_alone(body: bytes) -> None:
    async def test() -> None:
        async with Serving(both=True, admission={"replace_priority": True}) as world:
            answer = await ask(world, request(body))
            _, seen = only(world)
            assert seen.body == body
            assert "x-tailrace-priority" not in answer.headers

    run(test())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages"])
def test_other_kinds_are_passed_on_as_they_are(path: str) -> None:
    async def test() -> None:
        async with Serving(both=True) as world:
            body = orjson.dumps({"input": "a", "messages": [], "model": "m"})
            await ask(world, request(body, path=path))
            assert only(world)[1].body == body

    run(test())


def test_without_an_order_nothing_is_written() -> None:
    async def test() -> None:
        async with Serving(both=True, routing={"policy": "load_aware"}) as world:
            await ask(world, request(chat()))
            assert only(world)[1].body == chat()

    run(test())


def test_a_policys_own_order_is_for_servers_that_go_by_priorities(tmp_path: Path) -> None:
    mine, plain = tmp_path / "mine.tailrace", random_policy()
    save(mine, plain.config.model_copy(update={"order": Order(w=50)}), plain.tensors)

    async def test() -> None:
        async with Serving(routing={"policy": str(mine), "guard": False}) as world:
            assert world.router.backends.chooser.waiting_rules.order is None
            kinds = set()
            first, second = world.backends
            for k in range(12):
                is_long = k % 2 == 1
                text = f"{k} " + "long " * 4000 * is_long  # none of it cached
                began, told = time.time(), len(first.seen)
                assert (await ask(world, request(chat(text)))).status == 200
                if len(first.seen) > told:
                    key_s = orjson.loads(first.seen[-1].body)["priority"] / 1000
                    # Whenever it arrived in between: a long prompt gives way, a short one hardly.
                    given = key_s - (began if is_long else time.time())
                    assert given > 5 if is_long else given < 2
                    kinds.add(is_long)
            assert kinds == {False, True}
            assert second.seen
            assert all("priority" not in orjson.loads(one.body) for one in second.seen)

    run(test())


def test_longer_prompts_and_less_urgent_classes_get_higher_numbers() -> None:
    async def test() -> None:
        async with Serving(both=True) as world:
            sent = [
                request(chat("short")),
                request(chat("long " * 4000)),
                request(chat("short"), "x-priority: 1"),
                request(chat("short"), "x-priority: -1"),
            ]
            short, long, later, sooner = [
                int((await ask(world, one)).headers["x-tailrace-priority"]) for one in sent
            ]
            assert sooner < short < long < later

    run(test())


def test_a_retry_elsewhere_is_told_what_that_server_takes() -> None:
    async def test() -> None:
        async with Serving() as world:
            first, second = world.backends
            first.default = reply(b"{}", "503 Service Unavailable")
            for _ in range(8):
                answer = await ask(world, request(chat()))
                assert answer.status == 200
                assert "x-tailrace-priority" not in answer.headers
            assert all(one.body == chat() for one in second.seen)

    run(test())


def test_a_short_prompt_overtakes_a_long_one_at_an_emulated_server() -> None:
    async def test() -> None:
        replica = Replica(batch_cap=1, scheduling_policy="priority")
        async with Emulator(Cluster(replicas=(replica,)), time_scale=1.0, model="m") as emulator:
            for policy, first in (("load_aware", "long"), ("load_aware+order:w=500", "short")):
                assert await first_served(emulator, policy) == first

    run(test())


@asynccontextmanager
async def emulated_at(backends: list[dict[str, Any]], policy: str) -> AsyncIterator[Emulated]:
    settings = quiet_settings(
        backends, admin={"listen": "off"}, models={}, routing={"policy": policy}
    )
    counts = Counts()
    router = Router(settings, events=counts, clock=Clock())
    made = Emulated(router, [], counts)
    async with serving(router, made.opened):
        yield made


async def first_served(emulator: Emulator, policy: str) -> str:
    """Send a long and then a short prompt to a server that is busy; return which ends first."""
    backends = [{"url": url, "server": BY_PRIORITY} for url in emulator.urls]
    server = emulator.replicas[0]
    async with emulated_at(backends, policy) as world:

        def body(name: str, words: int, output: int) -> dict[str, Any]:
            prompt = f"{policy} {name} " + "word " * words
            return {"model": "m", "prompt": prompt, "max_tokens": output, "ignore_eos": True}

        async def until(waiting: int) -> None:
            while server.running == 0 or server.waiting < waiting:
                await asyncio.sleep(0.01)

        ended: list[str] = []

        async def one(name: str, words: int) -> None:
            assert (await world.ask("/v1/completions", body(name, words, 2))).status == 200
            ended.append(name)

        blocker = await world.client()
        blocker.send(request(orjson.dumps(body("blocker", 5, 4000)), path="/v1/completions"))
        await until(0)
        tasks = []
        for waiting, (name, words) in enumerate((("long", 2000), ("short", 10)), start=1):
            tasks.append(asyncio.ensure_future(one(name, words)))
            await until(waiting)
        blocker.writer.close()  # its place is free
        await asyncio.gather(*tasks)
        return ended[0]
