"""HTTP/2 and gRPC from peers that send anything: nothing is left behind, and nothing grows."""

import asyncio
import logging
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.net import http2
from tailrace.net.grpc import GrpcCall
from tailrace.net.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Connection,
    Http2Stream,
)

LONGEST = 2000
#: POST of a path, without entries in the table.
BLOCK = b"\x83\x86" + b"\x04\x05/echo"


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


class Transport(asyncio.Transport):
    """Keeps what is written; can be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.out = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.out += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Echo:
    """Sends messages back; counts its ends."""

    def __init__(self, call: GrpcCall) -> None:
        self.call = call
        self.messages: list[bytes] = []
        self.ends = 0
        self.largest = 0

    def message(self, data: bytes) -> None:
        assert not self.ends, "a message after the end"
        self.messages.append(data)
        self.call.write(data)

    def incomplete(self, size: int) -> bool:
        self.largest = max(self.largest, size)
        return True

    def half_closed(self) -> None:
        assert not self.ends
        self.ends += 1
        self.call.end()

    def gone(self) -> None:
        assert not self.ends
        self.ends += 1


class Owner:
    """Begins a call for each stream."""

    def __init__(self) -> None:
        self.calls: list[Echo] = []
        self.open = 0

    def opened(self, connection: Http2Connection) -> bool:
        self.open += 1
        return True

    def closed(self, connection: Http2Connection) -> None:
        self.open -= 1

    def stream(self, stream: Any, headers: Any) -> GrpcCall:
        call = GrpcCall(stream, LONGEST)
        call.handler = echo = Echo(call)
        self.calls.append(echo)
        return call


class Session:
    """A connection with a clock that is moved by hand."""

    def __init__(self, streams: int = 8) -> None:
        self.owner, self.transport, self.now = Owner(), Transport(), 0.0
        self.connection = Http2Connection(
            self.owner, streams=streams, header_bytes=1024, start_s=10, stall_s=60, frame_s=30,
            clock=lambda: self.now,
        )  # fmt: skip
        self.connection._in_turn = True  # no event loop: what is written goes out at the end
        self.connection.connection_made(self.transport)
        self.feed(PREFACE)

    def feed(self, data: bytes) -> None:
        if not self.transport.closed:
            self.connection.data_received(data)
            assert len(self.connection._rest) < http2.MAX_FRAME + 9
            assert len(self.connection.streams) <= 8

    def lose(self) -> None:
        self.connection.connection_lost(None)
        assert not self.connection.streams
        assert not self.connection.blocked
        assert self.owner.open == 0
        for call in self.owner.calls:
            over = call.call.is_over
            assert over, "a call that nobody has ended"

    def codes(self) -> list[int]:
        """Error codes of all GOAWAY frames that were sent."""
        found, at, out = [], 0, self.transport.out
        while at < len(out):
            size = int.from_bytes(out[at : at + 3], "big")
            if out[at + 3] == GOAWAY:
                found.append(int.from_bytes(out[at + 13 : at + 17], "big"))
            at += 9 + size
        return found


@pytest.fixture(autouse=True)
def _no_bugs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection that fails by a bug of ours logs it with a traceback."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(http2, "TURN_S", 1e9)  # there is no event loop
    yield
    assert not [record for record in caplog.records if record.exc_info]


small = st.binary(max_size=40)
numbers = st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 9, 2**31 - 1])
plausible = st.one_of(
    st.builds(frame, st.just(HEADERS), st.sampled_from([4, 5, 0, 1]), numbers, st.just(BLOCK)),
    st.builds(lambda n, d, f: frame(DATA, f, n, message(d)), numbers, small, st.integers(0, 1)),
    st.builds(lambda n, d: frame(DATA, 0, n, d), numbers, small),
    st.builds(lambda n, d: frame(DATA, PADDED, n, d), numbers, small),
    st.builds(lambda n, v: frame(WINDOW_UPDATE, 0, n, v.to_bytes(4, "big")), numbers,
              st.sampled_from([0, 1, 100, 2**31 - 1, 2**32 - 1])),
    st.builds(lambda n: frame(RST_STREAM, 0, n, b"\0\0\0\x08"), numbers),
    st.builds(lambda k, v: frame(SETTINGS, 0, 0, struct.pack(">HI", k, v)), st.integers(0, 8),
              st.sampled_from([0, 1, 16384, 65535, 2**31 - 1, 2**32 - 1])),
    st.builds(lambda d: frame(CONTINUATION, END_HEADERS, 1, d), small),
    st.just(frame(PING, 0, 0, b"12345678")), st.just(frame(SETTINGS, ACK, 0)),
    st.just(frame(GOAWAY, 0, 0, bytes(8))), st.just(frame(PRIORITY, 0, 1, bytes(5))),
)  # fmt: skip
anything = st.builds(
    frame, st.integers(0, 12), st.integers(0, 255), numbers, st.binary(max_size=60)
)


@settings(max_examples=400)
@given(st.lists(st.one_of(plausible, plausible, anything), max_size=25), st.data())
def test_frames_of_any_kind_leave_nothing_behind(frames: list[bytes], data: Any) -> None:
    session = Session()
    stream = b"".join(frames)
    while stream:
        cut = data.draw(st.integers(1, min(len(stream), 200)))
        session.feed(stream[:cut])
        stream = stream[cut:]
    session.connection.check(session.now)
    session.lose()


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_bytes_of_any_kind_leave_nothing_behind(data: bytes) -> None:
    session = Session()
    session.feed(data)
    session.lose()


@settings(max_examples=100)
@given(st.lists(small, min_size=1, max_size=6), st.lists(st.integers(1, 50), max_size=40))
def test_where_bytes_are_cut_does_not_matter(messages: list[bytes], cuts: list[int]) -> None:
    session = Session()
    stream = frame(HEADERS, END_HEADERS, 1, BLOCK)
    body = b"".join(map(message, messages))
    for at in range(0, len(body), 33):
        stream += frame(DATA, 0, 1, body[at : at + 33])
    stream += frame(DATA, END_STREAM, 1)
    for cut in cuts:
        session.feed(stream[:cut])
        stream = stream[cut:]
    session.feed(stream)
    (echo,) = session.owner.calls
    assert echo.messages == messages
    assert echo.ends == 1
    assert session.codes() == []
    session.lose()


@settings(max_examples=200)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_byte_leaves_nothing_behind(at: int, value: int) -> None:
    stream = bytearray(
        frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535))
        + frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, bytes(5) + BLOCK)
        + frame(DATA, 0, 1, message(b"hello")) + frame(HEADERS, 0, 3, BLOCK[:3])
        + frame(CONTINUATION, END_HEADERS, 3, BLOCK[3:]) + frame(DATA, END_STREAM, 3, message(b""))
        + frame(WINDOW_UPDATE, 0, 1, b"\0\0\1\0") + frame(DATA, END_STREAM, 1)
    )  # fmt: skip
    stream[at % len(stream)] = value
    session = Session()
    session.feed(bytes(stream))
    session.lose()


class Sender:
    """Ignores what its peer sends; the test writes to its stream."""

    def __init__(self, stream: Http2Stream) -> None:
        self.stream = stream

    def data(self, data: bytes) -> None:
        pass

    def half_closed(self) -> None:
        pass

    def gone(self) -> None:
        pass


class Senders(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Http2Stream] = []

    def stream(self, stream: Any, headers: Any) -> Any:
        self.streams.append(stream)
        return Sender(stream)


def sending(count: int) -> tuple[Session, list[Http2Stream]]:
    """A connection with streams that have no room to send."""
    session = Session(streams=count)
    owner = Senders()
    owner.open = 1
    session.connection._owner = session.owner = owner
    opened = b"".join(frame(HEADERS, END_HEADERS, 2 * k + 1, BLOCK) for k in range(count))
    session.connection.data_received(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)) + opened)
    session.connection._in_turn = True  # what is sent goes out with the next bytes that come
    return session, owner.streams


def frames(out: bytes) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    found, at = [], 0
    while at < len(out):
        size = int.from_bytes(out[at : at + 3], "big")
        kind, flags, number = struct.unpack_from(">BBI", out, at + 3)
        found.append((kind, flags, number, out[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 40_000), max_size=4), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30_000)), max_size=40),
)
def test_output_keeps_its_order_and_to_the_windows(
    parts: list[list[int]], updates: list[tuple[int, int]]
) -> None:
    """Whatever room the peer gives, to which stream and when."""
    session, streams = sending(len(parts))
    session.transport.out = b""
    wanted = {stream.number: b"" for stream in streams}
    for stream, sizes in zip(streams, parts, strict=True):
        for k, size in enumerate(sizes):
            data = bytes([65 + k]) * size
            stream.send_data(data)
            wanted[stream.number] += data
        stream.send_headers(b"end", end=True)
    session.feed(b"")
    room = {0: 65_535, **dict.fromkeys(wanted, 0)}
    sent = dict.fromkeys(wanted, b"")
    ended: set[int] = set()

    def check() -> None:
        for kind, flags, number, payload in frames(session.transport.out):
            if kind == DATA:
                assert number not in ended
                sent[number] += payload
                room[number] -= len(payload)
                room[0] -= len(payload)
            elif kind == HEADERS:
                assert flags & END_STREAM
                ended.add(number)
        session.transport.out = b""
        assert min(room.values()) >= 0

    check()
    initial = 0
    for which, more in updates:
        if which == 5:  # another initial size changes the windows of all streams
            size = more % 500 + initial
            session.feed(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size)))
            for number in wanted:
                room[number] += size - initial
            initial = size
        else:
            number = 2 * which - 1 if 0 < which <= len(parts) else 0
            if number not in ended:
                session.feed(frame(WINDOW_UPDATE, 0, number, more.to_bytes(4, "big")))
                room[number] += more
        check()
        for stream in streams:  # what can be sent has been
            number = stream.number
            if not stream.is_ended and sent[number] != wanted[number]:
                assert not room[0] or not room[number]
    session.feed(frame(WINDOW_UPDATE, 0, 0, (10**6).to_bytes(4, "big")))
    room[0] += 10**6
    for number in wanted:
        if number not in ended:
            session.feed(frame(WINDOW_UPDATE, 0, number, (10**6).to_bytes(4, "big")))
            room[number] += 10**6
    check()
    assert sent == wanted
    assert ended == set(wanted)
    session.lose()


def test_room_for_the_connection_costs_nothing_for_streams_without_room_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = 0
    drain = Http2Stream.drain

    def counted(stream: Http2Stream) -> Any:
        nonlocal looked_at
        looked_at += 1
        return drain(stream)

    session, streams = sending(500)
    for stream in streams:
        stream.send_data(b"x" * 100)
    monkeypatch.setattr(Http2Stream, "drain", counted)
    for _ in range(100):
        session.connection.data_received(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
    assert looked_at < 600
    session.transport.out = b""
    given = b"".join(frame(WINDOW_UPDATE, 0, s.number, b"\0\0\0\x64") for s in streams)
    session.connection.data_received(given)
    assert len(frames(session.transport.out)) == 500
    session.lose()


def test_room_byte_by_byte_does_not_copy_what_waits() -> None:
    session, (stream,) = sending(1)
    size = 4_000_000
    for _ in range(8):
        stream.send_data(b"x" * (size // 8))
    update = frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")
    session.feed(update * 10)  # as large as it gets
    tracemalloc.start()
    try:
        session.feed(update)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 100_000
    assert stream.waiting == size - 11
    session.lose()


def test_what_is_remembered_of_header_blocks_is_bounded() -> None:
    session = Session()
    for k in range(400):
        size = 720 if k % 2 else 400
        block = BLOCK + b"\0\1x\x7f" + bytes([size - 127 & 127 | 128, size - 127 >> 7])
        block += b"%08d" % k + b"v" * (size - 8)
        session.feed(frame(HEADERS, END_HEADERS, 2 * k + 1, block))
        session.feed(frame(RST_STREAM, 0, 2 * k + 1, bytes(4)))
    assert session.codes() == []
    kept = session.connection._blocks
    assert sum(map(len, kept)) <= 65_536
    session.lose()


@pytest.mark.parametrize("number", [0, 1])
def test_an_empty_window_update_ends_the_stream_and_frees_it(number: int) -> None:
    session = Session()
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK))
    (echo,) = session.owner.calls
    session.feed(frame(WINDOW_UPDATE, 0, number, bytes(4)))
    assert echo.ends == 1
    assert session.transport.closed == (number == 0)
    session.lose()


def test_nothing_is_read_on_a_stream_after_its_end() -> None:
    class Slow(Owner):
        def stream(self, stream: Any, headers: Any) -> GrpcCall:
            call = super().stream(stream, headers)
            self.calls[-1].half_closed = lambda: None  # type: ignore[method-assign]
            return call

    session = Session()
    session.connection._owner = session.owner = slow = Slow()
    slow.open = 1
    session.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, BLOCK))
    session.feed(frame(DATA, 0, 1, message(b"late")))
    assert slow.calls[0].messages == []
    assert session.transport.closed
    session.lose()


@pytest.mark.parametrize(
    "part",
    [
        frame(DATA, 0, 1, bytes(100))[:50], frame(PING, 0, 0, bytes(8))[:3],
        frame(HEADERS, 0, 3, BLOCK), frame(HEADERS, 0, 3, BLOCK) + frame(CONTINUATION, 0, 3),
    ],
)  # fmt: skip
def test_a_peer_that_stops_inside_a_frame_is_closed(part: bytes) -> None:
    session = Session()
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK))
    session.now = 100.0
    session.feed(part)
    session.now = 125.0
    session.connection.check(session.now)
    assert not session.transport.closed
    session.now = 131.0
    session.connection.check(session.now)
    assert session.transport.closed
    session.lose()


def test_a_peer_that_pauses_between_frames_is_not_closed() -> None:
    session = Session()
    for second in range(0, 1000, 20):
        session.now = float(second)
        session.feed(frame(PING, 0, 0, bytes(8)))
        session.connection.check(session.now)
    assert not session.transport.closed
    # Nor is one whose frames come in pieces, as long as they get complete.
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK))
    whole = frame(DATA, 0, 1, message(b"x" * 100))
    for second in range(1000, 1400, 20):
        session.now = float(second)
        session.feed(whole[50:] + whole[:50] if second > 1000 else whole[:50])
        session.connection.check(session.now)
    assert not session.transport.closed
    session.lose()


def test_settings_count_by_their_last_value_and_cannot_flood() -> None:
    session = Session()
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK))
    stream = session.connection.streams[1]
    before = stream.window
    windows = b"".join(struct.pack(">HI", 4, before + more) for more in (9, 10**6, 7))
    session.feed(frame(SETTINGS, 0, 0, windows))
    assert stream.window == before + 7
    for second in range(100):  # at most ten per second
        session.now = float(second)
        session.feed(frame(SETTINGS, 0, 0) * 10)
    assert not session.transport.closed
    flooded = Session()
    session.feed(frame(SETTINGS, 0, 0) * 200)
    flooded.feed(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1) * 10_000))  # in one frame
    for each in (session, flooded):
        assert each.transport.closed
        assert each.codes() == [http2.ENHANCE_YOUR_CALM]
        each.lose()


def test_a_connection_that_is_ended_with_an_error_is_not_kept_open() -> None:
    """The peer may not read the reason, so that closing in order would take for ever."""
    session = Session()
    session.feed(frame(PUSH, 0, 1, bytes(4)))
    assert session.codes() == [http2.PROTOCOL_ERROR]
    aborted = []
    session.transport.abort = lambda: aborted.append(True)  # type: ignore[method-assign]
    session.connection.check(session.now + 59)
    assert not aborted
    session.connection.check(session.now + 61)
    assert aborted
    session.lose()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\1" + bytes(4), b"compressed"),
        (b"\0" + (LONGEST + 1).to_bytes(4, "big"), b"longer than"),
        (b"\xff" * 10, b"compressed"),
    ],
)
def test_bad_messages_end_the_call_only(data: bytes, told: bytes) -> None:
    session = Session()
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 0, 1, data))
    session.feed(frame(DATA, 0, 1, b"more of it"))
    assert told in session.transport.out
    assert session.owner.calls[0].ends == 1, "what it holds is free"
    assert not session.transport.closed
    session.feed(frame(HEADERS, END_HEADERS, 3, BLOCK) + frame(DATA, 0, 3, message(b"good")))
    assert session.owner.calls[1].messages == [b"good"]
    session.lose()


def test_a_message_in_small_parts_takes_no_more_memory_than_its_bytes() -> None:
    session = Session()
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK))
    (echo,) = session.owner.calls
    whole = message(b"x" * 1999)
    tracemalloc.start()
    try:
        session.feed(b"".join(frame(DATA, 0, 1, whole[k : k + 2]) for k in range(0, 1998, 2)))
        most = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert most < 5000
    session.feed(frame(DATA, 0, 1, whole[1998:] + message(b"y" * 40)[:7]))
    assert echo.messages == [b"x" * 1999]
    session.feed(frame(DATA, 0, 1, message(b"y" * 40)[7:]))
    assert echo.messages[1:] == [b"y" * 40]
    session.lose()


def test_what_is_held_of_an_incomplete_message_is_told() -> None:
    session = Session()
    session.feed(frame(HEADERS, END_HEADERS, 1, BLOCK))
    (echo,) = session.owner.calls
    whole = message(b"x" * 1000)
    session.feed(frame(DATA, 0, 1, whole[:700]))
    assert echo.largest == 700
    session.feed(frame(DATA, 0, 1, whole[700:]))
    assert len(echo.messages) == 1
    echo.incomplete = lambda size: size < 100  # type: ignore[method-assign]
    session.feed(frame(DATA, 0, 1, whole[:99]))
    assert not echo.call.is_over
    session.feed(frame(DATA, 0, 1, whole[99:300]))
    assert echo.call.is_over
    session.lose()


def test_a_peer_that_sends_much_at_once_takes_turns_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn ends with the frame that exceeds its time."""
    monkeypatch.setattr(http2, "TURN_S", -1.0)

    async def scenario() -> None:
        session = Session()
        await asyncio.sleep(0)
        reading = []
        session.transport.pause_reading = lambda: reading.append(False)  # type: ignore[method-assign]
        session.transport.resume_reading = lambda: reading.append(True)  # type: ignore[method-assign]
        sent = [b"%d" % k for k in range(5)]
        session.feed(
            frame(HEADERS, END_HEADERS, 1, BLOCK)
            + b"".join(frame(DATA, 0, 1, message(data)) for data in sent)
            + frame(PING, 0, 0, bytes(8))[:5]
        )
        (echo,) = session.owner.calls
        for turn in range(4):
            assert echo.messages == sent[:turn]
            assert reading == [False] * (turn + 1)
            await asyncio.sleep(0)
        session.connection.pause_writing()
        for _ in range(3):
            await asyncio.sleep(0)
        assert echo.messages == sent[:4], "nothing is read while the peer does not read"
        session.connection.resume_writing()
        session.connection.pause_writing()
        session.connection.resume_writing()
        for _ in range(6):
            await asyncio.sleep(0)
        assert echo.messages == sent
        assert reading[-1], "more may come"
        session.feed(frame(PING, 0, 0, bytes(8))[5:])
        assert session.transport.out.endswith(frame(PING, ACK, 0, bytes(8)))
        session.feed(frame(DATA, 0, 1, message(b"more")) * 5)
        session.lose()
        await asyncio.sleep(0)
        assert len(echo.messages) == 6, "nothing is read after the end"

    asyncio.run(scenario())
