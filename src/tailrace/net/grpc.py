"""gRPC calls on streams of HTTP/2: messages in and out, and the status at the end."""

from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from tailrace.net.http2 import Http2Stream

# Codes of statuses.
OK, INVALID_ARGUMENT, NOT_FOUND = 0, 3, 5
RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14
#: Longest explanation of a status, in bytes.
_LONGEST_WHY = 1024


def _literal(name: bytes, value: bytes) -> bytes:
    """Encode a header without entering it into the peer's table (RFC 7541 6.2.2)."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,))
    size -= 127
    encoded = bytearray((127,))
    while size >= 128:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


#: ``:status: 200`` stands in the static table.
_HEAD = b"\x88" + _literal(b"content-type", b"application/grpc")
_DONE = _literal(b"grpc-status", b"0")


def _trailers(status: int, why: str) -> bytes:
    block = _literal(b"grpc-status", str(status).encode())
    if why:
        block += _literal(b"grpc-message", quote(why, safe=" ").encode()[:_LONGEST_WHY])
    return block


class MessageHandler(Protocol):
    """What the messages of a call are for."""

    def message(self, data: bytes) -> None:
        """The client has sent a message."""

    def incomplete(self, size: int) -> bool:
        """The client has sent ``size`` bytes of its next message; False: they cannot be held."""

    def half_closed(self) -> None:
        """The client sends no more messages."""

    def gone(self) -> None:
        """The client has cancelled the call, or its connection is lost."""


class GrpcCall:
    """One call. Implements ``http2.StreamHandler``."""

    __slots__ = ("_begun", "_held", "_longest", "_need", "_stream", "handler", "is_over")

    def __init__(self, stream: Http2Stream, longest: int) -> None:
        """``longest``: largest message that is accepted, in bytes."""
        self._stream = stream
        self._longest = longest
        self._held = bytearray()  # of a message that is not complete
        self._need = 5  # bytes until there is a length, or a message
        self._begun = False
        self.handler: MessageHandler | None = None
        self.is_over = False
        """Whether it has its status, or is gone."""

    # The client's side.

    def data(self, data: bytes) -> None:
        """Cut data into messages."""
        held = self._held
        if not held and len(data) >= 5:
            need = 5 + int.from_bytes(data[1:5], "big")
            if len(data) == need and not data[0] and need - 5 <= self._longest:
                # One whole message, as most clients send it.
                if self.handler is not None:
                    self.handler.message(data[5:])
                return
        if held or len(data) < self._need:
            held += data
            if len(held) < self._need:
                self._hold()
                return
            data = bytes(held)
        at, size = 0, len(data)
        need = 5
        while size - at >= 5:
            length = int.from_bytes(data[at + 1 : at + 5], "big")
            if data[at]:
                self._fail(UNIMPLEMENTED, "compressed messages are not supported")
                return
            if length > self._longest:
                self._fail(RESOURCE_EXHAUSTED, f"a message is longer than {self._longest} bytes")
                return
            need = 5 + length
            if size - at < need:
                break
            message = data[at + 5 : at + need]
            at += need
            need = 5
            if self.handler is not None:
                self.handler.message(message)
            if self.is_over:
                return
        self._need = need
        self._held = bytearray(data[at:])
        if self._held:
            self._hold()

    def _hold(self) -> None:
        """Count what is held of a message that is not complete."""
        if self.handler is not None and not self.handler.incomplete(len(self._held)):
            self._fail(RESOURCE_EXHAUSTED, "too many request bodies at once")

    def _fail(self, status: int, why: str) -> None:
        """End the call because of what the client has sent; the handler frees what it holds."""
        handler = self.handler
        self.end(status, why)
        if handler is not None:
            handler.gone()

    def half_closed(self) -> None:
        """Pass it on."""
        if self.handler is not None:
            self.handler.half_closed()

    def gone(self) -> None:
        """Pass it on."""
        self.is_over = True
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.gone()

    # Our side.

    def write(self, message: bytes) -> None:
        """Send a message."""
        if self.is_over:
            return
        if not self._begun:
            self._begun = True
            self._stream.send_headers(_HEAD)
        self._stream.send_data(b"\0" + len(message).to_bytes(4, "big") + message)

    def end(self, status: int = OK, why: str = "") -> None:
        """End the call with a status; the handler is called no more."""
        if self.is_over:
            return
        self.is_over = True
        self.handler = None
        self._held = bytearray()
        block = _trailers(status, why) if status or why else _DONE
        self._stream.send_headers(block if self._begun else _HEAD + block, end=True)

    @property
    def unread(self) -> int:
        """Bytes of output that the client has not made room for."""
        return self._stream.waiting


#: Begins a call: returns what its messages are for.
Method = Callable[[GrpcCall], MessageHandler]
