"""How long a prompt is in tokens, and how that is known.

In the order of preference: token ids in the request; a local tokenizer file; else bytes divided by
the bytes per token that the servers have shown so far for that model, in the usage figures of
answers and, where there are none, when asked (``/tokenize``, see asker.py); else by four.
"""

import importlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from tailrace.config import Settings
from tailrace.errors import TailraceError
from tailrace.router.intake.prompt_blocks import UNIT_BYTES
from tailrace.router.intake.request_body import RequestBody

#: How a length is known. Estimated: from bytes, as the servers' figures have shown; assumed: from
#: bytes alone. Usage: the server has said it, after the decision.
IDS, SERVER, LOCAL, ESTIMATED, ASSUMED = "ids", "server", "local", "estimated", "assumed"
USAGE, TOKENIZE = "usage", "tokenize"

#: English text; used until the first usage figure of a model.
BYTES_PER_TOKEN = 4.0
#: Weight of BYTES_PER_TOKEN as a prompt of this many tokens, and decay of past prompts per prompt.
_PRIOR_TOKENS = 500.0
_KEEP = 0.98
#: Outside of these it is no length of a prompt but something else (images, a broken server).
_LEAST, _MOST = 0.5, 64.0
_MAX_MODELS = 1024
#: A local tokenizer reads no more than this of a prompt and takes the rest to be alike.
LOCAL_BYTES = 8192


class TokenSettings(Settings):
    """How prompt tokens are counted."""

    source: str = Field(default="auto", pattern=r"^(auto|local|server|estimate)$")
    """auto: `tokenizer` if it is given, else as server; server: bytes per token, learnt from
    `usage` in responses and from the servers' /tokenize; local: `tokenizer` only; estimate: bytes
    per token, learnt from `usage` only."""
    every_s: float = Field(default=10.0, gt=0, le=1e6, allow_inf_nan=False)
    """Minimum time between two calls of a server's /tokenize for the same model, s; no request
    waits for them."""

    @property
    def asks(self) -> bool:
        """Whether the servers' /tokenize is used."""
        return self.source in ("auto", "server")


Post = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(slots=True)
class _Seen:
    """Bytes and tokens of a model's prompts, fading."""

    size: float = BYTES_PER_TOKEN * _PRIOR_TOKENS
    tokens: float = _PRIOR_TOKENS
    prompts: int = 0


class TokenCounter:
    """Prompt lengths by model."""

    def __init__(self, tokenizer: Path | None = None, source: str = "auto") -> None:
        """Take a local ``tokenizer.json`` if there is one; it needs the package ``tokenizers``."""
        if source == "local" and tokenizer is None:
            raise TailraceError("tokens.source is local, but no tokenizer is given")
        if source in ("server", "estimate"):
            tokenizer = None
        self.used: Counter[str] = Counter()
        """Prompts by how their length was known when they were routed."""
        self.learned: Counter[str] = Counter()
        """Figures of servers by where they came from: usage or tokenize."""
        self._models: dict[str, _Seen] = {}
        self._all = _Seen()
        self.units_per_token = BYTES_PER_TOKEN / UNIT_BYTES
        """Units of content per token, over all models."""
        self._tokenizer = _load(tokenizer) if tokenizer is not None else None
        self.reads_text = self._tokenizer is not None
        """Whether it needs the prompt's text, not only its length."""

    def count(self, request: RequestBody, size: int) -> tuple[int, str]:
        """Return the prompt's tokens, at least 1, and how they are known; ``size`` in bytes."""
        if request.ids:
            found, how = request.ids, IDS
        elif request.token_ids is not None:
            found, how = len(request.token_ids), IDS
        elif self._tokenizer is not None and request.text:
            found, how = self._local(request.text, len(request.text)), LOCAL
        elif self._tokenizer is not None and request.data is not None and not request.has_media:
            data = request.data[:LOCAL_BYTES].tobytes()
            text = data.decode(errors="ignore")
            found, how = self._local(text, size * len(text) // len(data)), LOCAL
        else:
            seen = self._models.get(request.model) or self._all
            found, how = (
                round(size * seen.tokens / seen.size),
                ESTIMATED if seen.prompts else ASSUMED,
            )
        self.used[how] += 1
        return found or 1, how

    def bytes_per_token(self, model: str | None = None) -> float:
        """Return the bytes per token seen so far for a model; None: for all of them together."""
        seen = self._all if model is None else self._models.get(model, self._all)
        return seen.size / seen.tokens

    def learn(self, model: str, size: int, tokens: int, source: str = USAGE) -> None:
        """A server has counted ``tokens`` in a prompt of ``size`` bytes of text."""
        if size <= 0 or tokens <= 0 or not _LEAST <= size / tokens <= _MOST:
            return
        self.learned[source] += 1
        seen = self._models.get(model)
        if seen is None:
            if len(self._models) >= _MAX_MODELS:  # names come from clients
                self._models.clear()
            seen = self._models[model] = _Seen()
        seen.size = seen.size * _KEEP + size
        seen.tokens = seen.tokens * _KEEP + tokens
        seen.prompts += 1
        both = self._all
        both.size = both.size * _KEEP + size
        both.tokens = both.tokens * _KEEP + tokens
        both.prompts += 1
        self.units_per_token = both.size / both.tokens / UNIT_BYTES

    def _local(self, text: str, size: int) -> int:
        """Count the tokens of the beginning of a text of ``size`` characters or bytes."""
        part = text[:LOCAL_BYTES]
        found = len(self._tokenizer.encode(part).ids)  # type: ignore[union-attr]
        if len(part) < size:
            found = round(found * size / len(part))
        return max(1, found)


async def ask_server(post: Post, kind: str, body: bytes) -> int | None:
    """Ask a server's ``/tokenize`` how long the prompt of a request is; None: it cannot say.

    ``post`` sends a body to a path of the server and returns the answer's body.
    """
    question = tokenize_body(kind, body)
    if question is None:
        return None
    try:
        answer = orjson.loads(await post("/tokenize", question))
    except (OSError, ValueError, TimeoutError):
        return None
    count = answer.get("count") if type(answer) is dict else None
    return count if type(count) is int and count > 0 else None


def tokenize_body(kind: str, body: bytes) -> bytes | None:
    """Return the body for ``/tokenize`` that asks about a request; None: it has no single text."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if type(data) is not dict:
        return None
    question: dict[str, Any] = {key: data[key] for key in ("model",) if key in data}
    if kind == "chat" and type(data.get("messages")) is list:
        question["messages"] = data["messages"]
        for key in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if key in data:
                question[key] = data[key]
    elif kind == "completion" and type(data.get("prompt")) is str:
        question["prompt"] = data["prompt"]
    elif kind == "embedding" and type(data.get("input")) is str:
        question["prompt"] = data["input"]
    else:
        return None
    try:
        return orjson.dumps(question)
    except orjson.JSONEncodeError:  # nested too deeply
        return None


def _load(path: Path) -> Any:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise TailraceError(
            "a local tokenizer needs the package tokenizers: pip install tokenizers, or leave the "
            "tokenizer out and let lengths be estimated"
        ) from None
    if not path.is_file():
        raise TailraceError(f"there is no tokenizer file {path}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise TailraceError(f"{path} is no tokenizer: {error}") from None
