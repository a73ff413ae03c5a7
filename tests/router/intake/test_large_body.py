"""The reader of large bodies: it finds what the other one finds, whatever their size."""

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.clusters import new_cluster
from tailrace.router.intake.large_body import MAX_KEYS, read_large
from tailrace.router.intake.request_body import MAX_NAME, BadRequest, RequestBody, read_body
from tailrace.router.intake.tokens import TokenCounter
from tailrace.router.state.arrival import Arrival

_FIELDS = ("kind", "model", "streams", "max_tokens", "session", "priority", "salt", "prompts",
           "previous")  # fmt: skip
_KINDS = ("chat", "completion", "embedding", "response", "message", "pooling", "rerank", "tokenize")


def _is_opaque(found: RequestBody, body: bytes) -> bool:
    return found.data is not None and found.data.tobytes() == body


def _check(kind: str, body: bytes) -> bool:
    """Read both ways and compare; return whether the shape of the prompt is known."""
    try:
        expected = read_body(kind, {}, body)
    except BadRequest:
        with pytest.raises(BadRequest):
            read_large(kind, {}, body)
        return False
    try:
        found = read_large(kind, {}, body)
    except BadRequest:
        return False
    opaque = _is_opaque(found, body)
    for name in _FIELDS:
        if not (opaque and name == "prompts"):
            assert getattr(found, name) == getattr(expected, name), name
    if opaque:
        return False
    if found.data is None:  # its text counts for nothing
        assert expected.text is expected.token_ids is None
        return True
    if expected.token_ids is not None:
        assert found.ids == len(expected.token_ids)
        assert found.data.tobytes() == np.array(expected.token_ids, np.int32).tobytes()
        return True
    text = expected.text or ""
    assert found.data.tobytes() == text.encode()
    assert found.has_media == expected.has_media
    answer = expected.answer and tuple(len(text[:at].encode()) for at in expected.answer)
    assert found.answer == answer
    return True


_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100}}
_CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {'é"': {"x": 1.5}}}}]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", {"messages": [{"role": "user", "content": "hi\n é 漢 \"q\""}], "tools": _TOOLS}),
        ("chat", {"tools": [], "messages": [{"role": "user", "content": "hi"}], "user": "u"}),
        ("chat", {"messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, "b", 5, _PICTURE, {}]},
            {"role": "assistant", "content": None, "tool_calls": _CALL},
            {"role": "tool", "content": "r", "tool_calls": []},
            {"role": "assistant", "content": "x", "name": {"a": []}},
            {"role": 5, "content": 7}, 3, {"content": [[]]},
        ], "conversation": {"id": "c"}, "priority": 3, "cache_salt": "s", "stream": True}),
        ("completion", {"prompt": "hello", "max_tokens": 5, "model": "m"}),
        ("completion", {"prompt": ["a", "", 5, "b"]}),
        ("completion", {"prompt": [1, 20, 2**31 - 1, 0]}),
        ("completion", {"prompt": [[1, 2], [], "x", [3]]}),
        ("embedding", {"input": ["a", "b"]}),
        ("embedding", {"input": [5] * 100}),
        ("response", {"instructions": "i", "input": "hello", "tools": _TOOLS}),
        ("response", {"input": [{"role": "user", "content": [{"type": "t", "text": "x"}]},
                                {"type": "function_call_output", "output": "o"}],
                      "instructions": "after", "previous_response_id": "r1"}),
        ("message", {"system": "s", "messages": [{"role": "user", "content": "x"}]}),
        ("message", {"system": [{"type": "text", "text": "s"}, _PICTURE], "tools": _TOOLS,
                     "messages": [{"role": "assistant", "content": [{"text": "x"}]}]}),
        ("pooling", {"messages": [{"role": "user", "content": "x"}], "input": "y"}),
        ("classify", {"input": ["a", "b"]}),
        ("tokenize", {"prompt": "a", "model": "m"}),
    ],
)  # fmt: skip
def test_shapes_of_prompts(kind: str, body: dict[str, Any]) -> None:
    assert _check(kind, orjson.dumps(body))
    spaced = json.dumps(body, indent=1, ensure_ascii=False).encode()
    one, other = (read_large(kind, {}, data).data for data in (orjson.dumps(body), spaced))
    assert (one is None) == (other is None)


