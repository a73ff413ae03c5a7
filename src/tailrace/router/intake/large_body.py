"""Reads large bodies in compiled code, without making objects of them.

A parser that makes an object of every value takes seconds and gigabytes for 32 MB of short values,
such as token ids or empty lists, and cannot be interrupted: no other client is served meanwhile.
This reader takes a few nanoseconds per byte, and other threads run while it works. It finds what
:func:`request_body.read_body` finds, with two differences. Tools and tool calls are taken as the
client wrote them, but for blanks between values. And where a prompt has a shape that is not known
here, the body as a whole stands for it.

A body that cannot be read is refused: one that is no JSON, repeats a key or writes it with escapes,
or is nested more than 60 levels deep. What matters to the router must not be hidden from it.
"""

# mypy: disallow-untyped-defs=False

import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tailrace.compiled import inner, unlocked
from tailrace.router.intake.hashing import fingerprint
from tailrace.router.intake.json_scan import (
    FALSE,
    NULL,
    ODD,
    blank,
    is_word,
    key,
    next_member,
    number,
    put_string,
    value,
    word,
)
from tailrace.router.intake.request_body import (
    MEDIA_CHARS,
    READERS,
    BadRequest,
    RequestBody,
    read_fields,
    read_headers,
)

#: Most keys of a body.
MAX_KEYS = 256
#: Longest value that is parsed, in bytes, unless it is a string.
PARSED_BYTES = 4096
#: Room of the prompt's buffer beyond twice the body's bytes: a token id of one digit becomes four
#: bytes.
SPARE = 64
#: Keys whose values say something other than the prompt.
FIELDS = frozenset(
    ("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "session_id",
     "conversation", "user", "priority", "cache_salt", "previous_response_id")
)  # fmt: skip

# How a value is written as a part of the prompt.
JSON, SYSTEM, MESSAGES, USER, PROMPTS = range(5)
#: What the prompt of each kind of request consists of, in order.
RECIPES: dict[str, tuple[tuple[str, int], ...]] = {
    "chat": (("tools", JSON), ("messages", MESSAGES)),
    "completion": (("prompt", PROMPTS),),
    "response": (("tools", JSON), ("instructions", SYSTEM), ("input", USER)),
    "message": (("tools", JSON), ("system", SYSTEM), ("messages", MESSAGES)),
    **dict.fromkeys(("embedding", "pooling", "classify"), (("input", PROMPTS),)),
}

# What is found: bytes of the prompt, where in it the latest earlier answer stands, whether there
# are images or the like, token ids in it, prompts of a batch.
_SIZE, _ANSWER_FROM, _ANSWER_TO, _MEDIA, _IDS, _PROMPTS, _FIGURES = range(7)
_ROLE, _CONTENT, _NEXT = 0x1E, 0x1F, 0x1D
_MOST_ID = 2**31 - 1
_ROLE_KEY, _CONTENT_KEY, _CALLS, _TEXT = map(word, ("role", "content", "tool_calls", "text"))
_ASSISTANT, _SYSTEM_ROLE, _USER_ROLE = map(word, ("assistant", "system", "user"))
_HEX_DIGITS = word("0123456789abcdef")
_U1 = np.dtype(np.uint8)


@unlocked
def outline(b, spans):
    """Check that ``b`` uint8 [n] is an object in JSON, and find its members.

    ``spans`` int64 [m, 4] takes where each key and each value begins and ends. Returns their
    number, or ODD if it is none, or one that is not read here.
    """
    at = blank(b, 0)
    if at >= b.size or b[at] != 0x7B:
        return ODD
    at = blank(b, at + 1)
    if at < b.size and b[at] == 0x7D:
        return 0 if blank(b, at + 1) == b.size else ODD
    count = 0
    more = True
    while more:
        start = at + 1
        end, at = key(b, at)
        if end < 0 or count == spans.shape[0]:
            return ODD
        spans[count, 0], spans[count, 1], spans[count, 2] = start, end, at
        at = value(b, at)
        if at < 0:
            return ODD
        spans[count, 3] = at
        count += 1
        at, more = next_member(b, at, 0x7D)
        if at < 0:
            return ODD
    return count if blank(b, at) == b.size else ODD


# ---- parts of a prompt. All values were checked by ``outline``. ---------------------------------


@inner
def _put_word(word, text, to):
    for k in range(word.size):
        text[to + k] = word[k]
    return to + word.size


