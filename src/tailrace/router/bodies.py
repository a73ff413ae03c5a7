"""Reads the bodies of chats and completions in compiled code, without making objects of them.

A router needs of a body little more than the prompt's bytes, to hash and to measure them. Making a
string of each and putting these together takes longer than all else that is done with a long body.
So the prompt is written to a buffer as the bytes that :func:`asked.read_body` would find, in one
pass over the body.

What is read here is certainly JSON and means what the other reader finds in it. Whatever is out of
the ordinary (content in parts, tools, a conversation's id, a key twice, an error) is left to that
one: then this costs the look at what stands before it.
"""

# mypy: disallow-untyped-defs=False

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import jit
from tailrace.router.asked import HEADERS, Asked, read_body, read_headers

#: Kinds of bodies that are read here.
CHAT, COMPLETION = range(2)
#: Places of what was found: bytes of the prompt, where the model's name stands, whether the answer
#: streams, its most tokens (0: not said), and where in the prompt the latest earlier answer stands.
SIZE, MODEL_FROM, MODEL_TO, STREAMS, MOST, ANSWER_FROM, ANSWER_TO, FIGURES = range(8)
#: Room that the prompt's buffer needs beyond the body's bytes.
SPARE = 64
#: Longer bodies are left to the other reader, so that the buffer stays small.
LONGEST = 1 << 20

_KINDS = {"chat": CHAT, "completion": COMPLETION}
#: Names of models that are remembered; clients can send any.
_MOST_MODELS = 256
_new = object.__new__
_frombuffer, _U1 = np.frombuffer, np.dtype(np.uint8)

_ODD = -1
_DEEPEST = 60
_LONGEST_NUMBER = 17
_MOST_TOKENS = 2**31 - 1
_ROLE, _CONTENT = 0x1E, 0x1F

_U = np.uint64
_ONES, _HIGHS, _BLANKS = _U(0x0101010101010101), _U(0x8080808080808080), _U(0x2020202020202020)
_QUOTES, _SLASHES = _U(0x2222222222222222), _U(0x5C5C5C5C5C5C5C5C)


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


_MODEL, _STREAM, _MESSAGES, _PROMPT = map(_bytes, ("model", "stream", "messages", "prompt"))
_ROLE_KEY, _CONTENT_KEY, _CALLS, _ASSISTANT = map(
    _bytes, ("role", "content", "tool_calls", "assistant")
)
_MOST_1, _MOST_2, _MOST_3 = map(
    _bytes, ("max_completion_tokens", "max_tokens", "max_output_tokens")
)
_TOOLS, _SESSION, _CONVERSATION, _USER, _PRIORITY, _SALT = map(
    _bytes, ("tools", "session_id", "conversation", "user", "priority", "cache_salt")
)
_TRUE, _FALSE, _NULL = map(_bytes, ("true", "false", "null"))


# ---- strings ------------------------------------------------------------------------------------


@jit
def _special(w):
    """Whether a word of eight bytes holds a quote, a backslash, a control or non-ASCII byte."""
    quote, slash = w ^ _QUOTES, w ^ _SLASHES
    found = ((quote - _ONES) & ~quote) | ((slash - _ONES) & ~slash) | ((w - _BLANKS) & ~w) | w
    return found & _HIGHS


@jit
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


@jit
def _character_end(b, at):
    """Return the end of the non-ASCII character at ``at``, checked as UTF-8; _ODD: it is none."""
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
        return _ODD
    if at + more >= b.size or not low <= b[at + 1] <= high:
        return _ODD
    for k in range(2, more + 1):
        if not 0x80 <= b[at + k] <= 0xBF:
            return _ODD
    return at + more + 1


@jit
def _string(b, at):
    """Return where the string that begins behind the quote before ``at`` ends, and how many
    backslashes it has; the end is _ODD if it is not sound. Escapes are checked when read."""
    slashes = 0
    while True:
        at = _plain_until(b, at)
        end = min(b.size, at + 8)
        while at < end:
            c = b[at]
            if c == 0x22:
                return at, slashes
            if c < 0x20:
                return _ODD, slashes
            if c < 0x80:
                at += 1
                if c == 0x5C:
                    slashes += 1
                    if at == b.size or b[at] < 0x20 or b[at] >= 0x80:
                        return _ODD, slashes
                    at += 1
            else:
                at = _character_end(b, at)
                if at < 0:
                    return _ODD, slashes
        if at >= b.size:
            return _ODD, slashes


