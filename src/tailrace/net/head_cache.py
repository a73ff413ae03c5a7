"""Caches of parsed heads: most heads of one client, or of one server, are identical.

Parsing a head strictly costs more than everything else in HTTP. Two heads that are equal but for
the digits of Content-Length have the same meaning, so only the first is parsed and the others are
looked up. A header that varies with every request, such as a request id, makes each head a new
one; the cost is then a failed look-up.
"""

from typing import Generic, TypeVar

from tailrace.net.framing import BrokenMessageError
from tailrace.net.heads import (
    RefusedError,
    RequestHead,
    ResponseHead,
    content_length,
    parse_request,
    parse_response,
)

#: Cached heads; when there are more, the cache is cleared.
MOST = 512
#: Longer heads are not cached, in bytes.
LONGEST = 4096
_LINES = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LINE_BYTES = len(_LINES[0])
_MOST_DIGITS = 18

Head = TypeVar("Head", RequestHead, ResponseHead)


class _Known(dict[tuple[bytes, bytes], Head], Generic[Head]):
    """Heads by the bytes before and after the digits of Content-Length."""

    def keep(self, before: bytes, after: bytes, head: Head) -> None:
        """Store a parsed head."""
        if len(before) + len(after) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[before, after] = head


class RequestHeadCache:
    """Parses request heads. The heads it returns are shared and must not be changed."""

    def __init__(self) -> None:
        self._known: _Known[RequestHead] = _Known()
        self.last: tuple[bytes, bytes, RequestHead] | None = None
        """The bytes before and after the length in the last head, and that head, for
        :func:`length_in`; None if another length there would change its meaning."""

    def read(self, data: bytes) -> tuple[RequestHead, int]:
        """Parse a head with its empty line; return it and the length of its body in bytes, which
        has no meaning if it is chunked. Raise ``RefusedError`` if it is not safe."""
        before, digits, after = split(data)
        head = self._known.get((before, after))
        self.last = None
        if head is not None:
            if digits is None:
                return head, 0
            self.last = before, after, head
            return head, content_length(digits)
        head = parse_request(data)
        if _is_length(head, digits):
            self._known.keep(before, after, head)
        return head, head.length


class ResponseHeadCache:
    """Parses response heads. The heads it returns are shared and must not be changed."""

    def __init__(self) -> None:
        self._known: _Known[ResponseHead] = _Known()
        self.last: tuple[bytes, bytes, ResponseHead] | None = None
        """As in :class:`RequestHeadCache`; the head may have a different length."""

    def read(self, data: bytes, method: bytes) -> ResponseHead:
        """Parse the head of a response to ``method``; raise ``BrokenMessageError`` if malformed."""
        self.last = None
        if method == b"HEAD":
            return parse_response(data, method)
        before, digits, after = split(data)
        known = self._known.get((before, after))
        if known is None:
            head = parse_response(data, method)
            if _is_length(head, digits):
                self._known.keep(before, after, head)
            return head
        if digits is None or known.framing.kind != "length":
            return known
        try:
            length = content_length(digits)
        except RefusedError as error:
            raise BrokenMessageError(error.why) from None
        self.last = before, after, known
        return known if length == known.framing.length else known.of_length(length)


def length_in(data: bytes, before: bytes, after: bytes) -> tuple[int, int]:
    """Return the end of the head at the start of ``data``, and its Content-Length.

    The end is 0 if the head does not have these bytes before and after its length.
    """
    start = len(before)
    if data.startswith(before):
        end = data.find(b"\r", start, start + _MOST_DIGITS + 1)
        digits = data[start:end]
        if end > 0 and digits.isdigit() and data.startswith(after, end):
            return end + len(after), int(digits)
    return 0, 0


def split(head: bytes) -> tuple[bytes, bytes | None, bytes]:
    """Split a head at the value of its Content-Length; without one, all of it is the first part."""
    for line in _LINES:
        at = head.find(line)
        if at >= 0:
            start = at + _LINE_BYTES
            end = head.find(b"\r\n", start)
            return head[:start], head[start:end], head[end:]
    return head, None, b""


def _is_length(head: RequestHead | ResponseHead, digits: bytes | None) -> bool:
    """Whether the value that was split off is the one the parser took for the body length."""
    if isinstance(head, ResponseHead) and digits is not None and head.framing.kind != "length":
        return False  # in a 304 it is the length of another response
    return head.lower.get(b"content-length") == digits
