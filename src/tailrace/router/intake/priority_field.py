"""Writes a ``priority`` into a JSON body, leaving every other byte as it is.

The field goes first, right behind the opening brace, so that the rest of the body, which may be
long, is neither read nor copied. A body that has the field already is the caller's to recognise
(``RequestBody.names_priority``): then its value is replaced, or the body left alone.
"""

import re
from typing import NamedTuple

import numpy as np

from tailrace.router.intake import member_scan
from tailrace.router.intake.json_scan import word

#: Kinds of requests whose servers know the field, see ``routes.py``.
KINDS = frozenset(("chat", "completion", "response"))

_OPENING = re.compile(rb"[ \t\n\r]*\{")
_EMPTY = re.compile(rb"[ \t\n\r]*\}")
_PRIORITY = word("priority")


class SplicedBody(NamedTuple):
    """A body in two pieces: ``start``, then the original from byte ``rest_at`` on."""

    start: bytes
    rest_at: int

    def length(self, body: bytes) -> int:
        """Bytes of the body as it is sent."""
        return len(self.start) + len(body) - self.rest_at

    def whole(self, body: bytes) -> bytes:
        """The body as it is sent, in one piece."""
        return self.start + body[self.rest_at :]


def spliced(body: bytes, priority: int) -> SplicedBody | None:
    """Return a body that has no priority with one; None: it is no JSON object."""
    opening = _OPENING.match(body)
    if opening is None:
        return None
    comma = b"" if _EMPTY.match(body, opening.end()) else b","
    return SplicedBody(b'%b"priority":%d%b' % (opening[0], priority, comma), opening.end())


def replaced(body: bytes, priority: int) -> SplicedBody | None:
    """Return a body with another priority than its own; None: its own is not clear.

    It is not if the field stands there twice, or if a key is written with escapes.
    """
    place = _place(body)
    if place is None:
        return None
    start, end = place
    return SplicedBody(b"%b%d" % (body[:start], priority), end)


def is_clear(body: bytes) -> bool:
    """Whether the priority of a body that has one can be replaced."""
    return _place(body) is not None


def _place(body: bytes) -> tuple[int, int] | None:
    """Return where the value of a body's priority stands; None: it is not clear."""
    span = np.zeros(2, np.int64)
    if member_scan.find(np.frombuffer(body, np.uint8), _PRIORITY, span) != 1:
        return None
    start, end = span.tolist()
    return start, end