@jit
def _hex4(b, at):
    """Return the four hexadecimal digits at ``at`` as a number; _ODD: they are none."""
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
            return _ODD
        value = value * 16 + c
    return value


@jit
def _code_point(b, at, end):
    """Return the character whose escape has its digits at ``at``, and where it ends."""
    if at + 4 > end:
        return _ODD, at
    code = _hex4(b, at)
    at += 4
    if 0xD800 <= code <= 0xDFFF:
        if code >= 0xDC00 or at + 6 > end or b[at] != 0x5C or b[at + 1] != 0x75:
            return _ODD, at
        low = _hex4(b, at + 2)
        if not 0xDC00 <= low <= 0xDFFF:
            return _ODD, at
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        at += 6
    return code, at


@jit
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


@jit
def _put_escape(b, at, text, to):
    """Write what the escape at ``at`` stands for; return where both end, the latter _ODD if it
    is none."""
    if at + 1 >= b.size:
        return at, _ODD
    c = b[at + 1]
    at += 2
    if c == 0x75:
        code, at = _code_point(b, at, b.size)
        if code < 0:
            return at, _ODD
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
        return at, _ODD
    return at, to + 1


@jit
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


@jit
def _put_string(b, at, text, to):
    """Write what the string that begins behind the quote before ``at`` stands for; return where
    it ends here and there, the former _ODD if it is not sound."""
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
                return _ODD, to
            if c == 0x5C:
                at, to = _put_escape(b, at, text, to)
                if to < 0:
                    return _ODD, to
                continue
            last = at + 1 if c < 0x80 else _character_end(b, at)
            if last < 0:
                return _ODD, to
            while at < last:
                text[to] = b[at]
                at += 1
                to += 1
        if at >= b.size:
            return _ODD, to


# ---- values that are not looked at --------------------------------------------------------------


@jit
def _blank(b, at):
    """Return where the next byte that is no blank stands."""
    while at < b.size and (b[at] == 0x20 or b[at] == 0x0A or b[at] == 0x0D or b[at] == 0x09):
        at += 1
    return at


@jit
def _is(b, start, end, word):
    """Whether these bytes are that word."""
    if end - start != word.size:
        return False
    same = True
    for k in range(word.size):
        same &= b[start + k] == word[k]
    return same


@jit
def _digits(b, at):
    while at < b.size and 0x30 <= b[at] <= 0x39:
        at += 1
    return at


@jit
def _number(b, at):
    """Return the end of a number, and whether it is whole; exponents are left to others."""
    start = at
    if at < b.size and b[at] == 0x2D:
        at += 1
    first = at
    at = _digits(b, at)
    if at == first or (b[first] == 0x30 and at > first + 1):
        return _ODD, False
    whole = True
    if at < b.size and b[at] == 0x2E:
        whole = False
        point = at
        at = _digits(b, at + 1)
        if at == point + 1:
            return _ODD, False
    if at - start > _LONGEST_NUMBER or (at < b.size and (b[at] == 0x45 or b[at] == 0x65)):
        return _ODD, False
    return at, whole


@jit
def _scalar(b, at):
    """Return the end of a string, number or word; _ODD: it is none."""
    if at >= b.size:
        return _ODD
    c = b[at]
    if c == 0x22:
        end, slashes = _string(b, at + 1)
        if end < 0 or (slashes > 0 and not _sound_escapes(b, at + 1, end)):
            return _ODD
        return end + 1
    if c == 0x2D or 0x30 <= c <= 0x39:
        return _number(b, at)[0]
    if _is(b, at, min(b.size, at + 4), _TRUE) or _is(b, at, min(b.size, at + 4), _NULL):
        return at + 4
    if _is(b, at, min(b.size, at + 5), _FALSE):
        return at + 5
    return _ODD


@jit
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


@jit
def _key(b, at):
    """Return where a key ends and where its value begins; _ODD: there is no plain one."""
    if at >= b.size or b[at] != 0x22:
        return _ODD, at
    end, slashes = _string(b, at + 1)
    if end < 0 or slashes > 0:
        return _ODD, at
    at = _blank(b, end + 1)
    if at >= b.size or b[at] != 0x3A:
        return _ODD, at
    return end, _blank(b, at + 1)


