"""Answers in vLLM's form, as bytes: events of a stream, and replies in one piece."""

import time
from typing import Any

import orjson

from tailrace.emulate import tokenizer
from tailrace.emulate.http import LAST_CHUNK, Connection
from tailrace.emulate.replica import Job
from tailrace.emulate.request_body import Asked, Served

_DONE = b"data: [DONE]\n\n"
_MARK = "\x00"
_FINGERPRINT = "vllm-emulated"


def usage(job: Job) -> dict[str, Any]:
    """Return what an answer used, in tokens."""
    given = job.request.generated
    return {
        "prompt_tokens": job.prompt_tokens,
        "total_tokens": job.prompt_tokens + given,
        "completion_tokens": given,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }


class Streamed:
    """An answer as a stream of events: one per token, or one for the first and for so many each."""

    def __init__(
        self, connection: Connection, asked: Asked, answer_id: str, served: Served
    ) -> None:
        self._connection = connection
        self._asked = asked
        self._merged, self._held = served.tokens_per_event, b""
        model = served.model
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        self._about = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        # Like vLLM, which says that all is well before it begins to work.
        self._framed = connection.start_stream()
        # Only the token differs between events, so the rest is made once.
        before, _, after = self._event(_MARK, None).partition(_MARK.encode())
        length = len(before) + len(after) + tokenizer.TOKEN_BYTES
        self._before, self._after = before, after
        if self._framed:
            self._before, self._after = b"%x\r\n%b" % (length, before), after + b"\r\n"

    def told(self, job: Job, is_last: bool) -> None:
        """Send the latest token, and the end of the stream after the last."""
        parts: list[bytes] = []
        if job.request.generated == 1 and self._asked.chat:
            parts.append(self._frame(self._role_event()))
        if not is_last:
            if self._merged == 1 or job.request.generated == 1:
                parts.append(self._before + job.token + self._after)
            else:
                self._held += job.token
                if len(self._held) < self._merged * tokenizer.TOKEN_BYTES:
                    return
                parts.append(self._frame(self._event(self._held.decode(), None)))
                self._held = b""
            self._connection.write(parts[0] if len(parts) == 1 else b"".join(parts))
            return
        text = (self._held + job.token).decode()
        parts.append(self._frame(self._event(text, self._asked.finish_reason)))
        if self._asked.include_usage:
            parts.append(self._frame(_data(self._about | {"choices": [], "usage": usage(job)})))
        parts.append(self._frame(_DONE))
        if self._framed:
            parts.append(LAST_CHUNK)
        self._connection.write(b"".join(parts))
        self._connection.finish()

    def _frame(self, event: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(event), event) if self._framed else event

    def _role_event(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return _data(self._about | {"choices": [choice]})

    def _event(self, token: str, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self._asked.chat:
            choice["delta"] = {"content": "\x01"}
        else:
            choice["text"] = "\x01"
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if not self._asked.chat:
            choice["prompt_token_ids"] = None
        choice["token_ids"] = None
        return _data(self._about | {"choices": [choice]}).replace(b"\\u0001", token.encode())


class Whole:
    """An answer in one piece."""

    def __init__(
        self, connection: Connection, asked: Asked, answer_id: str, served: Served
    ) -> None:
        self._connection = connection
        self._asked = asked
        model = served.model
        kind = "chat.completion" if asked.chat else "text_completion"
        self._about = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}

    def told(self, job: Job, is_last: bool) -> None:
        """Reply after the last token."""
        if not is_last:
            return
        text = tokenizer.decode(job.answer)
        choice: dict[str, Any] = {"index": 0}
        if self._asked.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": self._asked.finish_reason,
            "stop_reason": None,
        }
        body = self._about | {"choices": [choice], "usage": usage(job)}
        self._connection.reply(200, orjson.dumps(body | {"system_fingerprint": _FINGERPRINT}))


def _data(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
