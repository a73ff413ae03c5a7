"""Attacks over HTTP by one client: slow, large, malformed, endless or ungrateful requests.

Each is a coroutine that takes a :class:`Target`; ``CASES`` lists them. They use plain sockets, so
that every byte is theirs, and end by themselves: a connection that the router has not cut off after
GIVE_UP_S counts as tolerated.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Iterable

import orjson

from router.abuse.case import Attack, Case, Target
from router.processes import HOST

GIVE_UP_S = 20.0
#: Time limits under which slow clients are cut off within GIVE_UP_S.
STRICT = {"limits__header_s": 3, "limits__body_s": 5, "limits__client_stall_s": 5}
BODY_BYTES = 32 * 2**20 - 1024
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHAT = b"/v1/chat/completions"
COMPLETIONS = b"/v1/completions"
BEGIN = b'{"model":"emulated","prompt":"'
SMALL = b'{"model":"emulated","prompt":"a","max_tokens":5}'
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(path: bytes, body: bytes, length: int | None = None, extra: bytes = b"") -> bytes:
    """A request whose head announces ``length`` bytes, by default those of the body.

    ``extra``: further headers, each with its line end; see ``backend.py``.
    """
    announced = len(body) if length is None else length
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path, extra, announced) + body


async def connect(target: Target, *, receive_bytes: int | None = None) -> Stream:
    """Connect; ``receive_bytes``: how much the system takes in that is not read."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (HOST, target.port))
    return await asyncio.open_connection(sock=sock, limit=65_536)