@pytest.mark.parametrize(
    ("kind", "body"),
    [("chat", {"messages": 5}), ("chat", {}), ("completion", {"prompt": [1, -2]}),
     ("completion", {"prompt": [1, 2.5]}), ("completion", {"prompt": [2**31]}),
     ("completion", {"prompt": {}}), ("rerank", {"query": "q", "documents": ["d"]})],
)  # fmt: skip
def test_a_prompt_of_another_shape_is_the_whole_body(kind: str, body: dict[str, Any]) -> None:
    data = orjson.dumps(body | {"model": "m"})
    found = read_large(kind, {}, data)
    assert _is_opaque(found, data)
    assert found.model == "m"
    assert found.has_media  # nothing is learned from its length


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"a":1}x', b'{"model":"a","model":"b"}', b'{"mod\\u0065l":"a"}',
     b'{"a":' + b"[" * 61 + b"]" * 61 + b"}", b'{"a":1e400}', b'{"a":"\xff"}', b'{"a":"\\ud800"}',
     orjson.dumps({str(i): 0 for i in range(MAX_KEYS + 1)})],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_large("chat", {}, body)


def test_values_that_do_not_matter_may_be_of_any_kind() -> None:
    values = '{"\\u0061\\"": 1e-3, "b": -12.5E+7, "c": 123456789012345678901234567890, "d": [[]]}'
    body = f'{{"x": {values}, "prompt": "p", "model": "m"}}'.encode()
    assert _check("completion", body)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("field", ["model", "user", "session_id", "cache_salt"])
def test_long_names_are_kept_as_hashes(kind: str, field: str) -> None:
    def of(name: str) -> RequestBody:
        body = orjson.dumps({field: name, "prompt": "p"})
        found = read_large(kind, {}, body)
        assert _check(kind, body) or _is_opaque(found, body)
        return found

    one, same, other = of("a" * 10**5), of("a" * 10**5), of("a" * 10**5 + "b")
    names = [(r.model, r.session, r.salt) for r in (one, same, other)]
    assert names[0] == names[1] != names[2]
    assert all(len(name or "") <= MAX_NAME for name in names[0])


def _arrive(asked: RequestBody) -> Arrival:
    cluster = new_cluster()
    cluster.counter = TokenCounter()
    return cluster.arrive(asked)


def test_token_ids_arrive_as_those_of_the_other_reader() -> None:
    body = orjson.dumps({"prompt": list(range(1000))})
    one, other = (_arrive(read("completion", {}, body)) for read in (read_body, read_large))
    assert (one.prompt_tokens, one.how_long, one.size) == (1000, "ids", 0)
    assert (other.prompt_tokens, other.how_long, other.size) == (1000, "ids", 0)
    assert one.runs.keys.tolist() == other.runs.keys.tolist()


_SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text()
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_PART = st.text() | _VALUES | st.fixed_dictionaries({"text": st.text() | _VALUES})
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | st.text(max_size=4)},
    optional={"content": st.text() | st.lists(_PART, max_size=3) | _VALUES, "name": _VALUES,
              "tool_calls": _VALUES},
)  # fmt: skip
_PROMPT = st.lists(st.integers(0, 2**31), max_size=5) | st.lists(st.text(), max_size=3) | _VALUES
_BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(_MESSAGE | _VALUES, max_size=4), "model": st.text(max_size=5),
        "prompt": _PROMPT, "input": _PROMPT | st.lists(_MESSAGE, max_size=3), "tools": _VALUES,
        "instructions": _VALUES, "system": _VALUES, "previous_response_id": _VALUES,
        "stream": _VALUES, "max_tokens": _VALUES, "user": _VALUES,
        "session_id": _VALUES, "priority": _VALUES, "cache_salt": _VALUES,
    },
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    _BODY, st.sampled_from(_KINDS),
    st.lists(st.tuples(st.integers(0), st.binary(max_size=2)), max_size=2),
)  # fmt: skip
def test_both_readers_agree_on_any_body(
    body: dict[str, Any], kind: str, changes: list[tuple[int, bytes]]
) -> None:
    data = orjson.dumps(body)
    _check(kind, data)
    for at, new in changes:  # most are no JSON any more
        place = at % (len(data) + 1)
        data = data[:place] + new + data[place + 1 :]
        try:
            read_large(kind, {}, data)
        except BadRequest:
            continue
        orjson.loads(data)  # what is read is JSON
