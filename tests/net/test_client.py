"""The pool of connections to a backend, and the router's own questions."""

import asyncio
from typing import Any

import pytest

from router.conftest import Backend, chunked, raw, reply, run
from tailrace.net.client import MAX_FETCH_BYTES, Call, FetchError, Pool, failure_kind
from tailrace.net.origin import Origin


def pool_for(backend: Backend) -> Pool:
    return Pool(Origin.parse(backend.url), connect_s=3.0)


class Listener:
    """A sink that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.over = asyncio.Event()
        self.connection: Any = None

    def connected(self, connection: Any) -> bool:
        self.connection = connection
        connection.send(self, b"GET", b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n", b"")
        return True

    def failed(self, why: str, *, connecting: bool) -> None:
        self.heard.append(("failed", connecting))
        self.over.set()

    def head(self, head: Any) -> None:
        self.heard.append(head.status)

    def body(self, raw: bytes, parts: list[bytes], done: bool) -> None:
        self.heard.append((b"".join(parts), done))
        if done:
            self.over.set()

    def whole(self, head: Any, body: bytes) -> None:
        self.head(head)
        self.body(body, [body], True)

    async def ask(self, pool: Pool, **options: Any) -> list[Any]:
        connection = pool.acquire(self, **options)
        if connection is not None:
            self.connected(connection)
        await self.over.wait()
        return self.heard


async def backend_and_pool() -> tuple[Backend, Pool]:
    backend = Backend()
    await backend.start()
    return backend, pool_for(backend)


def test_a_connection_is_used_again() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        first, second = Listener(), Listener()
        assert await first.ask(pool) == [200, (b'{"ok":true}', True)]
        assert await second.ask(pool) == [200, (b'{"ok":true}', True)]
        assert (backend.connections, pool.open) == (1, 1)
        assert second.connection.reused
        await Listener().ask(pool, fresh=True)
        assert backend.connections == 2
        pool.abort()
        await backend.kill()

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more",
    ],
)
def test_a_connection_that_cannot_be_used_again(data: bytes) -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        backend.scripts.append(raw(data))
        assert (await Listener().ask(pool))[-1] == (b"ok", True)
        await Listener().ask(pool)
        assert backend.connections == 2
        pool.abort()
        await backend.kill()

    run(test())


def test_answers_that_announce_themselves_are_passed_over() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        backend.scripts.append(
            raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
                b"HTTP/1.1 204 No Content\r\n\r\n")
        )  # fmt: skip
        assert await Listener().ask(pool) == [204, (b"", True)]
        await Listener().ask(pool)
        assert backend.connections == 1
        pool.abort()
        await backend.kill()

    run(test())


def test_an_answer_in_single_bytes() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"abc", b"de")

    async def test() -> None:
        backend, pool = await backend_and_pool()

        async def script(seen: Any, reader: Any, writer: Any) -> None:
            for i in range(len(data)):
                writer.write(data[i : i + 1])
                await asyncio.sleep(0)

        backend.scripts.append(script)
        heard = await Listener().ask(pool)
        assert heard[0] == 200
        assert b"".join(part for part, _ in heard[1:]) == b"abcde"
        assert [done for _, done in heard[1:]].count(True) == 1
        pool.abort()
        await backend.kill()

    run(test())


def test_nobody_listens() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        await backend.kill()
        assert await Listener().ask(pool) == [("failed", True)]
        with pytest.raises(FetchError, match="cannot connect") as error:
            await pool.fetch("GET", "/")
        assert error.value.connecting

    run(test())


def test_a_head_without_end() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        backend.scripts.append(raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000))
        assert await Listener().ask(pool) == [("failed", False)]
        await asyncio.sleep(0)
        assert pool.open == 0
        await backend.kill()

    run(test())


def test_an_unwanted_connection_is_kept_for_the_next() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()

        class Gone(Listener):
            def connected(self, connection: Any) -> bool:
                self.over.set()
                return False

        await Gone().ask(pool)
        await Listener().ask(pool)
        assert backend.connections == 1
        pool.abort()
        await backend.kill()

    run(test())


def test_idle_connections_are_closed_in_time() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        listener = Listener()
        await listener.ask(pool)
        pool.sweep(listener.connection.idle_since + 1)
        assert pool.open == 1
        pool.sweep(listener.connection.idle_since + 10)
        while pool.open:
            await asyncio.sleep(0)
        await Listener().ask(pool)
        assert backend.connections == 2
        pool.abort()
        await backend.kill()

    run(test())


def test_questions_of_the_router() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        backend.scripts.append(reply(b"text", "418 Tea", kind="a/b"))
        answer = await pool.fetch("POST", "/tokenize", {"X-A": "b"}, b"body")
        assert (answer.status, answer.body) == (418, b"text")
        assert answer.headers[b"content-type"] == b"a/b"
        (seen,) = backend.seen
        assert (seen.line, seen.body) == ("POST /tokenize HTTP/1.1", b"body")
        assert seen.headers["x-a"] == "b"
        pool.abort()
        await backend.kill()

    run(test())


def test_a_question_without_an_answer() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()

        async def never(seen: Any, reader: Any, writer: Any) -> None:
            await reader.read()

        backend.scripts += [never, raw(b"", abort=True)]
        with pytest.raises(FetchError, match="no answer within") as error:
            await pool.fetch("GET", "/", timeout_s=0.01)
        assert error.value.late
        backend.scripts[:] = [raw(b"", abort=True)]
        with pytest.raises(FetchError, match="closed"):
            await pool.fetch("GET", "/")
        length = MAX_FETCH_BYTES + 1
        backend.scripts.append(
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + b"x" * length)
        )
        with pytest.raises(FetchError, match="too long"):
            await pool.fetch("GET", "/")
        pool.abort()
        await backend.kill()

    run(test())


def test_a_key_of_the_backend_replaces_the_clients() -> None:
    async def test() -> None:
        backend = Backend()
        await backend.start()
        pool = Pool(Origin.parse(backend.url + "/base"), connect_s=3.0, api_key="own")
        await pool.fetch("GET", "/x", {"Authorization": "Bearer client"})
        (seen,) = backend.seen
        assert seen.line == "GET /base/x HTTP/1.1"
        assert seen.headers["authorization"] == "Bearer own"
        assert seen.names.count("authorization") == 1
        pool.abort()
        await backend.kill()

    run(test())


class Recorded(Call):
    """A call that notes what becomes of it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool, b"GET", pool.head(b"GET", b"/x", 0), b"")
        self.heard: list[Any] = []
        self.finished = asyncio.Event()

    def began(self, head: Any) -> None:
        self.heard.append(head.status)

    def received(self, data: bytes) -> None:
        self.heard.append(data)

    def ended(self) -> None:
        self.finished.set()

    def broken(self, why: str, *, connecting: bool) -> None:
        self.heard.append(failure_kind(why, connecting=connecting))
        self.finished.set()


