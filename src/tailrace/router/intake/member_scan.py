"""Finds a member of a JSON object by its name, in compiled code, without parsing the object."""

# mypy: disallow-untyped-defs=False

from tailrace.compiled import jit
from tailrace.router.intake.json_scan import is_word, string, value

_QUOTE, _OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 0x22, 0x7B, 0x7D, 0x5B, 0x5D
_COLON = 0x3A


@jit
def find(b, name, span):
    """Return how many members of the object uint8 [n] have a ``name`` [k]; -1: it is unclear.

    ``b`` is known to be JSON. ``span`` int64 [2] gets the place of the last one's value, quotes
    included. Keys with escapes, which readers may take for another, make it unclear.
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
                if is_word(b, start + 1, end, name):
                    count += 1
                    after += 1
                    while after < b.size and b[after] <= 0x20:
                        after += 1
                    at = value(b, after)
                    if at < 0:
                        return -1
                    span[0], span[1] = after, at
            continue
        if c in (_OPEN, _OPEN_LIST):
            depth += 1
        elif c in (_CLOSE, _CLOSE_LIST):
            depth -= 1
        at += 1
    return count
