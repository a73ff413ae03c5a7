"""The protocol, message by message, against a real gRPC client."""

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import orjson
import pytest

from picker.pickers import CHAT, is_idle, picking
from router.conftest import run
from tailrace.net import http2
from tailrace.picker import health, messages
from tailrace.picker.app import Picker, endpoint_of
from tailrace.picker.messages import BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX, NONE, STREAMED
from tailrace.picker.proxy_client import ProxyStream, endpoints_of
from tailrace.router.settings import BackendSettings

USAGE = b'{"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}'


async def settle(picker: Picker) -> None:
    for _ in range(400):
        if is_idle(picker):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something is still in progress")


def test_a_request_is_picked_for_and_accounted() -> None:
    async def test() -> None:
        async with picking() as (picker, channel, endpoints):
            stream = ProxyStream(channel)
            named = await stream.pick(CHAT)
            assert len(named) == 3
            assert set(named) == set(endpoints)
            assert picker.backends.cluster.replicas["in_flight"].sum() == 1
            await stream.response()
            reply = await stream.read()
            headers = reply.response_headers.response.header_mutation.set_headers
            assert next(o.header.key for o in headers) == "x-tailrace-replica"
            await stream.response_body(USAGE, end=True)
            assert (await stream.read()).WhichOneof("response") == "response_body"
            assert is_idle(picker)
            assert await stream.close() == grpc.StatusCode.OK
            metrics = picker.telemetry
            metrics.flush()
            assert metrics.output_tokens[endpoints.index(named[0])] == 3

    run(test())


@pytest.mark.parametrize("ends", ["complete", "cancelled", "refused"])
def test_a_stream_that_is_over_is_freed_without_the_garbage_collector(ends: str) -> None:
    # Cycles of every request would be left to the collector, which stops the event loop for long.
    async def test() -> None:
        async with picking() as (picker, channel, _):
            stream = ProxyStream(channel)
            if ends == "refused":
                await stream.headers(mode=BUFFERED)
                await stream.read()
            else:
                await stream.pick(CHAT)
            (kept,) = [weakref.ref(request) for request in picker.intake.active]
            if ends == "complete":
                await stream.response()
                await stream.read()
                await stream.response_body(USAGE, end=True)
                await stream.read()
                await stream.close()
            elif ends == "cancelled":
                stream.call.cancel()
            else:
                await stream.body(b"no JSON")
                assert (await stream.read()).immediate_response.status.code == 400
            for _ in range(400):
                if kept() is None:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"still referred to by {gc.get_referrers(kept())}")

    gc.collect()
    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()


@pytest.mark.parametrize("as_list", [True, False])
def test_only_endpoints_of_the_subset_are_named(as_list: bool) -> None:
    async def test() -> None:
        async with picking(4) as (picker, channel, endpoints):
            wanted = endpoints[1:3]
            for _ in range(6):
                stream = ProxyStream(channel)
                subset = wanted if as_list else ", ".join(wanted)
                assert set(await stream.pick(CHAT, subset=subset)) == set(wanted)
                await stream.close()
            stream = ProxyStream(channel)
            await stream.headers(subset=["10.9.9.9:1"])
            await stream.body(CHAT)
            assert (await stream.read()).immediate_response.status.code == 503
            await settle(picker)

    run(test())


