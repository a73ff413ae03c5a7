"""How often a request is sent, and which replicas its failures count against."""

import asyncio
from typing import Any

import pytest

from router.conftest import Backend, Seen, World, post, raw, reply, run, world

CLOSE = raw(b"", close=True)
#: With paths of unknown kinds.
PATHS = ["/v1/completions", "/v1/anything", "/v1/files"]
POISON = b"poison"
INNOCENT = post("/v1/completions", b'{"prompt":"fine"}')


def chat(text: bytes) -> bytes:
    return post("/v1/chat/completions", b'{"messages":[{"role":"user","content":"%b"}]}' % text)


def sends(w: World, word: bytes = b"") -> int:
    """How often requests with this word in them were sent, to all backends together."""
    return sum(word in seen.body for b in w.backends for seen in b.seen)


def states(w: World) -> list[str]:
    return [b.health.state for b in w.router.backends.all]


def poisoned(then: Any = CLOSE) -> Any:
    """A server on which some requests end badly, and all others well."""

    async def script(seen: Seen, reader: Any, writer: Any) -> None:
        await (then if POISON in seen.body else reply(b'{"ok":true}'))(seen, reader, writer)

    return script


async def warm(w: World) -> None:
    """Leave an idle connection to every backend."""
    gate = asyncio.Event()

    async def wait(seen: Seen, reader: Any, writer: Any) -> None:
        await gate.wait()
        await reply(b"{}")(seen, reader, writer)

    for backend in w.backends:
        backend.scripts = [wait] * len(w.backends)
    clients = [await w.client() for _ in w.backends]
    for client in clients:
        client.send(INNOCENT)
    while sends(w) < len(clients):
        await asyncio.sleep(0)
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200
    for backend in w.backends:
        backend.seen.clear()
        backend.scripts.clear()


# ---- how often a request is sent ----------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_request_is_sent_no_more_often_than_set(attempts: int, n: int) -> None:
    """A second try on a new connection counts, whichever server it goes to."""

    async def test() -> None:
        async with world(n, retry={"attempts": attempts}) as w:
            await warm(w)
            for backend in w.backends:
                backend.default = CLOSE
            assert (await w.ask(chat(POISON))).status == 502
            assert 1 <= sends(w) <= attempts
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("script", [CLOSE, reply(b"", "503 Busy"), raw(b"HTTP/1.1 200 OK\r\nCo")])
def test_an_unknown_request_that_changes_something_is_sent_once(method: str, script: Any) -> None:
    async def test() -> None:
        async with world(3, paths=PATHS, limits={"first_byte_s": 100}) as w:
            await warm(w)
            for backend in w.backends:
                backend.default = script
            request = post("/v1/anything", b"x").replace(b"POST", method.encode())
            client = await w.client()
            client.send(request)
            while not sends(w):
                await asyncio.sleep(0)
            w.clock.ahead_s += 101
            assert (await client.answer()).status in (502, 503, 504)
            assert sends(w) == 1
            w.assert_quiet()

    run(test())


def test_an_unknown_request_may_move_on_before_it_was_sent() -> None:
    async def test() -> None:
        async with world(2, paths=PATHS) as w:
            await w.backends[0].kill()
            for _ in range(4):
                assert (await w.ask(post("/v1/anything", b"x"))).status == 200

    run(test())


def test_an_unknown_request_does_not_meet_a_connection_that_is_closing() -> None:
    """It could not be sent again, so it goes out on a new one."""

    async def test() -> None:
        async with world(1, paths=PATHS) as w:
            await warm(w)
            before = w.backends[0].connections
            assert (await w.ask(post("/v1/anything", b"x"))).status == 200
            assert w.backends[0].connections == before + 1

    run(test())


def test_reading_is_tried_again() -> None:
    async def test() -> None:
        async with world(2, paths=PATHS) as w:
            for backend in w.backends:
                backend.scripts.append(CLOSE)
            assert (await w.ask(b"GET /v1/files HTTP/1.1\r\nHost: x\r\n\r\n")).status in (200, 502)
            assert sends(w) == 2

    run(test())


