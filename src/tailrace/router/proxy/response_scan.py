"""Scans a response in transit: counts its tokens, sees its end, finds the usage it reports.

Only the small ``usage`` object is parsed. Only an incomplete line is kept, or the last bytes of a
response that does not stream.
"""

import re
from typing import Any, NamedTuple, Protocol

import orjson

#: Kept of a response that does not stream, in bytes: its usage is at its end.
TAIL_BYTES = 8192
#: Longest line of a stream that is read, in bytes; a longer one is only counted.
MAX_LINE_BYTES = 262_144
#: Token counts above this are ignored: readers of the decision log reject them.
MOST_TOKENS = 2**24
#: Malformed usage objects to try before giving up: a server may send any number of them.
MAX_USAGES = 8
#: Objects that a usage object may contain (details of prompt and output).
MAX_INNER_OBJECTS = 8
#: Start of an event's data in which its type stands, in bytes.
_TYPE_BYTES = 256
_RESPONSE_ENDS = (b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
#: Part of a response in which its id stands, in bytes.
ID_BYTES = 4096
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[!#-\[\]-~]{1,128})"')
_USAGE = b'"usage"'
#: As servers write it: no blanks, and nothing but numbers in it. Twice as fast as parsing it.
_PLAIN_USAGE = re.compile(
    rb'"usage":\{"prompt_tokens":(\d{1,12}),(?:"total_tokens":\d+,)?"completion_tokens":(\d{1,12})'
    rb'(?:,"total_tokens":\d+)?(?:,"prompt_tokens_details":null)?\}'
)


class Usage(NamedTuple):
    """Numbers of tokens as the server reports them; None: not reported."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


class Scanner(Protocol):
    """Reads a response part by part."""

    @property
    def usage(self) -> Usage | None:
        """The last usage seen."""

    @property
    def response_id(self) -> bytes:
        """Id of a response of the responses API, empty if none was seen."""

    done: bool
    """Whether the end mark has come."""

    def feed(self, part: bytes) -> int:
        """Read a decoded part of the body; return its number of tokens."""


class StreamScanner:
    """Counts tokens of a stream of server-sent events.

    An event counts as one token, which is right as long as the server keeps up: under load vLLM
    puts several tokens into one event. As soon as the stream reports usage, with the last event or
    (``continuous_usage_stats``) with each, that counts instead. A stream without usage is therefore
    taken to be as long as its number of events.

    Events without a token: the end mark, the role that opens a chat response, usage without a
    choice, and in the responses API and in Anthropic's messages everything but deltas.
    """

    __slots__ = ("_counted", "_kind", "_seen", "_tail", "done", "response_id", "usage")

    def __init__(self, kind: str = "chat") -> None:
        self.usage: Usage | None = None
        self.done = False
        self.response_id = b""
        """Under which the server may have stored the response."""
        self._kind = kind
        self._tail = b""
        self._seen = False
        self._counted = 0

    def feed(self, part: bytes) -> int:
        """Read a decoded part of the body; return its number of tokens."""
        tokens = self._feed(part)
        usage = self.usage
        if usage is not None and usage.output_tokens is not None:
            tokens = usage.output_tokens - self._counted
            if tokens < 0:
                return 0
        self._counted += tokens
        return tokens

    def _feed(self, part: bytes) -> int:
        if self._tail:
            part = self._tail + part
            self._tail = b""
        end = part.rfind(b"\n") + 1
        if end != len(part):
            self._keep(part[end:])
            if not end:
                return 0
            part = part[:end]
        events = part.count(b"\ndata:") + part.startswith(b"data:")
        if not events:
            return 0
        if self._kind == "response":
            return self._feed_responses(part)
        if self._kind == "message":
            return self._feed_messages(part)
        if b"[DONE]" in part and _has_end(part):
            self.done = True
            events -= 1
        if not self._seen and events:
            self._seen = True
            # The role comes alone, before the first token, in the first event of a chat response.
            line = part[part.find(b"data:") :].split(b"\n", 1)[0]
            if b'"role"' in line and (b'"content":""' in line or b'"content":null' in line):
                events -= 1
        if _USAGE in part:
            usage = find_usage(part)
            if usage is not None:
                self.usage = usage
                events -= part.count(b'"choices":[]') + part.count(b'"choices": []')
        return max(0, events)

    def _feed_responses(self, part: bytes) -> int:
        deltas = 0
        if not self.response_id:
            self.response_id = find_response_id(part)
        for line in part.split(b"\n"):
            if line.startswith(b"data:"):
                start = line[:_TYPE_BYTES]
                if b'.delta"' in start:
                    deltas += 1
                elif any(end in start for end in _RESPONSE_ENDS):
                    self.done = True
                    self.usage = find_usage(line) or self.usage
        return deltas

    def _feed_messages(self, part: bytes) -> int:
        """Anthropic: the prompt's length comes first, the answer's at the end."""
        deltas = 0
        for line in part.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            start = line[:_TYPE_BYTES]
            if b'"content_block_delta"' in start:
                deltas += 1
            elif b'"message_start"' in start:
                usage = find_usage(line)
                if usage is not None:
                    self.usage = usage._replace(output_tokens=None)
            elif b'"message_delta"' in start:
                self.usage = _merged(self.usage, find_usage(line))
            elif b'"message_stop"' in start:
                self.done = True
        return deltas

    def _keep(self, rest: bytes) -> None:
        """Keep an incomplete line; of one that is too long only the start."""
        if len(rest) > MAX_LINE_BYTES:
            rest = rest[:16]
        self._tail = rest


def _has_end(part: bytes) -> bool:
    """Whether a line is the end mark, rather than a text that contains it."""
    return part.startswith(b"data: [DONE]") or any(
        mark in part for mark in (b"\ndata: [DONE]", b"\ndata:[DONE]")
    )


class ReplyScanner:
    """Finds the usage in a response that does not stream."""

    __slots__ = ("_kind", "_start", "_tail", "done")

    def __init__(self, kind: str = "chat") -> None:
        self.done = False
        self._kind = kind
        self._start = b""
        self._tail = b""

    def feed(self, part: bytes) -> int:
        """Keep the end of the response; its tokens are not counted one by one."""
        if self._kind == "response" and len(self._start) < ID_BYTES:
            self._start += part[:ID_BYTES]
        tail = self._tail + part if self._tail else part
        self._tail = tail[-TAIL_BYTES:] if len(tail) > TAIL_BYTES else tail
        return 0

    @property
    def usage(self) -> Usage | None:
        """The usage, once the response is complete."""
        return find_usage(self._tail)

    @property
    def response_id(self) -> bytes:
        """Id of a response of the responses API, empty if none was seen."""
        return find_response_id(self._start)


class NoScanner:
    """For responses without tokens."""

    __slots__ = ()
    usage: Usage | None = None
    response_id = b""
    done = False

    def feed(self, part: bytes) -> int:
        """Ignore it."""
        del part
        return 0


def find_response_id(text: bytes) -> bytes:
    """Return the id of a response of the responses API, as far as it is in ``text``."""
    found = _RESPONSE_ID.search(text[:ID_BYTES])
    return found[1] if found else b""


def _merged(before: Usage | None, after: Usage | None) -> Usage | None:
    """Return a usage with what only an earlier one told."""
    if before is None or after is None:
        return after or before
    prompt = before.prompt_tokens if after.prompt_tokens is None else after.prompt_tokens
    cached = before.cached_tokens if after.cached_tokens is None else after.cached_tokens
    return Usage(prompt, after.output_tokens, cached)


def find_usage(text: bytes) -> Usage | None:
    """Return the last object under the key ``usage``; None: there is none.

    The quotes of a key cannot occur inside a JSON string without a backslash, so text that
    contains the word is not taken for it.
    """
    at = text.rfind(_USAGE)
    if at < 0:
        return None
    plain = _PLAIN_USAGE.match(text, at)
    if plain is not None:
        prompt, output = plain.groups()
        return Usage(_count(int(prompt)), _count(int(output)), None)
    tries = 0
    while at >= 0 and tries < MAX_USAGES:
        start = at + len(_USAGE)
        while start < len(text) and text[start] in b" \t\r\n:":
            start += 1
        if text[start : start + 1] == b"{":
            found = _object(text, start)
            if found is not None:
                return _usage(found)
            tries += 1
        at = text.rfind(_USAGE, 0, at)
    return None


def _object(text: bytes, start: int) -> dict[str, Any] | None:
    """Parse the JSON object that begins at ``start``, with a few objects in it at most."""
    end = start
    for closed in range(1, MAX_INNER_OBJECTS + 1):
        end = text.find(b"}", end) + 1
        if not end:
            return None
        if text.count(b"{", start, end) > closed:
            continue  # another one has begun in it
        try:
            found = orjson.loads(text[start:end])
        except orjson.JSONDecodeError:
            continue
        return found if isinstance(found, dict) else None
    return None


def _usage(found: dict[str, Any]) -> Usage:
    get = found.get
    prompt, output = get("prompt_tokens"), get("completion_tokens")
    details = get("prompt_tokens_details") or get("input_tokens_details")
    if prompt is None:
        prompt = get("input_tokens")
    if output is None:
        output = get("output_tokens")
    if prompt is None and output is None:
        prompt = get("total_tokens")  # of a rerank
    cached = details.get("cached_tokens") if type(details) is dict else None
    if cached is None:
        cached = get("cache_read_input_tokens")
    return Usage(_count(prompt), _count(output), None if cached is None else _count(cached))


def _count(value: Any) -> int | None:
    """Return a number of tokens, if it is one."""
    if type(value) is int and 0 <= value <= MOST_TOKENS:
        return value
    return None
