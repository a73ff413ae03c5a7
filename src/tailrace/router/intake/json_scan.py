"""Scans JSON in compiled code: where strings, numbers and values end, and what strings stand for.

For :mod:`tailrace.router.intake.fast_body`. Every function takes the bytes uint8 [n] and a
place in them, and returns a place, or ODD where what stands there is not sound, or is left to
another reader.
"""

# mypy: disallow-untyped-defs=False

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner

ODD = -1
_DEEPEST = 60
_LONGEST_NUMBER, _LONGEST_PLAIN_NUMBER = 17, 300

_U = np.uint64
_ONES, _HIGHS, _BLANKS = _U(0x0101010101010101), _U(0x8080808080808080), _U(0x2020202020202020)
_QUOTES, _SLASHES = _U(0x2222222222222222), _U(0x5C5C5C5C5C5C5C5C)


def word(text: str) -> NDArray[np.uint8]:
    """Return the bytes of a text, to compare with."""
    return np.frombuffer(text.encode(), np.uint8)


TRUE, FALSE, NULL = map(word, ("true", "false", "null"))


# ---- strings ------------------------------------------------------------------------------------


@inner
def _special(w):
    """Whether a word of eight bytes holds a quote, a backslash, a control or non-ASCII byte."""
    quote, slash = w ^ _QUOTES, w ^ _SLASHES
    found = ((quote - _ONES) & ~quote) | ((slash - _ONES) & ~slash) | ((w - _BLANKS) & ~w) | w
    return found & _HIGHS