async def status_of(reader: asyncio.StreamReader) -> str:
    """Wait for a response; return its status, or how the connection ended instead."""
    try:
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                line = await reader.readline()
                if not line:
                    return "closed"
                if line.startswith(b"HTTP/1.1 ") and line[9:12] != b"100":
                    return line[9:12].decode()
    except TimeoutError:
        return "tolerated"
    except OSError:
        return "reset"


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send as much as the router takes."""
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()


async def one(target: Target, data: bytes, drip: bytes = b"", every_s: float = 0.5) -> str:
    """Send data on a connection of its own, then a few bytes now and then; return the outcome."""
    try:
        reader, writer = await connect(target)
    except OSError:
        return "refused"
    answer = asyncio.ensure_future(status_of(reader))
    sending = asyncio.ensure_future(send(writer, data))
    try:
        await asyncio.wait([answer, sending], return_when=asyncio.FIRST_COMPLETED)
        while drip and not answer.done():
            await send(writer, drip)
            await asyncio.wait([answer], timeout=every_s)
        return await answer
    finally:
        sending.cancel()
        writer.transport.abort()


async def outcomes(attempts: Iterable[Awaitable[str]]) -> str:
    """Run all at once; return how often each outcome occurred."""
    return told(Counter(await asyncio.gather(*attempts)))


def told(found: Counter[str]) -> str:
    """Outcomes in words."""
    return ", ".join(f"{count} x {outcome}" for outcome, count in sorted(found.items()))


# ---- heads --------------------------------------------------------------------------------------


async def empty_lines(target: Target) -> str:
    """Ten connections that send a megabyte of empty lines each."""
    data = b"\r\n" * target.count(500_000)
    return await outcomes(one(target, data) for _ in range(10))


async def empty_lines_slowly(target: Target) -> str:
    """An empty line every second, which must not keep a connection open."""
    return await outcomes(one(target, b"", b"\r\n", 1.0) for _ in range(target.count(200)))


async def slow_heads(target: Target) -> str:
    """A byte of a head every second."""
    start = b"GET / HTTP/1.1\r\nhost: x\r\nx: "
    return await outcomes(one(target, start, b"a", 1.0) for _ in range(target.count(500)))


async def many_headers(target: Target) -> str:
    """Heads of thousands of short headers."""
    lines = b"".join(b"%x:\r\n" % i for i in range(5000))[:30_000]
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n" + lines.rpartition(b"\r\n")[0] + b"\r\n\r\n"
    return await outcomes(one(target, head) for _ in range(target.count(500)))


# ---- bodies -------------------------------------------------------------------------------------


async def slow_bodies(target: Target) -> str:
    """A byte every second: of a body, a chunk, an extension, a trailer."""
    starts = (
        post(COMPLETIONS, b"", 10_000),
        CHUNKED + b"2000\r\n",
        CHUNKED + b"1;",
        CHUNKED + b"1\r\na\r\n0\r\na: ",
    )
    each = target.count(100)
    return await outcomes(one(target, start, b"a", 1.0) for start in starts for _ in range(each))


async def two_byte_chunks(target: Target) -> str:
    """Bodies of many chunks of two bytes each."""
    count = target.count(4_000_000)
    body = (
        CHUNKED
        + b"%x\r\n%b\r\n" % (len(BEGIN), BEGIN)
        + b"2\r\naa\r\n" * count
        + b'2\r\n"}\r\n0\r\n\r\n'
    )
    return await outcomes(one(target, body) for _ in range(4))


async def long_extensions(target: Target) -> str:
    """A byte of data to every 200 bytes of extensions."""
    data = CHUNKED + (b"1;" + b"a" * 200 + b"\r\nx\r\n") * target.count(50_000)
    return await outcomes(one(target, data) for _ in range(10))


async def unfinished_bodies(target: Target) -> str:
    """More bytes than all bodies may have together; the last byte of each never comes."""
    size = target.count(BODY_BYTES)
    data = post(COMPLETIONS, b"a" * (size - 1), size)
    return await outcomes(one(target, data) for _ in range(16))


async def long_names(target: Target) -> str:
    """A megabyte each of user, session, salt and model, a new one with every request."""

    async def several(field: str) -> None:
        for i in range(target.count(50)):
            body = {"model": "emulated", "prompt": "a", "max_tokens": 1, field: f"{i} " * 200_000}
            found[await one(target, post(COMPLETIONS, orjson.dumps(body)))] += 1

    found: Counter[str] = Counter()
    await asyncio.gather(*map(several, ("user", "session_id", "cache_salt", "model")))
    return told(found)


#: Path, beginning, what is repeated, and end of large bodies.
SHAPES: dict[str, tuple[bytes, bytes, bytes, bytes]] = {
    "token ids": (COMPLETIONS, b'"prompt":[', b"1,", b"1]}"),
    "empty lists": (COMPLETIONS, b'"prompt":"a","x":[', b"[],", b"1]}"),
    "nested objects": (COMPLETIONS, b'"prompt":"a","x":[', b'{"a":{"a":0}},', b"1]}"),
    "one string": (COMPLETIONS, b'"prompt":"', b"words ", b'"}'),
    "escapes": (COMPLETIONS, b'"prompt":"', b"\\n", b'"}'),
    "lists of token ids": (COMPLETIONS, b'"prompt":[', b"[1],", b"[1]]}"),
    "messages": (CHAT, b'"messages":[', b'{"role":"user","content":"a"},', b"{}]}"),
    "parts": (CHAT, b'"messages":[{"role":"user","content":[', b'{"text":"a"},', b"{}]}]}"),
    "tools": (CHAT, b'"messages":[{"role":"user","content":"a"}],"tools":[', b'{"a":0},', b"{}]}"),
    "deep": (CHAT, b'"messages":', b"[", b""),
    "keys": (CHAT, b"", b'"a":0,', b'"a":0}'),
    "blanks": (CHAT, b'"a":0', b" ", b"}"),
}  # fmt: skip
ALONE = ("token ids", "empty lists", "nested objects", "one string")


def large_bodies(*names: str) -> Attack:
    """The attack with two bodies of the largest size of each shape, one after the other."""

    async def attack(target: Target) -> str:
        found: Counter[str] = Counter()
        for name in names:
            path, start, middle, end = SHAPES[name]
            start = b'{"model":"emulated",' + start
            count = (target.count(BODY_BYTES) - len(start) - len(end)) // len(middle)
            data = post(path, start + middle * count + end)
            for _ in range(2):
                found[await one(target, data)] += 1
        return told(found)

    return attack


async def middling_bodies(target: Target) -> str:
    """Many bodies at once that are just small enough to be parsed at once."""
    size = 60_000
    path, start, middle, end = SHAPES["empty lists"]
    data = post(path, b'{"model":"emulated",' + start + middle * (size // len(middle)) + end)
    return await outcomes(one(target, data) for _ in range(target.count(200)))


# ---- answers ------------------------------------------------------------------------------------


async def unread_answers(target: Target) -> str:
    """Hundreds of thousands of requests at once whose answers are not read."""

    async def attempt() -> str:
        reader, writer = await connect(target, receive_bytes=4096)
        sending = asyncio.ensure_future(send(writer, HEALTH * target.count(300_000)))
        await asyncio.wait([sending], timeout=8.0)
        cut = sending.done() or writer.transport.is_closing()
        sending.cancel()
        writer.transport.abort()
        del reader
        return "cut off" if cut else "held up"

    return await outcomes(attempt() for _ in range(4))


async def pipelined(target: Target) -> str:
    """Hundreds of thousands of requests at once, with answers that are read."""

    async def attempt() -> str:
        reader, writer = await connect(target)
        count = target.count(20_000)
        sending = asyncio.ensure_future(send(writer, HEALTH * count))
        answered = 0
        with contextlib.suppress(OSError):
            while answered < count:
                data = await reader.read(65_536)
                if not data:
                    break
                answered += data.count(b"HTTP/1.1 ")
        sending.cancel()
        writer.transport.abort()
        return "answered" if answered == count else "cut off"

    return await outcomes(attempt() for _ in range(4))


async def sent_ahead_and_closed(target: Target) -> str:
    """Clients that ask for long answers, send megabytes ahead, and close."""
    data = post(COMPLETIONS, SMALL, extra=b"x-tokens: 2000\r\n") + HEALTH * 50_000

    async def attempt() -> str:
        _, writer = await connect(target)
        writer.write(data)
        await asyncio.sleep(1.0)
        writer.transport.abort()
        return "closed"

    found = await outcomes(attempt() for _ in range(target.count(100)))
    await asyncio.sleep(4.0)  # until the router has noticed all of them
    return found


async def many_connections(target: Target) -> str:
    """More connections than the router has files; each asks for something."""
    data = post(COMPLETIONS, SMALL, extra=b"x-tokens: 200\r\n")
    found = await outcomes(one(target, data) for _ in range(target.count(400)))
    blamed = [b["name"] for b in target.stage.backends() if b["opened"]]
    assert not blamed, f"replicas are blamed: {blamed}"
    return found


CASES = (
    Case("empty lines", empty_lines),
    Case("empty lines, slowly", empty_lines_slowly, STRICT),
    Case("slow heads", slow_heads, STRICT),
    Case("many headers", many_headers),
    Case("slow bodies", slow_bodies, STRICT),
    Case("two-byte chunks", two_byte_chunks),
    Case("long chunk extensions", long_extensions),
    Case("unfinished bodies", unfinished_bodies, STRICT),
    Case("long names", long_names),
    *(Case(f"32 MB of {name}", large_bodies(name)) for name in ALONE),
    Case("32 MB of other shapes", large_bodies(*(name for name in SHAPES if name not in ALONE))),
    Case("many bodies of 60 KB", middling_bodies),
    Case("answers unread", unread_answers, STRICT),
    Case("pipelined requests", pipelined),
    Case("sent ahead and closed", sent_ahead_and_closed),
    # Whoever connects while there are no more files gets 503, also the innocent.
    Case("out of files", many_connections, files=160, may_fail=frozenset({"status"})),
)
