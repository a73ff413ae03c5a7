"""What a request asks for: one pass over its parsed body, which may be of any shape."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.router.intake.hashing import fingerprint
from tailrace.router.intake.routes import OTHER, kind_of

#: Before the role and before the content of a message. A message ends where the next begins, so
#: that a conversation's text is a prefix of the text of its later turns.
ROLE, CONTENT = "\x1e", "\x1f"
#: Between the prompts of a batch.
NEXT_PROMPT = "\x1d"

_SESSION_HEADERS = (b"x-session-id", b"session_id", b"session-id")
_SESSION_FIELDS = ("session_id", "conversation", "user")
#: Headers that say something about a request.
HEADERS = frozenset((*_SESSION_HEADERS, b"x-priority", b"x-slo-ttft-ms"))
#: Kinds of requests whose responses are computed from the prompt in one pass.
POOLING = frozenset(
    (
        *("embedding", "rerank", "score", "pooling", "classify"),
        *("tokenize", "detokenize", "count_tokens"),
    )
)
#: What most bodies do not have.
_RARE = frozenset((*_SESSION_FIELDS, "priority", "cache_salt", "previous_response_id"))
_MAX_PRIORITY = 2**31 - 1
#: Longer names are kept as a hash, in characters.
MAX_NAME = 256
#: Length of the hash that stands for an image or the like; shorter ones stand for themselves.
MEDIA_CHARS = 16
_new = object.__new__


def comparable(name: str) -> str:
    """Return a client's name for something in at most MAX_NAME characters, for comparison."""
    if len(name) <= MAX_NAME:
        return name
    data = name.encode(errors="surrogatepass")
    return "blake2:" + hashlib.blake2b(data, digest_size=16).hexdigest()


class BadRequest(TailraceError):  # noqa: N818
    """The client's body cannot be read; it deserves status 400 and this sentence."""


@dataclass
class RequestBody:
    """What is known of a request before it is routed. ``text`` is never kept or logged.

    No slots: what a request does not say is read from the class, and costs nothing to set.
    """

    kind: str
    """What the route says (``routes.py``): chat, completion, embedding ...; other: not read."""
    model: str = ""
    """Name of the model; empty if none is given."""
    text: str | None = None
    """What will be the prompt, for its length and content only."""
    token_ids: list[int] | None = None
    """The prompt, if it is given as token ids."""
    prompts: int = 1
    """Prompts in a batched completion or embedding."""
    max_tokens: int | None = None
    """Most tokens of the answer."""
    streams: bool = False
    """Whether the answer comes token by token."""
    session: str | None = None
    """Id of the conversation, from a header or the body."""
    priority: int = 0
    """Lower is sooner, as in vLLM."""
    ttft_slo_s: float | None = None
    """Target for the time to first token."""
    answer: tuple[int, int] | None = None
    """Where in ``text`` the latest earlier answer stands: what is before it was an own prompt."""
    has_media: bool = False
    """Whether there are images or the like, whose length in tokens the text does not show."""
    salt: str = ""
    """vLLM's ``cache_salt``: requests share cached prefixes only with those of the same salt."""
    previous: str | None = None
    """Id of the response that it continues; only the server that gave it knows it."""
    data: NDArray[np.uint8] | None = None
    """Instead of ``text`` and for a moment only: its bytes, in which ``answer`` counts then."""
    names_priority: bool = False
    """Whether the body itself has a ``priority``, whatever its value."""
    ids: int = 0
    """Token ids that ``data`` holds, four bytes each; 0: it holds text."""

    generates: bool = dataclass_field(default=True, init=False)
    """Whether its response is generated token by token."""

    def __post_init__(self) -> None:
        self.generates = self.kind not in POOLING

    def without_text(self) -> "RequestBody":
        """Return the same without prompt."""
        request = _new(RequestBody)
        vars(request).update(vars(self), text=None, token_ids=None, answer=None, data=None, ids=0)
        return request


def read_request(path: str, headers: Mapping[bytes, bytes], body: bytes) -> RequestBody:
    """Read what a request asks for; ``headers`` have lower-case names.

    Fields of odd shapes are ignored. Only a body that is no JSON where JSON is needed raises
    BadRequest.
    """
    return read_body(kind_of(path), headers, body)


