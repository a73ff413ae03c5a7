"""Heads that were read before: most heads of one client, or of one server, differ in nothing.

Reading a head strictly costs more than all else that HTTP needs. Two heads that are the same byte
for byte but for the digits of Content-Length are read alike, so the first is read and the others
are looked up. What varies in every request, such as an id of the client's, makes a head a new one;
then nothing is lost but the search.
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

#: Heads that are remembered; when there are more, all are forgotten.
MOST = 512
#: Longer heads are not remembered, in bytes.
LONGEST = 4096
_LINES = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LINE_BYTES = len(_LINES[0])
_MOST_DIGITS = 18

Head = TypeVar("Head", RequestHead, ResponseHead)


class _Known(dict[tuple[bytes, bytes], Head], Generic[Head]):
    """Heads by what stands before and after the digits of Content-Length."""

    def keep(self, before: bytes, after: bytes, head: Head) -> None:
        """Remember a head that was read."""
        if len(before) + len(after) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[before, after] = head


class RequestHeadCache:
    """Reads heads of requests. Those it returns are shared: nobody may change them."""

    def __init__(self) -> None:
        self._known: _Known[RequestHead] = _Known()
        self.last: tuple[bytes, bytes, RequestHead] | None = None
        """What stood before and after the length in the head read last, and that head, if any
        other length there would make no difference; for :func:`length_in`."""

    def read(self, data: bytes) -> tuple[RequestHead, int]:
        """Read a head with its empty line; return it and the length of its body in bytes, which
        means nothing if it is chunked. Raise ``RefusedError`` if it is not safe."""
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
    """Reads heads of answers. Those it returns are shared: nobody may change them."""

    def __init__(self) -> None:
        self._known: _Known[ResponseHead] = _Known()
        self.last: tuple[bytes, bytes, ResponseHead] | None = None
        """As in :class:`RequestHeadCache`; the head is of some length."""

    def read(self, data: bytes, method: bytes) -> ResponseHead:
        """Read the head of an answer to ``method``; raise ``BrokenMessageError`` if it is odd."""
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
    """Return where the head at the start of ``data`` ends, and the length it tells.

    The end is 0 if the head is none that has these bytes before and after its length.
    """
    start = len(before)
    if data.startswith(before):
        end = data.find(b"\r", start, start + _MOST_DIGITS + 1)
        digits = data[start:end]
        if end > 0 and digits.isdigit() and data.startswith(after, end):
            return end + len(after), int(digits)
    return 0, 0


def split(head: bytes) -> tuple[bytes, bytes | None, bytes]:
    """Split a head at the value of its Content-Length; without one all stands before it."""
    for line in _LINES:
        at = head.find(line)
        if at >= 0:
            start = at + _LINE_BYTES
            end = head.find(b"\r\n", start)
            return head[:start], head[start:end], head[end:]
    return head, None, b""


def _is_length(head: RequestHead | ResponseHead, digits: bytes | None) -> bool:
    """Whether what was split off is what the parser took for the length of the body."""
    if isinstance(head, ResponseHead) and digits is not None and head.framing.kind != "length":
        return False  # a 304 says how long something else is
    return head.lower.get(b"content-length") == digits
