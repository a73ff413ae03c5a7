"""Counting tokens while an answer passes by."""

import time
from itertools import pairwise

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.router.proxy.response_scan import (
    MAX_LINE_BYTES,
    NoScanner,
    ReplyScanner,
    StreamScanner,
    Usage,
    find_usage,
)

USAGE = b'"usage":{"prompt_tokens":4,"total_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":2}}'  # noqa: E501
CHAT = b"".join(
    [
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"data: [DONE] \\"usage\\": {"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],' + USAGE + b"}\n\n",
        b"data: [DONE]\n\n",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(CHAT)), max_size=30))
def test_a_stream_cut_anywhere(cuts: list[int]) -> None:
    places = sorted({*cuts, 0, len(CHAT)})
    scanner = StreamScanner("chat")
    tokens = sum(scanner.feed(CHAT[start:stop]) for start, stop in pairwise(places))
    assert tokens == 5  # as the figures say: one of the three events brought three
    assert scanner.done
    assert scanner.usage == Usage(4, 5, 2)


def test_one_event_per_part() -> None:
    scanner = StreamScanner("completion")
    event = b'data: {"choices":[{"text":"x"}],"usage":null}\n\n'
    assert [scanner.feed(event) for _ in range(3)] == [1, 1, 1]
    assert scanner.feed(b"data: {") == 0
    assert scanner.usage is None
    assert not scanner.done


def test_lines_that_end_with_crlf_and_comments() -> None:
    scanner = StreamScanner("completion")
    assert scanner.feed(b': ping\r\n\r\ndata: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n') == 1
    assert scanner.done


def test_usage_with_every_event() -> None:
    scanner = StreamScanner("completion")
    event = b'data: {"choices":[{"text":"x"}],' + USAGE + b"}\n\n"
    assert scanner.feed(event + event) == 5  # as the figures say
    assert scanner.usage == Usage(4, 5, 2)


def test_the_responses_api() -> None:
    scanner = StreamScanner("response")
    stream = (
        b'event: response.created\ndata: {"type":"response.created","response":{"usage":null}}\n\n'
        b'event: x\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
        b'event: x\ndata: {"type":"response.output_text.delta","delta":"b"}\n\n'
        b'event: x\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":7,'
        b'"output_tokens":2,"input_tokens_details":{"cached_tokens":1}}}}\n\n'
    )
    assert scanner.feed(stream) == 2
    assert scanner.usage == Usage(7, 2, 1)
    assert scanner.done


def test_an_endless_line_is_not_kept() -> None:
    scanner = StreamScanner("chat")
    for _ in range(6):
        assert scanner.feed(b"data: " + b"x" * MAX_LINE_BYTES) == 0
    assert len(scanner._tail) <= MAX_LINE_BYTES + 100


def test_a_reply() -> None:
    scanner = ReplyScanner()
    body = b'{"choices":[{"text":"' + b"x" * 20_000 + b'"}],' + USAGE + b',"id":"a"}'
    for at in range(0, len(body), 700):
        assert scanner.feed(body[at : at + 700]) == 0
    assert scanner.usage == Usage(4, 5, 2)


def test_figures_that_are_none() -> None:
    assert find_usage(b"{}") is None
    assert find_usage(b'{"usage":null}') is None
    assert find_usage(b'{"usage":{"prompt_tokens":') is None
    assert find_usage(b'{"usage":{"prompt_tokens":true,"completion_tokens":-1}}') == Usage(
        None, None, None
    )
    text = orjson.dumps({"text": '"usage": {"prompt_tokens": 1}'})
    assert find_usage(text) is None
    assert NoScanner().feed(b"data: x\n\n") == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\ndata:", b'"usage":{', b"}", b"\n"])))
def test_any_bytes(parts: list[bytes]) -> None:
    for scanner in (StreamScanner("chat"), StreamScanner("response"), ReplyScanner()):
        for part in parts:
            assert scanner.feed(part) >= 0
        assert scanner.usage is None or isinstance(scanner.usage, Usage)


def test_more_tokens_than_there_can_be_are_none() -> None:
    plain = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d}'
    assert find_usage(plain % (2**24, 5)) == Usage(2**24, 5, None)
    assert find_usage(plain % (2**24 + 1, 10**11)) == Usage(None, None, None)
    details = b'"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":%d}}'
    assert find_usage(details % 2**33) == Usage(7, None, None)


def test_many_broken_usages_take_no_time() -> None:
    usage = b'"usage":{"prompt_tokens":3,"completion_tokens":2,"x":[]}'
    assert find_usage(usage + b',"usage":null' * 99) == Usage(3, 2, None)
    began = time.process_time()
    for end in (b"", b"x}"):
        assert find_usage(b'"usage":{' * 40_000 + end) is None
    assert time.process_time() - began < 0.5


def test_an_event_may_bring_several_tokens() -> None:
    # vLLM puts what has piled up into one event; its own figures say how many tokens that is.
    scanner = StreamScanner()
    assert scanner.feed(b'data: {"choices":[{"delta":{"content":"a b c"}}]}\n\n') == 1
    last = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\n'
    assert scanner.feed(last + b"data: [DONE]\n\n") == 6
    running = StreamScanner()
    total = 0
    for said in (2, 5, 5, 9):  # continuous_usage_stats
        total += running.feed(
            b'data: {"choices":[{"delta":{"content":"x"}}],'
            b'"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n' % said
        )
        assert total == said
    # Fewer than were counted are never taken back.
    fewer = StreamScanner()
    assert fewer.feed(b'data: {"choices":[{"text":"x"}]}\n\n' * 3) == 3
    assert fewer.feed(b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n') == 0