def read_body(kind: str, headers: Mapping[bytes, bytes], body: bytes) -> RequestBody:
    """The same for a path whose kind is known."""
    request = _new(RequestBody)
    request.kind = kind
    request.generates = kind not in POOLING
    if kind != OTHER or body[:1] == b"{":
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            if kind != OTHER:
                raise BadRequest(f"the body is not JSON: {error}") from None
            data = None
        if type(data) is dict:
            _read_body(request, data)
    if not HEADERS.isdisjoint(headers):
        read_headers(request, headers)
    return request


def read_headers(request: RequestBody, headers: Mapping[bytes, bytes]) -> None:
    """Read what headers say of a request; they come before what its body says.

    A priority in the body comes first all the same: servers read that one, so a client must not be
    able to show the router another.
    """
    for name in _SESSION_HEADERS:
        value = headers.get(name)
        if value:
            request.session = comparable(value.decode("latin-1"))
            break
    priority = headers.get(b"x-priority")
    if priority is not None and not request.priority:
        request.priority = _priority(priority)
    slo_ms = headers.get(b"x-slo-ttft-ms")
    if slo_ms is not None:
        value_ms = _number(slo_ms)
        if value_ms is not None and 0 < value_ms < 1e9:
            request.ttft_slo_s = value_ms / 1e3


