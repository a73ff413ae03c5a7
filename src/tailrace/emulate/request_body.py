"""Reading the bodies of generation requests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tailrace.emulate import tokenizer
from tailrace.emulate.connection import ApiError

OUTPUT_HEADER = b"x-emulate-output-tokens"
OUTPUT_FIELD = "emulate_output_tokens"
#: vLLM's default for /v1/completions.
COMPLETION_TOKENS = 16
#: Answers whose length nothing says: lognormal, tokens.
MEDIAN_OUTPUT, OUTPUT_SIGMA = 128.0, 0.8


@dataclass(slots=True)
class GenerationRequest:
    """One prompt and the output it will get."""

    chat: bool
    prompt: bytes
    answer: bytes
    """All tokens of the output, four bytes each."""
    finish_reason: str
    streams: bool
    include_usage: bool
    priority: int = 0
    """Lower goes first, on servers that serve by priority."""


@dataclass(frozen=True)
class Served:
    """What a server serves."""

    model: str
    max_model_len: int
    """Prompt and answer together, tokens."""
    seed: int = 0
    tokens_per_event: int = 1
    """Of a stream, after its first; a busy vLLM puts several into one."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters, which are models of their own."""


def read_generation(
    body: Mapping[str, Any], headers: Mapping[bytes, bytes], served: Served, *, chat: bool
) -> GenerationRequest:
    """Understand a body of /v1/chat/completions or /v1/completions, or raise ApiError."""
    check_model(body, served)
    if body.get("n") not in (None, 1):
        raise ApiError(400, "emulated servers give one answer: n must be 1")
    prompt = _chat_prompt(body) if chat else completion_prompt(body.get("prompt"))
    key = xxhash.xxh3_64_intdigest(prompt, served.seed)
    output, reason = _output(body, headers, served, tokenizer.count(prompt), key, chat=chat)
    options = body.get("stream_options")
    return GenerationRequest(
        chat=chat,
        prompt=prompt,
        answer=tokenizer.words(key, 0, output),
        finish_reason=reason,
        streams=body.get("stream") is True,
        include_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        priority=_priority(body.get("priority", 0)),
    )


def check_model(body: Mapping[str, Any], served: Served) -> None:
    """Refuse a model that is not served."""
    model = body.get("model")
    if model is not None and model != served.model and model not in served.adapters:
        raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError")


def completion_prompt(prompt: Any) -> bytes:
    """Return the tokens of a prompt: a text, a list of token ids, or a list of one of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ApiError(400, "emulated servers take one prompt per request")
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = tokenizer.text_tokens(prompt)
    elif isinstance(prompt, list):
        try:
            tokens = tokenizer.from_ids(prompt)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
    else:
        raise ApiError(400, "prompt must be a text or a list of token ids")
    if not tokens:
        raise ApiError(400, "The decoder prompt cannot be empty")
    return tokens


def _chat_prompt(body: Mapping[str, Any]) -> bytes:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ApiError(400, "messages must be a list of messages")
    try:
        return tokenizer.chat_tokens(messages, body.get("tools"))
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _output(
    body: Mapping[str, Any],
    headers: Mapping[bytes, bytes],
    served: Served,
    prompt: int,
    key: int,
    *,
    chat: bool,
) -> tuple[int, str]:
    """Return the length of the answer in tokens and why it ends there."""
    limit = body.get("max_completion_tokens")
    limit = _whole(body.get("max_tokens") if limit is None else limit, "max_tokens")
    own = headers.get(OUTPUT_HEADER)
    if own is not None:
        wanted = _whole(own.decode("latin-1"), OUTPUT_HEADER.decode())
    else:
        wanted = _whole(body.get(OUTPUT_FIELD), OUTPUT_FIELD)
    room = served.max_model_len - prompt
    if room < max(1, limit or 1):
        outputs = f" and {limit} output tokens" if limit else ""
        raise ApiError(
            400,
            f"This model's maximum context length is {served.max_model_len} tokens. However, you "
            f"requested {prompt} input tokens{outputs}. Please reduce the length of the input.",
        )
    if limit is None:
        limit = room if chat or wanted is not None else min(COMPLETION_TOKENS, room)
        if chat and wanted is None:
            noise = np.random.default_rng(key).standard_normal()
            wanted = max(1, round(MEDIAN_OUTPUT * math.exp(OUTPUT_SIGMA * noise)))
    if wanted is not None and wanted < limit and body.get("ignore_eos") is not True:
        return wanted, "stop"
    return limit if wanted is None else min(wanted, limit), "length"


def _priority(value: Any) -> int:
    """Return a priority as vLLM reads it, or raise."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ApiError(400, f"priority must be a whole number, got {value!r}") from None
    if number != value and not isinstance(value, str):
        raise ApiError(400, f"priority must be a whole number, got {value!r}")
    return number


def _whole(value: Any, name: str) -> int | None:
    """Return a positive whole number, None if there is none, or raise."""
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, bool | float):
        raise ApiError(400, f"{name} must be at least 1, got {value!r}")
    return number
