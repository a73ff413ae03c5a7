"""Heads that are remembered: never read otherwise than they would be anew."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.net.framing import BrokenMessageError
from tailrace.net.head_cache import MOST, RequestHeadCache, ResponseHeadCache, length_in
from tailrace.net.heads import RefusedError, client_head, parse_request, parse_response

_START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def _request(length: bytes, name: bytes = b"Content-Length", more: bytes = b"") -> bytes:
    return _START + name + b": " + length + b"\r\n" + more + b"\r\n"


def test_heads_that_differ_in_the_length_only_are_one() -> None:
    heads = RequestHeadCache()
    first, length = heads.read(_request(b"12"))
    assert length == 12
    again, length = heads.read(_request(b"345"))
    assert again is first
    assert length == 345
    other, _ = heads.read(_request(b"12", more=b"X-Request-Id: 7\r\n"))
    assert other is not first
    assert other.lower[b"x-request-id"] == b"7"


@pytest.mark.parametrize(
    "length", [b"", b"-1", b"+5", b"5, 5", b"0x5", b"5;", b"1_0", b"\xb2", b"5\nX: y", b"9" * 19]
)
@pytest.mark.parametrize("name", [b"Content-Length", b"content-length"])
def test_what_is_no_length_is_refused_though_the_rest_is_known(length: bytes, name: bytes) -> None:
    heads = RequestHeadCache()
    heads.read(_request(b"5", name))
    with pytest.raises(RefusedError):
        heads.read(_request(length, name))
    assert heads.read(_request(b"6", name))[1] == 6


def test_two_lengths_are_refused_however_they_are_written() -> None:
    heads = RequestHeadCache()
    for more in (b"", b"X-Content-Length: 7\r\n"):
        assert heads.read(_request(b"5", more=more))[1] == 5
    for more in (
        b"content-length: 7\r\n",
        b"CONTENT-LENGTH:7\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ):
        for _ in range(2):
            with pytest.raises(RefusedError):
                heads.read(_request(b"5", more=more))


def test_what_only_looks_like_a_length_is_not_taken_for_one() -> None:
    heads = RequestHeadCache()
    for value in (b"1", b"2"):
        head, length = heads.read(_START + b"X-Content-Length: " + value + b"\r\n\r\n")
        assert length == 0
        assert head.lower[b"x-content-length"] == value


_LINES = st.lists(
    st.sampled_from(
        [b"Content-Length: 5", b"content-length: 17", b"Content-Length:5", b"CONTENT-LENGTH: 5",
         b"Content-Length: 05", b"Content-Length: x", b"Host: a", b"Connection: close", b"A: b",
         b"Transfer-Encoding: chunked", b"Expect: 100-continue", b" folded: 5"]
    ),
    max_size=4,
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(_LINES, max_size=8))
def test_a_remembered_head_is_read_as_a_new_one(heads_lines: list[list[bytes]]) -> None:
    requests = RequestHeadCache()
    for lines in heads_lines * 2:
        data = b"\r\n".join([b"POST / HTTP/1.1", b"Host: x", *lines]) + b"\r\n\r\n"
        try:
            fresh = parse_request(data)
        except RefusedError:
            with pytest.raises(RefusedError):
                requests.read(data)
            continue
        head, length = requests.read(data)
        assert length == fresh.length
        assert (head.chunked, head.keep_alive, head.target) == (
            fresh.chunked, fresh.keep_alive, fresh.target,
        )  # fmt: skip
        for keys in (True, False):
            assert head.passed(keys=keys) == fresh.passed(keys=keys)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([200, 204, 304, 500]), _LINES), max_size=8))
def test_a_remembered_answer_is_read_as_a_new_one(answers: list[tuple[int, list[bytes]]]) -> None:
    responses = ResponseHeadCache()
    for status, lines in answers * 2:
        data = b"\r\n".join([b"HTTP/1.1 %d OK" % status, *lines]) + b"\r\n\r\n"
        for method in (b"POST", b"HEAD"):
            try:
                fresh = parse_response(data, method)
            except BrokenMessageError:
                with pytest.raises(BrokenMessageError):
                    responses.read(data, method)
                continue
            head = responses.read(data, method)
            assert head.framing == fresh.framing
            assert head.keep_alive == fresh.keep_alive
            built = [
                client_head(h, chunked=False, keep_alive=True, http10=False, extra=b"")
                for h in (head, fresh)
            ]
            assert built[0] == built[1]


def test_the_head_a_client_sent_before_is_recognised_and_no_other() -> None:
    heads = RequestHeadCache()
    heads.read(_request(b"5"))
    assert heads.last is None  # read for the first time
    heads.read(_request(b"5"))
    assert heads.last is not None
    before, after, head = heads.last
    assert head.length == 5
    good = _request(b"17")
    assert length_in(good + b"body\r\n\r\n", before, after) == (len(good), 17)
    for data in (
        good[:-1], good[:-20], b"", _request(b""), _request(b"-1"), _request(b"1 "),
        _request(b"1\r"), _request(b"9" * 19), _request(b"5", b"content-length"),
        _request(b"5", more=b"Connection: close\r\n"), b"\r\n" + good,
    ):  # fmt: skip
        assert length_in(data, before, after) == (0, 0)
    heads.read(_START + b"\r\n")
    heads.read(_START + b"\r\n")
    assert heads.last is None  # no length to look at


@settings(deadline=None)
@given(_LINES, _LINES, st.binary(max_size=8))
def test_a_recognised_head_is_read_as_a_new_one(
    first: list[bytes], second: list[bytes], more: bytes
) -> None:
    """Of requests and of answers, whatever stands behind them."""
    for start, reader in (
        (b"POST / HTTP/1.1\r\nHost: x", RequestHeadCache()),
        (b"HTTP/1.1 200 OK", ResponseHeadCache()),
    ):
        data = b"\r\n".join([start, *first]) + b"\r\n\r\n"
        other = b"\r\n".join([start, *second]) + b"\r\n\r\n"
        try:
            for _ in range(2):
                if isinstance(reader, RequestHeadCache):
                    reader.read(data)
                else:
                    reader.read(data, b"POST")
        except (RefusedError, BrokenMessageError):
            continue
        if reader.last is None:
            continue
        end, length = length_in(other + more, reader.last[0], reader.last[1])
        if end == 0:
            continue
        assert end == len(other)
        if isinstance(reader, RequestHeadCache):
            assert parse_request(other).length == length
            assert parse_request(other).passed(keys=True) == reader.last[2].passed(  # type: ignore[call-arg]
                keys=True
            )
        else:
            fresh = parse_response(other, b"POST")
            assert (fresh.framing.kind, fresh.framing.length) == ("length", length)
            assert fresh.passed() == reader.last[2].passed()  # type: ignore[call-arg]


def test_memory_is_bounded() -> None:
    heads = RequestHeadCache()
    for i in range(3 * MOST):
        heads.read(_request(b"1", more=b"X-Id: %d\r\n" % i))
    heads.read(_request(b"1", more=b"X: " + b"a" * 8000 + b"\r\n"))
    assert len(heads._known) <= MOST
    assert all(len(b) + len(a) < 8000 for b, a in heads._known)