@jit
def _value(b, at):
    """Return the end of any value; _ODD: it is none, or too deep."""
    objects, depth = _U(0), 0  # a bit per open bracket: whether it is an object's
    while True:
        if at >= b.size:
            return _ODD
        if b[at] == 0x7B or b[at] == 0x5B:
            if depth == _DEEPEST:
                return _ODD
            in_object = b[at] == 0x7B
            objects = (objects << _U(1)) | (_U(1) if in_object else _U(0))
            depth += 1
            at = _blank(b, at + 1)
            if at < b.size and b[at] != (0x7D if in_object else 0x5D):
                if in_object:
                    end, at = _key(b, at)
                    if end < 0:
                        return _ODD
                continue
        else:
            at = _scalar(b, at)
            if at < 0:
                return _ODD
        # A value has ended, or an empty object or array is about to.
        while depth > 0:
            in_object = (objects & _U(1)) != _U(0)
            at = _blank(b, at)
            if at >= b.size:
                return _ODD
            if b[at] == 0x2C:
                at = _blank(b, at + 1)
                if in_object:
                    end, at = _key(b, at)
                    if end < 0:
                        return _ODD
                break
            if b[at] != (0x7D if in_object else 0x5D):
                return _ODD
            at += 1
            objects >>= _U(1)
            depth -= 1
        if depth == 0:
            return at


# ---- bodies -------------------------------------------------------------------------------------


@jit
def _next(b, at, closing):
    """Behind a member: return where the next begins, and whether there is one; _ODD: neither."""
    at = _blank(b, at)
    if at < b.size and b[at] == 0x2C:
        return _blank(b, at + 1), True
    if at < b.size and b[at] == closing:
        return at + 1, False
    return _ODD, False


@jit
def _message(b, at, text, found):
    """Read a message and write it behind what is in ``text``; return its end."""
    if at >= b.size or b[at] != 0x7B:
        return _ODD
    role_from = role_to = content_from = 0
    to = began = found[SIZE]
    text[to] = _ROLE
    text[to + 1] = _CONTENT
    to += 2
    has_role = has_content = False
    at = _blank(b, at + 1)
    more = True
    while more:
        start = at + 1
        end, at = _key(b, at)
        if end < 0 or at >= b.size:
            return _ODD
        if _is(b, start, end, _ROLE_KEY):
            if has_role or b[at] != 0x22:
                return _ODD
            has_role, role_from = True, at + 1
            role_to, slashes = _string(b, at + 1)
            if role_to < 0 or slashes > 0:
                return _ODD
            for k in range(role_from, role_to):
                text[to - 1] = b[k]
                to += 1
            text[to - 1] = _CONTENT
            at = role_to + 1
        elif _is(b, start, end, _CONTENT_KEY):
            if has_content or b[at] != 0x22:
                return _ODD
            has_content = True
            if has_role:
                at, to = _put_string(b, at + 1, text, to)
            else:  # it stands behind the role
                content_from = at + 1
                at, slashes = _string(b, at + 1)
            if at < 0:
                return _ODD
            at += 1
        elif _is(b, start, end, _CALLS):
            return _ODD
        else:
            at = _value(b, at)
            if at < 0:
                return _ODD
        at, more = _next(b, at, 0x7D)
        if at < 0:
            return _ODD
    if content_from > 0:
        end, to = _put_string(b, content_from, text, to)
        if end < 0:
            return _ODD
    if _is(b, role_from, role_to, _ASSISTANT):
        found[ANSWER_FROM], found[ANSWER_TO] = began, to
    found[SIZE] = to
    return at


@jit
def _messages(b, at, text, found):
    if b[at] != 0x5B:
        return _ODD
    at = _blank(b, at + 1)
    more = True
    while more:
        at = _message(b, at, text, found)
        if at < 0:
            return _ODD
        at, more = _next(b, at, 0x5D)
        if at < 0:
            return _ODD
    return at


@jit
def _tokens(b, at):
    """Return the end of a number of tokens, and the number; 0: not said."""
    if _is(b, at, min(b.size, at + 4), _NULL):
        return at + 4, 0
    end, whole = _number(b, at)
    if not whole:
        return _ODD, 0
    value = 0
    for k in range(at, end):
        if b[k] != 0x2D:
            value = value * 10 + int(b[k] - 0x30)
    return end, 0 if b[at] == 0x2D else min(value, _MOST_TOKENS)


