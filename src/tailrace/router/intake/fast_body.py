"""Reads the bodies of chats and completions in compiled code, without making objects of them.

A router needs little more of a body than the prompt's bytes, to hash and to measure them. Making a
string of each message and joining them takes longer than everything else done with a long body. So
the prompt is written to a buffer, as the bytes that :func:`request_body.read_body` would find, in
one pass over the body.

Against ``orjson``, on whole requests through the router (``benchmarks/bench_bodies.py``,
docs/results/bench_bodies.json): 6 % more requests per second with bodies of 1 KB, 7 % with 16 KB,
10 % with 128 KB, and 5, 9 and 19 % less CPU time per request. ``msgspec``
is faster than orjson with 1 KB only.

What is read here is certainly JSON and means what the other reader finds in it. Whatever is out of
the ordinary (content in parts, tools, a conversation's id, a key twice, an error) is left to that
one: then this costs the look at what stands before it.
"""

# mypy: disallow-untyped-defs=False

from collections.abc import Mapping

import numpy as np

from tailrace.compiled import inner, jit
from tailrace.router.intake.json_scan import (
    NULL,
    ODD,
    TRUE,
    blank,
    is_word,
    key,
    next_member,
    number,
    put_string,
    string,
    value,
    word,
)
from tailrace.router.intake.request_body import (
    HEADERS,
    MAX_NAME,
    RequestBody,
    comparable,
    read_headers,
)

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

_MOST_TOKENS = 2**31 - 1
_ROLE, _CONTENT = 0x1E, 0x1F

_MODEL, _STREAM, _MESSAGES, _PROMPT = map(word, ("model", "stream", "messages", "prompt"))
_ROLE_KEY, _CONTENT_KEY, _CALLS, _ASSISTANT = map(
    word, ("role", "content", "tool_calls", "assistant")
)
_MOST_1, _MOST_2, _MOST_3 = map(word, ("max_completion_tokens", "max_tokens", "max_output_tokens"))
_TOOLS, _SESSION, _CONVERSATION, _USER, _PRIORITY, _SALT = map(
    word, ("tools", "session_id", "conversation", "user", "priority", "cache_salt")
)


@inner
def _message(b, at, text, found):
    """Read a message and write it behind what is in ``text``; return its end."""
    if at >= b.size or b[at] != 0x7B:
        return ODD
    role_from = role_to = content_from = 0
    to = began = found[SIZE]
    text[to] = _ROLE
    text[to + 1] = _CONTENT
    to += 2
    has_role = has_content = False
    at = blank(b, at + 1)
    more = True
    while more:
        start = at + 1
        end, at = key(b, at)
        if end < 0 or at >= b.size:
            return ODD
        if is_word(b, start, end, _ROLE_KEY):
            if has_role or b[at] != 0x22:
                return ODD
            has_role, role_from = True, at + 1
            role_to, slashes = string(b, at + 1)
            if role_to < 0 or slashes > 0:
                return ODD
            for k in range(role_from, role_to):
                text[to - 1] = b[k]
                to += 1
            text[to - 1] = _CONTENT
            at = role_to + 1
        elif is_word(b, start, end, _CONTENT_KEY):
            if has_content or b[at] != 0x22:
                return ODD
            has_content = True
            if has_role:
                at, to = put_string(b, at + 1, text, to)
            else:  # it stands behind the role
                content_from = at + 1
                at, slashes = string(b, at + 1)
            if at < 0:
                return ODD
            at += 1
        elif is_word(b, start, end, _CALLS):
            return ODD
        else:
            at = value(b, at)
            if at < 0:
                return ODD
        at, more = next_member(b, at, 0x7D)
        if at < 0:
            return ODD
    if content_from > 0:
        end, to = put_string(b, content_from, text, to)
        if end < 0:
            return ODD
    if is_word(b, role_from, role_to, _ASSISTANT):
        found[ANSWER_FROM], found[ANSWER_TO] = began, to
    found[SIZE] = to
    return at


@inner
def _messages(b, at, text, found):
    if b[at] != 0x5B:
        return ODD
    at = blank(b, at + 1)
    more = True
    while more:
        at = _message(b, at, text, found)
        if at < 0:
            return ODD
        at, more = next_member(b, at, 0x5D)
        if at < 0:
            return ODD
    return at


@inner
def _tokens(b, at):
    """Return the end of a number of tokens, and the number; 0: not said."""
    if is_word(b, at, min(b.size, at + 4), NULL):
        return at + 4, 0
    end, whole = number(b, at)
    if not whole:
        return ODD, 0
    count = 0
    for k in range(at, end):
        if b[k] != 0x2D:
            count = count * 10 + int(b[k] - 0x30)
    return end, 0 if b[at] == 0x2D else min(count, _MOST_TOKENS)


