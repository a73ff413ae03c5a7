"""Finds the ``model`` of a body that is known to be JSON, and replaces it.

A body can name its model twice, or write the key with escapes, so that the router and a server read
different models. Where the name decides what a client may use, such a body is refused.
"""

import numpy as np
import orjson

from tailrace.router.intake import member_scan
from tailrace.router.intake.json_scan import word

_MODEL = word("model")
_QUOTE = 0x22


def _find(body: bytes) -> tuple[int, int, int]:
    """How many members are called ``model``, and the place of the last one's value.

    -1: it is unclear, or the value is no string.
    """
    b, span = np.frombuffer(body, np.uint8), np.zeros(2, np.int64)
    count = int(member_scan.find(b, _MODEL, span))
    start, end = span.tolist()
    return -1 if count > 0 and b[start] != _QUOTE else count, start, end


def is_clear(body: bytes) -> bool:
    """Whether every reader finds the same model, or none, in a body."""
    return _find(body)[0] in (0, 1)


def replaced(body: bytes, model: str) -> bytes | None:
    """Return a body with another model and all else as it was; None: it is unclear."""
    count, start, end = _find(body)
    if count != 1:
        return None
    return body[:start] + orjson.dumps(model) + body[end:]