@jit
def _rare(b, start, end):
    """Whether a key is one that only the other reader understands."""
    return (
        _is(b, start, end, _TOOLS) or _is(b, start, end, _SESSION)
        or _is(b, start, end, _CONVERSATION) or _is(b, start, end, _USER)
        or _is(b, start, end, _PRIORITY) or _is(b, start, end, _SALT)
    )  # fmt: skip


@jit
def read(b, kind, text, found):
    """Read a body uint8 [n] of a kind; return whether it could be.

    ``text`` uint8 [>= n + SPARE] takes the prompt, ``found`` int64 [FIGURES] all else.
    """
    for k in range(FIGURES):
        found[k] = 0
    at = _blank(b, 0)
    if at >= b.size or b[at] != 0x7B:
        return False
    at = _blank(b, at + 1)
    # Each known key once: model, prompt or messages, stream, three limits.
    seen = 0
    most_1 = most_2 = most_3 = 0
    more = True
    while more:
        start = at + 1
        end, at = _key(b, at)
        if end < 0 or at >= b.size:
            return False
        bit = 0
        if _is(b, start, end, _MODEL):
            bit = 1
            if b[at] != 0x22:
                return False
            to, slashes = _string(b, at + 1)
            if to < 0 or slashes > 0:
                return False
            found[MODEL_FROM], found[MODEL_TO] = at + 1, to
            at = to + 1
        elif kind == CHAT and _is(b, start, end, _MESSAGES):
            bit = 2
            if seen & bit == 0:
                at = _messages(b, at, text, found)
        elif kind == COMPLETION and _is(b, start, end, _PROMPT):
            bit = 2
            if b[at] != 0x22:
                return False
            at, found[SIZE] = _put_string(b, at + 1, text, 0)
            if at < 0:
                return False
            at += 1
        elif _is(b, start, end, _STREAM):
            bit = 4
            found[STREAMS] = 1 if _is(b, at, min(b.size, at + 4), _TRUE) else 0
            at = _value(b, at)
        elif _is(b, start, end, _MOST_1):
            bit = 8
            at, most_1 = _tokens(b, at)
        elif _is(b, start, end, _MOST_2):
            bit = 16
            at, most_2 = _tokens(b, at)
        elif _is(b, start, end, _MOST_3):
            bit = 32
            at, most_3 = _tokens(b, at)
        elif _rare(b, start, end):
            return False
        else:
            at = _value(b, at)
        if at < 0 or seen & bit != 0:
            return False
        seen |= bit
        at, more = _next(b, at, 0x7D)
        if at < 0:
            return False
    found[MOST] = most_1 if most_1 > 0 else (most_2 if most_2 > 0 else most_3)
    return found[SIZE] > 0 and _blank(b, at) == b.size


class Bodies:
    """Reads bodies one after the other. The prompt of one is gone when the next is read."""

    def __init__(self) -> None:
        self._text = np.empty(1 << 16, np.uint8)
        self._found = np.zeros(FIGURES, np.int64)
        self._models: dict[bytes, str] = {}
        self.read("chat", {}, b'{"messages":[{"role":"user","content":"a"}]}')  # compile it now

    def read(self, kind: str, headers: Mapping[bytes, bytes], body: bytes) -> Asked:
        """Read what a request asks for; raise BadRequest if its body is no JSON.

        As :func:`asked.read_body`, but the prompt may stand in ``data`` instead of ``text``.
        """
        code = _KINDS.get(kind)
        size = len(body)
        if code is None or not 0 < size <= LONGEST:
            return read_body(kind, headers, body)
        if size + SPARE > self._text.size:
            self._text = np.empty(2 * size, np.uint8)
        if not read(_frombuffer(body, _U1), code, self._text, self._found):
            return read_body(kind, headers, body)
        length, model_from, model_to, streams, most, answer_from, answer_to = self._found.tolist()
        asked = _new(Asked)
        asked.kind = kind
        name = body[model_from:model_to]
        asked.model = self._models.get(name) or self._model(name)
        asked.streams = streams == 1
        asked.max_tokens = most or None
        asked.session = None
        asked.priority = 0
        asked.ttft_slo_s = None
        asked.data = self._text[:length]
        if answer_to:
            asked.answer = (answer_from, answer_to)
        if not HEADERS.isdisjoint(headers):
            read_headers(asked, headers)
        return asked

    def _model(self, name: bytes) -> str:
        if len(self._models) >= _MOST_MODELS:
            self._models.clear()
        model = self._models[name] = name.decode()
        return model
