"""The compiled reader of bodies: it finds what the other one finds, or leaves the body to it."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.router.intake import fast_body
from tailrace.router.intake.fast_body import BodyReader
from tailrace.router.intake.request_body import BadRequest, RequestBody, read_body

_READER = BodyReader()


def read(kind: str, headers: dict[bytes, bytes], body: bytes) -> RequestBody:
    return _READER.read(kind, headers, body) or read_body(kind, headers, body)


_FIELDS = ("kind", "model", "streams", "max_tokens", "session", "priority", "ttft_slo_s", "salt",
           "has_media", "token_ids", "prompts")  # fmt: skip


def _text(request: RequestBody) -> bytes | None:
    if request.data is not None:
        return request.data.tobytes()
    return None if request.text is None else request.text.encode(errors="surrogatepass")


def _answer(request: RequestBody) -> tuple[int, int] | None:
    """Where the latest answer stands, in bytes."""
    if request.answer is None or request.data is not None:
        return request.answer
    text = request.text or ""
    start, end = (len(text[:at].encode(errors="surrogatepass")) for at in request.answer)
    return start, end


def _check(kind: str, body: bytes) -> RequestBody | None:
    """Read both ways and compare; return what the compiled reader says."""
    try:
        expected = read_body(kind, {}, body)
    except BadRequest:
        with pytest.raises(BadRequest):
            read(kind, {}, body)
        return None
    found = read(kind, {}, body)
    for name in _FIELDS:
        assert getattr(found, name) == getattr(expected, name), name
    assert _text(found) == _text(expected)
    assert _answer(found) == _answer(expected)
    return found


def _is_compiled(kind: str, body: bytes) -> bool:
    request = _check(kind, body)
    return request is not None and request.data is not None


_CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": 'Line\n"quoted" \\ tab\t / é ü 漢字 😀 \x7f \x01' + "x" * 200},
        {"role": "assistant", "content": "An answer — with dashes", "name": "a"},
        {"role": "user", "content": ""},
    ],
    "temperature": 0.7, "stop": ["a", "b"], "stream": True, "max_tokens": 64,
    "stream_options": {"include_usage": True}, "logit_bias": {}, "n": 1, "seed": None,
}  # fmt: skip


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_ordinary_chat_is_read_compiled(ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(_CHAT, ensure_ascii=ascii_only, indent=indent).encode()
    request = _check("chat", body)
    assert request is not None
    assert request.data is not None
    assert request.answer is not None
    assert (request.model, request.streams, request.max_tokens) == ("m", True, 64)
    assert "漢字 😀".encode() in request.data.tobytes()


def test_an_ordinary_completion_is_read_compiled() -> None:
    request = _check("completion", b' {"prompt": "a\\u00e9b" , "model":"x", "max_tokens":5}\n')
    assert request is not None
    assert request.data is not None
    assert request.data.tobytes() == "aéb".encode()


def test_headers_are_read_too() -> None:
    headers = {b"x-session-id": b"s", b"x-priority": b"3", b"x-slo-ttft-ms": b"250"}
    request = read("chat", headers, json.dumps(_CHAT).encode())
    assert request.data is not None
    assert (request.session, request.priority, request.ttft_slo_s) == ("s", 3, 0.25)


def test_content_before_the_role_and_other_orders() -> None:
    message = '{"name":"n","content":"c\\n","x":[{}],"role":"assistant"}'
    assert _is_compiled("chat", f'{{"messages":[{message}],"model":"m"}}'.encode())


@pytest.mark.parametrize(
    "change",
    [{"user": "u"}, {"session_id": "s"}, {"conversation": {"id": "c"}}, {"priority": 3},
     {"cache_salt": "x"}, {"tools": [{"type": "function"}]}, {"model": 5}, {"model": "a\n"},
     {"messages": "text"}, {"messages": []}, {"messages": [1]}, {"messages": [{}]},
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}]},
     {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
     {"max_tokens": 2.5}, {"max_tokens": "5"}, {"max_tokens": 1e30}],
)  # fmt: skip
def test_what_is_rare_is_left_to_the_other_reader(change: dict[str, Any]) -> None:
    assert not _is_compiled("chat", json.dumps(_CHAT | change).encode())


@pytest.mark.parametrize(
    ("most", "expected"),
    [({"max_tokens": 7, "max_completion_tokens": 9}, 9), ({"max_completion_tokens": 0}, 64),
     ({"max_tokens": None, "max_output_tokens": 3}, 3), ({"max_tokens": -4}, None),
     ({"max_tokens": 10**15}, 2**31 - 1), ({"max_tokens": 0}, None)],
)  # fmt: skip
def test_the_most_tokens_of_the_answer(most: dict[str, Any], expected: int | None) -> None:
    request = _check("chat", json.dumps(_CHAT | most).encode())
    assert request is not None
    assert request.data is not None
    assert request.max_tokens == expected


_GOOD = b'{"model":"m","messages":[{"role":"user","content":"abc"}],"n":1}'


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{}", b"[]", b"null", _GOOD + b"x", _GOOD[:-1], _GOOD.replace(b"1", b"01"),
     _GOOD.replace(b"1", b"1."), _GOOD.replace(b"1", b"-"), _GOOD.replace(b"1", b"tru"),
     _GOOD.replace(b"1", b"[1,]"), _GOOD.replace(b"1", b'{"a":1,}'), _GOOD.replace(b"1", b"{1:2}"),
     _GOOD.replace(b"abc", b"a\nc"), _GOOD.replace(b"abc", b"a\\xc"),
     _GOOD.replace(b"abc", b"\\ud800"), _GOOD.replace(b"abc", b"\\udc00\\ud800"),
     _GOOD.replace(b"abc", b"\\u12"), _GOOD.replace(b"abc", b"\xff"),
     _GOOD.replace(b"abc", b"\xc0\xaf"), _GOOD.replace(b"abc", b"\xed\xa0\x80"),
     _GOOD.replace(b"abc", b"\xf4\x90\x80\x80"), _GOOD.replace(b"abc", b"\xe6\xbc"),
     _GOOD.replace(b'"n":1', b'"n":"\\q"'), _GOOD.replace(b'"n":1', b'"n":1,"n":2,"model":"z"'),
     _GOOD.replace(b'"n":1', b'"messages":[]'), _GOOD.replace(b'"n"', b'"stream":true,"stream"'),
     _GOOD.replace(b'"n":1', b'"n":' + b"[" * 70 + b"]" * 70), _GOOD.replace(b"1", b"1e5"),
     _GOOD.replace(b"1", b"1" * 30), _GOOD.replace(b'"n"', b'"\\u006dodel"')],
)  # fmt: skip
def test_odd_bodies_mean_the_same_to_both(body: bytes) -> None:
    _check("chat", body)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | st.text(max_size=4)},
    optional={"content": st.text() | _VALUES, "name": _VALUES, "tool_calls": _VALUES},
)
_BODY = st.fixed_dictionaries(
    {"messages": st.lists(_MESSAGE, max_size=5) | _VALUES},
    optional={
        "model": st.text(max_size=5), "prompt": st.text() | _VALUES, "stream": _VALUES,
        "max_tokens": _VALUES, "max_completion_tokens": _VALUES, "user": _VALUES, "x": _VALUES,
    },
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    _BODY, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["chat", "completion"]),
    st.lists(st.tuples(st.integers(0), st.binary(max_size=2)), max_size=2),
)  # fmt: skip
@example({"messages": [{"role": "user", "content": "\ud800"}]}, False, None, "chat", [])
def test_both_readers_agree_on_any_body(
    body: dict[str, Any], ascii_only: bool, indent: int | None, kind: str,
    changes: list[tuple[int, bytes]],
) -> None:  # fmt: skip
    data = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    _check(kind, data)
    for at, new in changes:  # most are no JSON any more
        place = at % (len(data) + 1)
        data = data[:place] + new + data[place + 1 :]
        _check(kind, data)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=300), st.integers(0, 80), st.booleans())
def test_texts_of_all_lengths_and_places(text: str, before: int, ascii_only: bool) -> None:
    """Words and blocks of bytes begin anywhere."""
    chat = {"messages": [{"role": "r" * before, "content": text}]}
    assert _is_compiled("chat", json.dumps(chat, ensure_ascii=ascii_only).encode())


def test_a_longer_body_than_ever_has_room() -> None:
    reader = BodyReader()
    for size in (10, 70_000, 300_000, fast_body.LONGEST, 20):
        body = json.dumps({"prompt": "é" * (size // 2)}, ensure_ascii=False).encode()
        request = reader.read("completion", {}, body)
        assert (request is None) == (len(body) > fast_body.LONGEST)
        assert request is None or _text(request) == ("é" * (size // 2)).encode()