@inner
def _plain_until(b, at):
    """Return how far from ``at`` nothing special stands, but for the last few bytes."""
    words = b[at : at + (b.size - at) // 8 * 8].view(np.uint64)
    k = 0
    while k + 8 <= words.size:
        found = _U(0)
        for j in range(8):  # without a way out, so that it vectorises
            found |= _special(words[k + j])
        if found != _U(0):
            break
        k += 8
    while k < words.size and _special(words[k]) == _U(0):
        k += 1
    return at + 8 * k


@inner
def _character_end(b, at):
    """Return the end of the non-ASCII character at ``at``, checked as UTF-8; ODD: it is none."""
    c = b[at]
    low, high, more = 0x80, 0xBF, 1
    if 0xC2 <= c <= 0xDF:
        pass
    elif 0xE0 <= c <= 0xEF:
        more = 2
        if c == 0xE0:
            low = 0xA0
        elif c == 0xED:
            high = 0x9F
    elif 0xF0 <= c <= 0xF4:
        more = 3
        if c == 0xF0:
            low = 0x90
        elif c == 0xF4:
            high = 0x8F
    else:
        return ODD
    if at + more >= b.size or not low <= b[at + 1] <= high:
        return ODD
    for k in range(2, more + 1):
        if not 0x80 <= b[at + k] <= 0xBF:
            return ODD
    return at + more + 1


@inner
def string(b, at):
    """Return where the string that begins behind the quote before ``at`` ends, and how many
    backslashes it has; the end is ODD if it is not sound. Escapes are checked when read."""
    slashes = 0
    while True:
        at = _plain_until(b, at)
        end = min(b.size, at + 8)
        while at < end:
            c = b[at]
            if c == 0x22:
                return at, slashes
            if c < 0x20:
                return ODD, slashes
            if c < 0x80:
                at += 1
                if c == 0x5C:
                    slashes += 1
                    if at == b.size or b[at] < 0x20 or b[at] >= 0x80:
                        return ODD, slashes
                    at += 1
            else:
                at = _character_end(b, at)
                if at < 0:
                    return ODD, slashes
        if at >= b.size:
            return ODD, slashes


@inner
def _hex4(b, at):
    """Return the four hexadecimal digits at ``at`` as a number; ODD: they are none."""
    value = 0
    for k in range(at, at + 4):
        c = int(b[k])
        if 0x30 <= c <= 0x39:
            c -= 0x30
        elif 0x41 <= c <= 0x46:
            c -= 0x37
        elif 0x61 <= c <= 0x66:
            c -= 0x57
        else:
            return ODD
        value = value * 16 + c
    return value


@inner
def _code_point(b, at, end):
    """Return the character whose escape has its digits at ``at``, and where it ends."""
    if at + 4 > end:
        return ODD, at
    code = _hex4(b, at)
    at += 4
    if 0xD800 <= code <= 0xDFFF:
        if code >= 0xDC00 or at + 6 > end or b[at] != 0x5C or b[at + 1] != 0x75:
            return ODD, at
        low = _hex4(b, at + 2)
        if not 0xDC00 <= low <= 0xDFFF:
            return ODD, at
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        at += 6
    return code, at


@inner
def _put_character(text, to, code):
    """Write a character as UTF-8; return where it ends."""
    if code < 0x80:
        text[to] = code
        return to + 1
    if code < 0x800:
        text[to] = 0xC0 | (code >> 6)
    else:
        if code < 0x10000:
            text[to] = 0xE0 | (code >> 12)
        else:
            text[to] = 0xF0 | (code >> 18)
            to += 1
            text[to] = 0x80 | ((code >> 12) & 0x3F)
        to += 1
        text[to] = 0x80 | ((code >> 6) & 0x3F)
    text[to + 1] = 0x80 | (code & 0x3F)
    return to + 2


@inner
def _put_escape(b, at, text, to):
    """Write what the escape at ``at`` stands for; return where both end, the latter ODD if it
    is none."""
    if at + 1 >= b.size:
        return at, ODD
    c = b[at + 1]
    at += 2
    if c == 0x75:
        code, at = _code_point(b, at, b.size)
        if code < 0:
            return at, ODD
        return at, _put_character(text, to, code)
    if c == 0x22 or c == 0x5C or c == 0x2F:
        text[to] = c
    elif c == 0x6E:
        text[to] = 0x0A
    elif c == 0x74:
        text[to] = 0x09
    elif c == 0x72:
        text[to] = 0x0D
    elif c == 0x62:
        text[to] = 0x08
    elif c == 0x66:
        text[to] = 0x0C
    else:
        return at, ODD
    return at, to + 1


@inner
def _put_plain(b, at, text, to):
    """Write what stands from ``at`` on as long as it is nothing special, but for the last few
    bytes; return where it ends in ``b``."""
    size = (b.size - at) // 8
    source = b[at : at + 8 * size].view(np.uint64)
    target = text[to : to + 8 * size].view(np.uint64)
    k = 0
    while k + 8 <= size:
        found = _U(0)
        for j in range(8):
            found |= _special(source[k + j])
        if found != _U(0):
            break
        for j in range(8):
            target[k + j] = source[k + j]
        k += 8
    while k < size and _special(source[k]) == _U(0):
        target[k] = source[k]
        k += 1
    return at + 8 * k


@inner
def put_string(b, at, text, to):
    """Write what the string that begins behind the quote before ``at`` stands for; return where
    it ends here and there, the former ODD if it is not sound."""
    while True:
        end = _put_plain(b, at, text, to)
        to += end - at
        at = end
        end = min(b.size, at + 8)
        while at < end:
            c = b[at]
            if c == 0x22:
                return at, to
            if c < 0x20:
                return ODD, to
            if c == 0x5C:
                at, to = _put_escape(b, at, text, to)
                if to < 0:
                    return ODD, to
                continue
            last = at + 1 if c < 0x80 else _character_end(b, at)
            if last < 0:
                return ODD, to
            while at < last:
                text[to] = b[at]
                at += 1
                to += 1
        if at >= b.size:
            return ODD, to


# ---- values that are not looked at --------------------------------------------------------------


@inner
def blank(b, at):
    """Return where the next byte that is no blank stands."""
    while at < b.size and (b[at] == 0x20 or b[at] == 0x0A or b[at] == 0x0D or b[at] == 0x09):
        at += 1
    return at


@inner
def is_word(b, start, end, word):
    """Whether these bytes are that word."""
    if end - start != word.size:
        return False
    same = True
    for k in range(word.size):
        same &= b[start + k] == word[k]
    return same


@inner
def _digits(b, at):
    while at < b.size and 0x30 <= b[at] <= 0x39:
        at += 1
    return at


@inner
def number(b, at):
    """Return the end of a number, and whether it is whole; exponents are left to others."""
    start = at
    if at < b.size and b[at] == 0x2D:
        at += 1
    first = at
    at = _digits(b, at)
    if at == first or (b[first] == 0x30 and at > first + 1):
        return ODD, False
    whole = True
    if at < b.size and b[at] == 0x2E:
        whole = False
        point = at
        at = _digits(b, at + 1)
        if at == point + 1:
            return ODD, False
    if at - start > _LONGEST_NUMBER or (at < b.size and (b[at] == 0x45 or b[at] == 0x65)):
        return ODD, False
    return at, whole


@inner
def _number_end(b, at):
    """Return the end of any number that has a finite value; ODD: it is none, or very long."""
    start = at
    if b[at] == 0x2D:
        at += 1
    first = at
    at = _digits(b, at)
    if at == first or (b[first] == 0x30 and at > first + 1):
        return ODD
    if at < b.size and b[at] == 0x2E:
        point = at
        at = _digits(b, at + 1)
        if at == point + 1:
            return ODD
    longest = _LONGEST_PLAIN_NUMBER
    if at < b.size and (b[at] == 0x45 or b[at] == 0x65):
        longest = _LONGEST_NUMBER
        at += 1
        if at < b.size and (b[at] == 0x2B or b[at] == 0x2D):
            at += 1
        first = at
        at = _digits(b, at)
        if at == first or at > first + 2:
            return ODD
    return at if at - start <= longest else ODD


@inner
def _scalar(b, at):
    """Return the end of a string, number or word; ODD: it is none."""
    if at >= b.size:
        return ODD
    c = b[at]
    if c == 0x22:
        end, slashes = string(b, at + 1)
        if end < 0 or (slashes > 0 and not _sound_escapes(b, at + 1, end)):
            return ODD
        return end + 1
    if c == 0x2D or 0x30 <= c <= 0x39:
        return _number_end(b, at)
    if is_word(b, at, min(b.size, at + 4), TRUE) or is_word(b, at, min(b.size, at + 4), NULL):
        return at + 4
    if is_word(b, at, min(b.size, at + 5), FALSE):
        return at + 5
    return ODD


@inner
def _sound_escapes(b, at, end):
    """Whether all escapes of a string are such."""
    while at < end:
        if b[at] != 0x5C:
            at += 1
            continue
        c = b[at + 1]
        at += 2
        if c == 0x75:
            code, at = _code_point(b, at, end)
            if code < 0:
                return False
        elif not (
            c == 0x22 or c == 0x5C or c == 0x2F or c == 0x6E or c == 0x74 or c == 0x72
            or c == 0x62 or c == 0x66
        ):  # fmt: skip
            return False
    return at == end


@inner
def _any_key(b, at):
    """Return where a key ends, where its value begins, and its backslashes; ODD: no key."""
    if at >= b.size or b[at] != 0x22:
        return ODD, at, 0
    end, slashes = string(b, at + 1)
    if end < 0:
        return ODD, at, 0
    at = blank(b, end + 1)
    if at >= b.size or b[at] != 0x3A:
        return ODD, at, 0
    return end, blank(b, at + 1), slashes


@inner
def key(b, at):
    """Return where a key ends and where its value begins; ODD: there is no plain one."""
    end, value_at, slashes = _any_key(b, at)
    return (ODD if slashes > 0 else end), value_at


@inner
def _inner_key(b, at):
    """As :func:`key`, for objects whose keys mean nothing here: they may have escapes."""
    end, value_at, slashes = _any_key(b, at)
    if slashes > 0 and not _sound_escapes(b, at + 1, end):
        end = ODD
    return end, value_at


@inner
def value(b, at):
    """Return the end of any value; ODD: it is none, or too deep."""
    objects, depth = _U(0), 0  # a bit per open bracket: whether it is an object's
    while True:
        if at >= b.size:
            return ODD
        if b[at] == 0x7B or b[at] == 0x5B:
            if depth == _DEEPEST:
                return ODD
            in_object = b[at] == 0x7B
            objects = (objects << _U(1)) | (_U(1) if in_object else _U(0))
            depth += 1
            at = blank(b, at + 1)
            if at < b.size and b[at] != (0x7D if in_object else 0x5D):
                if in_object:
                    end, at = _inner_key(b, at)
                    if end < 0:
                        return ODD
                continue
        else:
            at = _scalar(b, at)
            if at < 0:
                return ODD
        # A value has ended, or an empty object or array is about to.
        while depth > 0:
            in_object = (objects & _U(1)) != _U(0)
            at = blank(b, at)
            if at >= b.size:
                return ODD
            if b[at] == 0x2C:
                at = blank(b, at + 1)
                if in_object:
                    end, at = _inner_key(b, at)
                    if end < 0:
                        return ODD
                break
            if b[at] != (0x7D if in_object else 0x5D):
                return ODD
            at += 1
            objects >>= _U(1)
            depth -= 1
        if depth == 0:
            return at


@inner
def next_member(b, at, closing):
    """Behind a member: return where the next begins, and whether there is one; ODD: neither."""
    at = blank(b, at)
    if at < b.size and b[at] == 0x2C:
        return blank(b, at + 1), True
    if at < b.size and b[at] == closing:
        return at + 1, False
    return ODD, False
