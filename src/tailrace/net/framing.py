"""Body framing: where the body of a message ends, and its content.

Because the exact end is known, nothing in a body can be taken for a second request, and the bytes
of a response can be passed on as received.
"""

from functools import lru_cache
from typing import NamedTuple

#: Longest line of a chunk's size with its extensions, and of all trailers together, in bytes.
MAX_CHUNK_LINE = 256
MAX_TRAILER_BYTES = 8192
_CR = 13
_HEX = frozenset(b"0123456789abcdefABCDEF")
#: Bytes of a header's name.
TOKEN_BYTES = frozenset(b"!#$%&'*+-.^_`|~0123456789"
                        b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")  # fmt: skip


class BrokenMessageError(Exception):
    """A message whose framing cannot be trusted."""


class Framing(NamedTuple):
    """How the end of a response body is marked."""

    kind: str
    """none, length, chunked or close."""
    length: int = 0


def chunk(data: bytes) -> bytes:
    """Frame data as one chunk; empty data gives nothing, as an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


LAST_CHUNK = b"0\r\n\r\n"


class ChunkedReader:
    """Reads a chunked body from pieces that may be cut anywhere."""

    __slots__ = ("_rest", "_trailer_bytes", "_where", "border", "done", "left")

    def __init__(self) -> None:
        self.left = 0
        """Bytes of the current chunk still to come."""
        self.done = False
        self.border = 0
        """Bytes of the last piece up to the end of its last complete chunk; 0: none ended in it."""
        self._rest = b""
        self._where = 0  # 0 size line, 1 data, 2 CRLF behind data, 3 trailers
        self._trailer_bytes = 0

    @property
    def between_chunks(self) -> bool:
        """Whether no chunk has been read in part."""
        return self._where == 0 and not self._rest

    def feed(self, data: bytes, start: int = 0) -> tuple[int, list[bytes]]:
        """Read a piece from ``start``; return where the body ends in it, and the decoded parts.

        The end is ``len(data)`` while the body goes on. Raises ``BrokenMessageError``.
        """
        parts: list[bytes] = []
        shift = 0
        first = start
        if self._rest:
            # A line was cut: join its parts, and count positions from the start of the piece.
            shift = len(self._rest) - start
            data, start, self._rest = self._rest + data[start:], 0, b""
        pos, size, self.border = start, len(data), 0
        where, left = self._where, self.left
        while pos < size:
            if where == 1:
                end = min(size, pos + left)
                parts.append(data[pos:end])
                left -= end - pos
                pos = end
                if not left:
                    where = 2
                continue
            if where == 2:
                if not b"\r\n".startswith(data[pos : pos + 2]):
                    raise BrokenMessageError("a chunk is longer than it says")
                if size - pos < 2:
                    break
                pos += 2
                self.border = pos - shift - first
                where = 0
                continue
            end = data.find(b"\n", pos) - 1
            if end < -1:
                if size - pos > (MAX_CHUNK_LINE if where == 0 else MAX_TRAILER_BYTES):
                    raise BrokenMessageError("a chunk's line is too long")
                break
            if end < pos or data[end] != _CR:
                raise BrokenMessageError("a line of a chunked body does not end with CRLF")
            if where == 0:
                left = chunk_size(data[pos:end])
                where = 1 if left else 3
                behind = end + 2 + left
                if left and data.startswith(b"\r\n", behind):  # all of the chunk is here
                    parts.append(data[end + 2 : behind])
                    pos = behind + 2
                    self.border = pos - shift - first
                    where = left = 0
                    continue
            else:
                self._trailer_bytes += end - pos
                if self._trailer_bytes > MAX_TRAILER_BYTES:
                    raise BrokenMessageError("the trailers are too long")
                if end == pos:
                    self.done = True
                    pos += 2
                    break
                _check_trailer(data[pos:end])
            pos = end + 2
        if not self.done and pos < size:
            self._rest = data[pos:]
            pos = size
        self._where, self.left = where, left
        return pos - shift, parts


@lru_cache(maxsize=1024)  # the events of a stream have few different sizes
def chunk_size(line: bytes) -> int:
    """Read the size line of a chunk: hexadecimal digits, perhaps followed by extensions."""
    digits, semicolon, extension = line.partition(b";")
    if not digits or len(digits) > 8 or not _HEX.issuperset(digits) or len(line) > MAX_CHUNK_LINE:
        raise BrokenMessageError("a chunk's size is no number")
    if semicolon and (b"\n" in extension or b"\r" in extension or b"\0" in extension):
        raise BrokenMessageError("a chunk's extension holds control characters")
    return int(digits, 16)


def is_token(text: bytes) -> bool:
    """Whether a text is a valid header name."""
    return bool(text) and TOKEN_BYTES.issuperset(text)


def _check_trailer(line: bytes) -> None:
    name, colon, value = line.partition(b":")
    if not colon or not is_token(name) or b"\n" in value or b"\r" in value or b"\0" in value:
        raise BrokenMessageError("a trailer is malformed")


class LengthReader:
    """Reads a body of known length."""

    __slots__ = ("done", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        """Bytes still to come."""
        self.done = length == 0

    def feed(self, data: bytes, start: int = 0) -> tuple[int, list[bytes]]:
        """Read a piece from ``start``; return where the body ends in it, and the parts."""
        have = len(data) - start
        if have < self.left:
            self.left -= have
            return len(data), [data[start:] if start else data]
        end = start + self.left
        self.left = 0
        self.done = True
        return end, [data if start == 0 and end == len(data) else data[start:end]]


class CloseReader:
    """Reads a body that ends with the connection."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, start: int = 0) -> tuple[int, list[bytes]]:
        """Read a piece from ``start``: all of it is body."""
        return len(data), [data[start:] if start else data]


BodyReader = ChunkedReader | LengthReader | CloseReader


def reader_for(framing: Framing) -> BodyReader:
    """Return a reader for a response body."""
    if framing.kind == "chunked":
        return ChunkedReader()
    if framing.kind == "close":
        return CloseReader()
    return LengthReader(framing.length)
