"""What real vLLM says, and that the router's readers understand it; no router is involved."""

import json

import pytest

from tailrace.net.engine_metrics import parse_metrics
from tailrace.router.intake.tokens import tokenize_body
from tailrace.router.proxy.response_scan import ReplyScanner, StreamScanner

from .client import get, post
from .processes import BLOCK_TOKENS, BLOCKS, MODEL

pytestmark = pytest.mark.vllm

PROMPT = "The gate keeper counts the queues of the river. " * 20


def completion(**more):
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        **more,
    }  # fmt: skip


def streamed(**more):
    return completion(stream=True, stream_options={"include_usage": True}, **more)


def scanned(kind, body, size):
    """Feed an answer to the scanner in pieces of ``size`` bytes; return it and the tokens seen."""
    scanner = StreamScanner(kind)
    return scanner, sum(scanner.feed(body[at : at + size]) for at in range(0, len(body), size))


@pytest.mark.parametrize("piece", [7, 65536])
def test_scanner_counts_the_tokens_of_a_stream(servers, piece):
    reply = post(servers[0].address, "/v1/completions", streamed())
    assert reply.is_whole
    scanner, tokens = scanned("completion", reply.body, piece)
    usage = reply.chunks[-1]["usage"]
    assert usage["completion_tokens"] == 12
    assert tokens == sum(bool(chunk["choices"]) for chunk in reply.chunks)
    assert 1 <= tokens <= 12  # vLLM puts several into one event when it cannot keep up
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert scanner.usage == (usage["prompt_tokens"], 12, cached)


def test_scanner_counts_the_tokens_of_a_chat(servers):
    body = streamed(messages=[{"role": "user", "content": PROMPT}])
    del body["prompt"]
    reply = post(servers[0].address, "/v1/chat/completions", body)
    assert reply.is_whole
    scanner, tokens = scanned("chat", reply.body, 65536)
    # The event that only names the role is no token.
    assert tokens == sum(bool(chunk["choices"]) for chunk in reply.chunks) - 1
    assert scanner.usage is not None
    assert scanner.usage[1] == 12


def test_scanner_reads_the_usage_of_a_reply_that_does_not_stream(servers):
    reply = post(servers[0].address, "/v1/completions", completion())
    scanner = ReplyScanner()
    scanner.feed(reply.body)
    usage = reply.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert scanner.usage == (usage["prompt_tokens"], 12, cached)


def test_second_prompt_with_the_same_beginning_is_cached(servers):
    # Token ids that no other test uses.
    ids = [3 + (7 * k) % 400 for k in range(200)]
    cached = []
    for _ in range(2):
        reply = post(servers[0].address, "/v1/completions", completion(prompt=ids, max_tokens=2))
        cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] == 200 // BLOCK_TOKENS * BLOCK_TOKENS


def test_metrics_are_understood(servers):
    server = servers[0].address
    before = parse_metrics(get(server, "/metrics").body.decode())
    assert before.kv_tokens == BLOCKS * BLOCK_TOKENS
    assert before.block_size == BLOCK_TOKENS
    assert (before.waiting, before.running, before.kv_used) == (0, 0, 0)


def test_tokenize_says_what_usage_says(servers):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    for kind, path, body in (
        ("completion", "/v1/completions", completion(max_tokens=1)),
        ("chat", "/v1/chat/completions", chat),
    ):
        question = tokenize_body(kind, json.dumps(body).encode())
        count = post(servers[0].address, "/tokenize", json.loads(question)).json()["count"]
        assert count == post(servers[0].address, path, body).json()["usage"]["prompt_tokens"]
