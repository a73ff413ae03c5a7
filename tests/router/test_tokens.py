"""Lengths of prompts and how they are known."""

import asyncio
from pathlib import Path

import orjson
import pytest

from tailrace.errors import TailraceError
from tailrace.router.asked import Asked
from tailrace.router.tokens import TokenCounter, ask_server, tokenize_body


def test_ids_are_counted_and_text_is_estimated() -> None:
    counter = TokenCounter()
    assert counter.count(Asked("completion", token_ids=[1, 2, 3]), 0) == (3, "ids")
    assert counter.count(Asked("completion", text="x" * 400), 400) == (100, "estimated")
    assert counter.count(Asked("completion", text=""), 0) == (1, "estimated")


def test_the_estimate_follows_the_servers_figures_by_model() -> None:
    counter = TokenCounter()
    for _ in range(300):
        counter.learn("dense", 1000, 500)
    assert counter.bytes_per_token("dense") == pytest.approx(2.0, rel=0.02)
    assert counter.count(Asked("chat", "dense", "x" * 1000), 1000)[0] == pytest.approx(500, abs=9)
    assert counter.prompts_seen("dense") == 300
    assert counter.prompts_seen("other") == 0
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
    assert counter.count(Asked("chat", text="a b c"), 5) == (3, "local")
    long = "abc " * 10_000
    assert counter.count(Asked("chat", text=long), len(long))[0] == pytest.approx(10_000, rel=0.01)


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
