"""Finds the ``model`` of a body that is known to be JSON, and replaces it.

A body can name its model twice, or write the key with escapes, so that the router and a server read
different models. Where the name decides what a client may use, such a body is refused.
"""

# mypy: disallow-untyped-defs=False

import numpy as np
import orjson

from tailrace.compiled import jit
from tailrace.router.intake.json_scan import is_word, string, word

_MODEL = word("model")
_QUOTE, _OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 0x22, 0x7B, 0x7D, 0x5B, 0x5D
_COLON, _BACKSLASH = 0x3A, 0x5C


@jit
def find(b, span):
    """Return how many members of the object uint8 [n] are called ``model``; -1: it is unclear.

    ``span`` int64 [2] gets the place of the last one's value, if it is a string, quotes included.
    """
    at = count = depth = 0
    span[0] = span[1] = 0
    while at < b.size:
        c = b[at]
        if c == _QUOTE:
            start = at
            end, slashes = string(b, at + 1)
            if end < 0:
                return -1
            at = end + 1
            after = at
            while after < b.size and b[after] <= 0x20:
                after += 1
            if depth == 1 and after < b.size and b[after] == _COLON:
                if slashes > 0:
                    return -1
                if is_word(b, start + 1, end, _MODEL):
                    count += 1
                    after += 1
                    while after < b.size and b[after] <= 0x20:
                        after += 1
                    if after >= b.size or b[after] != _QUOTE:
                        return -1
                    end, slashes = string(b, after + 1)
                    if end < 0:
                        return -1
                    span[0], span[1] = after, end + 1
                    at = end + 1
            continue
        if c in (_OPEN, _OPEN_LIST):
            depth += 1
        elif c in (_CLOSE, _CLOSE_LIST):
            depth -= 1
        at += 1
    return count


def is_clear(body: bytes) -> bool:
    """Whether every reader finds the same model, or none, in a body."""
    return find(np.frombuffer(body, np.uint8), np.zeros(2, np.int64)) in (0, 1)


def replaced(body: bytes, model: str) -> bytes | None:
    """Return a body with another model and all else as it was; None: it is unclear."""
    span = np.zeros(2, np.int64)
    if find(np.frombuffer(body, np.uint8), span) != 1:
        return None
    start, end = span.tolist()
    return body[:start] + orjson.dumps(model) + body[end:]
