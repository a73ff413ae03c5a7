"""Server side of HTTP/2 (RFC 9113): what gRPC needs, and no more. TLS is the transport's.

A connection parses frames, keeps both flow-control windows and hands the data of each stream to a
handler. There is no server push, no priorities, no upgrade from HTTP/1.1. A general library in
Python takes several times as long per message (docs/picker.md), and the picker handles several
messages per request.

What a peer can make a connection hold is bounded: header blocks by ``header_bytes``, streams by
``streams``, data by what handlers keep, output by withheld window updates: as long as a stream's
output waits for the peer, the peer gets no more room to send on that stream.
"""

import asyncio
import logging
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol, cast

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Types of frames.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
# Flags.
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 1, 1, 4, 8, 0x20
# Error codes.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11
# Settings.
_TABLE_SIZE, _PUSH, _MOST_STREAMS, _WINDOW, _FRAME_SIZE, _HEADERS_SIZE = range(1, 7)

#: Largest frame that is accepted, in bytes.
MAX_FRAME = 65_536
#: What a peer may send ahead on one stream and on one connection, in bytes.
STREAM_WINDOW, CONNECTION_WINDOW = 1 << 20, 16 << 20
#: Output of a stream that may wait for the peer before it gets no more room to send, in bytes.
MOST_WAITING = 256 * 1024
#: SETTINGS of a peer at once, and more per second: each may change the windows of all streams. With
#: many values, each hundred counts as one.
MOST_SETTINGS, SETTINGS_PER_S = 100.0, 10.0
#: How long frames of one peer are read while others wait, s.
TURN_S = 0.01
#: Size of a window, and of a frame, before settings say another one.
_FIRST_WINDOW, _FIRST_FRAME = 65_535, 16_384
_MAX_WINDOW = 2**31 - 1
#: Head of a frame: length (16 and 8 bits), type, flags, stream.
_FRAME_HEAD = struct.Struct(">HBBBI")
#: Header blocks whose meaning is remembered, and the longest, in bytes; clients repeat theirs.
_MOST_BLOCKS, _LONGEST_BLOCK = 64, 512

_log = logging.getLogger("tailrace.router")

Headers = list[tuple[bytes, bytes]]
Bytes = bytes | memoryview


class StreamHandler(Protocol):
    """What a stream's data is for."""

    def data(self, data: bytes) -> None:
        """The peer has sent data."""

    def half_closed(self) -> None:
        """The peer will send nothing more on this stream."""

    def gone(self) -> None:
        """The stream was reset or its connection lost. Not called after an end by us."""


class ConnectionOwner(Protocol):
    """The service that connections belong to."""

    def opened(self, connection: "Http2Connection") -> bool:
        """Register a connection; False: there are too many."""

    def closed(self, connection: "Http2Connection") -> None:
        """Forget a connection."""

    def stream(self, stream: "Http2Stream", headers: Headers) -> StreamHandler | None:
        """Begin with a stream; None: it has its response already."""


