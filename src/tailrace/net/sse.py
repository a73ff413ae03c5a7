"""Reads streamed responses (server-sent events): times of tokens, their number, and the usage."""

from collections.abc import Callable
from typing import Any

import orjson

_DATA = b"data:"
_DONE = b"[DONE]"


class StreamedResponse:
    """One response of an OpenAI endpoint as a stream. Times are those of ``clock`` in seconds.

    Events are parsed only as far as needed: until the first token, those that may hold the usage
    or an error, and all of them if the text is wanted.
    """

    __slots__ = ("_clock", "_rest", "_texts", "cached_tokens", "code", "error", "events",
                 "first_s", "is_done", "last_s", "output_tokens", "prompt_tokens")  # fmt: skip

    def __init__(self, clock: Callable[[], float], *, keep_text: bool = False) -> None:
        self._clock = clock
        self._rest = b""
        self._texts: list[str] | None = [] if keep_text else None
        self.code = 0
        self.events = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.is_done = False
        self.error = False
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Output tokens: the server's own count, else the number of events."""
        return self.events if self.output_tokens is None else self.output_tokens

    @property
    def text(self) -> str:
        """The text, if it was kept."""
        return "".join(self._texts or ())

    def failure(self) -> str | None:
        """Return the kind of failure that a complete response is, or None."""
        if self.code != 200:
            return f"HTTP {self.code}"
        if self.error:
            return "error in stream"
        if not self.is_done or self.events == 0:
            return "cut short"
        return None

    def feed(self, data: bytes) -> None:
        """Read a part of the body."""
        if self.code != 200:
            return
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith(b"\n"):
            data, newline, self._rest = data.rpartition(b"\n")
            data += newline
        for line in data.splitlines():
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip())

    def _event(self, event: bytes) -> None:
        if event == _DONE:
            self.is_done = True
            return
        if (
            self.first_s is not None
            and self._texts is None
            and b'"choices":[{' in event
            and b'"usage":{' not in event
        ):
            self._token()
            return
        try:
            value = orjson.loads(event)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict) or "error" in value:
            self.error = True
            return
        if isinstance(value.get("usage"), dict):
            self._usage(value["usage"])
        choices = value.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0])

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        text = choice.get("text")
        if isinstance(delta, dict):
            text = delta.get("content")
            if "role" in delta and not text:
                return  # announces the role, holds no token
        if self._texts is not None and isinstance(text, str):
            self._texts.append(text)
        self._token()

    def _token(self) -> None:
        self.events += 1
        self.last_s = self._clock()
        if self.first_s is None:
            self.first_s = self.last_s

    def _usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details")
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
