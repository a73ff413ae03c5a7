"""What requests of all kinds ask for, and bodies of any shape."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.router.intake.request_body import BadRequest, RequestBody, read_request


def _read(path: str, body: Any, **headers: str) -> RequestBody:
    named = {k.replace("_", "-").encode(): v.encode() for k, v in headers.items()}
    return read_request(path, named, orjson.dumps(body))


def test_chat() -> None:
    request = _read(
        "/v1/chat/completions",
        {
            "model": "m",
            "stream": True,
            "max_completion_tokens": 50,
            "max_tokens": 9,
            "priority": -2,
            "user": "ada",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
        },
    )
    assert (request.kind, request.model, request.streams) == ("chat", "m", True)
    assert (request.max_tokens, request.priority, request.session) == (50, -2, "ada")
    assert request.text is not None
    assert "Be brief." in request.text
    assert request.text.endswith("Hi")
    assert request.answer is None
    assert not request.has_media


def test_the_text_of_a_turn_begins_with_the_text_of_the_turn_before() -> None:
    turns = [{"role": "user", "content": "Who?"}]
    first = _read("/v1/chat/completions", {"messages": turns, "tools": [{"type": "function"}]})
    turns += [{"role": "assistant", "content": "I."}, {"role": "user", "content": "Why?"}]
    second = _read("/v1/chat/completions", {"messages": turns, "tools": [{"type": "function"}]})
    assert first.text is not None
    assert second.text is not None
    assert second.text.startswith(first.text)
    assert second.answer is not None
    start, end = second.answer
    assert start == len(first.text)
    assert second.text[start:end].endswith("I.")


def test_pictures_differ_but_are_not_kept() -> None:
    def of(url: str) -> RequestBody:
        part = {"type": "image_url", "image_url": {"url": url}}
        return _read("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})

    one, other = of("data:" + "A" * 10_000), of("data:" + "A" * 9_999 + "B")
    assert one.has_media
    assert one.text != other.text
    assert one.text is not None
    assert len(one.text) < 100


@pytest.mark.parametrize(
    ("prompt", "text", "ids", "prompts"),
    [
        ("hello", "hello", None, 1),
        (["a", "b"], "a\x1db", None, 2),
        ([1, 2, 3], None, [1, 2, 3], 1),
        ([[1, 2], [3]], None, [1, 2, 3], 2),
        ([1, -5], None, None, 1),
        ([1, 2**40], None, None, 1),
        ([], None, None, 1),
        (7, None, None, 1),
        ([None, "a"], "a", None, 1),
    ],
)
def test_prompts_in_all_forms(
    prompt: Any, text: str | None, ids: list[int] | None, prompts: int
) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        request = _read(path, {field: prompt})
        assert (request.text, request.token_ids, request.prompts) == (text, ids, prompts)


def test_responses() -> None:
    request = _read(
        "/v1/responses",
        {"instructions": "Be kind.", "input": "Hi", "conversation": {"id": "c1"}},
    )
    assert (request.kind, request.session) == ("response", "c1")
    assert request.text is not None
    assert "Be kind." in request.text
    assert request.text.endswith("Hi")
    items = [{"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}]
    assert _read("/v1/responses", {"input": items}).answer is not None


def test_headers() -> None:
    request = _read(
        "/v1/completions",
        {"prompt": "x", "user": "body", "priority": 3},
        x_session_id="head",
        x_priority="-4",
        x_slo_ttft_ms="250",
    )
    assert (request.session, request.priority, request.ttft_slo_s) == ("head", 3, 0.25)
    assert _read("/v1/completions", {"prompt": "x"}, x_priority="-4").priority == -4
    odd = _read("/v1/completions", {"prompt": "x"}, x_priority="soon", x_slo_ttft_ms="nan")
    assert (odd.priority, odd.ttft_slo_s) == (0, None)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 2000])
def test_no_json_is_the_clients_mistake_only_where_json_is_needed(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not JSON"):
        read_request("/v1/completions", {}, body)
    assert read_request("/v1/files", {}, body).kind == "other"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["model", "messages", "prompt", "input", "content", "role", "text", "stream", "tools",
             "user", "priority", "max_tokens", "conversation", "tool_calls", "instructions", "id"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(_JSON, st.sampled_from(["chat/completions", "completions", "embeddings", "responses", "x"]))
def test_odd_shapes_never_raise(body: Any, path: str) -> None:
    data = body if isinstance(body, dict) else {"messages": body, "prompt": body, "input": body}
    request = read_request(f"/v1/{path}", {}, orjson.dumps(data))
    assert isinstance(request.model, str)
    assert request.text is None or isinstance(request.text, str)
    assert request.max_tokens is None or request.max_tokens > 0
    read_request(f"/v1/{path}", {}, orjson.dumps(body))


def test_without_text_keeps_all_else() -> None:
    request = _read("/v1/completions", {"prompt": "secret", "user": "ada", "model": "m"})
    bare = request.without_text()
    assert bare.text is None
    assert (bare.session, bare.model, bare.kind) == ("ada", "m", "completion")
