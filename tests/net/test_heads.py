"""Heads and framing: what is refused, what is passed on, and bodies cut anywhere."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.net.client import Pool
from tailrace.net.framing import BrokenMessageError, ChunkedReader, LengthReader, chunk, chunk_size
from tailrace.net.heads import (
    RefusedError,
    RequestHead,
    client_head,
    is_request_id,
    parse_request,
    parse_response,
)
from tailrace.net.origin import Origin


def upstream_head(
    request: RequestHead, url: str, body_bytes: int, request_id: bytes, api_key: str | None = None
) -> bytes:
    pool = Pool(Origin.parse(url), connect_s=1.0, api_key=api_key)
    first = pool.request_head(request, body_bytes, request_id)
    assert pool.request_head(request, body_bytes, request_id) == first  # the second is cached
    return first


def head(*lines: str, start: str = "POST /v1/completions HTTP/1.1", host: bool = True) -> bytes:
    all_lines = [start, *(["Host: a"] if host else []), *lines]
    return ("\r\n".join(all_lines) + "\r\n\r\n").encode("latin-1")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("Content-Length: 3", "Transfer-Encoding: chunked"), 400),
        (head("Transfer-Encoding: chunked", "Content-Length: 3"), 400),
        (head("Content-Length: 3", "Content-Length: 3"), 400),
        (head("Content-Length: 3", "Content-Length: 4"), 400),
        (head("Content-Length: 3, 3"), 400),
        (head("Content-Length: +3"), 400),
        (head("Content-Length: -3"), 400),
        (head("Content-Length: 0x3"), 400),
        (head("Content-Length: 99999999999999999999"), 400),
        (head("Content-Length:"), 400),
        (head("Transfer-Encoding: gzip"), (400, 501)),
        (head("Transfer-Encoding: gzip, chunked"), (400, 501)),
        (head("Transfer-Encoding: chunked, chunked"), (400, 501)),
        (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
        (head("Transfer-Encoding: \x0bchunked"), (400, 501)),
        (head("Transfer-Encoding : chunked"), 400),
        (head("Transfer-Encoding: chunked", start="POST / HTTP/1.0"), 400),
        (head("X: a\r\n b"), 400),
        (head("X: a\r\n\tb"), 400),
        (head("X: a\nTransfer-Encoding: chunked"), 400),
        (head("X: a\rb"), 400),
        (head("X: a\0b"), 400),
        (head("X y: a"), 400),
        (head(": a"), 400),
        (head("Host: b"), 400),
        (head(host=False), 400),
        (head(start="CONNECT a:1 HTTP/1.1"), 405),
        (head(start="GET a HTTP/1.1"), 400),
        (head(start="GET ftp://a/ HTTP/1.1"), 400),
        (head(start="GET / HTTP/2.0"), 505),
        (head(start="GET / HTTP/0.9"), 505),
        (head(start="NONSENSE / HTTP/1.1"), 501),
        (head(start="GET /\x01 HTTP/1.1"), 400),
        (head("Expect: 200-ok"), 417),
    ],
)
def test_unsafe_heads_are_refused(data: bytes, status: int | tuple[int, ...]) -> None:
    with pytest.raises(RefusedError) as refused:
        parse_request(data)
    assert refused.value.status in (status if isinstance(status, tuple) else (status,))


def test_a_head_is_read() -> None:
    request = parse_request(head("Content-Length: 12", "X-A: b", "x-a: c", "Expect: 100-Continue"))
    assert (request.method, request.target) == (b"POST", b"/v1/completions")
    assert request.length == 12
    assert request.expects_continue
    assert request.lower[b"x-a"] == b"b"
    assert [value for name, value in request.headers if name.lower() == b"x-a"] == [b"b", b"c"]


@pytest.mark.parametrize(
    ("start", "lines", "keep"),
    [
        ("GET / HTTP/1.1", [], True),
        ("GET / HTTP/1.1", ["Connection: Close"], False),
        ("GET / HTTP/1.1", ["Connection: x, close"], False),
        ("GET / HTTP/1.0", [], False),
        ("GET / HTTP/1.0", ["Connection: keep-alive"], True),
    ],
)
def test_keep_alive(start: str, lines: list[str], keep: bool) -> None:
    assert parse_request(head(*lines, start=start)).keep_alive is keep


def test_an_upgrade_is_ignored_and_its_body_still_measured() -> None:
    request = parse_request(
        head("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA",
             "Content-Length: 5")
    )  # fmt: skip
    assert request.length == 5
    out = upstream_head(request, "http://b:1", 5, b"id")
    assert b"pgrade" not in out
    assert b"ettings" not in out


def test_an_absolute_address_does_not_say_where_a_request_goes() -> None:
    request = parse_request(head(start="GET http://evil/v1/models?a=b HTTP/1.1"))
    assert request.target == b"/v1/models?a=b"
    out = upstream_head(request, "http://b:1/base", 0, b"id")
    assert out.startswith(b"GET /base/v1/models?a=b HTTP/1.1\r\nhost: b:1\r\n")
    assert b"evil" not in out


def test_the_head_for_a_backend() -> None:
    request = parse_request(
        head("Connection: X-Secret, Authorization, keep-alive", "X-Secret: 1", "TE: trailers",
             "Keep-Alive: 5", "Proxy-Authorization: p", "Authorization: Bearer k", "Accept: */*",
             "X-Request-Id: mine", "Transfer-Encoding: chunked", "Expect: 100-continue")
    )  # fmt: skip
    lines = upstream_head(request, "http://b:1", 7, b"mine").lower().split(b"\r\n")
    assert lines[1:-2] == [
        b"host: b:1", b"authorization: bearer k", b"accept: */*", b"x-request-id: mine",
        b"content-length: 7",
    ]  # fmt: skip
    own = upstream_head(request, "http://b:1", 7, b"mine", "own")
    assert own.count(b"uthorization") == 1
    assert b"authorization: Bearer own\r\n" in own


def test_a_request_without_a_body_gets_no_length() -> None:
    request = parse_request(head(start="GET / HTTP/1.1"))
    assert b"content-length" not in upstream_head(request, "http://b", 0, b"i")
    request = parse_request(head("Content-Length: 0"))
    assert b"content-length: 0\r\n" in upstream_head(request, "http://b", 0, b"i")


def answer(*lines: str, start: str = "HTTP/1.1 200 OK") -> bytes:
    return ("\r\n".join([start, *lines]) + "\r\n\r\n").encode("latin-1")


@pytest.mark.parametrize(
    ("data", "method", "kind"),
    [
        (answer("Content-Length: 3"), b"POST", "length"),
        (answer("Transfer-Encoding: chunked"), b"POST", "chunked"),
        (answer(), b"POST", "close"),
        (answer("Content-Length: 3"), b"HEAD", "none"),
        (answer("Transfer-Encoding: chunked"), b"HEAD", "none"),
        (answer(start="HTTP/1.1 204 No Content"), b"POST", "none"),
        (answer("Content-Length: 3", start="HTTP/1.1 304 Not Modified"), b"GET", "none"),
    ],
)
def test_how_an_answer_is_framed(data: bytes, method: bytes, kind: str) -> None:
    assert parse_response(data, method).framing.kind == kind


@pytest.mark.parametrize(
    "data",
    [
        answer("Content-Length: 3", "Transfer-Encoding: chunked"),
        answer("Content-Length: 3", "Content-Length: 4"),
        answer("Content-Length: x"),
        answer("Transfer-Encoding: gzip, chunked"),
        answer(start="HTTP/1.1 101 Switching Protocols"),
        answer(start="garbage"),
        answer("X: a\r\n b"),
    ],
)
def test_answers_that_cannot_be_trusted(data: bytes) -> None:
    with pytest.raises(BrokenMessageError):
        parse_response(data, b"POST")


def test_the_head_for_a_client() -> None:
    response = parse_response(
        answer("Content-Type: a/b", "Connection: close, X-Hop", "X-Hop: 1", "Keep-Alive: 5",
               "Transfer-Encoding: chunked", "X-Tailrace-Replica: forged", "X-Request-Id: other",
               "Set-Cookie: a=1", "Set-Cookie: b=2"),
        b"POST",
    )  # fmt: skip
    out = client_head(response, chunked=True, keep_alive=True, http10=False, extra=b"x-y: z\r\n")
    assert out == (
        b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        b"transfer-encoding: chunked\r\nx-y: z\r\n\r\n"
    )


@pytest.mark.parametrize("line", [b"", b"g", b"-1", b"+1", b"0x1", b" 1", b"1 ", b"123456789",
                                  b"1\n", b"1;a\nb", b"1;" + b"a" * 300, b"_1",
                                  b"1_0"])  # fmt: skip
def test_bad_chunk_sizes(line: bytes) -> None:
    with pytest.raises(BrokenMessageError):
        chunk_size(line)


def test_good_chunk_sizes() -> None:
    assert [chunk_size(x) for x in (b"0", b"a", b"FF", b"00ff;name=value")] == [0, 10, 255, 255]


@pytest.mark.parametrize(
    "data",
    [b"3\r\nabcd\r\n", b"3\r\nabcX\r\n", b"0\r\nbad trailer\r\n\r\n", b"0\r\nA: b\nc\r\n\r\n",
     b"0\r\n" + b"A: b\r\n" * 3000, b"1" * 300],
)  # fmt: skip
def test_broken_chunked_bodies(data: bytes) -> None:
    with pytest.raises(BrokenMessageError):
        ChunkedReader().feed(data)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    trailer=st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"]),
    behind=st.binary(max_size=20),
)
def test_a_chunked_body_cut_anywhere(
    parts: list[bytes], cuts: list[int], trailer: bytes, behind: bytes
) -> None:
    message = b"".join(chunk(p) for p in parts) + b"0\r\n" + trailer + b"\r\n"
    data = message + behind
    places = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    reader, decoded, used = ChunkedReader(), b"", 0
    for start, stop in pairwise(places):
        end, got = reader.feed(b"junk" + data[start:stop], 4)
        decoded += b"".join(got)
        used += end - 4
        whole = message[: start + reader.border] if reader.border > 0 else b""
        # Whatever ends at the border is chunks that are complete.
        assert not whole or whole.endswith(b"\r\n")
        if reader.done:
            break
    assert decoded == b"".join(parts)
    assert reader.done
    assert used == len(message)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_any_bytes_as_a_chunked_body(data: bytes, cut: int) -> None:
    reader = ChunkedReader()
    try:
        end, _ = reader.feed(data[:cut])
        assert 0 <= end <= len(data[:cut])
        if not reader.done:
            end, _ = reader.feed(data[cut:])
            assert 0 <= end <= len(data[cut:])
    except BrokenMessageError:
        pass


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"POST / HTTP/1.1\r\n",
                b"Host: a\r\n",
                b"Content-Length: 5\r\n",
                b" fold\r\n",
                b"Transfer-Encoding: chunked\r\n",
                b"Transfer-Encoding:\tchunked\r\n",
                b"\n",
                b"\r",
                b"X: \xff\r\n",
                b"Connection: close\r\n",
                b"Expect: 100-continue\r\n",
                b"\0",
            ]
        )
        | st.binary(max_size=12),
        max_size=8,
    )
)
def test_any_head_is_read_or_refused(pieces: list[bytes]) -> None:
    data = b"POST / HTTP/1.1\r\n" + b"".join(pieces)
    data = data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        request = parse_request(data)
    except RefusedError:
        return
    out = upstream_head(request, "http://b", request.length, b"id")
    # What we send is one head, which a second parser reads as the same message.
    assert out.count(b"\r\n\r\n") == 1
    again = parse_request(out)
    assert not again.chunked
    assert again.length == request.length
    assert b"\n" not in out.replace(b"\r\n", b"")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_as_an_answer(data: bytes) -> None:
    with suppress(BrokenMessageError):
        parse_response(b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n", b"GET")


def test_a_body_of_known_length() -> None:
    reader = LengthReader(5)
    assert reader.feed(b"xabc", 1) == (4, [b"abc"])
    assert reader.feed(b"defg") == (2, [b"de"])
    assert reader.done


def test_request_ids() -> None:
    assert is_request_id(b"abc-123")
    assert not is_request_id(b"")
    assert not is_request_id(b"a b")
    assert not is_request_id(b"a" * 129)
    assert not is_request_id(b"a\xff")


def test_a_fresh_request_head_is_empty() -> None:
    assert RequestHead().headers == []
