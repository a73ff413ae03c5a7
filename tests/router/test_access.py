"""Who reaches what through a whole router: paths, keys, limits, and what a client is told."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.conftest import (
    SSE_HEAD,
    Answer,
    World,
    chunked,
    event,
    post,
    raw,
    reply,
    run,
    world,
)
from router.intake.test_routes import OUT_OF_REACH

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
USAGE = b'{"usage":{"prompt_tokens":100,"completion_tokens":100}}'


def error_of(answer: Answer) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's form."""
    (name, error), *more = orjson.loads(answer.body).items()
    assert (name, more) == ("error", [])
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


def keyed(key: str, *headers: str, body: bytes = CHAT, path: str = "/v1/chat/completions") -> bytes:
    return post(path, body, f"Authorization: Bearer {key}", *headers)


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        monkeypatch.setenv(f"KEY_{name.upper()}", f"secret-{name}")


def client(name: str = "a", **more: Any) -> dict[str, Any]:
    return {"name": name, "key_env": f"KEY_{name.upper()}", **more}


def quiet(w: World) -> None:
    w.assert_quiet()
    assert all(c.account.active == 0 for c in w.router.keyring.clients)


def later(w: World, seconds: float) -> None:
    w.clock.ahead_s += seconds
    w.router.sweep(w.clock())


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_no_path_but_inference_reaches_a_server(method: str) -> None:
    async def test() -> None:
        async with world(2) as w:
            for path in OUT_OF_REACH:
                if not path.startswith("/") or not path.isprintable() or " " in path:
                    continue
                for target in (path, f"{path}?a=/v1/chat/completions", f"http://x{path}"):
                    line = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
                    answer = await w.ask(line.encode())
                    assert answer.status in (400, 404), target
                    error_of(answer)
            assert [s.line for b in w.backends for s in b.seen] == []
            quiet(w)

    run(test())


def test_other_methods_on_inference_paths() -> None:
    async def test() -> None:
        async with world(1) as w:
            for method in ("GET", "PUT", "DELETE", "OPTIONS"):
                line = f"{method} /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n"
                answer = await w.ask(line.encode())
                assert (answer.status, answer.headers["allow"]) == (405, "POST")
            assert (await w.ask(post("/health", b"{}"))).status == 405
            assert not w.backends[0].seen

    run(test())


def test_the_absolute_form_of_an_inference_path() -> None:
    async def test() -> None:
        async with world(1) as w:
            assert (await w.ask(post("http://elsewhere/v1/chat/completions?x", CHAT))).status == 200
            assert w.backends[0].seen[0].line == "POST /v1/chat/completions?x HTTP/1.1"

    run(test())


# ---- keys ---------------------------------------------------------------------------------------


def test_without_clients_the_router_is_open() -> None:
    async def test() -> None:
        async with world(1) as w:
            assert (await w.ask(keyed("whatever"))).status == 200
            assert w.backends[0].seen[0].headers["authorization"] == "Bearer whatever"

    run(test())


