"""The queue of a policy (``+queue``) at the live router: who waits, who is next, who is told."""

import asyncio
from typing import Any

import orjson
import pytest

from router.conftest import Seen, World, post, reply, run, world
from tailrace.errors import TailraceError

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
LONG, SHORT = "long " * 400, "short"


def completion(prompt: str, *headers: str, stream: bool = False) -> bytes:
    body = {"prompt": prompt, "stream": stream}
    return post("/v1/completions", orjson.dumps(body), *headers)


class Gate:
    """Backends that answer one request at a time, when told."""

    def __init__(self, at: World) -> None:
        self._open = asyncio.Semaphore(0)
        self.prompts: list[str] = []
        for backend in at.backends:
            backend.default = self._answer

    async def _answer(self, seen: Seen, reader: Any, writer: asyncio.StreamWriter) -> None:
        self.prompts.append(orjson.loads(seen.body)["prompt"])
        await self._open.acquire()
        await reply(b'{"usage":{}}')(seen, reader, writer)

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self._open.release()


async def until(condition: Any) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


def routing(queue: str) -> dict[str, Any]:
    return {"policy": f"least_outstanding+queue:{queue}", "limit_ms": 10_000}


def test_requests_wait_only_while_no_replica_has_room_and_the_shortest_goes_first() -> None:
    async def test() -> None:
        async with world(2, routing=routing("max_in_flight=1,order=wspt")) as w:
            gate = Gate(w)
            asked = [asyncio.ensure_future(w.ask(completion(f"{k}"))) for k in range(2)]
            await until(lambda: len(gate.prompts) == 2)  # an idle replica is never left out
            assert {len(b.seen) for b in w.backends} == {1}
            for k, prompt in enumerate((LONG, SHORT)):
                asked.append(asyncio.ensure_future(w.ask(completion(prompt))))
                await until(lambda k=k: len(w.router.dispatcher.queue) == k + 1)
            gate.let_go()
            await until(lambda: len(gate.prompts) == 3)
            assert gate.prompts[2] == SHORT
            assert len(w.router.dispatcher.queue) == 1
            gate.let_go(3)
            answers = await asyncio.gather(*asked)
            assert [a.status for a in answers] == [200] * 4
            assert "x-tailrace-queue" not in answers[0].headers
            told = [answers[k].headers["x-tailrace-queue"].partition(", ")[2] for k in (3, 2)]
            assert told == ["overtook=1, why=order, overtaken=0", "overtook=0, overtaken=1"]

    run(test(), limit_s=600)


def test_a_first_token_makes_room() -> None:
    """With ``max_queued`` the next request goes when the prompt before it is prefilled."""

    async def test() -> None:
        async with world(1, routing=routing("max_queued=1")) as w:
            begin, end = asyncio.Event(), asyncio.Event()
            prompts: list[str] = []

            async def script(seen: Seen, reader: Any, writer: asyncio.StreamWriter) -> None:
                prompts.append(orjson.loads(seen.body)["prompt"])
                await begin.wait()
                event = b'data: {"choices":[{"text":"a"}]}\n\n'
                writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                await end.wait()
                writer.write(b"0\r\n\r\n")

            w.backends[0].default = script
            asked = [asyncio.ensure_future(w.ask(completion(p, stream=True))) for p in "ab"]
            await until(lambda: len(prompts) + len(w.router.dispatcher.queue) == 2)
            assert len(prompts) == 1
            begin.set()
            await until(lambda: len(prompts) == 2)
            end.set()
            assert [a.status for a in await asyncio.gather(*asked)] == [200, 200]

    run(test(), limit_s=600)


def test_a_more_urgent_class_goes_before_a_shorter_prompt() -> None:
    async def test() -> None:
        async with world(1, routing=routing("max_in_flight=1,order=wspt")) as w:
            gate = Gate(w)
            sent = [completion("first"), completion(SHORT), completion(LONG, "x-priority: -1")]
            asked = []
            for k, one in enumerate(sent):
                asked.append(asyncio.ensure_future(w.ask(one)))
                await until(lambda k=k: len(gate.prompts) + len(w.router.dispatcher.queue) == k + 1)
            gate.let_go(3)
            await asyncio.gather(*asked)
            assert gate.prompts == ["first", LONG, SHORT]

    run(test(), limit_s=600)