def test_large_bodies_come_back_whole_and_in_parts() -> None:
    async def test() -> None:
        async with picking() as (picker, channel, _):
            for size in (61_999, 62_000, 62_001, 400_000, 3_000_000):
                stream = ProxyStream(channel)
                text = "word " * (size // 5)
                body = orjson.dumps({"model": "emulated", "prompt": text})
                await stream.headers(path="/v1/completions")
                for at in range(0, len(body), 100_000):
                    await stream.body(body[at : at + 100_000], end=False)
                await stream.body(b"", end=True)
                endpoints_of(await stream.read())
                assert await stream.body_back() == body
                await stream.close()
            await settle(picker)

    run(test())


def test_trailers_follow_the_body() -> None:
    async def test() -> None:
        from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

        async with picking() as (_, channel, _e):
            stream = ProxyStream(channel)
            await stream.headers()
            await stream.body(CHAT, end=False)
            request = pb.ProcessingRequest()
            request.request_trailers.SetInParent()
            await stream.send(request)
            kinds = [(await stream.read()).WhichOneof("response") for _ in range(3)]
            assert kinds == ["request_headers", "request_body", "request_trailers"]

    run(test())


def test_other_modes_of_the_requests_body() -> None:
    async def test() -> None:
        async with picking() as (picker, channel, _):
            buffered = ProxyStream(channel)
            await buffered.headers(mode=BUFFERED)
            first = await buffered.read()
            assert not first.request_headers.response.header_mutation.set_headers
            await buffered.body(CHAT)
            assert endpoints_of(await buffered.read())
            for mode in (NONE, STREAMED):
                stream = ProxyStream(channel)
                await stream.headers(mode=mode)
                assert endpoints_of(await stream.read())
                await stream.close()
            partial = ProxyStream(channel)
            await partial.headers(mode=BUFFERED_PARTIAL)
            await partial.read()
            await partial.body(CHAT[:20], end=False)
            assert endpoints_of(await partial.read())
            get = ProxyStream(channel)
            await get.headers(method="GET", path="/v1/models", end=True)
            assert endpoints_of(await get.read())
            for stream in (buffered, partial, get):
                await stream.close()
            await settle(picker)

    run(test())


def test_the_model_is_rewritten_in_place() -> None:
    async def test() -> None:
        async with picking(models={"aliases": {"nice": "emulated"}}) as (_, channel, _e):
            for given, headers in (("nice", {}), ("any", {"x-gateway-model-name-rewrite": "nice"})):
                body = b'{ "messages" : [ ], "model" : "%b" ,"n":1.00 }' % given.encode()
                stream = ProxyStream(channel)
                await stream.headers(headers)
                await stream.body(body)
                reply = await stream.read()
                assert endpoints_of(reply)
                assert (
                    await stream.body_back()
                    == b'{ "messages" : [ ], "model" : "emulated" ,"n":1.00 }'
                )
                lengths = [
                    o.header.raw_value
                    for o in reply.request_headers.response.header_mutation.set_headers
                    if o.header.key == "content-length"
                ]  # fmt: skip
                assert lengths == [b"52"]
                await stream.close()
            unknown = ProxyStream(channel)
            await unknown.headers()
            await unknown.body(b'{"model": "none", "messages": []}')
            assert (await unknown.read()).immediate_response.status.code == 404

    run(test())


def test_a_full_cluster_sheds_by_objective_and_shares_by_fairness_id() -> None:
    async def test() -> None:
        over: dict[str, Any] = {
            "admission": {"max_in_flight": 1, "queue": 10, "max_wait_s": 60},
            "pick": {"objectives": {"batch": -1, "chat": 5}},
        }
        async with picking(1, **over) as (picker, channel, _):
            first = ProxyStream(channel)
            await first.pick(CHAT)
            batch = ProxyStream(channel)
            await batch.headers({"x-gateway-inference-objective": "batch"})
            await batch.body(CHAT)
            refused = (await batch.read()).immediate_response
            assert refused.status.code == 429
            assert "retry-after" in [o.header.key for o in refused.headers.set_headers]
            waiting = []
            for flow, objective in (("a", ""), ("a", ""), ("b", ""), ("c", "chat")):
                stream = ProxyStream(channel)
                await stream.headers(
                    {"x-gateway-inference-fairness-id": flow,
                     "x-gateway-inference-objective": objective}
                )  # fmt: skip
                await stream.body(CHAT)
                waiting.append(stream)
            while len(picker.intake.queue) < 4:
                await asyncio.sleep(0.01)
            order = []
            running, reading = (
                first,
                {asyncio.ensure_future(stream.read()): k for k, stream in enumerate(waiting)},
            )
            for _ in range(4):
                await running.close()
                done, _pending = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                assert len(done) == 1
                task = done.pop()
                endpoints_of(task.result())
                order.append(reading.pop(task))
                running = waiting[order[-1]]
                await running.body_back()
            await running.close()
            assert order[0] == 3  # the urgent one
            assert order[1:] == [0, 2, 1]  # a and b take turns
            await settle(picker)

    run(test())


def any_message(chance: random.Random) -> Any:
    """A message as a proxy may send it, or nearly so."""
    request = messages.pb.ProcessingRequest()
    kinds = ["request_headers", "request_body", "request_trailers", "response_headers",
             "response_body", "response_trailers"]  # fmt: skip
    kind = chance.choice(kinds)
    part = getattr(request, kind)
    part.SetInParent()
    if kind.endswith("headers"):
        pairs = {
            ":method": chance.choice(["POST", "GET", ""]), ":status": chance.choice(["200", "5x"]),
            ":path": chance.choice(["/v1/chat/completions", "/", "*"]),
            "x-gateway-inference-objective": chance.choice(["", "batch"]),
        }  # fmt: skip
        for name, value in pairs.items():
            header = part.headers.headers.add()
            header.key, header.raw_value = name, value.encode()
        request.protocol_config.request_body_mode = chance.randrange(5)
        request.protocol_config.response_body_mode = chance.randrange(5)
    elif kind.endswith("body"):
        part.body = chance.choice([CHAT, b"", b"{", b"data: [DONE]\n\n", USAGE])
    if not kind.endswith("trailers"):
        part.end_of_stream = chance.random() < 0.5
    if chance.random() < 0.2:
        fields = request.metadata_context.filter_metadata[messages.NAMESPACE].fields
        fields[messages.SERVED].string_value = chance.choice(["", "127.0.0.1:1"])
    return request


@pytest.mark.parametrize("seed", range(3))
def test_messages_in_any_order_leave_nothing_behind(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)

    async def one(channel: Any) -> None:
        stream = ProxyStream(channel)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if chance.random() < 0.6:
                await stream.headers(mode=chance.choice([FULL_DUPLEX, FULL_DUPLEX, BUFFERED]))
                await stream.body(CHAT)
            for _ in range(chance.randint(1, 5)):
                await stream.send(any_message(chance))
                await asyncio.sleep(chance.choice([0, 0.002]))
            if chance.random() < 0.5:
                await stream.call.done_writing()
        stream.call.cancel()

    async def test() -> None:
        over: dict[str, Any] = {
            "admission": {"max_in_flight": 2, "queue": 10, "max_wait_s": 60},
            "pick": {"objectives": {"batch": -1}},
        }
        async with picking(2, **over) as (picker, channel, _):
            for _ in range(10):
                await asyncio.gather(*(one(channel) for _ in range(30)))
            await settle(picker)

    run(test())
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("answer", ["response_headers", "response_body", "response_trailers"])
def test_a_request_that_the_proxy_answers_itself_while_it_waits_gets_no_endpoint(
    answer: str,
) -> None:
    """A time-out of the proxy, for instance; the queue must not send it later."""

    async def test() -> None:
        admission = {"max_in_flight": 1, "queue": 10, "max_wait_s": 60}
        async with picking(1, admission=admission) as (picker, channel, _):
            first, waiting = ProxyStream(channel), ProxyStream(channel)
            await first.pick(CHAT)
            await waiting.headers()
            await waiting.body(CHAT)
            await until(lambda: len(picker.intake.queue) == 1)
            if answer == "response_headers":
                await waiting.response(504, "text/plain")
            elif answer == "response_body":
                await waiting.response_body(b"", end=True)
            else:
                request = messages.pb.ProcessingRequest()
                request.response_trailers.SetInParent()
                await waiting.send(request)
            assert (await waiting.read()).WhichOneof("response") == answer
            assert not len(picker.intake.queue)
            await waiting.close()
            await first.close()
            await settle(picker)
            third = ProxyStream(channel)
            assert await third.pick(CHAT)
            third.call.cancel()
            await settle(picker)

    run(test())


def test_cancels_free_everything_at_every_step() -> None:
    async def test() -> None:
        async with picking(admission={"max_in_flight": 1}) as (picker, channel, _):
            for steps in range(7):
                stream = ProxyStream(channel)
                if steps >= 1:
                    await stream.headers()
                if steps >= 2:
                    await stream.body(CHAT[:10], end=False)
                if steps >= 3:
                    await stream.body(CHAT[10:])
                    await stream.read()
                if steps >= 4:
                    await stream.body_back()
                if steps >= 5:
                    await stream.response(kind="text/event-stream")
                    await stream.read()
                if steps >= 6:
                    await stream.response_body(b'data: {"choices":[{"text":"a"}]}\n\n')
                    await stream.read()
                stream.call.cancel()
                await settle(picker)

    run(test())


def test_the_endpoint_that_served_is_charged() -> None:
    async def test() -> None:
        async with picking(2, health={"failures": 1, "interval_s": 1000}) as (
            picker,
            channel,
            all_,
        ):
            for told in ("served", "upstream"):
                stream = ProxyStream(channel)
                first, second = await stream.pick(CHAT)
                await stream.response(**{told: second}, kind="text/event-stream")
                reply = await stream.read()
                value = reply.response_headers.response.header_mutation.set_headers[0].header
                assert value.raw_value.decode() == second
                in_flight = picker.backends.cluster.replicas["in_flight"]
                assert in_flight[all_.index(second)] == 1
                assert in_flight[all_.index(first)] == 0
                await stream.close()
                await settle(picker)
                for backend in picker.backends.all:
                    backend.health.remove(False)  # closed again

    run(test())


def test_answers_of_the_proxy_itself_blame_no_endpoint() -> None:
    async def test() -> None:
        async with picking(2, health={"failures": 1, "interval_s": 1000}) as (picker, channel, _):
            for upstream, failures in (("", 0), (None, 1)):
                stream = ProxyStream(channel)
                await stream.pick(CHAT)
                await stream.response(503, "text/plain", upstream=upstream)
                await stream.read()
                await stream.response_body(b"no healthy upstream", end=True)
                await stream.read()
                await settle(picker)
                opened = sum(b.health.breaker.opened for b in picker.backends.all)
                assert opened == failures

    run(test())


def test_responses_that_are_not_read_count_until_their_end() -> None:
    async def test() -> None:
        async with picking() as (picker, channel, _):
            stream = ProxyStream(channel)
            await stream.pick(CHAT, response_mode=NONE)
            await stream.response(kind="text/event-stream")
            reply = await stream.read()
            assert not reply.HasField("mode_override")  # Envoy would not follow
            assert not is_idle(picker)
            await stream.close()
            assert is_idle(picker)
            picker.telemetry.flush()
            done = [key for key in picker.telemetry.requests if key[2] == "done"]
            assert len(done) == 1

    run(test())


@pytest.mark.parametrize(("responses", "mode", "asked"), [
    ("none", STREAMED, NONE), ("all", NONE, STREAMED), ("all", STREAMED, None),
])  # fmt: skip
def test_how_a_response_is_to_be_sent(responses: str, mode: int, asked: int | None) -> None:
    async def test() -> None:
        async with picking(pick={"responses": responses}) as (_, channel, _e):
            stream = ProxyStream(channel)
            await stream.headers(mode=BUFFERED, response_mode=mode)
            await stream.read()
            await stream.body(CHAT)
            await stream.read()
            await stream.response(kind="text/event-stream")
            reply = await stream.read()
            assert reply.HasField("mode_override") == (asked is not None)
            if asked is not None:
                assert reply.mode_override.response_body_mode == asked

    run(test())


def test_streams_are_read_within_their_budget() -> None:
    async def test() -> None:
        async with picking(pick={"stream_messages_per_s": 10}) as (picker, _c, _e):
            assert picker.reads_response(True)
            for _ in range(100):
                picker.read_part()
            assert not picker.reads_response(True)
            assert picker.reads_response(False)

    run(test())


def test_a_full_duplex_response_is_passed_on() -> None:
    async def test() -> None:
        async with picking() as (_, channel, _e):
            stream = ProxyStream(channel)
            await stream.pick(CHAT, response_mode=FULL_DUPLEX)
            await stream.response(kind="text/event-stream")
            await stream.read()
            for data, end in ((b"data: x\n\n", False), (b"data: [DONE]\n\n", True)):
                await stream.response_body(data, end=end)
                part = (await stream.read()).response_body.response.body_mutation.streamed_response
                assert (part.body, part.end_of_stream) == (data, end)

    run(test())


def test_clients_need_their_keys_and_endpoints_do_not_see_them(monkeypatch: Any) -> None:
    monkeypatch.setenv("A_KEY", "secret-a")
    monkeypatch.setenv("B_KEY", "for-backend")
    clients = [{"name": "a", "key_env": "A_KEY", "models": ["emulated"], "concurrent": 1}]

    async def test() -> None:
        async with picking(clients=clients) as (picker, channel, _):
            without = ProxyStream(channel)
            await without.headers()
            assert (await without.read()).immediate_response.status.code == 401
            stream = ProxyStream(channel)
            await stream.headers({"authorization": "Bearer secret-a"})
            await stream.body(CHAT)
            reply = await stream.read()
            assert endpoints_of(reply)
            await stream.body_back()
            removed = reply.request_headers.response.header_mutation.remove_headers
            assert "authorization" in removed
            second = ProxyStream(channel)
            await second.headers({"authorization": "Bearer secret-a"})
            assert (await second.read()).immediate_response.status.code == 429
            other = {"authorization": "Bearer secret-a", "x-gateway-model-name-rewrite": "other"}
            await stream.close()
            await settle(picker)
            third = ProxyStream(channel)
            await third.headers(other)
            await third.body(CHAT)
            assert (await third.read()).immediate_response.status.code == 403
            await settle(picker)

    run(test())


def test_objectives_give_a_client_no_priority_that_its_key_may_not_use(monkeypatch: Any) -> None:
    monkeypatch.setenv("A_KEY", "secret-a")
    monkeypatch.setenv("B_KEY", "secret-b")
    over: dict[str, Any] = {
        "clients": [
            {"name": "a", "key_env": "A_KEY"},
            {"name": "b", "key_env": "B_KEY", "priorities": [-5]},
        ],
        "pick": {"objectives": {"urgent": 5, "batch": -1}},
    }

    async def test() -> None:
        async with picking(1, **over) as (picker, channel, _):
            for key, objective, allowed in (
                ("a", "urgent", False), ("a", "batch", True), ("a", "other", True),
                ("b", "urgent", True),
            ):  # fmt: skip
                stream = ProxyStream(channel)
                await stream.headers(
                    {"authorization": f"Bearer secret-{key}",
                     "x-gateway-inference-objective": objective}
                )  # fmt: skip
                await stream.body(CHAT)
                reply = await stream.read()
                if allowed:
                    assert endpoints_of(reply)
                    await stream.body_back()
                else:
                    assert reply.immediate_response.status.code == 403
                    assert b"priority_not_allowed" in reply.immediate_response.body
                await stream.close()
            await settle(picker)

    run(test())


def test_names_and_paths_are_no_endpoints() -> None:
    assert endpoint_of(BackendSettings(url="http://[::1]:8000")) == "[::1]:8000"
    for url in ("http://localhost:8000", "http://10.0.0.1:8000/base"):
        with pytest.raises(Exception, match="backend"):
            endpoint_of(BackendSettings(url=url))


async def raw_stream(picker: Picker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with one stream for the picker, begun byte by byte."""
    reader, writer = await asyncio.open_connection(*picker.listen_at)
    block = b"\x83\x86" + b"\x04" + bytes([len(messages.METHOD)]) + messages.METHOD
    writer.write(http2.PREFACE + frame(http2.SETTINGS, 0, 0))
    writer.write(frame(http2.HEADERS, http2.END_HEADERS, 1, block))
    return reader, writer


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big")
    return head + payload


def test_a_message_that_never_ends_counts_and_is_refused() -> None:
    """Bytes of incomplete messages are in the budget of all bodies, and have a time limit."""

    async def scenario() -> None:
        limits = {"bodies_bytes": 100_000, "body_s": 500}
        async with picking(limits=limits) as (picker, _, _):
            opened = []
            for _ in range(3):
                reader, writer = await raw_stream(picker)
                opened.append((reader, writer))
                writer.write(frame(http2.DATA, 0, 1, b"\0\0\1\0\0" + bytes(40_000)))
                if len(opened) < 3:
                    size = 40_005 * len(opened)
                    await until(lambda size=size: picker.held.used == size)
            # There is no room for the third, and what it held is free.
            told = b""
            while b"too many request bodies" not in told:
                told += await opened[2][0].read(1000)
            assert picker.held.used == 2 * 40_005
            picker.intake.sweep(picker.clock() + 501)
            assert is_idle(picker)
            for _, writer in opened:
                writer.close()

    run(scenario(), factory=asyncio.new_event_loop)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_bodies_that_are_too_long_too_late_or_too_many() -> None:
    async def scenario() -> None:
        limits = {"body_bytes": 2000, "bodies_bytes": 3000, "body_s": 500}
        async with picking(limits=limits) as (picker, channel, _):
            long = ProxyStream(channel)
            await long.headers()
            await long.body(bytes(1500), end=False)
            await long.body(bytes(600), end=False)
            assert (await long.read()).immediate_response.status.code == 413
            many = [ProxyStream(channel) for _ in range(2)]
            for number, stream in enumerate(many):
                await stream.headers()
                await stream.body(bytes(1600 + number * 100), end=False)
            # The largest that is not complete has to go.
            assert (await many[1].read()).immediate_response.status.code == 503
            await until(lambda: picker.held.used == 1600)
            picker.intake.sweep(picker.clock() + 501)
            assert (await many[0].read()).immediate_response.status.code == 408
            await until(lambda: is_idle(picker))
            good = ProxyStream(channel)
            assert await good.pick(CHAT)
            good.call.cancel()
            await until(lambda: is_idle(picker))

    run(scenario(), factory=asyncio.new_event_loop)


def test_headers_that_are_too_long_are_refused() -> None:
    """They are held as long as the stream, and are not in the budget of bodies."""

    async def scenario() -> None:
        async with picking(limits={"header_bytes": 4096}) as (picker, channel, endpoints):
            long = ProxyStream(channel)
            await long.headers({"x-long": "x" * 5000})
            assert (await long.read()).immediate_response.status.code == 431
            await until(lambda: is_idle(picker))
            # Nor are they read to their end.
            reader, writer = await raw_stream(picker)
            part = frame(http2.DATA, 0, 1, bytes(60_000))
            writer.write(frame(http2.DATA, 0, 1, b"\0" + (10**7).to_bytes(4, "big")) + part * 17)
            await until(lambda: picker.held.used == 17 * 60_000 + 5)
            writer.write(part)
            told = b""
            while b"headers are too long" not in told:
                told += await reader.read(1000)
            await until(lambda: is_idle(picker))
            writer.close()
            good = ProxyStream(channel)
            # What else the message says does not count.
            subset = [*endpoints, *(f"10.0.{k}.1:8000" for k in range(500))]
            assert await good.pick(CHAT, headers={"x-long": "x" * 3000}, subset=subset)
            good.call.cancel()
            await until(lambda: is_idle(picker))

    run(scenario(), factory=asyncio.new_event_loop)


def test_a_bug_of_ours_ends_its_own_stream_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with picking() as (picker, channel, _):
            good = ProxyStream(channel)
            assert await good.pick(CHAT)
            with monkeypatch.context() as patched:
                patched.setattr(picker.intake, "find_model", None)
                bad = ProxyStream(channel)
                await bad.headers()
                await bad.body(CHAT)
                assert (await bad.read()).immediate_response.status.code == 500
            await good.response(end=True)
            assert (await good.read()).WhichOneof("response") == "response_headers"
            assert await good.close() == grpc.StatusCode.OK
            await until(lambda: is_idle(picker))

    run(scenario(), factory=asyncio.new_event_loop)
    assert any(record.exc_info for record in caplog.records)


def test_health_is_watched_and_follows_the_endpoints() -> None:
    def named(service: str) -> bytes:
        return bytes((0x0A, len(service))) + service.encode() if service else b""

    async def scenario() -> None:
        async with picking(2) as (picker, channel, _):
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            services = ("", "liveness", "readiness", messages.SERVICE, "unknown")
            calls = {service: watch(named(service)) for service in services}
            told = {service: (await call.read())[1] for service, call in calls.items()}
            assert told == dict.fromkeys(services, 1) | {"unknown": 3}
            for backend in picker.backends.all:
                picker.drain(str(backend.index), True)
            picker.health.refresh()
            for service in ("", "readiness", messages.SERVICE):
                assert (await calls[service].read())[1] == 2  # NOT_SERVING
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert (await check(named("liveness")))[1] == 1
            assert (await check(named("readiness")))[1] == 2
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await check(named("unknown"))
            assert failure.value.code() is grpc.StatusCode.NOT_FOUND
            for call in calls.values():
                call.cancel()
            await until(lambda: not picker.health.calls)

    run(scenario(), factory=asyncio.new_event_loop)


def test_health_checks_without_a_message_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MOST_CALLS", 3)

    async def scenario() -> None:
        async with picking(1) as (picker, channel, _):
            stuck = channel.stream_stream("/grpc.health.v1.Health/Check")
            empty = stuck()
            await empty.done_writing()
            assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
            calls = [stuck() for _ in range(3)]
            await until(lambda: len(picker.health.calls) == 3)
            assert await stuck().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for call in calls:
                call.cancel()
            await until(lambda: not picker.health.calls)
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            for _ in range(5):
                assert await check(b"") == b"\x08\1"
            assert not picker.health.calls

    run(scenario(), factory=asyncio.new_event_loop)


@pytest.mark.parametrize("size", [0, 3, 9, 20])
def test_a_proxy_that_stops_inside_a_frame_is_closed(size: int) -> None:
    async def scenario() -> None:
        async with picking(limits={"body_s": 500}) as (picker, _, _):
            reader, writer = await raw_stream(picker)
            writer.write(frame(http2.DATA, 0, 1, bytes(50))[:size] if size else b"")
            await until(lambda: len(picker.intake.active) == 1)
            await asyncio.sleep(0.05)
            picker.sweep(picker.clock() + 501)
            assert is_idle(picker)
            if size:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                await until(lambda: not picker.connections)
            writer.close()

    run(scenario(), factory=asyncio.new_event_loop)