class Http2Stream:
    """One stream of a connection."""

    __slots__ = ("_connection", "_credit", "_waiting", "handler", "is_ended", "is_half_closed",
                 "number", "waiting", "window")  # fmt: skip

    def __init__(self, connection: "Http2Connection", number: int, window: int) -> None:
        self.number = number
        self.handler: StreamHandler | None = None
        self.window = window
        """Bytes the peer accepts on this stream now; may be negative."""
        self.is_ended = False
        """Whether we have ended it, or it is gone."""
        self.is_half_closed = False
        """Whether the peer has ended its side."""
        self.waiting = 0
        """Bytes of output that wait for room in a window."""
        self._waiting: deque[tuple[int, int, Bytes]] = deque()  # type, flags, payload
        self._credit = 0  # bytes received that the peer was not given back yet
        self._connection = connection

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send an encoded header block; after data it is the trailers."""
        self._send(HEADERS, END_HEADERS | (END_STREAM if end else 0), block)

    def send_data(self, data: bytes) -> None:
        """Send data as the windows allow."""
        connection, size = self._connection, len(data)
        if (
            self._waiting
            or self.is_ended
            or size > self.window
            or size > connection.window
            or size > connection.peer_frame
        ):
            self._send(DATA, 0, data)
        elif size:
            self.window -= size
            connection.window -= size
            connection.write(DATA, 0, self.number, data)

    def reset(self, code: int) -> None:
        """End the stream abruptly."""
        if not self.is_ended:
            self._waiting.clear()
            self._connection.write(RST_STREAM, 0, self.number, code.to_bytes(4, "big"))
            self._connection.forget(self)

    def _send(self, kind: int, flags: int, payload: bytes) -> None:
        if self.is_ended:
            return
        rest = payload if self._waiting else self._write(kind, flags, payload)
        if rest or self._waiting:
            self._waiting.append((kind, flags, rest))
            self.waiting += len(rest)
            self._queue_up()

    def _write(self, kind: int, flags: int, payload: Bytes) -> Bytes:
        """Write what fits into the windows; return the rest."""
        connection = self._connection
        if kind != DATA:
            connection.write(kind, flags, self.number, payload)
            if flags & END_STREAM:
                connection.finish(self)
            return b""
        while payload:
            size = len(payload)
            room = min(self.window, connection.window, connection.peer_frame)
            if room <= 0:
                break
            part = payload
            if room < size:
                view = memoryview(payload)  # a copy of the rest for each part would be too much
                part, payload = view[:room], view[room:]
                size = room
            else:
                payload = b""
            self.window -= size
            connection.window -= size
            connection.write(DATA, 0, self.number, part)
        return payload

    def drain(self) -> None:
        """Write what waited, as far as there is room."""
        waiting = self._waiting
        while waiting:
            kind, flags, payload = waiting[0]
            rest = self._write(kind, flags, payload)
            self.waiting -= len(payload) - len(rest)
            if rest:
                waiting[0] = kind, flags, rest
                break
            waiting.popleft()
        else:
            self._give_credit()
        self._queue_up()

    def _queue_up(self) -> None:
        """Wait for room on the connection, if it is that which is missing."""
        if self._waiting and self.window > 0:
            self._connection.blocked[self.number] = self
        else:
            self._connection.blocked.pop(self.number, None)

    def received(self, size: int) -> None:
        """Count data that was received, and give the peer its room back in large steps."""
        self._credit += size
        if self._credit >= STREAM_WINDOW // 2 and self.waiting <= MOST_WAITING:
            self._give_credit()

    def _give_credit(self) -> None:
        if self._credit >= STREAM_WINDOW // 2 and not self.is_ended:
            credit, self._credit = self._credit, 0
            self._connection.write(WINDOW_UPDATE, 0, self.number, credit.to_bytes(4, "big"))

    @property
    def overrun(self) -> bool:
        """Whether the peer has sent more than it was allowed to."""
        return self._credit > STREAM_WINDOW


class _BrokenError(Exception):
    """The connection cannot go on."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Http2Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(
        self,
        owner: ConnectionOwner,
        *,
        streams: int = 10_000,
        header_bytes: int = 32_768,
        start_s: float = 10.0,
        stall_s: float = 60.0,
        frame_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``streams``: most at once; ``start_s``: for the preface; ``stall_s``: to read output.

        ``frame_s``: to complete a frame, or a header block, that has begun.
        """
        self._owner = owner
        self._most_streams = streams
        self._header_bytes = header_bytes
        self._start_s, self._stall_s, self._frame_s = start_s, stall_s, frame_s
        self._clock = clock
        self._since = clock()
        self._stalled_at: float | None = None
        self._partial_at: float | None = None  # since when a frame or header block is incomplete
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._started = False
        self._closing = False
        self._out: list[Bytes] = []
        self._flushing = False
        self._is_behind = False  # bytes that have come wait for the next turn of the event loop
        self._in_turn = False  # bytes are being read: what is written goes out at the end
        self._decoder = hpack.Decoder(max_header_list_size=4 * header_bytes)
        self._blocks: dict[bytes, Headers] = {}
        self._block: list[bytes] = []  # fragments of the header block that is being received
        self._block_size = 0
        self._block_of = 0  # its stream, 0: none
        self._settings_left, self._settings_at = MOST_SETTINGS, clock()
        self._block_ends = False
        self._last = 0  # highest stream of the peer
        self._credit = 0
        self.streams: dict[int, Http2Stream] = {}
        self.window = _FIRST_WINDOW
        """Bytes the peer accepts on the connection now."""
        self.peer_window = _FIRST_WINDOW
        self.peer_frame = _FIRST_FRAME
        self.blocked: OrderedDict[int, Http2Stream] = OrderedDict()
        """Streams that wait only for room on the connection, in the order of their turns."""

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: settings, and a larger window for the connection."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._owner.opened(self):
            self._transport.abort()
            return
        values = (
            (_MOST_STREAMS, self._most_streams), (_WINDOW, STREAM_WINDOW),
            (_FRAME_SIZE, MAX_FRAME), (_HEADERS_SIZE, self._header_bytes),
        )  # fmt: skip
        self.write(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *value) for value in values))
        more = CONNECTION_WINDOW - _FIRST_WINDOW
        self.write(WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big"))

    def connection_lost(self, exc: Exception | None) -> None:
        """All streams are gone."""
        del exc
        self._closing = True
        self._transport = None
        self._out.clear()
        self._owner.closed(self)
        for stream in tuple(self.streams.values()):
            self._lose(stream)

    def pause_writing(self) -> None:
        """The peer does not read: do not read from it either, until it does."""
        self._stalled_at = self._clock()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._stalled_at = None
        if self._is_behind:
            asyncio.get_running_loop().call_soon(self._next_turn)
        else:
            self._resume()

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        if not self._closing:
            self._turn(self._rest + data if self._rest else data)

    def _turn(self, data: bytes) -> None:
        """Read frames for TURN_S; what is left then has to wait until others had their turn."""
        self._in_turn, self._is_behind = True, False
        try:
            self._read(data)
        except _BrokenError as error:
            self._break(error.code, str(error))
        except Exception:
            _log.exception("an HTTP/2 connection has failed")
            self._break(INTERNAL_ERROR, "internal error")
        finally:
            self._in_turn = False
            self._flush()
        if not self._rest and not self._block_of:
            self._partial_at = None
        elif self._partial_at is None:
            self._partial_at = self._clock()
        transport = self._transport
        if self._is_behind and transport is not None and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Go on with what was left, unless the peer does not read."""
        if self._is_behind and not self._closing and self._stalled_at is None:
            self._turn(self._rest)
            if not self._is_behind and self._stalled_at is None:
                self._resume()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _read(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self._started:
            if size < len(PREFACE):
                if not PREFACE.startswith(data):
                    raise _BrokenError(PROTOCOL_ERROR, "no HTTP/2 preface")
                self._rest = data
                return
            if not data.startswith(PREFACE):
                raise _BrokenError(PROTOCOL_ERROR, "no HTTP/2 preface")
            self._started, at = True, len(PREFACE)
        ends_at = time.perf_counter() + TURN_S
        while size - at >= 9:
            high, low, kind, flags, number = _FRAME_HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > MAX_FRAME:
                raise _BrokenError(FRAME_SIZE_ERROR, "a frame is too long")
            end = at + 9 + length
            if end > size:
                break
            self._frame(kind, flags, number & 0x7FFFFFFF, data[at + 9 : end])
            if self._closing:
                return
            at = end
            if not self._block_of:
                self._partial_at = None
            if at < size and time.perf_counter() > ends_at:
                self._is_behind = True
                break
        self._rest = data[at:] if at < size else b""

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block_of and (kind != CONTINUATION or number != self._block_of):
            raise _BrokenError(PROTOCOL_ERROR, "a header block is interrupted")
        if kind == DATA:
            self._data(flags, number, payload)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RST_STREAM:
            if len(payload) != 4:
                raise _BrokenError(FRAME_SIZE_ERROR, "RST_STREAM has another length")
            stream = self.streams.get(number)
            if stream is not None:
                self._lose(stream)
            elif number > self._last:
                raise _BrokenError(PROTOCOL_ERROR, "RST_STREAM of an idle stream")
        elif kind == PING:
            if len(payload) != 8 or number:
                raise _BrokenError(FRAME_SIZE_ERROR, "PING has another length")
            if not flags & ACK:
                self.write(PING, ACK, 0, payload)
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == CONTINUATION:
            if not self._block_of:
                raise _BrokenError(PROTOCOL_ERROR, "CONTINUATION of nothing")
            self._fragment(flags, payload)
        elif kind == PUSH:
            raise _BrokenError(PROTOCOL_ERROR, "clients cannot push")
        # GOAWAY of a client, PRIORITY and unknown types ask for nothing.

    # Frames.

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        # Padding counts too, and so does data of streams that are over.
        self._credit += size
        if self._credit >= CONNECTION_WINDOW // 4:
            self.write(WINDOW_UPDATE, 0, 0, self._credit.to_bytes(4, "big"))
            self._credit = 0
        stream = self.streams.get(number)
        if stream is None:
            if not number or number > self._last:
                raise _BrokenError(PROTOCOL_ERROR, "DATA of an idle stream")
            return  # of one that we have ended
        stream.received(size)
        if stream.overrun:
            raise _BrokenError(FLOW_CONTROL_ERROR, "more data than there is room for")
        if stream.is_half_closed:
            raise _BrokenError(STREAM_CLOSED, "DATA after the end of a stream")
        if flags & PADDED:
            payload = _unpadded(payload)
        handler = stream.handler
        if handler is None:
            return
        if payload:
            handler.data(payload)
        if flags & END_STREAM and not stream.is_ended:
            stream.is_half_closed = True
            handler.half_closed()

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise _BrokenError(FRAME_SIZE_ERROR, "HEADERS is too short")
            payload = payload[5:]
        if not number % 2 or (number <= self._last and number not in self.streams):
            raise _BrokenError(PROTOCOL_ERROR, "HEADERS of a stream that is over")
        self._block_of, self._block_ends = number, bool(flags & END_STREAM)
        self._fragment(flags, payload)

    def _fragment(self, flags: int, payload: bytes) -> None:
        self._block.append(payload)
        # Empty fragments cost something too.
        self._block_size += max(len(payload), 64)
        if self._block_size > self._header_bytes:
            raise _BrokenError(ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & END_HEADERS:
            return
        block = b"".join(self._block)
        number, self._block_of = self._block_of, 0
        self._block, self._block_size = [], 0
        headers = self._decode(block)
        stream = self.streams.get(number)
        if stream is None:
            self._begin(number, headers)
        elif not self._block_ends or stream.is_half_closed:
            raise _BrokenError(PROTOCOL_ERROR, "a second header block does not end its stream")
        stream = self.streams.get(number)
        if self._block_ends and stream is not None and stream.handler is not None:
            stream.is_half_closed = True
            stream.handler.half_closed()

    def _decode(self, block: bytes) -> Headers:
        """Decode a header block; one that leaves the table as it was is remembered."""
        known = self._blocks.get(block)
        if known is not None:
            return known
        entries = self._decoder.header_table.dynamic_entries
        before = len(entries), entries[0] if entries else None
        try:
            found = cast(Headers, self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            raise _BrokenError(COMPRESSION_ERROR, f"bad header block: {error}") from None
        after = len(entries), entries[0] if entries else None
        if before[0] != after[0] or before[1] is not after[1]:
            self._blocks.clear()  # the same bytes mean something else now
        elif len(block) <= _LONGEST_BLOCK:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = found
        return found

    def _begin(self, number: int, headers: Headers) -> None:
        self._last = number
        stream = Http2Stream(self, number, self.peer_window)
        if self._closing or len(self.streams) >= self._most_streams:
            self.write(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big"))
            return
        self.streams[number] = stream
        handler = self._owner.stream(stream, headers)
        if handler is not None and not stream.is_ended:
            stream.handler = handler

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _BrokenError(FRAME_SIZE_ERROR, "WINDOW_UPDATE has another length")
        more = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if not number:
            self.window += more
            if not more or self.window > _MAX_WINDOW:
                raise _BrokenError(FLOW_CONTROL_ERROR, "a window is too large")
            self._drain()
            return
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last:
                raise _BrokenError(PROTOCOL_ERROR, "WINDOW_UPDATE of an idle stream")
            return
        stream.window += more
        if not more or stream.window > _MAX_WINDOW:
            self.write(RST_STREAM, 0, number, FLOW_CONTROL_ERROR.to_bytes(4, "big"))
            self._lose(stream)
        elif stream.waiting:
            stream.drain()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if flags & ACK:
            return
        if len(payload) % 6 or number:
            raise _BrokenError(FRAME_SIZE_ERROR, "SETTINGS has another length")
        now = self._clock()
        more = (now - self._settings_at) * SETTINGS_PER_S
        self._settings_left = min(MOST_SETTINGS, self._settings_left + more)
        self._settings_left -= 1 + len(payload) // 600
        self._settings_at = now
        if self._settings_left < 0:
            raise _BrokenError(ENHANCE_YOUR_CALM, "too many SETTINGS")
        window = self.peer_window
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _WINDOW:
                if value > _MAX_WINDOW:
                    raise _BrokenError(FLOW_CONTROL_ERROR, "a window is too large")
                window = value  # the last one counts
            elif key == _FRAME_SIZE:
                if not _FIRST_FRAME <= value < 1 << 24:
                    raise _BrokenError(PROTOCOL_ERROR, "an impossible frame size")
                self.peer_frame = min(value, MAX_FRAME)
        if window != self.peer_window:
            more, self.peer_window = window - self.peer_window, window
            for stream in tuple(self.streams.values()):
                stream.window += more
                if stream.waiting:
                    stream.drain()
        self.write(SETTINGS, ACK, 0, b"")
        self._drain()

    def _drain(self) -> None:
        """Write what waited for room on the connection, stream by stream."""
        while self.window > 0 and self.blocked:
            _, stream = self.blocked.popitem(last=False)
            stream.drain()

    # Output.

    def write(self, kind: int, flags: int, number: int, payload: Bytes) -> None:
        """Write a frame; frames of one turn of the event loop go out together."""
        size = len(payload)
        head = _FRAME_HEAD.pack(size >> 8, size & 0xFF, kind, flags, number)
        self._out.append(head)
        if size:
            self._out.append(payload)
        if not self._in_turn and not self._flushing and self._transport is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out, transport = self._out, self._transport
        if out and transport is not None and not transport.is_closing():
            transport.write(b"".join(out))
        self._out = []

    # The end of streams and connections.

    def finish(self, stream: Http2Stream) -> None:
        """We have ended a stream; the peer may still be sending on it, for nothing."""
        if stream.number in self.streams:
            self.forget(stream)

    def forget(self, stream: Http2Stream) -> None:
        """A stream is over."""
        stream.is_ended = True
        stream.handler = None
        self.streams.pop(stream.number, None)
        self.blocked.pop(stream.number, None)

    def _lose(self, stream: Http2Stream) -> None:
        handler = stream.handler
        self.forget(stream)
        if handler is not None:
            try:
                handler.gone()
            except Exception:
                _log.exception("the end of a stream has failed")

    def _break(self, code: int, why: str) -> None:
        """End the connection with an error."""
        _log.info("an HTTP/2 connection is ended", extra={"why": why, "code": code})
        payload = struct.pack(">II", self._last, code) + why.encode()[:200]
        self.write(GOAWAY, 0, 0, payload)
        self._flush()
        self._closing = True
        self._stalled_at = self._clock()  # the peer may not read this
        for stream in tuple(self.streams.values()):
            self._lose(stream)
        if self._transport is not None:
            self._transport.close()

    def shutdown(self) -> None:
        """Take no more streams; close when those in progress are over."""
        if self._closing or self._transport is None:
            return
        self.write(GOAWAY, 0, 0, struct.pack(">II", self._last, NO_ERROR))
        self._flush()
        self._most_streams = 0  # further ones are refused
        if not self.streams:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Enforce time limits at ``now`` (s)."""
        late = not self._started and now - self._since > self._start_s
        stalled = self._stalled_at is not None and now - self._stalled_at > self._stall_s
        stuck = self._partial_at is not None and now - self._partial_at > self._frame_s
        if late or stalled or stuck:
            self.abort()
        elif self._most_streams == 0 and not self.streams and self._transport is not None:
            self._transport.close()


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _BrokenError(PROTOCOL_ERROR, "more padding than data")
    return payload[1 : len(payload) - payload[0]]
