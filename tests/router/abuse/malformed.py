"""Requests that are broken in one of many ways, from a seeded generator."""

import random

from router.processes import completion

_CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
_BODIES = (b"{", b"[]", b"nul", b'{"prompt":', b"\xff\xfe", b'"a"', b"{" * 500, b"[" * 5000,
           b'{"messages":[{"role":"user","content":' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}]}",
           b'{"prompt":[1e999]}', b'{"prompt":"\\ud800"}', b'{"max_tokens":-1}')  # fmt: skip
_CHUNKS = (b"zz\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"fffffffff\r\n", b"-1\r\n", b"5\nabcde\n0\n\n",
           b"1;" + b"a" * 5000, b"0\r\n" + b"a: b\r\n" * 500, b"\r\n", b"+3\r\na")  # fmt: skip
_LINES = (b"content-length: 5", b"content-length: 7\r\ncontent-length: 8", b"no colon", b" folded",
          b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, identity", b"a\0b: c",
          b"expect: 100-continue", b"connection: upgrade\r\nupgrade: h2c", b"host: y", b": empty",
          b"content-length : 3", b"x: a\rb", b"content-length: 99999999999999999999")  # fmt: skip


def malformed(rng: random.Random) -> bytes:
    """Return a request, most probably not a valid one."""
    good = completion(2)
    head, _, body = good.partition(b"\r\n\r\n")
    kind = rng.randrange(15)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 400))
    if kind == 1:
        data = bytearray(good)
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 2:
        return good[: rng.randrange(1, len(good))]  # and then the client closes
    if kind == 3:
        return head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + body
    if kind == 4:
        return head.replace(b"content-length: ", b"content-length: -") + b"\r\n\r\n" + body
    if kind == 5:
        return head.replace(b"content-length: ", b"content-length: 9") + b"\r\n\r\n" + body
    if kind == 6:
        return head + b"\r\nx: " + b"a" * 40_000 + b"\r\n\r\n" + body
    if kind == 7:
        broken = rng.choice(_BODIES)
        return _CHAT % (len(broken), broken)
    if kind == 8:
        return good.replace(b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP/0.9", b"HTTPS", b""]))
    if kind == 9:
        return _CHUNKED + rng.choice(_CHUNKS)
    if kind == 10:
        return b"GET / HTTP/1.1\r\n" + b"a: b\n" * rng.randrange(5) + b"\r\n\r\n"
    if kind == 11:
        return head + b"\r\n" + rng.choice(_LINES) + b"\r\n\r\n" + body
    if kind == 12:
        path = bytes(rng.choices(b"/.%2f\\?#aA:@ \t~", k=rng.randrange(1, 60)))
        return good.replace(b"/v1/completions", path)
    if kind == 13:
        return good + rng.randbytes(rng.randrange(1, 100))
    return good.replace(b"max_tokens", b"max_tok\xffens")