async def called(pool: Pool) -> list[Any]:
    call = Recorded(pool)
    call.start()
    await call.finished.wait()
    return call.heard


def test_calls_keep_their_connection_and_survive_its_end() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        assert await called(pool) == [200, b'{"ok":true}']
        assert await called(pool) == [200, b'{"ok":true}']
        assert (backend.connections, pool.made) == (1, 1)
        # The server closes a kept connection instead of responding: sent again, once.
        backend.scripts.append(raw(b"", abort=True))
        assert await called(pool) == [200, b'{"ok":true}']
        assert pool.made == 2
        backend.scripts += [raw(b"", abort=True), raw(b"", abort=True)]
        assert await called(pool) == ["disconnected"]
        pool.abort()
        await backend.kill()

    run(test())


def test_failures_of_calls() -> None:
    async def test() -> None:
        backend, pool = await backend_and_pool()
        backend.scripts.append(raw(b"nonsense\r\n\r\n"))
        assert await called(pool) == ["malformed"]
        backend.scripts.append(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", close=True))
        assert await called(pool) == [200, b"abc", "disconnected"]
        call = Recorded(pool)
        call.start()
        call.cancel()
        await backend.kill()
        assert await called(pool) == ["connect"]
        assert call.heard == []
        pool.abort()

    run(test())