# ---- which replicas it counts against -----------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("status", ["", "500 Bug", "503 Busy"])
def test_one_client_cannot_take_out_every_replica(n: int, status: str) -> None:
    async def test() -> None:
        async with world(n) as w:
            for backend in w.backends:
                backend.default = poisoned(reply(b"{}", status) if status else CLOSE)
            for _ in range(6 * n):
                assert (await w.ask(chat(POISON))).status in (500, 502, 503)
            assert sum(s != "closed" for s in states(w)) <= n // 2
            for _ in range(2 * n):
                assert (await w.ask(INNOCENT)).status == 200
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_request_that_fails_everywhere_counts_against_nobody(n: int) -> None:
    async def test() -> None:
        async with world(n) as w:
            for backend in w.backends:
                backend.default = poisoned()
            for _ in range(5 * n):
                assert (await w.ask(chat(POISON))).status == 502
            assert states(w) == ["closed"] * n
            assert not any(b.health.breaker.failures for b in w.router.backends.all)

    run(test())


def test_a_replica_that_fails_what_others_answer_is_taken_out() -> None:
    """Also two of four, on requests that meet both of them."""

    async def test() -> None:
        async with world(4) as w:
            for backend in w.backends[:2]:
                backend.default = CLOSE
            for _ in range(20):
                assert (await w.ask(chat(b"fine"))).status == 200
            assert states(w) == ["open", "open", "closed", "closed"]

    run(test())


def test_failures_of_requests_take_out_no_more_than_a_share() -> None:
    async def test() -> None:
        health = {"interval_s": 1000, "max_ejected": 0.25, "window_requests": 10}
        async with world(4, health=health) as w:
            for backend in w.backends[:3]:
                backend.default = CLOSE
            for _ in range(40):  # those that meet all three prove nothing by themselves
                await w.ask(chat(b"fine"))
            assert states(w).count("open") == 1
            assert states(w)[3] == "closed"

    run(test())


def test_drained_replicas_do_not_count_as_there() -> None:
    """The last one that serves is kept, however many others are drained."""

    async def test() -> None:
        async with world(3) as w:
            for backend in w.router.backends.all[1:]:
                backend.health.drain(True)
            w.backends[0].default = reply(b"{}", "500 Bug")
            for _ in range(9):
                assert (await w.ask(INNOCENT)).status == 500
            assert states(w) == ["closed", "draining", "draining"]

    run(test())


async def _timed_out(w: World, silent: list[Backend], count: int) -> list[int]:
    """Send requests that time out at servers which, but for these ones, go on answering."""
    gate = asyncio.Event()

    async def wait(seen: Seen, reader: Any, writer: Any) -> None:
        if POISON in seen.body:
            await gate.wait()
        await reply(b"{}")(seen, reader, writer)

    for backend in silent:
        backend.default = wait
    statuses = []
    for _ in range(count):
        client = await w.client()
        before = sends(w, POISON)
        client.send(chat(POISON))
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            await asyncio.sleep(0)
            if sends(w, POISON) > before:
                before = sends(w, POISON)
                for _ in w.backends:  # others are answered meanwhile
                    assert (await w.ask(INNOCENT)).status == 200
                w.clock.ahead_s += 101
                w.router.sweep(w.clock())
        statuses.append((await answer).status)
    gate.set()
    return statuses


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_busy_replica_that_is_late_is_not_broken(n: int) -> None:
    """Overload must not become an outage: who answers others is alive."""

    async def test() -> None:
        async with world(n, limits={"first_byte_s": 100}, routing=LEAST) as w:
            assert set(await _timed_out(w, w.backends[:1], 4)) <= {200, 504}
            assert states(w) == ["closed"] * n
            assert not any(b.health.breaker.failures for b in w.router.backends.all)

    run(test())


LEAST = {"policy": "round_robin", "limit_ms": 10_000}


def test_a_replica_that_has_fallen_silent_is_taken_out() -> None:
    async def test() -> None:
        async with world(2, limits={"first_byte_s": 100}) as w:

            async def never(seen: Seen, reader: Any, writer: Any) -> None:
                await reader.read()

            w.backends[0].default = never
            while states(w)[0] != "open":
                client = await w.client()
                client.send(chat(b"fine"))
                answer = asyncio.create_task(client.answer())
                while not answer.done():
                    await asyncio.sleep(0)
                    if w.backends[0].arrived.is_set():
                        w.backends[0].arrived.clear()
                        w.clock.ahead_s += 101
                assert (await answer).status == 200
            assert states(w) == ["open", "closed"]

    run(test())