def test_who_has_waited_long_enough_is_sent_room_or_not() -> None:
    async def test() -> None:
        async with world(1, routing=routing("max_in_flight=1,max_wait_s=5")) as w:
            gate = Gate(w)
            asked = [asyncio.ensure_future(w.ask(completion("a")))]
            await until(lambda: len(gate.prompts) == 1)
            asked.append(asyncio.ensure_future(w.ask(completion("b"))))
            await until(lambda: len(w.router.dispatcher.queue) == 1)
            w.clock.ahead_s += 5.0
            await until(lambda: gate.prompts == ["a", "b"])
            gate.let_go(2)
            assert [a.status for a in await asyncio.gather(*asked)] == [200, 200]

    run(test(), limit_s=600)


def test_who_waits_for_the_policy_alone_is_sent_rather_than_rejected() -> None:
    """Also where the operator's longest wait is as long as the policy's, or shorter."""

    async def test(queue: str, admission: dict[str, Any], ahead_s: float) -> None:
        async with world(1, routing=routing(queue), admission=admission) as w:
            gate = Gate(w)
            asked = [asyncio.ensure_future(w.ask(completion("a")))]
            await until(lambda: len(gate.prompts) == 1)
            asked.append(asyncio.ensure_future(w.ask(completion("b"))))
            await until(lambda: len(w.router.dispatcher.queue) == 1)
            w.clock.ahead_s += ahead_s
            await until(lambda: len(w.router.dispatcher.queue) == 0)
            gate.let_go(2)
            assert [a.status for a in await asyncio.gather(*asked)] == [200, 200]

    run(test("max_in_flight=1", {}, 31.0), limit_s=600)
    run(test("max_in_flight=1,max_wait_s=60", {"max_wait_s": 5}, 5.5), limit_s=600)


def test_an_operators_limit_is_never_exceeded() -> None:
    """What has waited too long for that is rejected, as ever."""

    async def test() -> None:
        admission = {"max_in_flight": 1, "max_wait_s": 5}
        over: dict[str, Any] = {"routing": routing("max_in_flight=4,max_wait_s=2")}
        async with world(1, admission=admission, **over) as w:
            gate = Gate(w)
            asked = [asyncio.ensure_future(w.ask(completion("a")))]
            await until(lambda: len(gate.prompts) == 1)
            asked.append(asyncio.ensure_future(w.ask(completion("b"))))
            await until(lambda: len(w.router.dispatcher.queue) == 1)
            w.clock.ahead_s += 6.0
            assert (await asked[1]).status == 429
            gate.let_go()
            assert (await asked[0]).status == 200

    run(test(), limit_s=600)


def test_an_order_alone_says_who_is_next_at_an_operators_limit() -> None:
    async def test() -> None:
        over = {"routing": {"policy": "round_robin+order:w=1000", "limit_ms": 10_000}}
        async with world(1, admission={"max_in_flight": 1}, **over) as w:
            gate = Gate(w)
            asked = []
            for k, prompt in enumerate(("first", LONG, SHORT)):
                asked.append(asyncio.ensure_future(w.ask(completion(prompt))))
                await until(lambda k=k: len(gate.prompts) + len(w.router.dispatcher.queue) == k + 1)
            gate.let_go(3)
            await asyncio.gather(*asked)
            assert gate.prompts == ["first", SHORT, LONG]

    run(test(), limit_s=600)


def test_a_queue_without_a_limit_is_refused() -> None:
    async def test() -> None:
        async with world(1, routing={"policy": "round_robin+queue"}):
            raise AssertionError("it was accepted")

    with pytest.raises(TailraceError, match="nobody ever waits"):
        run(test(), limit_s=600)
