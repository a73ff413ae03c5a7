"""Large bodies, and bodies of odd shapes: read beside the requests of others, or refused."""

import asyncio
import gc
import threading
from collections.abc import Callable

import orjson
import pytest

from router.conftest import World, post, run, world
from tailrace.router.intake.request_body import BadRequest
from tailrace.router.proxy import large_bodies, request_intake
from tailrace.router.proxy.large_bodies import INLINE_BYTES, PARSED_BYTES, SHORT_BYTES

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHAT = "/v1/chat/completions"


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def hold_readers(w: World) -> threading.Event:
    """Keep the thread that reads large bodies busy until the event is set."""
    go = threading.Event()
    w.router.dispatcher.large_bodies.threads.submit(go.wait, 10)
    return go


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [7] * 100_000}),
        ("/v1/completions", {"prompt": [[7] * 50_000, [8] * 50_000]}),
        ("/v1/completions", {"prompt": "text " * 50_000}),
        ("/v1/embeddings", {"input": ["text"] * 30_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a"}]}], "x": [[]] * 50_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 5000, "user": "u"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"a": 1}] * 20_000}),
        (CHAT, {"messages": [[]] * 50_000}),
    ],
)
def test_large_bodies_do_not_hold_up_others(path: str, body: dict[str, object]) -> None:
    data = orjson.dumps(body | {"model": "m"})

    async def test() -> None:
        async with world(1) as w:
            go = hold_readers(w)
            large = await w.client()
            large.send(post(path, data))
            await until(lambda: w.router.held.used >= len(data))
            # Both kinds of small bodies are read while the large one waits.
            assert (await w.ask(post())).status == 200
            assert (await w.ask(post(CHAT, b'{"messages":[],"tools":[{"a":1}]}'))).status == 200
            assert (await w.ask(GET)).status == 200
            assert len(w.backends[0].seen) == 2
            go.set()
            assert (await large.answer()).status == 200
            assert w.backends[0].seen[2].body == data
            await until(lambda: w.router.held.used == 0)
            w.assert_quiet()

    run(test())