def _number(text: bytes | str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _priority(value: Any) -> int:
    """Return a priority as servers read it: they take numbers as texts, and of any length."""
    if isinstance(value, bytes | str):
        value = _number(value)
    if type(value) is float:  # orjson reads whole numbers of more than 64 bits as such
        value = min(max(value, -_MAX_PRIORITY), _MAX_PRIORITY) if value == value else 0
    return _whole(int(value) if value is True else value, -_MAX_PRIORITY, _MAX_PRIORITY) or 0


def _whole(value: Any, low: int, high: int) -> int | None:
    """Return a number as a whole one within bounds; None if it is none."""
    if type(value) is int:
        return min(max(value, low), high)
    if type(value) is float and low <= value <= high:
        return int(value)
    return None


def read_fields(request: RequestBody, data: dict[str, Any]) -> None:
    """Read what the fields of a body say, but for the prompt."""
    model = data.get("model")
    if type(model) is str:
        request.model = comparable(model)
    if data.get("stream") is True:
        request.streams = True
    for field in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if field in data:
            most = _whole(data[field], 0, 2**31 - 1)
            if most:
                request.max_tokens = most
                break
    if not _RARE.isdisjoint(data):
        _read_rare(request, data)


def _read_body(request: RequestBody, data: dict[str, Any]) -> None:
    read_fields(request, data)
    reader = READERS.get(request.kind)
    if reader is not None:
        reader(request, data)


def _read_rare(request: RequestBody, data: dict[str, Any]) -> None:
    if "priority" in data:
        request.names_priority = True
        request.priority = _priority(data["priority"])
    for field in _SESSION_FIELDS:
        value = data.get(field)
        if type(value) is dict:
            value = value.get("id")
        if type(value) is str and value:
            request.session = comparable(value)
            break
    salt = data.get("cache_salt")
    if type(salt) is str:
        request.salt = comparable(salt)
    previous = data.get("previous_response_id")
    if request.kind == "response" and type(previous) is str and previous:
        request.previous = comparable(previous)


def _read_chat(request: RequestBody, messages: Any, tools: Any) -> None:
    if type(messages) is not list:
        return
    parts: list[str] = []
    length = 0
    if tools:
        parts.append(_json(tools).decode())
        length = len(parts[0])
    for message in messages:
        if type(message) is not dict:
            continue
        role = message.get("role")
        content = message.get("content")
        text = content if type(content) is str else _content_text(request, content)
        if "tool_calls" in message:
            calls = message["tool_calls"]
            if calls:
                text += _json(calls).decode()
        part = f"{ROLE}{role if type(role) is str else ''}{CONTENT}{text}"
        parts.append(part)
        if role == "assistant":
            request.answer = (length, length + len(part))
        length += len(part)
    request.text = "".join(parts)


def _content_text(request: RequestBody, content: Any) -> str:
    """Text of a message's content in parts; media stand in it as a hash of what they are."""
    if type(content) is str:
        return content
    if type(content) is not list:
        return ""
    texts: list[str] = []
    for part in content:
        if type(part) is str:
            texts.append(part)
        elif type(part) is dict:
            text = part.get("text")
            if type(text) is str:
                texts.append(text)
            else:
                request.has_media = True
                texts.append(_media(part))
    return "".join(texts)


def _media(part: dict[str, Any]) -> str:
    """Return what stands for an image or the like in a text."""
    data = _json(part)
    if len(data) <= MEDIA_CHARS:
        return data.decode()
    return f"{int(fingerprint(np.frombuffer(data, np.uint8), 0, len(data))):0{MEDIA_CHARS}x}"


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise BadRequest("the body is nested too deeply") from None


def _read_prompts(request: RequestBody, given: Any) -> None:
    """Read a prompt: text, token ids, or a list of either."""
    if type(given) is str:
        request.text = given
    elif type(given) is list and given:
        first = given[0]
        if type(first) is int:
            request.token_ids = _ids(given)
        elif type(first) is list:
            request.prompts = len(given)
            request.token_ids = _ids([i for ids in given if type(ids) is list for i in ids])
        else:
            texts = [text for text in given if type(text) is str]
            request.prompts = max(1, len(texts))
            request.text = NEXT_PROMPT.join(texts)


def _ids(values: list[Any]) -> list[int] | None:
    if all(type(value) is int and 0 <= value < 2**31 for value in values):
        return values
    return None


def _read_chat_body(request: RequestBody, data: dict[str, Any]) -> None:
    _read_chat(request, data.get("messages"), data.get("tools"))


def _read_response(request: RequestBody, data: dict[str, Any]) -> None:
    """Read OpenAI's /v1/responses: instructions, then text or a list of messages and items."""
    given = data.get("input")
    messages = [{"role": "user", "content": given}] if type(given) is str else given
    _read_chat(request, _after(data.get("instructions"), messages), data.get("tools"))


def _read_message(request: RequestBody, data: dict[str, Any]) -> None:
    """Read Anthropic's /v1/messages: a system prompt beside the messages."""
    _read_chat(request, _after(data.get("system"), data.get("messages")), data.get("tools"))


def _after(system: Any, messages: Any) -> list[Any]:
    """Return messages with the system prompt before them."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, *messages] if type(messages) is list else head


def _read_completion(request: RequestBody, data: dict[str, Any]) -> None:
    _read_prompts(request, data.get("prompt"))


def _read_input(request: RequestBody, data: dict[str, Any]) -> None:
    """Read what is embedded, pooled or classified: texts, token ids, or a conversation."""
    if "messages" in data:
        _read_chat_body(request, data)
    else:
        _read_prompts(request, data.get("input"))


def _read_rerank(request: RequestBody, data: dict[str, Any]) -> None:
    _read_pairs(request, data.get("query"), data.get("documents"))


def _read_score(request: RequestBody, data: dict[str, Any]) -> None:
    first = data.get("text_1", data.get("queries"))
    _read_pairs(request, first, data.get("text_2", data.get("documents", data.get("items"))))


def _read_pairs(request: RequestBody, *given: Any) -> None:
    """Read texts that are compared with each other; each counts once."""
    parts = [part for value in given for part in (value if type(value) is list else [value])]
    texts = [
        text
        for part in parts
        for text in (part, part.get("text") if type(part) is dict else None)
        if type(text) is str
    ]
    request.prompts = max(1, len(texts) - 1)
    request.text = NEXT_PROMPT.join(texts) or None


#: How bodies are read, by kind. Of others only model, priority and the like: to tokenize a text
#: costs a server no time of its GPU, so the text counts for nothing.
READERS: Mapping[str, Callable[[RequestBody, dict[str, Any]], None]] = {
    "chat": _read_chat_body,
    "completion": _read_completion,
    "response": _read_response,
    "message": _read_message,
    "embedding": _read_input,
    "pooling": _read_input,
    "classify": _read_input,
    "rerank": _read_rerank,
    "score": _read_score,
}
