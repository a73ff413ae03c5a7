"""A priority is written into a body, and nothing else changes."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.router.intake.large_body import read_large
from tailrace.router.intake.priority_field import replaced, spliced
from tailrace.router.intake.request_body import read_request

PATH = "/v1/completions"
texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.just(-1e30) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner),
    max_leaves=8,
)  # fmt: skip
keys = texts | st.sampled_from(["priority", "prompt", "model", 'a"b', "{", "\\"])
objects = st.dictionaries(keys, values, max_size=6)


@given(objects, st.integers(-(2**62), 2**62), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_only_the_priority_changes(data: dict[str, Any], priority: int, indent: Any, escapes: bool):
    body = json.dumps(data, indent=indent, ensure_ascii=escapes).encode()
    data = orjson.loads(body)
    names_one = read_request(PATH, {}, body).names_priority
    assert names_one == ("priority" in data)
    if names_one:
        found = replaced(body, priority)
        if found is None:
            assert b"\\" in body  # a key with an escape: left alone
            return
        assert orjson.loads(found.whole(body)) == {**data, "priority": priority}
        assert list(orjson.loads(found.whole(body))) == list(data)
    else:
        found = spliced(body, priority)
        assert found is not None
        assert orjson.loads(found.whole(body)) == {**data, "priority": priority}
        # Every byte of the client's is there, in its order.
        assert found.whole(body).endswith(body[found.rest_at :])
        assert body[: found.rest_at] in found.start
    assert found.length(body) == len(found.whole(body))


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b"{}", b'{"priority":7}'),
        (b" \r\n{ \t}", b' \r\n{"priority":7 \t}'),
        (b'{"a":1}', b'{"priority":7,"a":1}'),
        (b'\n{\n  "a": 1\n}\n', b'\n{"priority":7,\n  "a": 1\n}\n'),
        (b'{"x":{"priority":1}}', b'{"priority":7,"x":{"priority":1}}'),
        (b'{"x":"\\"priority\\":1"}', b'{"priority":7,"x":"\\"priority\\":1"}'),
    ],
)
def test_where_it_is_written(body: bytes, sent: bytes):
    found = spliced(body, 7)
    assert found is not None
    assert found.whole(body) == sent
    orjson.loads(sent)


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b'"{"', b"null", b"  "])
def test_what_is_no_object_is_left_alone(body: bytes):
    assert spliced(body, 7) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"priority":1,"priority":2}',  # which of them a server reads is its own affair
        b'{"priorit\\u0079":1}',
        b'{"priority":1,"a\\u0062":2}',
    ],
)
def test_an_unclear_priority_is_not_replaced(body: bytes):
    assert read_request(PATH, {}, body).names_priority
    assert replaced(body, 7) is None


@pytest.mark.parametrize("own", [b"0", b"-3", b'"5"', b"null", b"[1,{}]", b"true", b"1e3"])
def test_any_value_of_the_clients_counts_as_one(own: bytes):
    body = b'{"prompt":"a","priority" : %b ,"n":1}' % own
    assert read_request(PATH, {}, body).names_priority
    found = replaced(body, 7)
    assert found is not None
    assert found.whole(body) == b'{"prompt":"a","priority" : 7 ,"n":1}'


def test_a_large_body_with_a_priority_of_any_size_is_recognised():
    huge = b"[" + b"1," * 100_000 + b"1]"
    body = b'{"prompt":"a","priority":%b}' % huge
    assert read_large("completion", {}, body).names_priority
    assert not read_large("completion", {}, b'{"prompt":"a"}').names_priority
