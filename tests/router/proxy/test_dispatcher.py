"""The life of requests through a real router in front of scripted backends."""

import asyncio
import logging
from typing import Any

import orjson
import pytest

from router.conftest import (
    SSE_HEAD,
    Backend,
    Seen,
    World,
    chunked,
    event,
    post,
    raw,
    reply,
    run,
    world,
)

DONE = b"data: [DONE]\n\n"
STREAM = post("/v1/completions", b'{"prompt":"hello","stream":true}')


def all_scripts(w: World, *scripts: Any) -> None:
    for backend in w.backends:
        backend.scripts += scripts


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def hang(head: bytes = b"") -> Any:
    """A script that writes something and then waits for the connection to end."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: Any) -> None:
        writer.write(head)
        await reader.read()
        raise ConnectionError

    return script


def test_a_reply_and_its_headers() -> None:
    async def test() -> None:
        async with world(2) as w:
            answer = await w.ask(
                post("/v1/chat/completions?x=1", b'{"messages":[]}', "X-Request-Id: mine",
                     "Authorization: Bearer secret", "Connection: X-Drop", "X-Drop: 1")
            )  # fmt: skip
            assert (answer.status, answer.body) == (200, b'{"ok":true}')
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["x-tailrace-replica"] == "b0"
            assert answer.headers["x-tailrace-policy"] == "round_robin"
            assert answer.headers["x-tailrace-reason"]
            (seen,) = w.backends[0].seen
            assert seen.line == "POST /v1/chat/completions?x=1 HTTP/1.1"
            assert seen.headers["authorization"] == "Bearer secret"
            assert seen.headers["host"] == f"127.0.0.1:{w.backends[0].port}"
            assert seen.headers["x-request-id"] == "mine"
            assert "x-drop" not in seen.headers
            assert seen.body == b'{"messages":[]}'
            assert w.counts.done == [(200, "done", "chat")]
            w.assert_quiet()

    run(test())


def test_a_stream_passes_byte_for_byte() -> None:
    framed = b"2;ext=1\r\nda\r\n" + chunked(b"ta: x\n\n", event("b"), DONE)

    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(raw(SSE_HEAD + framed))
            client = await w.client()
            client.send(STREAM)
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert await client.reader.readexactly(len(framed)) == framed
            client.send(STREAM)  # the connection goes on
            assert (await client.answer()).status == 200
            w.assert_quiet()
            cluster = w.router.backends.cluster
            assert cluster.replicas["finished_tokens"][0] == 2

    run(test())


def test_a_stream_arrives_event_by_event() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def script(seen: Seen, reader: Any, writer: Any) -> None:
            writer.write(SSE_HEAD)
            writer.write(chunked(event("a"), end=False) + b"5\r\nda")  # and half a chunk
            await go.wait()
            writer.write(b"ta:\r\n" + chunked(b" b\n\n", DONE))

        async with world(1) as w:
            w.backends[0].scripts.append(script)
            client = await w.client()
            client.send(STREAM)
            await client.reader.readuntil(b"\r\n\r\n")
            first = chunked(event("a"), end=False)
            assert await client.reader.readexactly(len(first)) == first
            assert w.router.backends.cluster.replicas["in_flight"][0] == 1
            assert w.router.backends.cluster.replicas["queued"][0] == 0
            go.set()
            rest = b"5\r\ndata:\r\n" + chunked(b" b\n\n", DONE)
            assert await client.reader.readexactly(len(rest)) == rest
            w.assert_quiet()

    run(test())


def test_usage_is_taken_from_the_answer() -> None:
    async def test() -> None:
        async with world(1) as w:
            usage = b'{"usage":{"prompt_tokens":3,"completion_tokens":17}}'
            w.backends[0].scripts.append(reply(usage))
            await w.ask(post())
            assert w.router.backends.cluster.replicas["finished_tokens"][0] == 17

    run(test())


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST", "PUT", "OPTIONS"])
def test_a_listed_path_is_passed_through(method: str) -> None:
    async def test() -> None:
        async with world(2, paths=["/any/*"]) as w:
            request = f"{method} /any/path?q=%20 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            answer = await w.ask(request)
            assert answer.status == 200
            seen = [s for b in w.backends for s in b.seen]
            assert [s.line for s in seen] == [f"{method} /any/path?q=%20 HTTP/1.1"]
            assert "x-tailrace-policy" not in answer.headers
            w.assert_quiet()

    run(test())


def test_head_requests_keep_their_connection_in_step() -> None:
    async def test() -> None:
        async with world(1, paths=["/file", "/v1/completions"]) as w:
            client = await w.client()
            for _ in range(2):
                client.send(b"HEAD /file HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = await client.answer(head=True)
                assert answer.headers["content-length"] == "11"
            client.send(post())
            assert (await client.answer()).body == b'{"ok":true}'
            assert w.backends[0].connections == 1

    run(test())


def test_an_old_client_gets_no_chunks() -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(raw(SSE_HEAD + chunked(event("a"), DONE)))
            request = STREAM.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: x\r\n", b"")
            answer = await w.ask(request)
            assert answer.body == event("a") + DONE
            assert answer.headers["connection"] == "close"
            assert "transfer-encoding" not in answer.headers
            w.assert_quiet()

    run(test())


def test_an_answer_that_ends_with_its_connection_gets_chunks() -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(
                raw(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nabc", close=True)
            )
            client = await w.client()
            client.send(post())
            answer = await client.answer()
            assert (answer.body, answer.complete) == (b"abc", True)
            client.send(post())
            assert (await client.answer()).status == 200
            w.assert_quiet()

    run(test())


def test_no_json_is_the_clients_mistake() -> None:
    async def test() -> None:
        async with world(1) as w:
            answer = await w.ask(post(body=b"{"))
            assert answer.status == 400
            assert orjson.loads(answer.body)["error"]["type"] == "invalid_request_error"
            assert not w.backends[0].seen
            w.assert_quiet()

    run(test())


# ---- retries ------------------------------------------------------------------------------------


def test_a_dead_replica_costs_no_request() -> None:
    async def test() -> None:
        async with world(3) as w:
            await w.backends[0].kill()
            answers = [await w.ask(post()) for _ in range(12)]
            assert {a.status for a in answers} == {200}
            assert w.router.backends.all[0].health.state == "open"
            # After it is known to be dead nobody is sent there.
            assert len(w.counts.retries) == w.router.settings.health.failures
            assert {a.headers["x-tailrace-replica"] for a in answers} == {"b1", "b2"}
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize(
    "script",
    [
        raw(b"", abort=True),
        raw(b"", close=True),
        raw(b"HTTP/1.1 200 OK\r\nContent-Le", close=True),
        raw(b"\x00\x01garbage\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
        raw(SSE_HEAD, abort=True),
        raw(SSE_HEAD + b"5\r\ndat", abort=True),
        raw(SSE_HEAD + b"zz\r\n"),
        reply(b"", "502 Bad Gateway"),
        reply(b"", "503 Busy"),
        reply(b"", "504 Late"),
    ],
)
def test_a_failure_before_the_first_byte_is_tried_elsewhere(script: Any) -> None:
    async def test() -> None:
        async with world(2) as w:
            w.backends[0].scripts += [script, script]
            answer = await w.ask(STREAM)
            assert (answer.status, answer.body) == (200, b'{"ok":true}')
            assert answer.headers["x-tailrace-replica"] == "b1"
            assert len(w.counts.retries) == 1
            assert w.backends[1].seen[0].body == b'{"prompt":"hello","stream":true}'
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_clients_mistake_is_no_failure_of_the_replica(status: int) -> None:
    async def test() -> None:
        async with world(2) as w:
            for backend in w.backends:
                backend.default = reply(b'{"error":{}}', f"{status} No")
            for _ in range(10):
                assert (await w.ask(post())).status == status
            assert w.counts.retries == []
            assert {t.health.state for t in w.router.backends.all} == {"closed"}
            assert w.counts.done[0] == (status, "rejected", "completion")
            w.assert_quiet()

    run(test())


def test_when_all_fail_the_last_answer_is_passed_on() -> None:
    async def test() -> None:
        async with world(2) as w:
            for backend in w.backends:
                backend.default = reply(b'{"detail":"busy"}', "503 Busy")
            answer = await w.ask(post())
            assert (answer.status, answer.body) == (503, b'{"detail":"busy"}')
            for backend in w.backends:
                await backend.kill()
            answer = await w.ask(post())
            assert answer.status == 502
            assert orjson.loads(answer.body)["error"]["code"] == "backend_failed"
            w.assert_quiet()

    run(test())


def test_errors_of_all_replicas_open_no_more_than_half_of_the_breakers() -> None:
    async def test() -> None:
        async with world(4) as w:
            for backend in w.backends:
                backend.default = reply(b"{}", "500 Poison")
            for _ in range(60):
                assert (await w.ask(post())).status == 500
            states = [t.health.state for t in w.router.backends.all]
            assert states.count("open") == 2
            w.assert_quiet()

    run(test())


def test_retries_have_a_budget() -> None:
    async def test() -> None:
        async with world(
            2, retry={"budget": 0.0, "burst": 3}, health={"failures": 999, "window_requests": 999}
        ) as w:
            for backend in w.backends:
                backend.default = raw(b"", abort=True)
            answers = [await w.ask(post()) for _ in range(8)]
            assert {a.status for a in answers} == {502}
            assert len(w.counts.retries) == 3
            assert sum(len(b.seen) for b in w.backends) == 8 + 3
            w.assert_quiet()

    run(test())


def test_a_connection_that_the_server_was_closing_is_no_failure() -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(post())
            await client.answer()
            # The next request meets a server that has just closed the idle connection.
            w.backends[0].scripts.append(raw(b"", close=True))
            client.send(post())
            assert (await client.answer()).status == 200
            assert w.backends[0].connections == 2
            assert w.router.backends.all[0].health.breaker.failures == 0
            w.assert_quiet()

    run(test())


# ---- failures while an answer is under way ------------------------------------------------------


@pytest.mark.parametrize(
    ("partial", "version"),
    [(b"", b"HTTP/1.1"), (b"1f\r\ndata: {", b"HTTP/1.1"), (b"", b"HTTP/1.0")],
)
def test_a_stream_that_breaks_ends_with_an_error(partial: bytes, version: bytes) -> None:
    async def test() -> None:
        async with world(2) as w:
            all_scripts(w, raw(SSE_HEAD + chunked(event("a"), end=False) + partial, abort=True))
            answer = await w.ask(STREAM.replace(b"HTTP/1.1", version))
            assert answer.complete
            assert answer.body.startswith(event("a"))
            last = answer.body[len(event("a")) :]
            assert last.startswith(b"data: ")
            assert last.endswith(b"\n\n")
            error = orjson.loads(last[6:])["error"]
            assert error["type"] == "server_error"
            assert "b0" in error["message"]
            assert w.counts.retries == []
            assert w.counts.done == [(200, "backend_failed", "completion")]
            w.assert_quiet()

    run(test())


def test_an_error_behind_half_an_event_stands_on_its_own() -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(
                raw(SSE_HEAD + chunked(b'data: {"half', end=False), abort=True)
            )
            answer = await w.ask(STREAM)
            assert answer.complete
            assert answer.body.startswith(b'data: {"half\n\ndata: {"error"')

    run(test())


@pytest.mark.parametrize(
    "partial",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\ndata: x",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    ],
)
def test_another_answer_that_breaks_is_seen_to_be_cut_off(partial: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(raw(partial, abort=True))
            answer = await w.ask(post())
            assert not answer.complete
            assert w.counts.done == [(200, "backend_failed", "completion")]
            w.assert_quiet()

    run(test())


def test_bytes_behind_an_answer_are_not_passed_on() -> None:
    async def test() -> None:
        async with world(1) as w:
            forged = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
            w.backends[0].scripts.append(raw(SSE_HEAD + chunked(event("a")) + forged))
            w.backends[0].scripts.append(
                raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + forged)
            )
            client = await w.client()
            for body in (event("a"), b"ok", b'{"ok":true}'):
                client.send(post())
                assert (await client.answer()).body == body
            assert w.backends[0].connections == 3

    run(test())


# ---- clients ------------------------------------------------------------------------------------


def test_a_client_may_close_at_the_end_mark_before_the_last_chunk() -> None:
    """Some clients do; the answer was complete, and what the server said of it counts."""
    told = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
    begun = SSE_HEAD + chunked(event("a"), told, b"data: [DONE]\n\n", end=False)

    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(hang(begun))
            client = await w.client()
            client.send(STREAM)
            await client.reader.readuntil(b"[DONE]\n\n")
            client.abort()
            await w.backends[0].lost.wait()
            await until(lambda: not w.router.dispatcher.active)
            assert w.counts.done == [(200, "done", "completion")]
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("begun", [b"", SSE_HEAD, SSE_HEAD + chunked(event("a"), end=False)])
def test_when_the_client_goes_the_backend_notices_at_once(begun: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(hang(begun))
            client = await w.client()
            client.send(STREAM)
            await w.backends[0].arrived.wait()
            if begun.endswith(b"\n\n\r\n"):
                await client.reader.readuntil(b"data:")
            client.abort()
            await w.backends[0].lost.wait()
            await until(lambda: not w.router.dispatcher.active)
            assert w.counts.done == [(499, "client_gone", "completion")]
            assert w.router.backends.all[0].health.breaker.failures == 0
            w.assert_quiet()

    run(test())


def test_a_slow_client_slows_the_backend_and_loses_nothing() -> None:
    blob = b"x" * 1_000_000

    async def test() -> None:
        async with world(1) as w:
            sent = 0

            async def script(seen: Seen, reader: Any, writer: asyncio.StreamWriter) -> None:
                nonlocal sent
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 40000000\r\n\r\n")
                for _ in range(40):
                    writer.write(blob)
                    await writer.drain()
                    sent += 1

            w.backends[0].scripts.append(script)
            client = await w.client()
            client.send(post())
            (exchange,) = await _active(w)
            await until(lambda: exchange.paused)
            assert sent < 40
            answer = await client.answer()
            assert len(answer.body) == 40_000_000
            w.assert_quiet()

    run(test())


async def _active(w: World) -> list[Any]:
    await until(lambda: w.router.dispatcher.active)
    return list(w.router.dispatcher.active)


def test_a_client_that_never_reads_is_cut_off() -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(
                raw(b"HTTP/1.1 200 OK\r\nContent-Length: 90000000\r\n\r\n" + b"x" * 90_000_000)
            )
            client = await w.client()
            client.send(post())
            (exchange,) = await _active(w)
            await until(lambda: exchange.paused)
            while w.router.dispatcher.active:  # buffers on the way may still take some of it
                w.clock.ahead_s += w.router.limits.client_stall_s + 1
                w.router.sweep(w.clock())
                await asyncio.sleep(0)
            assert w.counts.done == [(499, "client_gone", "completion")]
            w.assert_quiet()

    run(test())


# ---- time limits --------------------------------------------------------------------------------


def test_a_replica_that_never_answers() -> None:
    async def test() -> None:
        async with world(2, limits={"first_byte_s": 100}) as w:
            w.backends[0].scripts.append(hang(SSE_HEAD))
            client = await w.client()
            client.send(STREAM)
            await w.backends[0].arrived.wait()
            w.clock.ahead_s += 101
            assert (await client.answer()).headers["x-tailrace-replica"] == "b1"
            assert w.counts.retries == [(0, "timeout")]
            await w.backends[0].lost.wait()
            w.assert_quiet()

    run(test())


def test_the_only_replica_never_answers() -> None:
    async def test() -> None:
        async with world(1, limits={"first_byte_s": 100}) as w:
            w.backends[0].scripts.append(hang())
            client = await w.client()
            client.send(post())
            await w.backends[0].arrived.wait()
            w.clock.ahead_s += 101
            answer = await client.answer()
            assert answer.status == 504
            assert w.counts.done == [(504, "timeout", "completion")]
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("limits", [{"between_chunks_s": 50}, {"total_s": 50}])
def test_a_stream_that_falls_silent(limits: dict[str, float]) -> None:
    async def test() -> None:
        async with world(1, limits=limits) as w:
            w.backends[0].scripts.append(hang(SSE_HEAD + chunked(event("a"), end=False)))
            client = await w.client()
            client.send(STREAM)
            await client.reader.readuntil(b"data:")
            w.clock.ahead_s += 51
            rest = await client.reader.readuntil(b"0\r\n\r\n")
            assert b'"code":"timeout"' in rest
            await w.backends[0].lost.wait()
            w.assert_quiet()

    run(test())


# ---- admission ----------------------------------------------------------------------------------


def test_requests_wait_for_room_most_urgent_first() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def slow(seen: Seen, reader: Any, writer: Any) -> None:
            await gate.wait()
            await reply(b"{}")(seen, reader, writer)

        async with world(1, admission={"max_in_flight": 1}) as w:
            w.backends[0].default = slow
            clients = []
            for number, priority in enumerate((0, 5, 0, -3)):
                client = await w.client()
                client.send(post("/v1/completions", b'{"prompt":"%d"}' % number,
                                 f"X-Priority: {priority}"))  # fmt: skip
                await until(lambda n=number: len(w.router.dispatcher.queue) == n)
                await until(lambda n=number: len(w.router.dispatcher.active) == n + 1)
                clients.append(client)
            assert len(w.backends[0].seen) <= 1
            gate.set()
            for client in clients:
                assert (await client.answer()).status == 200
            order = [orjson.loads(seen.body)["prompt"] for seen in w.backends[0].seen]
            assert order == ["0", "3", "2", "1"]
            w.assert_quiet()

    run(test())


def test_who_finds_the_queue_full_is_sent_away() -> None:
    async def test() -> None:
        async with world(1, admission={"max_in_flight": 1, "queue": 1}) as w:
            w.backends[0].default = hang()
            busy = [await w.client(), await w.client()]
            for number, client in enumerate(busy):
                client.send(post())
                await until(lambda n=number: len(w.router.dispatcher.active) == n + 1)
            answer = await w.ask(post())
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert orjson.loads(answer.body)["error"]["type"] == "rate_limit_error"
            assert w.counts.sheds == ["queue"]
            busy[1].abort()  # a waiting client goes: its place is free
            await until(lambda: len(w.router.dispatcher.queue) == 0)
            busy[0].abort()
            await until(lambda: not w.router.dispatcher.active)
            w.assert_quiet()

    run(test())


def test_who_waits_too_long_is_sent_away() -> None:
    async def test() -> None:
        async with world(1, admission={"max_in_flight": 1, "max_wait_s": 20}) as w:
            w.backends[0].default = hang()
            first, second = await w.client(), await w.client()
            first.send(post())
            await w.backends[0].arrived.wait()
            second.send(post())
            await until(lambda: len(w.router.dispatcher.queue) == 1)
            w.clock.ahead_s += 21
            assert (await second.answer()).status == 429
            first.abort()
            await until(lambda: not w.router.dispatcher.active)
            w.assert_quiet()

    run(test())


def test_no_replica_at_all() -> None:
    async def test() -> None:
        async with world(2, paths=["/x", "/v1/completions"]) as w:
            for backend in w.router.backends.all:
                backend.health.drain(True)
            for request in (post(), b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"):
                answer = await w.ask(request)
                assert answer.status == 503
                assert int(answer.headers["retry-after"]) >= 1
            w.assert_quiet()

    run(test())


def test_the_way_back_of_a_replica() -> None:
    async def test() -> None:
        async with world(2) as w:
            port = w.backends[0].port
            await w.backends[0].kill()
            for _ in range(8):
                await w.ask(post())
            backend = w.router.backends.all[0]
            assert backend.health.state == "open"
            again = Backend()
            await again.start(port)
            w.backends.append(again)
            await w.router.probe()
            assert backend.health.state == "open"  # not before its pause is over
            w.clock.ahead_s += w.router.settings.health.open_s + 1
            await w.router.probe()
            assert backend.health.state == "half_open"
            for _ in range(8):
                assert (await w.ask(post())).status == 200
            assert backend.health.state == "closed"
            assert again.seen
            w.assert_quiet()

    run(test())


def test_logs_hold_no_text_and_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with world(2, log={"requests": True}) as w:
            w.backends[0].scripts.append(raw(b"", abort=True))
            await w.ask(post("/v1/completions", b'{"prompt":"secret-text"}',
                             "Authorization: Bearer secret-key"))  # fmt: skip

    with caplog.at_level(logging.DEBUG, logger="tailrace.router"):
        run(test())
    logged = " ".join(str(record.__dict__) for record in caplog.records)
    assert "request done" in logged
    assert "tried again" in logged
    assert "secret" not in logged