def test_only_valid_keys_get_through(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with world(1, clients=[client("a"), client("b")], log={"requests": True}) as w:
            for request in (
                post(), keyed("secret-c"), keyed("secret-a,secret-b"), keyed(""),
                post("/v1/completions", CHAT, "Authorization: Basic secret-a"),
                post("/v1/completions", CHAT, "x-api-key: secret"),
                post("/metrics", b""), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
                post("/v1/completions", CHAT, "Authorization: Bearer " + "x" * 20_000),
            ):  # fmt: skip
                answer = await w.ask(request)
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                error = error_of(answer)
                assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
                assert "secret" not in answer.raw.decode()
            assert not w.backends[0].seen
            assert (await w.ask(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
            for headers in (("Authorization: Bearer secret-a",), ("X-Api-Key: secret-b",)):
                assert (await w.ask(post("/v1/chat/completions", CHAT, *headers))).status == 200
            for seen in w.backends[0].seen:
                assert "authorization" not in seen.headers
                assert "x-api-key" not in seen.headers
            quiet(w)
            status = w.router.snapshot()
            assert "secret" not in repr(status)

    with caplog.at_level(logging.INFO):
        run(test())
    assert "secret" not in "".join(str(vars(record)) for record in caplog.records)
    assert [r.client for r in caplog.records if hasattr(r, "client")] == ["a", "b"]


def test_a_backends_own_key_takes_the_place_of_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BACKEND", "theirs")

    async def test() -> None:
        async with world(1, clients=[client("a")]) as w:
            backend = {"url": w.backends[0].url, "api_key_env": "BACKEND"}
            settings = w.router.settings.model_validate(
                w.router.settings.model_dump() | {"backends": [backend]}
            )
            w.router._load = lambda: settings
            w.router.reload()
            assert (await w.ask(keyed("secret-a"))).status == 200
            assert w.backends[0].seen[0].headers["authorization"] == "Bearer theirs"

    run(test())


def test_keys_are_changed_by_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")

    async def test() -> None:
        async with world(1, clients=[{"name": "a", "key_file": str(file)}]) as w:
            w.router._load = lambda: w.router.settings

            async def statuses() -> list[int]:
                return [(await w.ask(keyed(key))).status for key in ("old", "new")]

            assert await statuses() == [200, 401]
            file.write_text("old\nnew\n")
            assert await statuses() == [200, 401]
            w.router.reload()
            assert await statuses() == [200, 200]
            file.write_text("new\n")
            w.router.reload()
            assert await statuses() == [401, 200]
            file.unlink()
            with pytest.raises(Exception, match="cannot read keys"):
                w.router.reload()
            assert await statuses() == [401, 200]
            quiet(w)

    run(test())


# ---- what a client may ask for ------------------------------------------------------------------


def test_priorities_are_for_those_who_may() -> None:
    async def test() -> None:
        clients = [client("a", priorities=[-5, 3]), client("b")]
        async with world(1, clients=clients) as w:
            urgent = CHAT[:-1] + b',"priority":-5}'
            assert (await w.ask(keyed("secret-a", body=urgent))).status == 200
            for request in (
                keyed("secret-b", body=urgent),
                keyed("secret-b", "x-priority: -1"),
                keyed("secret-a", "x-priority: -4"),
            ):
                answer = await w.ask(request)
                assert (answer.status, error_of(answer)["param"]) == (403, "priority")
            assert (await w.ask(keyed("secret-b", "x-priority: 0"))).status == 200
            assert len(w.backends[0].seen) == 2
            quiet(w)

    run(test())


@pytest.mark.parametrize(
    "field",
    [b'"priority":-1', b'"priority":"-1"', b'"priority":-1.0', b'"priority":true',
     b'"pri\\u006frity":-1', b'"priority":0,"priority":-1', b'"priority":-1e99',
     b'"priority":-99999999999999999999', b'"priority":"-99999999999999999999"'],
)  # fmt: skip
def test_no_priority_is_hidden_from_the_router(field: bytes) -> None:
    """Servers read the body: another priority in a header, another form or path hides nothing."""

    async def test() -> None:
        async with world(1, clients=[client("a")], paths=["/v1/completions", "/v1/new"]) as w:
            body = b'{"prompt":"x",' + field + b"}"
            for path in ("/v1/completions", "/v1/new"):
                for headers in ((), ("x-priority: 0",)):
                    answer = await w.ask(keyed("secret-a", *headers, body=body, path=path))
                    assert (answer.status, error_of(answer)["param"]) == (403, "priority")
            assert not w.backends[0].seen
            quiet(w)

    run(test())


@pytest.mark.parametrize(
    "field", [b'"priority":0,"priority":0', b'"pri\\u006frity":0', b'"priority":0,"\\u0061":0']
)
def test_a_priority_that_cannot_be_replaced_is_refused(field: bytes) -> None:
    """It would go before all that the router has ordered."""

    async def test() -> None:
        for replace in (False, True):
            admission = {"replace_priority": replace}
            async with world(1, clients=[client("a")], admission=admission) as w:
                body = b'{"prompt":"x",' + field + b"}"
                answer = await w.ask(keyed("secret-a", body=body, path="/v1/completions"))
                assert answer.status == (400 if replace else 200)
                if replace:
                    assert error_of(answer)["code"] == "unclear_priority"
                plain = b'{"prompt":"x","priority":0}'
                answer = await w.ask(keyed("secret-a", body=plain, path="/v1/completions"))
                assert answer.status == 200
                quiet(w)

    run(test())


# ---- limits -------------------------------------------------------------------------------------


def test_requests_per_second_and_retry_after() -> None:
    async def test() -> None:
        async with world(1, clients=[client("a", requests_per_s=0.1), client("b")]) as w:
            w.clock.stop()
            assert (await w.ask(keyed("secret-a"))).status == 200
            answer = await w.ask(keyed("secret-a"))
            assert answer.status == 429
            assert error_of(answer)["type"] == "rate_limit_error"
            after_s = int(answer.headers["retry-after"])
            assert after_s == 10
            models = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Api-Key: secret-a\r\n\r\n"
            assert (await w.ask(models)).status == 429
            assert (await w.ask(keyed("secret-b"))).status == 200
            later(w, after_s)
            assert (await w.ask(keyed("secret-a"))).status == 200
            assert w.counts.sheds == ["client_requests"] * 2
            assert (await w.ask(keyed("secret-b", body=b"{"))).status == 400
            assert (await w.ask(keyed("secret-c"))).status == 401
            quiet(w)
            done, shed, refused = "done", "shed", "refused"
            assert w.counts.by_client == [
                ("a", done), ("a", shed), ("a", shed), ("b", done), ("a", done), ("b", refused),
            ]  # fmt: skip

    run(test())


def test_requests_at_once_are_freed_however_they_end() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow(seen: Any, reader: Any, writer: Any) -> None:
            writer.write(SSE_HEAD + chunked(event("a"), end=False))
            await go.wait()
            writer.write(chunked(b"data: [DONE]\n\n"))

        async with world(1, clients=[client("a", concurrent=2)], retry={"attempts": 1}) as w:
            backend = w.backends[0]
            stream = keyed("secret-a", body=b'{"prompt":"x","stream":true}', path="/v1/completions")
            for ending in ("done", "gone", "broken", "refused", "unread"):
                go.clear()
                backend.scripts = [slow, slow]
                held = [await w.client() for _ in range(2)]
                for one in held:
                    one.send(stream)
                    await one.reader.readuntil(b"\r\n\r\n")
                answer = await w.ask(stream)
                assert answer.status == 429
                assert answer.headers["retry-after"] == "1"
                if ending == "done":
                    go.set()
                    for one in held:
                        await one.reader.readuntil(b"0\r\n\r\n")
                elif ending == "broken":
                    await backend.kill()
                    await backend.start(backend.port)
                for one in held:
                    one.abort()
                while w.router.dispatcher.active:
                    await asyncio.sleep(0.01)
                w.router.backends.all[0].health.remove(False)
                if ending == "refused":
                    for body, expected in ((b"{", 400), (CHAT[:-1] + b',"priority":1}', 403)):
                        for _ in range(5):
                            answer = await w.ask(keyed("secret-a", body=body))
                            assert answer.status == expected
                quiet(w)

    run(test())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("reports", [False, True])
def test_tokens_per_minute(streams: bool, reports: bool) -> None:
    """What answers really cost is counted, as far as it is known; then the minute is over."""

    async def test() -> None:
        async with world(1, clients=[client("a", tokens_per_minute=1000)]) as w:
            w.clock.stop()
            backend = w.backends[0]
            body = {"prompt": "x" * 400, "max_tokens": 300, "stream": streams}
            request = keyed("secret-a", body=orjson.dumps(body), path="/v1/completions")
            usage = (
                b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":100}}\n\n'
            )
            events = [event("word")] * 100 + [usage] * reports + [b"data: [DONE]\n\n"]
            if streams:
                backend.default = raw(SSE_HEAD + chunked(*events))
            elif reports:
                backend.default = reply(USAGE)
            statuses = [(await w.ask(request)).status for _ in range(6)]
            # 400 are reserved of each; 200 is what it costs, unless nobody knows.
            known = streams or reports
            assert statuses == ([200] * 4 + [429] * 2 if known else [200] * 2 + [429] * 4)
            answer = await w.ask(request)
            after_s = int(answer.headers["retry-after"])
            assert after_s == 60 * (400 - 200) / 1000
            later(w, after_s)
            assert (await w.ask(request)).status == 200
            quiet(w)

    run(test())


def test_tokens_of_requests_that_fail_are_given_back() -> None:
    async def test() -> None:
        async with world(
            1, clients=[client("a", tokens_per_minute=1000)], retry={"attempts": 1}
        ) as w:
            body = orjson.dumps({"prompt": "x" * 400, "max_tokens": 500})
            request = keyed("secret-a", body=body, path="/v1/completions")
            for script in (reply(b"{}", "400 No"), reply(b"{}", "500 No"), raw(b"", close=True)):
                w.backends[0].scripts = [script] * 9
                assert {(await w.ask(request)).status for _ in range(2)} <= {400, 500, 502}
                w.router.backends.all[0].health.remove(False)
            w.backends[0].scripts = [reply(USAGE)]
            assert (await w.ask(request)).status == 200
            quiet(w)

    run(test())


def test_tokens_of_abandoned_requests_count() -> None:
    async def test() -> None:
        async def hang(seen: Any, reader: Any, writer: Any) -> None:
            await reader.read()
            raise ConnectionError

        async with world(1, clients=[client("a", tokens_per_minute=1000)]) as w:
            w.backends[0].default = hang
            body = orjson.dumps({"prompt": "x" * 400, "max_tokens": 500})
            request = keyed("secret-a", body=body, path="/v1/completions")
            one = await w.client()
            one.send(request)
            await w.backends[0].arrived.wait()
            one.abort()
            await w.backends[0].lost.wait()
            answer = await w.ask(request)
            assert answer.status == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 12
            quiet(w)

    run(test())


# ---- what a client is told ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "explained"),
    [
        ({}, True),
        ({"explain": False}, False),
        ({"listen": "0.0.0.0:0"}, False),
        ({"listen": "0.0.0.0:0", "explain": True}, True),
        ({"clients": [client("a")]}, False),
        ({"clients": [client("a")], "explain": True}, True),
        ({"clients": [client("a", explain=True), client("b")]}, True),
        ({"clients": [client("a", explain=False), client("b")], "explain": True}, False),
    ],
)
def test_who_is_told_where_requests_go(
    over: dict[str, Any], explained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with world(1, retry={"attempts": 1}, **over) as w:
            host, port = w.router.listen_at
            w.router._listen_at = ("127.0.0.1", port) if host == "0.0.0.0" else (host, port)
            answer = await w.ask(keyed("secret-a"))
            names = {name for name in answer.headers if name.startswith("x-tailrace-")}
            assert bool(names) == explained
            assert answer.headers["x-request-id"]
            where = str(w.backends[0].port)
            stream = b'{"prompt":"x","stream":true}'
            begun = SSE_HEAD + chunked(event("a"), end=False)
            w.backends[0].scripts = [raw(begun, abort=True), raw(b"nonsense\r\n\r\n", abort=True)]
            for body, status in ((stream, 200), (CHAT, 502)):
                answer = await w.ask(keyed("secret-a", body=body, path="/v1/completions"))
                assert answer.status == status
                assert b"error" in answer.body
                assert (b"replica b0" in answer.body) == explained
                assert where.encode() not in answer.body
                w.router.backends.all[0].health.remove(False)

    with caplog.at_level(logging.INFO):
        run(test())
    assert any(getattr(record, "why", None) for record in caplog.records)  # the log has it


# ---- before the body ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/chat/completions", "wrong", 401),
        ("/sleep", "secret-a", 404),
        ("/v1/chat/completions", "secret-a", 100),
    ],
)
def test_no_body_is_read_of_who_may_not_ask(path: str, key: str, status: int) -> None:
    async def test() -> None:
        async with world(1, clients=[client("a")]) as w:
            one = await w.client()
            one.send(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                f"Authorization: Bearer {key}\r\nContent-Length: 30000000\r\n\r\n".encode()
            )
            answer = await one.answer()
            assert answer.status == status
            if status != 100:
                assert answer.headers["connection"] == "close"
                assert error_of(answer)["code"] in ("invalid_api_key", "unknown_path")
            assert not w.backends[0].seen

    run(test())
