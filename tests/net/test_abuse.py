"""What clients do that costs more than it should: each is bounded, and others are served."""

import asyncio
import contextlib
import os
import resource
import socket
import sys
import time
from pathlib import Path

import orjson
import pytest

from router.conftest import (
    SSE_HEAD,
    Client,
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
from tailrace.net.client import NO_FILES, FetchError, Pool
from tailrace.net.origin import Origin
from tailrace.net.server import TURN_BYTES, ClientConnection
from tailrace.router import process
from tailrace.router.settings import BackendSettings

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def until(holds) -> None:  # type: ignore[no-untyped-def]
    while not holds():
        await asyncio.sleep(0.001)


def hang(data: bytes = b""):  # type: ignore[no-untyped-def]
    """A script that writes these bytes and then waits for the end of the connection."""

    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(data)
        await reader.read()
        writer.close()

    return script


async def connect_slow_reader(w: World) -> Client:
    """A client whose system takes in only a few kilobytes that it does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, w.router.listen_at)
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    client = Client(reader, writer)
    w.opened.append(client)
    return client


# ---- before a request ---------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [1, 2, 500])
def test_a_few_empty_lines_before_a_request_are_skipped(lines: int) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            for _ in range(2):
                client.send(b"\r\n" * lines + GET)
                assert (await client.answer()).status == 200

    run(test())


@pytest.mark.parametrize("end", [b"", b"\r", GET])
def test_empty_lines_count_as_bytes_of_the_head(end: bytes) -> None:
    async def test() -> None:
        async with world(1, limits={"header_bytes": 1024}) as w:
            client = await w.client()
            client.send(b"\r\n" * 500_000 + end)
            assert (await client.answer()).status == 431
            assert await client.closed() == b""
            assert (await w.ask(GET)).status == 200

    run(test())


@pytest.mark.parametrize("data", [b"\n\n" + GET, b"\r\r\n" + GET, b"\r" + GET, b"\r\n\n" + GET])
def test_other_line_ends_before_a_request_are_refused(data: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(data)
            assert (await client.answer()).status == 400

    run(test())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("drop", [b"\r\n", b"\r", b"a"])
def test_no_trickle_extends_the_time_for_a_head(drop: bytes, used: bool) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            if used:
                client.send(GET)
                await client.answer()
            for _ in range(2):
                client.send(drop if drop != b"\r" else b"\r\n")
                await asyncio.sleep(0.2)  # so that a sweep has seen it
                assert w.router.clients
                w.clock.ahead_s += 6
            assert (await client.answer()).status == 408
            assert await client.closed() == b""

    run(test())


def test_many_headers_are_refused_without_being_read_on() -> None:
    async def test() -> None:
        async with world(1) as w:
            lines = b"".join(b"x%d:\r\n" % i for i in range(5000))
            client = await w.client()
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + lines[:30_000] + b"a:\r\n\r\n")
            assert (await client.answer()).status == 431
            lines = b"".join(b"x%d: y\r\n" % i for i in range(200))
            answer = await w.ask(b"GET /health HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
            assert answer.status == 200

    run(test())


# ---- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("extension", [b"", b";a=b"])
def test_small_chunks_cost_no_more_than_the_body(size: int, extension: bytes) -> None:
    body = orjson.dumps({"prompt": "x" * 50_000})
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in parts)

    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(CHUNKED + framed[:-2])
            await until(lambda: w.router.held.used == len(body))
            (connection,) = w.router.clients
            kept = [getattr(connection, name, None) for name in connection.__slots__]
            assert sum(sys.getsizeof(k) for k in kept if isinstance(k, bytes | bytearray)) < (
                1.2 * len(body) + 1000
            )
            assert not any(isinstance(k, list) for k in kept)
            client.send(b"\r\n0\r\n\r\n")
            assert (await client.answer()).status == 200
            assert w.backends[0].seen[0].body == body
            await until(lambda: w.router.held.used == 0)

    run(test())


def test_framing_that_is_larger_than_the_data_is_refused() -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(CHUNKED + (b"1;" + b"a" * 200 + b"\r\nx\r\n") * 1000)
            assert (await client.answer()).status == 400

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\n0\n\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello\r\n0\n\n",
        b"5\r\nhello\r\n0\r\nA: b\n\n",
        b"5\r\nhello\r\n0\r\n\n",
        b"5;a=b\nhello",
        b"x",
        b" 5\r\n",
        b"5\r\nhelloo",
        b"5\r\nhello\r\n0\r\n A: b\r\n\r\n",
        b"-5\r\n",
        b"5\0\r\n",
        b"5;a\0\r\n",
    ],
)
def test_malformed_chunks_are_refused_at_once(data: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
                client = await w.client()
                client.send(CHUNKED)
                for piece in pieces:
                    client.send(piece)
                    await asyncio.sleep(0)
                assert (await client.answer()).status == 400
                assert await client.closed() == b""
            assert not w.backends[0].seen
            assert w.router.held.used == 0

    run(test())


def test_a_chunk_that_announces_too_much_is_refused_before_it_comes() -> None:
    async def test() -> None:
        async with world(1, limits={"body_bytes": 2048}) as w:
            client = await w.client()
            client.send(CHUNKED + b"400\r\n" + b"a" * 1024 + b"\r\n401\r\n")
            assert (await client.answer()).status == 413

    run(test())


@pytest.mark.parametrize(
    "start",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
        CHUNKED + b"64\r\n",
        CHUNKED + b"1;",  # in an extension
        CHUNKED + b"1\r\na\r\n0\r\na:",  # in a trailer
    ],
)
def test_a_body_has_one_deadline(start: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(start)
            for _ in range(2):
                await asyncio.sleep(0.2)
                client.send(b"a")
                assert w.router.clients
                w.clock.ahead_s += 16
            assert (await client.answer()).status == 408
            assert await client.closed() == b""
            assert w.router.held.used == 0

    run(test())


def test_a_large_body_takes_turns_with_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it has come, one piece is read in each turn of the event loop."""
    turn, turns = 0, []
    received = ClientConnection.data_received

    def note(self: ClientConnection, data: bytes) -> None:
        if len(data) > TURN_BYTES:
            turns.append(turn)
        received(self, data)

    monkeypatch.setattr(ClientConnection, "data_received", note)

    async def test() -> None:
        async with world(1) as w:
            loop = asyncio.get_running_loop()

            def count() -> None:
                nonlocal turn
                turn += 1
                loop.call_soon(count)

            count()
            client = await w.client()
            client.send(post("/v1/completions", b'{"prompt":"%b"}' % (b"a" * 4_000_000)))
            time.sleep(0.05)  # it must not be read meanwhile
            assert (await client.answer()).status == 200

    run(test())
    assert len(turns) > 4
    assert len(set(turns)) == len(turns)


def test_all_bodies_have_one_budget_and_the_largest_unfinished_one_goes() -> None:
    async def test() -> None:
        async with world(1, limits={"bodies_bytes": 100_000}) as w:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            large, medium = await w.client(), await w.client()
            large.send(head % 90_000 + b"a" * 60_000)
            await until(lambda: w.router.held.used == 60_000)
            medium.send(head % 45_000 + b"a" * 39_000)
            await until(lambda: w.router.held.used == 99_000)
            assert (await w.ask(post(body=b'{"prompt":"%b"}' % (b"b" * 5000)))).status == 200
            answer = await large.answer()
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert await large.closed() == b""
            medium.send(b"a" * 6000)
            assert (await medium.answer()).status == 400  # no JSON, but read
            # Larger than what is being received, and than all the room there is.
            answer = await w.ask(post(body=b"c" * 100_001))
            assert answer.status == 503
            await until(lambda: w.router.held.used == 0)

    run(test())


def test_what_is_held_is_free_after_every_end() -> None:
    async def test() -> None:
        async with world(1, admission={"max_in_flight": 1}) as w:
            w.backends[0].default = hang()
            body = orjson.dumps({"prompt": "x" * 20_000})
            clients = [await w.client() for _ in range(6)]
            for client in clients:
                client.send(post(body=body))
            unfinished = await w.client()
            unfinished.send(post(body=body)[:10_000])
            await until(lambda: len(w.router.dispatcher.queue) == 5)
            await until(lambda: w.router.held.used > 6 * len(body))
            assert w.router.held.used < 7 * len(body)
            waiting = [e for e in w.router.dispatcher.active if e.stage == 0]
            for client in [*clients, unfinished]:
                client.writer.transport.abort()
            w.clock.ahead_s += 2
            await until(lambda: w.router.held.used == 0)
            await until(lambda: not w.router.dispatcher.active)
            # The queue may not have come to them yet, but they hold nothing any more.
            assert all(e.arrival is None for e in waiting)

    run(test())


def test_a_body_is_freed_when_its_answer_has_begun() -> None:
    async def test() -> None:
        async with world(1) as w:
            go = asyncio.Event()

            async def script(seen: Seen, reader: object, writer: asyncio.StreamWriter) -> None:
                writer.write(SSE_HEAD + chunked(event("a"), end=False))
                await go.wait()
                writer.write(chunked(b"data: [DONE]\n\n"))

            w.backends[0].scripts.append(script)
            client = await w.client()
            client.send(post(body=orjson.dumps({"prompt": "x" * 100_000, "stream": True})))
            await client.reader.readuntil(b"data: ")
            assert w.router.held.used == 0
            go.set()
            assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")

    run(test())


# ---- many requests at once ----------------------------------------------------------------------


def test_requests_sent_at_once_take_turns_with_those_of_others() -> None:
    async def test() -> None:
        async with world(1) as w:
            count = 5000
            greedy = await w.client()
            greedy.send(GET * count)
            await greedy.answer()
            answered = 1
            modest = await w.client()
            modest.send(GET)
            asked = asyncio.get_running_loop().create_task(modest.answer())
            while not asked.done():
                await greedy.answer()
                answered += 1
            assert (await asked).status == 200
            assert answered < count / 2

    run(test())


@pytest.mark.parametrize("request_bytes", [GET, post("/v1/x", b"{}")])
def test_answers_that_are_not_read_hold_up_further_requests(request_bytes: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].default = reply(b"x" * 2000)
            client = await connect_slow_reader(w)
            await until(lambda: w.router.clients)
            (connection,) = w.router.clients
            sock = connection._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.send(request_bytes * 20_000)
            await until(lambda: connection._stalled)
            await asyncio.sleep(0.3)
            assert connection._transport.get_write_buffer_size() < 100_000
            assert w.router.held.used < 600_000
            assert (await w.ask(GET)).status == 200
            w.clock.ahead_s += 61
            await until(lambda: not w.router.clients or connection not in w.router.clients)
            w.opened.remove(client)
            client.abort()
            await until(lambda: w.router.held.used == 0)

    run(test())


# ---- clients that end their side ----------------------------------------------------------------


@pytest.mark.parametrize("begins_late", [False, True])
def test_a_client_that_has_ended_its_side_gets_its_answers(begins_late: bool) -> None:
    async def test() -> None:
        async with world(1) as w:
            go = asyncio.Event()

            async def script(seen: Seen, reader: object, writer: asyncio.StreamWriter) -> None:
                await go.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

            w.backends[0].scripts.append(script)
            client = await w.client()
            client.send(post() + post() + GET)
            client.writer.write_eof()
            await w.backends[0].arrived.wait()
            if begins_late:
                await asyncio.sleep(0.3)
                w.clock.ahead_s += 2
                assert (await client.answer()).status == 100  # is it still there?
            go.set()
            assert (await client.answer()).body == b"{}"
            assert (await client.answer()).body == b'{"ok":true}'
            assert orjson.loads((await client.answer()).body)["status"] == "ok"
            assert await client.closed() == b""
            await until(lambda: not w.router.clients)
            w.assert_quiet()

    run(test())


def test_a_stream_to_a_client_that_has_ended_its_side() -> None:
    async def test() -> None:
        async with world(1) as w:
            go = asyncio.Event()

            async def script(seen: Seen, reader: object, writer: asyncio.StreamWriter) -> None:
                writer.write(SSE_HEAD + chunked(event("a"), end=False))
                await go.wait()
                writer.write(chunked(event("b"), b"data: [DONE]\n\n"))

            w.backends[0].scripts.append(script)
            client = await w.client()
            client.send(post(body=b'{"prompt":"hello","stream":true}'))
            client.writer.write_eof()
            await client.reader.readuntil(b"\n\n\r\n")
            w.clock.ahead_s += 2
            assert await client.reader.readuntil(b"\n\n\r\n") == chunked(b":\n\n", end=False)
            go.set()
            rest = chunked(event("b"), b"data: [DONE]\n\n")
            assert await client.closed() == rest
            assert w.counts.done == [(200, "done", "completion")]

    run(test())


@pytest.mark.parametrize("data", [b"GET / HTT", post()[:-3], CHUNKED + b"5\r\nhe"])
def test_a_request_that_is_cut_off(data: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(data)
            client.writer.write_eof()
            assert (await client.answer()).status == 400
            assert await client.closed() == b""
            await until(lambda: not w.router.clients)

    run(test())


@pytest.mark.parametrize("begun", [b"", SSE_HEAD, SSE_HEAD + chunked(event("a"), end=False)])
@pytest.mark.parametrize("ahead", [0, 1000, 2_000_000])
def test_a_client_that_sends_ahead_and_closes_is_noticed(begun: bytes, ahead: int) -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(hang(begun))
            client = await w.client()
            client.send(post(body=b'{"prompt":"hello","stream":true}') + b"x" * ahead)
            await w.backends[0].arrived.wait()
            if begun.endswith(b"\n\n\r\n"):
                await client.reader.readuntil(b"data:")
            client.abort()
            await asyncio.sleep(0.3)  # it must have been seen once before time passes
            w.clock.ahead_s += 2
            await w.backends[0].lost.wait()
            await until(lambda: not w.router.dispatcher.active)
            assert w.counts.done == [(499, "client_gone", "completion")]
            await until(lambda: w.router.held.used == 0)
            w.assert_quiet()

    run(test())


# ---- paths and answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../admin", "/v1/../../admin", "/..", "/v1/..", "/./v1", "/%2e%2e/admin", "/%2E./admin",
        "/..%2fadmin", "/v1%2F..%2F..%2fadmin", "/..\\admin", "/v1\\..\\..", "/..%5cadmin",
        "/..;/admin", "/%252e%252e/admin", "/..%252fadmin", "http://x/../admin",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_backends_prefix(path: str) -> None:
    async def test() -> None:
        async with world(1) as w:
            answer = await w.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert answer.status == 400
            assert not w.backends[0].seen

    run(test())


@pytest.mark.parametrize("path", ["/v1/files/a..b", "/v1/...", "/.well-known/x", "/v1?a=../..",
                                  "/v1/x%20y", "/v1/100%25"])  # fmt: skip
def test_dots_that_are_no_segments_pass(path: str) -> None:
    async def test() -> None:
        async with world(1) as w:
            answer = await w.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert answer.status != 400

    run(test())


@pytest.mark.parametrize("status", [b"205 Reset Content", b"204 No Content", b"304 Not Modified"])
def test_answers_without_content_do_not_leave_the_client_waiting(status: bytes) -> None:
    body = b"hello" if status.startswith(b"205") else b""

    async def test() -> None:
        async with world(1) as w:
            w.backends[0].scripts.append(
                raw(b"HTTP/1.1 %b\r\nContent-Length: 5\r\n\r\n%b" % (status, body))
            )
            client = await w.client()
            client.send(post() + post())
            top = await client.reader.readuntil(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 " + status)
            assert (b"content-length" in top) == (not status.startswith(b"204"))
            assert await client.reader.readexactly(len(body)) == body
            assert (await client.answer()).body == b'{"ok":true}'

    run(test())


# ---- what the router lacks is not blamed on replicas --------------------------------------------


def test_running_out_of_files_is_not_blamed_on_replicas() -> None:
    async def test() -> None:
        async with world(2, health={"failures": 1, "interval_s": 1000}) as w:
            clients = [await w.client() for _ in range(4)]
            for client in clients:
                client.send(GET)
                await client.answer()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            used = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
            spare = []
            try:
                with contextlib.suppress(OSError):
                    while True:
                        spare.append(os.open(os.devnull, os.O_RDONLY))
                for client in clients:
                    client.send(post())
                    answer = await client.answer()
                    assert answer.status == 503
                    assert answer.headers["retry-after"] == "1"
                assert all(why == NO_FILES for _, why in await w.router.probe())
            finally:
                for file in spare:
                    os.close(file)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert set(w.counts.sheds) == {"no_files"}
            for backend in w.router.backends.all:
                assert backend.health.available
                assert backend.health.breaker.failures == 0
            for client in clients:
                client.send(post())
                assert (await client.answer()).status == 200
            w.assert_quiet()

    run(test())


def test_clients_leave_files_for_their_requests() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
        assert process.most_clients() == 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("url", ["http://a..b", "http://.a", f"http://{'a' * 64}.b:80"])
def test_a_name_that_no_host_can_have_is_refused_in_the_settings(url: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        BackendSettings(url=url)


def test_a_failure_to_connect_of_any_kind_is_reported() -> None:
    """The name cannot be encoded: that is no OSError."""

    async def test() -> None:
        pool = Pool(Origin("a..b", 80), connect_s=1.0)
        with pytest.raises(FetchError, match="cannot connect"):
            await pool.fetch("GET", "/")

    run(test())