# ---- probes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_replicas_are_dead_and_return(n: int) -> None:
    """Probes that cannot connect take out all of them, and the first good one lets requests in."""

    async def test() -> None:
        async with world(n) as w:
            ports = [b.port for b in w.backends]
            for backend in w.backends:
                await backend.kill()
            for _ in range(3):
                await w.router.probe()
            assert states(w) == ["open"] * n
            answer = await w.ask(INNOCENT)
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            # Long outages must not leave a pause behind: nobody else is there.
            for _ in range(4):
                w.clock.ahead_s += 70
                await w.router.probe()
            for port in ports:
                w.backends.append(Backend())
                await w.backends[-1].start(port)
            await w.router.probe()
            assert (await w.ask(INNOCENT)).status == 200
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_late_probes_take_out_no_more_than_half(n: int) -> None:
    """A router that is late itself, or servers that are overloaded, are not dead."""

    async def test() -> None:
        async with world(n, health={"interval_s": 1000, "timeout_s": 0.05}) as w:
            for backend in w.backends:
                backend.mute = True
            for _ in range(4):
                await w.router.probe()
            assert states(w).count("open") == n // 2
            for backend in w.backends:
                backend.mute = False
            for _ in range(2 * n):
                assert (await w.ask(INNOCENT)).status == 200

    run(test())


def test_good_probes_do_not_bring_back_a_replica_whose_trials_hang() -> None:
    async def test() -> None:
        async with world(2, limits={"first_byte_s": 100}) as w:
            for _ in range(3):
                w.router.backends.all[0].health.failure(w.clock(), "x")
            assert states(w)[0] == "open"
            w.clock.ahead_s += 10

            async def never(seen: Seen, reader: Any, writer: Any) -> None:
                await reader.read()

            w.backends[0].default = never
            await w.router.probe()
            assert states(w)[0] == "half_open"
            clients = []
            while not w.backends[0].seen:
                clients.append(await w.client())
                clients[-1].send(chat(b"fine"))
                await asyncio.sleep(0.01)
            for _ in range(5):
                await w.router.probe()
            assert states(w)[0] == "half_open"
            w.clock.ahead_s += 101
            for client in clients:
                assert (await client.answer()).status == 200
            assert states(w)[0] == "open"
            w.assert_quiet()

    run(test())


# ---- servers that ask for a pause ---------------------------------------------------------------


def busy(status: str, after: str) -> Any:
    return raw(
        f"HTTP/1.1 {status}\r\nRetry-After: {after}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    )


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Busy"])
@pytest.mark.parametrize("after", ["7", "Thu, 31 Dec 2037 23:59:59 GMT"])
def test_a_server_that_asks_for_a_pause_gets_one(status: str, after: str) -> None:
    async def test() -> None:
        async with world(3, retry={"max_pause_s": 10}) as w:
            w.backends[0].scripts.append(busy(status, after))
            for _ in range(9):
                assert (await w.ask(INNOCENT)).status == 200
            assert len(w.backends[0].seen) == 1
            assert states(w) == ["closed"] * 3
            w.clock.ahead_s += 11
            w.router.sweep(w.clock())
            for _ in range(6):
                assert (await w.ask(INNOCENT)).status == 200
            assert len(w.backends[0].seen) > 1

    run(test())


def test_when_all_ask_for_a_pause_the_client_is_told() -> None:
    """It may be the client that sends too much, so nobody else has to wait for it."""

    async def test() -> None:
        async with world(3) as w:
            for backend in w.backends:
                backend.default = poisoned(busy("429 Too Many Requests", "9"))
            for _ in range(5):
                answer = await w.ask(chat(POISON))
                assert (answer.status, answer.headers["retry-after"]) == (429, "9")
            before = [len(b.seen) for b in w.backends]
            for _ in range(6):
                assert (await w.ask(INNOCENT)).status == 200
            assert [len(b.seen) - k for b, k in zip(w.backends, before, strict=True)] == [2, 2, 2]

    run(test())


@pytest.mark.parametrize("after", ["", "-5", "soon", "1e9", "9" * 40])
def test_a_pause_that_makes_no_sense_is_none(after: str) -> None:
    async def test() -> None:
        async with world(2) as w:
            w.backends[0].scripts.append(busy("429 No", after))
            for _ in range(6):
                assert (await w.ask(INNOCENT)).status == 200

    run(test())