def test_many_bodies_of_odd_shapes_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time is parsed at once; the others wait for the thread, but short ones do not."""
    monkeypatch.setattr(request_intake, "PAUSE_SHARE", 1e6)
    tools = [{"a": 1}] * 2000
    data = orjson.dumps({"messages": [], "tools": tools})
    short = orjson.dumps({"messages": [], "tools": tools[:10]})
    assert len(short) < SHORT_BYTES < len(data) < PARSED_BYTES

    async def test() -> None:
        async with world(1) as w:
            go = hold_readers(w)
            assert (await w.ask(post(CHAT, data))).status == 200
            second = await w.client()
            second.send(post(CHAT, data))
            await until(lambda: w.router.held.used >= len(data))
            assert (await w.ask(post(CHAT, short))).status == 200
            assert [len(seen.body) for seen in w.backends[0].seen] == [len(data), len(short)]
            go.set()
            assert (await second.answer()).status == 200

    run(test())


@pytest.mark.parametrize("size", [PARSED_BYTES + 1, INLINE_BYTES - 1000])
def test_ordinary_bodies_are_read_at_once(size: int) -> None:
    async def test() -> None:
        async with world(1) as w:
            go = hold_readers(w)
            body = orjson.dumps({"messages": [{"role": "user", "content": "x" * size}]})
            assert (await w.ask(post(CHAT, body))).status == 200
            go.set()

    run(test())


def test_a_client_that_goes_while_its_body_is_read() -> None:
    async def test() -> None:
        async with world(1) as w:
            go = hold_readers(w)
            client = await w.client()
            client.send(post(body=orjson.dumps({"prompt": [7] * 100_000})))
            await until(lambda: w.router.held.used > 0)
            client.abort()
            await asyncio.sleep(0.3)
            w.clock.ahead_s += 2
            await until(lambda: not w.router.clients)
            assert w.router.held.used == 0
            go.set()
            assert (await w.ask(post(body=orjson.dumps({"prompt": [8] * 100_000})))).status == 200
            assert len(w.backends[0].seen) == 1
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"%b' % (b"x" * 300_000),
        b'{"prompt":"a","prompt":"%b"}' % (b"x" * 300_000),
        b'{"prompt":' + b"[" * 150_000 + b"]" * 150_000 + b"}",
        b"\0" * 300_000,
    ],
)
def test_large_bodies_that_cannot_be_read_are_refused(body: bytes) -> None:
    async def test() -> None:
        async with world(1) as w:
            client = await w.client()
            client.send(post(body=body) + GET)
            assert (await client.answer()).status == 400
            assert (await client.answer()).status == 200
            assert not w.backends[0].seen
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("depth", [50, 250, 300, 900])
@pytest.mark.parametrize(
    "place",
    [
        lambda value: {"tools": [value], "messages": [{"role": "user", "content": "x"}]},
        lambda value: {"messages": [{"role": "user", "content": [value]}]},
        lambda value: {"messages": [{"role": "assistant", "tool_calls": [value]}]},
        lambda value: {"messages": [{"role": "user", "content": "x"}], "metadata": value},
    ],
)
def test_deep_bodies_give_no_traceback(
    place: Callable[[str], dict[str, object]], depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    inner = "".join(['{"a":'] * depth + ["1"] + ["}"] * depth)
    body = orjson.dumps(place("?")).replace(b'"?"', inner.encode())

    async def test() -> None:
        async with world(1) as w:
            answer = await w.ask(post(CHAT, body))
            assert answer.status in (200, 400)
            assert depth > 200 or answer.status == 200
            w.assert_quiet()

    run(test())
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("size", [1000, 300_000])
def test_a_refused_body_is_freed_at_once(size: int) -> None:
    """Not when the garbage collector comes by: that may be hundreds of megabytes later."""
    body = bytes(size)

    async def test() -> None:
        async with world(1) as w:
            gc.collect()
            gc.disable()
            try:
                before = _errors()
                for _ in range(3):
                    assert (await w.ask(post(CHAT, body))).status == 400
                assert _errors() <= before
            finally:
                gc.enable()

    run(test())


def _errors() -> int:
    """Errors about bodies that are still there; their tracebacks hold the bodies."""
    return sum(type(o) is BadRequest for o in gc.get_objects())


def key_a(body: bytes) -> bytes:
    return post("/v1/completions", body, "Authorization: Bearer secret-a")


def test_the_place_of_a_client_is_freed_however_the_reading_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_A", "secret-a")
    large = orjson.dumps({"model": "m", "prompt": [7] * 100_000})
    clients = [{"name": "a", "key_env": "KEY_A", "concurrent": 1, "models": ["m"]}]

    async def test() -> None:
        async with world(1, clients=clients) as w:
            go = hold_readers(w)
            gone = await w.client()
            gone.send(key_a(large))
            await until(lambda: w.router.held.used >= len(large))
            assert (await w.ask(key_a(large))).status == 429  # one at once, also while it is read
            gone.abort()
            w.clock.ahead_s += 2
            await until(lambda: w.router.keyring.clients[0].account.active == 0)
            go.set()
            for body, status in (
                (large, 200),
                (large[:-1], 400),
                (large.replace(b'"m"', b'"n"'), 403),
                (large.replace(b'{"model"', b'{"model":"m","model"'), 400),
            ):
                assert (await w.ask(key_a(body))).status == status
            assert len(w.backends[0].seen) == 1
            w.assert_quiet()
            assert w.router.keyring.clients[0].account.active == 0

    run(test())


@pytest.mark.parametrize("by", ["key", "address"])
def test_clients_take_turns_in_having_their_bodies_read(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """One with many large bodies does not delay another one's until all of its own are read."""
    bodies = [orjson.dumps({"model": "m", "prompt": [k] * 100_000}) for k in range(6)]
    clients = []
    for name in "abc":
        monkeypatch.setenv(f"KEY_{name}", f"secret-{name}")
        clients.append({"name": name, "key_env": f"KEY_{name}"})
    hosts = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}

    async def test() -> None:
        async with world(1, clients=clients if by == "key" else []) as w:
            go = hold_readers(w)
            asked = []
            for body, name in zip(bodies, "aaaabc", strict=True):
                client = await w.client(hosts[name] if by == "address" else None)
                client.send(post("/v1/completions", body, f"Authorization: Bearer secret-{name}"))
                asked.append(client)
                held = sum(len(b) for b in bodies[: len(asked)])
                await until(lambda held=held: w.router.held.used >= held)
            asked[2].abort()  # its turn does not come
            w.clock.ahead_s += 2
            await until(lambda: len(w.router.clients) == len(asked) - 1)
            go.set()
            for number in (0, 1, 3, 4, 5):
                assert (await asked[number].answer()).status == 200
            order = [bodies.index(seen.body) for seen in w.backends[0].seen]
            assert order == [0, 1, 4, 5, 3]  # the first was begun before the others came
            w.assert_quiet()

    run(test())


def test_a_failure_of_the_reader_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance when the system has no more memory."""
    monkeypatch.setenv("KEY_A", "secret-a")
    large = orjson.dumps({"model": "m", "prompt": [7] * 100_000})

    def no_memory(*_: object) -> None:
        raise OSError("no memory")

    async def test() -> None:
        clients = [{"name": "a", "key_env": "KEY_A", "concurrent": 1}]
        async with world(1, clients=clients) as w:
            monkeypatch.setattr(large_bodies, "read_large", no_memory)
            for _ in range(3):
                assert (await w.ask(key_a(large))).status == 500
            monkeypatch.undo()
            assert w.router.keyring.clients[0].account.active == 0
            assert w.router.held.used == 0
            w.assert_quiet()

    run(test())
