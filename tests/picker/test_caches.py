"""A picker that reads the KV events of its servers: what it believes cached is what they have."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest

from picker.pickers import is_idle
from router.conftest import Backend, Seen, quiet_settings, reply, run
from tailrace.emulate.kv_publisher import KvPublisher
from tailrace.picker.app import Picker
from tailrace.picker.messages import BUFFERED, FULL_DUPLEX, NONE, STREAMED
from tailrace.picker.proxy_client import ProxyStream, endpoints_of
from tailrace.router.state.exact_caches import EXACT, STALE

#: A session with a real vLLM whose cache is too small for it (tests/vllm/record_events.py).
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "kv_session_vllm.json").read_text())
BLOCK = 32  # tokens
#: Most tokens of a run of 256 bytes: the recorded model's tokens are short.
RUN = 160


class Played:
    """A picker before a server that publishes, and answers, what was recorded."""

    def __init__(self, picker: Picker, channel: Any, publisher: KvPublisher) -> None:
        self.picker, self.channel, self.publisher = picker, channel, publisher
        self.sent = 0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    @property
    def trust(self) -> str:
        streams = self.picker.kv_streams
        return streams.caches.trust_of(0) if streams is not None else ""

    async def settled(self) -> None:
        """Wait until all events are read and all tokens are learned."""
        streams, learner = self.picker.kv_streams, self.picker.intake.context.prompt_learner
        await self.until(lambda: is_idle(self.picker))
        if streams is not None and learner is not None:
            stream = streams.streams[0]
            await self.until(lambda: stream.next_number == self.sent and not learner._tasks)

    async def step(self, step: dict[str, Any], response_mode: int = STREAMED) -> int | None:
        """Play a step; return the tokens that were believed cached, if the request is ours."""
        believed = None
        stream = None
        if step["own"]:
            stream = ProxyStream(self.channel)
            body = orjson.dumps(step["request"])
            await stream.pick(body, response_mode=response_mode)
            believed = next(iter(attempts(self.picker))).cached
        for payload in step["payloads"]:
            self.publisher.send(bytes.fromhex(payload))
            self.sent += 1
        if stream is not None:
            await stream.response()
            await stream.read()
            if response_mode != NONE:
                usage = {
                    **step["usage"],
                    "prompt_tokens_details": None,
                }  # it says nothing of caches
                await stream.response_body(orjson.dumps({"usage": usage}), end=True)
                await stream.read()
            await stream.close()
        await self.settled()
        return believed


def attempts(picker: Picker) -> list[Any]:
    """The requests that are at a server."""
    picks = [s._pick for s in picker.intake.active if getattr(s, "_pick", None) is not None]
    return [pick.attempt for pick in picks if pick.attempt is not None]


async def answer(seen: Seen, reader: Any, writer: Any) -> None:
    """Answer ``/tokenize`` as was recorded."""
    asked = json.loads(seen.body)["messages"]
    found = next(s["tokenize"] for s in RECORDED["steps"] if s["request"]["messages"] == asked)
    await reply(orjson.dumps(found))(seen, reader, writer)


@asynccontextmanager
async def playing(events: bool = True, **over: Any) -> AsyncIterator[Played]:
    server, publisher = Backend(), KvPublisher()
    server.default = answer
    await server.start()
    blocks = RECORDED["blocks"]
    kind = {"num_blocks": blocks, "block_size": BLOCK, "prefix_caching": True}
    backend: dict[str, Any] = {"url": server.url, "server": {**kind, "scheduler": "vllm_v1"}}
    if events:
        backend |= {"kv_events": publisher.endpoint, "kv_replay": publisher.replay}
    settings = quiet_settings([backend], **{"admin": {"listen": "off"}, **over})
    picker = Picker(settings)
    await picker.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.listen_at[1]}") as channel:
            played = Played(picker, channel, publisher)
            if events:
                await played.until(lambda: played.trust == EXACT)
            yield played
    finally:
        await picker.stop()
        publisher.close()
        await server.kill()


@pytest.mark.parametrize("response_mode", [STREAMED, NONE])
def test_predictions_are_what_a_real_server_reported(response_mode: int) -> None:
    """Of the other client's requests, a picker without events knows nothing."""

    async def errors(events: bool) -> list[int]:
        found = []
        async with playing(events) as played:
            for step in RECORDED["steps"]:
                believed = await played.step(step, response_mode)
                if believed is not None:
                    found.append(believed - step["cached"])
            if events:
                learner = played.picker.intake.context.prompt_learner
                assert learner is not None
                assert (learner.failed, learner.skipped) == (0, 0)
                assert played.trust == EXACT
        return found

    async def test() -> None:
        estimated, exact = await errors(False), await errors(True)
        assert min(exact) >= -RUN - BLOCK
        assert max(exact) <= BLOCK
        assert max(estimated) > 3 * BLOCK  # it does not know what was evicted
        assert sum(map(abs, exact)) < sum(map(abs, estimated))

    run(test())


def test_trust_goes_and_comes_back_with_the_events() -> None:
    async def test() -> None:
        async with playing() as played:
            first, *others = RECORDED["steps"]
            await played.step(first)
            played.publisher.cut()
            await played.until(lambda: played.trust == STALE)
            assert played.picker.snapshot().backends[0].caches == STALE
            for step in others[:2]:  # missed, and replayed later
                for payload in step["payloads"]:
                    played.publisher.send(bytes.fromhex(payload))
                    played.sent += 1
            played.publisher.open()
            await played.until(lambda: played.trust == EXACT)
            await played.settled()
            streams = played.picker.kv_streams
            assert streams is not None
            assert streams.streams[0].lost == 0

    run(test())


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
@pytest.mark.parametrize("events", [False, True])
def test_bodies_are_held_only_if_their_tokens_are_wanted(mode: int, events: bool) -> None:
    async def test() -> None:
        async with playing(events) as played:
            body = orjson.dumps(RECORDED["steps"][0]["request"])
            stream = ProxyStream(played.channel)
            await stream.headers(mode=mode)
            if mode == BUFFERED:
                await stream.read()
            await stream.body(body)
            endpoints_of(await stream.read())
            if mode == FULL_DUPLEX:
                await stream.body_back()
            assert played.picker.held.used == (len(body) if events else 0)
            stream.call.cancel()
            await played.until(lambda: is_idle(played.picker))
            assert not played.picker.held.spare

    run(test())


def test_bodies_that_are_only_kept_make_room_for_requests() -> None:
    async def test() -> None:
        body = orjson.dumps(RECORDED["steps"][0]["request"])
        limits = {"bodies_bytes": 3 * len(body), "body_bytes": 3 * len(body)}
        async with playing(limits=limits) as played:
            streams = [ProxyStream(played.channel) for _ in range(8)]
            for stream in streams:
                assert len(await stream.pick(body)) == 1
                assert 0 < played.picker.held.used <= limits["bodies_bytes"]
            assert len(played.picker.held.spare) == 3
            for stream in streams:
                stream.call.cancel()
            await played.until(lambda: is_idle(played.picker))

    run(test())