@inner
def _is_something(b, at, end):
    """Whether a value is none of null, false, 0 and the empty ones."""
    c = b[at]
    if c == 0x22:
        return end > at + 2
    if c == 0x5B or c == 0x7B:
        return blank(b, at + 1) != end - 1
    if is_word(b, at, end, NULL) or is_word(b, at, end, FALSE):
        return False
    for k in range(at, end):
        if b[k] == 0x45 or b[k] == 0x65:
            return False
        if 0x31 <= b[k] <= 0x39 or b[k] == 0x74:
            return True
    return False


@inner
def _put_json(b, at, end, text, to):
    """Write a value without the blanks between its parts."""
    quoted = False
    while at < end:
        c = b[at]
        if quoted or not (c == 0x20 or c == 0x0A or c == 0x0D or c == 0x09):
            text[to] = c
            to += 1
        if c == 0x22:
            quoted = not quoted
        elif c == 0x5C:  # the next character is escaped
            at += 1
            text[to] = b[at]
            to += 1
        at += 1
    return to


@inner
def _put_hash(b, at, end, text, to):
    """Write a hash of a value in place of it, unless that would be longer."""
    if end - at <= MEDIA_CHARS:
        return _put_json(b, at, end, text, to)
    number = fingerprint(b, at, end)
    for k in range(MEDIA_CHARS):
        text[to + MEDIA_CHARS - 1 - k] = _HEX_DIGITS[int(number & np.uint64(15))]
        number >>= np.uint64(4)
    return to + MEDIA_CHARS


@inner
def _first(b, at, closing):
    """Return where the first member of an array or object begins, and whether it has one."""
    at = blank(b, at + 1)
    return at, b[at] != closing


@inner
def _member(b, at, word):
    """Return where the value of an object's key begins; 0: it has no such key, ODD: unclear."""
    found = 0
    at, more = _first(b, at, 0x7D)
    while more:
        start = at + 1
        end, at = key(b, at)
        if end < 0:
            return ODD
        if is_word(b, start, end, word):
            found = at
        at, more = next_member(b, value(b, at), 0x7D)
    return found


@inner
def _put_content(b, at, text, to, found):
    """Write the content of a message: a text, or the texts of its parts; ODD: it is unclear."""
    if b[at] == 0x22:
        return put_string(b, at + 1, text, to)[1]
    if b[at] != 0x5B:
        return to
    at, more = _first(b, at, 0x5D)
    while more:
        end = value(b, at)
        if b[at] == 0x22:
            to = put_string(b, at + 1, text, to)[1]
        elif b[at] == 0x7B:
            inner = _member(b, at, _TEXT)
            if inner < 0:
                return ODD
            if inner > 0 and b[inner] == 0x22:
                to = put_string(b, inner + 1, text, to)[1]
            else:
                found[_MEDIA] = 1
                to = _put_hash(b, at, end, text, to)
        at, more = next_member(b, end, 0x5D)
    return to


@inner
def _put_message(b, at, text, to, found):
    """Write a message; ODD: it is unclear. What is no object is no message."""
    if b[at] != 0x7B:
        return to
    role, content = _member(b, at, _ROLE_KEY), _member(b, at, _CONTENT_KEY)
    calls = _member(b, at, _CALLS)
    if role < 0 or content < 0 or calls < 0:
        return ODD
    began = to
    text[to] = _ROLE
    to += 1
    if role > 0 and b[role] == 0x22:
        to = put_string(b, role + 1, text, to)[1]
    answers = is_word(text, began + 1, to, _ASSISTANT)
    text[to] = _CONTENT
    to += 1
    if content > 0:
        to = _put_content(b, content, text, to, found)
        if to < 0:
            return ODD
    if calls > 0:
        end = value(b, calls)
        if _is_something(b, calls, end):
            to = _put_json(b, calls, end, text, to)
    if answers:
        found[_ANSWER_FROM], found[_ANSWER_TO] = began, to
    return to


@inner
def _put_messages(b, at, text, to, found):
    if b[at] != 0x5B:
        return ODD
    at, more = _first(b, at, 0x5D)
    while more:
        to = _put_message(b, at, text, to, found)
        if to < 0:
            return ODD
        at, more = next_member(b, value(b, at), 0x5D)
    return to


@inner
def _put_ids(b, at, text, to, found):
    """Write the token ids of a list as four bytes each; ODD: something else is among them."""
    at, more = _first(b, at, 0x5D)
    while more:
        end, whole = number(b, at)
        if not whole or b[at] == 0x2D or end - at > 10:
            return ODD
        token = 0
        for k in range(at, end):
            token = token * 10 + int(b[k] - 0x30)
        if token > _MOST_ID:
            return ODD
        for k in range(4):
            text[to + k] = (token >> (8 * k)) & 255
        to += 4
        found[_IDS] += 1
        at, more = next_member(b, end, 0x5D)
    return to