@inner
def _rare(b, start, end):
    """Whether a key is one that only the other reader understands."""
    return (
        is_word(b, start, end, _TOOLS) or is_word(b, start, end, _SESSION)
        or is_word(b, start, end, _CONVERSATION) or is_word(b, start, end, _USER)
        or is_word(b, start, end, _PRIORITY) or is_word(b, start, end, _SALT)
    )  # fmt: skip


@jit
def read(b, kind, text, found):
    """Read a body uint8 [n] of a kind; return whether it could be.

    ``text`` uint8 [>= n + SPARE] takes the prompt, ``found`` int64 [FIGURES] all else.
    """
    for k in range(FIGURES):
        found[k] = 0
    at = blank(b, 0)
    if at >= b.size or b[at] != 0x7B:
        return False
    at = blank(b, at + 1)
    # Each known key once: model, prompt or messages, stream, three limits.
    seen = 0
    most_1 = most_2 = most_3 = 0
    more = True
    while more:
        start = at + 1
        end, at = key(b, at)
        if end < 0 or at >= b.size:
            return False
        bit = 0
        if is_word(b, start, end, _MODEL):
            bit = 1
            if b[at] != 0x22:
                return False
            to, slashes = string(b, at + 1)
            if to < 0 or slashes > 0:
                return False
            found[MODEL_FROM], found[MODEL_TO] = at + 1, to
            at = to + 1
        elif kind == CHAT and is_word(b, start, end, _MESSAGES):
            bit = 2
            if seen & bit == 0:
                at = _messages(b, at, text, found)
        elif kind == COMPLETION and is_word(b, start, end, _PROMPT):
            bit = 2
            if b[at] != 0x22:
                return False
            at, found[SIZE] = put_string(b, at + 1, text, 0)
            if at < 0:
                return False
            at += 1
        elif is_word(b, start, end, _STREAM):
            bit = 4
            found[STREAMS] = 1 if is_word(b, at, min(b.size, at + 4), TRUE) else 0
            at = value(b, at)
        elif is_word(b, start, end, _MOST_1):
            bit = 8
            at, most_1 = _tokens(b, at)
        elif is_word(b, start, end, _MOST_2):
            bit = 16
            at, most_2 = _tokens(b, at)
        elif is_word(b, start, end, _MOST_3):
            bit = 32
            at, most_3 = _tokens(b, at)
        elif _rare(b, start, end):
            return False
        else:
            at = value(b, at)
        if at < 0 or seen & bit != 0:
            return False
        seen |= bit
        at, more = next_member(b, at, 0x7D)
        if at < 0:
            return False
    found[MOST] = most_1 if most_1 > 0 else (most_2 if most_2 > 0 else most_3)
    return found[SIZE] > 0 and blank(b, at) == b.size


class BodyReader:
    """Reads bodies one after the other. The prompt of one is gone when the next is read."""

    def __init__(self) -> None:
        self._text = np.empty(1 << 16, np.uint8)
        self._found = np.zeros(FIGURES, np.int64)
        self._models: dict[bytes, str] = {}
        self.read("chat", {}, b'{"messages":[{"role":"user","content":"a"}]}')  # compile it now

    def read(self, kind: str, headers: Mapping[bytes, bytes], body: bytes) -> RequestBody | None:
        """Read what a request asks for; None: its body has an odd shape, or is no JSON.

        As :func:`request_body.read_body`, but the prompt stands in ``data`` instead of ``text``.
        """
        code = _KINDS.get(kind)
        size = len(body)
        if code is None or not 0 < size <= LONGEST:
            return None
        if size + SPARE > self._text.size:
            self._text = np.empty(2 * size, np.uint8)
        if not read(_frombuffer(body, _U1), code, self._text, self._found):
            return None
        length, model_from, model_to, streams, most, answer_from, answer_to = self._found.tolist()
        request = _new(RequestBody)
        request.kind = kind
        name = body[model_from:model_to]
        request.model = self._models.get(name) or self._model(name)
        request.streams = streams == 1
        request.max_tokens = most or None
        request.session = None
        request.priority = 0
        request.ttft_slo_s = None
        request.data = self._text[:length]
        if answer_to:
            request.answer = (answer_from, answer_to)
        if not HEADERS.isdisjoint(headers):
            read_headers(request, headers)
        return request

    def _model(self, name: bytes) -> str:
        if len(name) > MAX_NAME:
            return comparable(name.decode())
        if len(self._models) >= _MOST_MODELS:
            self._models.clear()
        model = self._models[name] = name.decode()
        return model
