"""What a client may do, and what becomes of clients that do worse."""

import asyncio
import random

import orjson
import pytest

from router.conftest import Client, World, post, run, world

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def until_closed(client: Client) -> bytes:
    return await client.closed()


async def forget_clients(w: World) -> None:
    while w.router.clients:
        await asyncio.sleep(0)


def test_several_requests_on_one_connection_and_in_one_packet() -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            bodies = [b'{"prompt":"%d"}' % i for i in range(5)]
            client.send(b"".join(post(body=body) for body in bodies) + GET)
            for _ in bodies:
                assert (await client.answer()).body == b'{"ok":true}'
            assert orjson.loads((await client.answer()).body)["status"] == "ok"
            assert [seen.body for seen in w.backends[0].seen] == bodies
            w.assert_quiet()

    run(test())


def test_a_request_in_single_bytes() -> None:
    data = (
        b"\r\nPOST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'a;x=y\r\n{"prompt":\r\n3\r\n"a"\r\n1\r\n}\r\n0\r\nTrailer: x\r\n\r\n' + GET
    )

    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            for i in range(len(data)):
                client.send(data[i : i + 1])
                await asyncio.sleep(0)
            assert (await client.answer()).status == 200
            assert orjson.loads((await client.answer()).body)["status"] == "ok"
            (seen,) = w.backends[0].seen
            assert seen.body == b'{"prompt":"a"}'
            assert seen.headers["content-length"] == "14"
            assert "transfer-encoding" not in seen.headers
            assert "trailer" not in seen.headers

    run(test())


def test_a_body_is_awaited_with_100_continue() -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            head, body = post(body=b"{}").split(b"\r\n\r\n")
            client.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert (await client.answer()).status == 100
            client.send(body)
            assert (await client.answer()).status == 200
            assert "expect" not in w.backends[0].seen[0].headers

    run(test())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000, 431),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n", 413),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9999\r\n\r\n",
         413),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n"
         + b"a" * 4096 + b"\r\n1000\r\n", 413),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnope\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
         400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"\x16\x03\x01\x00garbage", 400),
        (b"NONSENSE\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_refusals_end_the_connection(data: bytes, status: int) -> None:
    async def test() -> None:
        async with world(1, limits={"body_bytes": 2048}) as w:
            client = await w.client()
            # What follows would be a second request to whoever reads lengths differently.
            client.send(data + GET)
            answer = await client.answer()
            assert answer.status in (status, 501)
            assert answer.headers["connection"] == "close"
            assert "error" in orjson.loads(answer.body)
            assert await until_closed(client) == b""
            assert not w.backends[0].seen
            client.writer.close()
            await forget_clients(w)
            w.assert_quiet()

    run(test())


def test_a_refused_client_is_not_kept() -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(b"NONSENSE\r\n\r\n")
            await client.answer()
            client.send(b"more")
            assert len(w.router.clients) == 1
            w.clock.ahead_s += 5
            await forget_clients(w)

    run(test())


@pytest.mark.parametrize(
    "data", [b"GET / HT", b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"]
)
def test_a_slow_request(data: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(data)
            while not w.router.clients:
                await asyncio.sleep(0)
            (connection,) = w.router.clients
            while not connection._ahead and connection._head is None:
                await asyncio.sleep(0)
            w.clock.ahead_s += 31
            assert (await client.answer()).status == 408
            assert await until_closed(client) == b""

    run(test())


def test_an_idle_connection_is_closed_without_a_word() -> None:
    async def test() -> None:
        async with world(1) as w:
            fresh, used = await w.client(), await w.client()
            used.send(GET)
            await used.answer()
            w.clock.ahead_s += 76
            assert await until_closed(fresh) == b""
            assert await until_closed(used) == b""

    run(test())


def test_too_many_connections() -> None:
    async def test() -> None:
        async with world(1, limits={"connections": 2}) as w:
            clients = [await w.client() for _ in range(2)]
            for client in clients:
                client.send(GET)
                await client.answer()
            third = await w.client()
            answer = await third.answer()
            assert answer.status == 503
            assert "retry-after" in answer.headers
            clients[0].abort()
            third.abort()
            while len(w.router.clients) > 1:
                await asyncio.sleep(0)
            assert (await w.ask(GET)).status == 200

    run(test())


def test_a_client_that_sends_far_ahead_is_held_up() -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            count = 20_000
            client.send(GET * count)
            for _ in range(count):
                assert (await client.answer()).status == 200

    run(test())


@pytest.mark.parametrize(
    ("version", "connection", "closes"),
    [
        ("1.1", "close", True),
        ("1.0", "", True),
        ("1.0", "keep-alive", False),
    ],
)
def test_who_closes_when(version: str, connection: str, closes: bool) -> None:
    async def test() -> None:
        async with world(1, paths=["/x"]) as w:
            client = await w.client()
            line = f"Connection: {connection}\r\n" if connection else ""
            client.send(f"GET /x HTTP/{version}\r\nHost: x\r\n{line}\r\n".encode())
            answer = await client.answer()
            assert answer.body == b'{"ok":true}'
            assert answer.headers.get("connection") == ("close" if closes else "keep-alive")
            if closes:
                assert await until_closed(client) == b""
            else:
                client.send(GET)
                assert (await client.answer()).status == 200

    run(test())


def test_an_error_of_ours_is_told_and_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(1) as w:
            monkeypatch.setattr(w.router.dispatcher, "start", lambda request: 1 / 0)
            answer = await w.ask(post())
            assert answer.status == 500
            monkeypatch.undo()
            assert (await w.ask(post())).status == 200
            w.assert_quiet()

    run(test())


def test_malformed_requests_leave_nothing_behind() -> None:
    rng = random.Random(5)
    good = post() + GET + post("/v1/chat/completions", b'{"messages":[]}')

    def damaged() -> bytes:
        data = bytearray(good[: rng.randrange(1, len(good))])
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)

    async def test() -> None:
        async with world(2) as w:
            for _ in range(40):
                clients = [await w.client() for _ in range(10)]
                for client in clients:
                    client.send(damaged())
                    await asyncio.sleep(0)
                for client in clients:
                    client.abort() if rng.random() < 0.5 else client.writer.close()
                w.opened.clear()
            await forget_clients(w)
            while w.router.dispatcher.active:
                await asyncio.sleep(0)
            w.assert_quiet()
            assert (await w.ask(post())).status == 200

    run(test())