@inner
def _put_prompts(b, at, text, to, found):
    """Write a prompt, or a list of them: texts or token ids; ODD: it is none."""
    if b[at] == 0x22:
        return put_string(b, at + 1, text, to)[1]
    if b[at] != 0x5B:
        return ODD
    first, more = _first(b, at, 0x5D)
    if b[first] == 0x2D or 0x30 <= b[first] <= 0x39:
        return _put_ids(b, at, text, to, found)
    at, of_ids = first, b[first] == 0x5B
    count = texts = 0
    while more:
        if of_ids and b[at] == 0x5B:
            to = _put_ids(b, at, text, to, found)
            if to < 0:
                return ODD
        elif not of_ids and b[at] == 0x22:
            if texts > 0:
                text[to] = _NEXT
                to += 1
            to = put_string(b, at + 1, text, to)[1]
            texts += 1
        count += 1
        at, more = next_member(b, value(b, at), 0x5D)
    found[_PROMPTS] = max(1, count if of_ids else texts)
    return to


@unlocked
def put(b, how, at, end, text, found):
    """Write the value at ``at`` as the next part of a prompt; return whether that is possible.

    ``text`` uint8 [>= 2 n + SPARE] takes the prompt, ``found`` int64 [_FIGURES] what is known of
    it.
    """
    to = found[_SIZE]
    if how == JSON:
        if _is_something(b, at, end):
            to = _put_json(b, at, end, text, to)
    elif how == PROMPTS:
        to = _put_prompts(b, at, text, to, found)
    elif how == MESSAGES or (how == USER and b[at] == 0x5B):
        to = _put_messages(b, at, text, to, found)
    elif b[at] == 0x22 if how == USER else _is_something(b, at, end):
        text[to] = _ROLE
        to = _put_word(_SYSTEM_ROLE if how == SYSTEM else _USER_ROLE, text, to + 1)
        text[to] = _CONTENT
        to = _put_content(b, at, text, to + 1, found)
    found[_SIZE] = max(to, 0)
    return to >= 0


def read_large(kind: str, headers: Mapping[bytes, bytes], body: bytes) -> RequestBody:
    """Read what a request asks for, as :func:`request_body.read_body`; any thread may call it."""
    b = np.frombuffer(body, _U1)
    spans = np.empty((MAX_KEYS, 4), np.int64)
    count = outline(b, spans)
    places: dict[bytes, tuple[int, int]] = {}
    for start, end, value_from, value_to in spans[: max(count, 0)].tolist():
        places[body[start:end]] = (value_from, value_to)
    if len(places) != count:
        raise BadRequest(
            "the body is not JSON, or not plain: a body of this size must not repeat keys, have "
            f"more than {MAX_KEYS}, write them with escapes, or be nested over 60 levels deep"
        )
    request = RequestBody(kind)
    read_fields(request, _fields(body, places))
    request.names_priority = b"priority" in places
    _read_prompt(request, b, places)
    read_headers(request, headers)
    return request


def _fields(body: bytes, places: dict[bytes, tuple[int, int]]) -> dict[str, Any]:
    """Return the short values, and strings of any length, that say more than the prompt."""
    found = {}
    for name in FIELDS:
        start, end = places.get(name.encode(), (0, 0))
        if 0 < end - start <= PARSED_BYTES or body[start : start + 1] == b'"':
            found[name] = orjson.loads(body[start:end])
    return found


def _read_prompt(
    request: RequestBody, b: NDArray[np.uint8], places: dict[bytes, tuple[int, int]]
) -> None:
    if request.kind not in READERS:
        return  # its text counts for nothing
    recipe = RECIPES.get(request.kind, ())
    if recipe == RECIPES["embedding"] and b"messages" in places:
        recipe = RECIPES["chat"]
    found = np.zeros(_FIGURES, np.int64)
    # From the system, to which it returns at once: glibc would keep it in this thread's arena.
    text = np.frombuffer(mmap.mmap(-1, 2 * b.size + SPARE), _U1)
    good = bool(recipe)
    for name, how in recipe:
        start, end = places.get(name.encode(), (0, 0))
        if start:
            good = good and put(b, how, start, end, text, found)
        elif how in (MESSAGES, PROMPTS):
            good = False
    size, answer_from, answer_to, media, ids, prompts = found.tolist()[:_FIGURES]
    if not good or not size:
        request.data = b
        request.has_media = True  # its length says little about its tokens
        return
    request.data = text[:size]  # which goes as soon as it is hashed, and the whole buffer with it
    request.ids = ids
    request.prompts = prompts or 1
    request.has_media = media == 1
    if answer_to:
        request.answer = (answer_from, answer_to)
