"""Lengths of prompts and how they are known."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.conftest import (
    SSE_HEAD,
    Script,
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
from tailrace.errors import TailraceError
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.intake.tokens import TokenCounter, ask_server, tokenize_body


def test_ids_are_counted_and_text_is_estimated() -> None:
    counter = TokenCounter()
    assert counter.count(RequestBody("completion", token_ids=[1, 2, 3]), 0) == (3, "ids")
    assert counter.count(RequestBody("completion", text="x" * 400), 400) == (100, "assumed")
    assert counter.count(RequestBody("completion", text=""), 0) == (1, "assumed")
    counter.learn("m", 400, 100)
    assert counter.count(RequestBody("completion", "m", text="x" * 400), 400) == (100, "estimated")
    assert counter.used == {"ids": 1, "assumed": 2, "estimated": 1}
    assert counter.learned == {"usage": 1}


def test_a_local_tokenizer_must_be_given_if_it_is_wanted() -> None:
    with pytest.raises(TailraceError, match="no tokenizer"):
        TokenCounter(None, "local")
    TokenCounter(Path("/nowhere"), "estimate")  # and is not needed if it is not


def test_the_estimate_follows_the_servers_figures_by_model() -> None:
    counter = TokenCounter()
    for _ in range(300):
        counter.learn("dense", 1000, 500)
    assert counter.bytes_per_token("dense") == pytest.approx(2.0, rel=0.02)
    assert counter.count(RequestBody("chat", "dense", "x" * 1000), 1000)[0] == pytest.approx(
        500, abs=9
    )
    for _ in range(300):
        counter.learn("sparse", 5000, 1000)
    assert counter.bytes_per_token("sparse") == pytest.approx(5.0, rel=0.02)
    assert counter.bytes_per_token("dense") == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("size", "tokens"), [(0, 5), (5, 0), (10, 1000), (100_000, 1), (-1, -1)])
def test_figures_that_cannot_be_are_ignored(size: int, tokens: int) -> None:
    counter = TokenCounter()
    counter.learn("m", size, tokens)
    assert counter.bytes_per_token("m") == 4.0


def test_names_of_models_from_clients_do_not_pile_up() -> None:
    counter = TokenCounter()
    for i in range(5000):
        counter.learn(f"m{i}", 400, 100)
    assert len(counter._models) <= 1024


def test_a_local_tokenizer_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(TailraceError, match="pip install tokenizers"):
        TokenCounter(tmp_path / "tokenizer.json")


def test_a_local_tokenizer_reads_the_beginning_of_a_long_text() -> None:
    class Words:
        def encode(self, text: str) -> "Words":
            self.ids = text.split()
            return self

    counter = TokenCounter()
    counter._tokenizer = Words()
    assert counter.count(RequestBody("chat", text="a b c"), 5) == (3, "local")
    long = "abc " * 10_000
    assert counter.count(RequestBody("chat", text=long), len(long))[0] == pytest.approx(
        10_000, rel=0.01
    )


def test_the_server_is_asked_with_what_the_client_sent() -> None:
    sent: list[dict[str, object]] = []

    async def post(path: str, body: bytes) -> bytes:
        assert path == "/tokenize"
        sent.append(orjson.loads(body))
        return orjson.dumps({"count": 12, "max_model_len": 4096, "tokens": [1] * 12})

    chat = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 1})
    assert asyncio.run(ask_server(post, "chat", chat)) == 12
    assert sent == [{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}]
    plain = orjson.dumps({"model": "m", "prompt": "Hi"})
    assert asyncio.run(ask_server(post, "completion", plain)) == 12
    assert sent[1] == {"model": "m", "prompt": "Hi"}


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"count": "12"}', b'{"count": 0}', b"{}"])
def test_a_server_that_cannot_say(answer: bytes) -> None:
    async def post(path: str, body: bytes) -> bytes:
        return answer

    assert asyncio.run(ask_server(post, "completion", b'{"prompt": "x"}')) is None


def test_a_server_that_fails() -> None:
    async def post(path: str, body: bytes) -> bytes:
        raise ConnectionError

    assert asyncio.run(ask_server(post, "completion", b'{"prompt": "x"}')) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"prompt": ["a", "b"]}', b'{"prompt": [1]}'])
def test_no_question_without_one_text(body: bytes) -> None:
    assert tokenize_body("completion", body) is None


# ---- asked beside the traffic -------------------------------------------------------------------


def tokenizing(count: int, status: str = "200 OK") -> Script:
    """A server whose streams bring no figures, and which counts tokens when asked."""
    stream = raw(SSE_HEAD + chunked(event("a"), b"data: [DONE]\n\n"))
    answer = reply(orjson.dumps({"count": count, "tokens": []}), status)

    async def script(seen: Seen, reader: Any, writer: Any) -> None:
        asked = seen.line.startswith("POST /tokenize")
        await (answer if asked else stream)(seen, reader, writer)

    return script


def questions(w: World) -> list[Any]:
    """What was put to /tokenize."""
    return [orjson.loads(s.body) for b in w.backends for s in b.seen if "/tokenize" in s.line]


async def settled(w: World) -> None:
    while w.router.dispatcher.context.tokenize_probe.pending:
        await asyncio.sleep(0)


PROMPT = b'{"model":"m","prompt":"%b","stream":true}' % (b"x" * 4000)


def test_servers_are_asked_where_answers_say_nothing() -> None:
    async def test() -> None:
        async with world(1, tokens={"source": "auto"}) as w:
            w.backends[0].default = tokenizing(2000)
            counter = w.router.backends.cluster.counter
            for _ in range(5):
                assert (await w.ask(post(body=PROMPT))).complete
                await settled(w)
            # Once, however many requests there are; then again after a while.
            assert questions(w) == [{"model": "m", "prompt": "x" * 4000}]
            assert counter.learned == {"tokenize": 1}
            assert counter.bytes_per_token("m") < 2.5
            assert counter.used == {"assumed": 1, "estimated": 4}
            w.clock.ahead_s += 11
            w.router.sweep(w.clock())
            await w.ask(post(body=PROMPT))
            await settled(w)
            assert len(questions(w)) == 2
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("how", ["usage", "estimate", "media", "failed", "long"])
def test_servers_are_not_asked_in_vain(how: str) -> None:
    async def test() -> None:
        source = "estimate" if how == "estimate" else "auto"
        async with world(1, tokens={"source": source, "every_s": 0.001}) as w:
            backend, body = w.backends[0], PROMPT
            backend.default = tokenizing(9, "404 Not Found")
            path = "/v1/completions"
            if how == "usage":
                usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
                stream = chunked(event("a"), usage + b"\n\n", b"data: [DONE]\n\n")
                backend.default = raw(SSE_HEAD + stream)
            elif how == "media":
                path = "/v1/chat/completions"
                image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
                body = orjson.dumps({"model": "m", "messages": [image]})
            elif how == "long":
                body = b'{"model":"m","prompt":"%b","stream":true}' % (b"x" * 70_000)
            for _ in range(4):
                w.clock.ahead_s += 1
                w.router.sweep(w.clock())
                assert (await w.ask(post(path, body))).complete
                await settled(w)
            # One that cannot answer is asked once and then left alone.
            assert len(questions(w)) == (1 if how == "failed" else 0)
            assert w.router.dispatcher.context.tokenize_probe.failed == (
                1 if how == "failed" else 0
            )

    run(test())
