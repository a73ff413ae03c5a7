"""Reading streams, however they are cut into pieces."""

import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.net.sse import StreamedResponse


def event(**value):
    return b"data: " + orjson.dumps(value) + b"\n\n"


def token(text, **more):
    return event(choices=[{"index": 0, "text": text, **more}])


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)
STREAM = token(" the") + token("") + token(" end\n\ndata: x") + USAGE + b"data: [DONE]\n\n"


def read(*parts, code=200, keep_text=False):
    answer = StreamedResponse(itertools.count(1).__next__, keep_text=keep_text)
    answer.code = code
    for part in parts:
        answer.feed(part)
    return answer


def test_a_stream():
    answer = read(STREAM, keep_text=True)
    assert (answer.events, answer.tokens, answer.first_s, answer.last_s) == (3, 3, 1, 3)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 3, 4)
    assert answer.text == " the end\n\ndata: x"
    assert answer.failure() is None


@given(st.lists(st.integers(0, len(STREAM))), st.booleans())
def test_pieces_do_not_matter(cuts, keep_text):
    edges = [0, *sorted(cuts), len(STREAM)]
    answer = read(*(STREAM[a:b] for a, b in itertools.pairwise(edges)), keep_text=keep_text)
    assert (answer.events, answer.first_s, answer.last_s, answer.cached_tokens) == (3, 1, 3, 4)
    assert answer.failure() is None


def test_a_chat_stream_begins_with_the_first_token_not_with_the_role():
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    word = event(choices=[{"index": 0, "delta": {"content": " hi"}}])
    answer = read(role, word, word, b"data: [DONE]\r\n\r\n", keep_text=True)
    assert (answer.events, answer.first_s, answer.text) == (2, 1, " hi hi")


def test_servers_without_usage_are_counted_by_events():
    answer = read(token("a"), token("b"), b"data: [DONE]\n\n")
    assert (answer.tokens, answer.output_tokens, answer.prompt_tokens) == (2, None, None)


@pytest.mark.parametrize(
    ("parts", "code", "failure"),
    [
        ((b"oh no",), 503, "HTTP 503"),
        ((STREAM,), 429, "HTTP 429"),
        ((token("a"),), 200, "cut short"),
        ((b"data: [DONE]\n\n",), 200, "cut short"),
        ((b'{"not":"a stream"}',), 200, "cut short"),
        ((token("a"), event(error={"message": "x"}), b"data: [DONE]\n\n"), 200, "error in stream"),
        ((b"data: {broken\n\n", b"data: [DONE]\n\n"), 200, "error in stream"),
        ((b"data: 7\n\n", b"data: [DONE]\n\n"), 200, "error in stream"),
    ],
)
def test_failures(parts, code, failure):
    assert read(*parts, code=code).failure() == failure


@pytest.mark.parametrize(
    "usage", [None, 3, {}, {"prompt_tokens": "x"}, {"prompt_tokens_details": 4}]
)
def test_odd_usage_is_unknown(usage):
    answer = read(token("a"), event(choices=[], usage=usage), b"data: [DONE]\n\n")
    assert answer.failure() is None
    assert (answer.prompt_tokens, answer.cached_tokens, answer.tokens) == (None, None, 1)
