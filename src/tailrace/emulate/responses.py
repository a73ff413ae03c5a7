"""Responses in vLLM's form, as bytes: event streams, and responses in one piece."""

import time
from collections.abc import Callable
from typing import Any

import orjson

from tailrace.emulate import tokenizer
from tailrace.emulate.connection import EmulatedConnection
from tailrace.emulate.job import Job
from tailrace.emulate.replica import EmulatedReplica
from tailrace.emulate.request_body import GenerationRequest, Served
from tailrace.net.framing import chunk
from tailrace.net.heads import RequestHead

_DONE = b"data: [DONE]\n\n"
_MARK = "\x00"
_FINGERPRINT = "vllm-emulated"


def usage(job: Job) -> dict[str, Any]:
    """Return the token counts of a response."""
    given = job.request.generated
    return {
        "prompt_tokens": job.prompt_tokens,
        "total_tokens": job.prompt_tokens + given,
        "completion_tokens": given,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }


class Generation:
    """A response that is being generated; its job is aborted when the client disconnects."""

    def __init__(
        self,
        client: EmulatedConnection,
        head: RequestHead,
        wanted: GenerationRequest,
        response_id: str,
        served: Served,
    ) -> None:
        self._client, self._head, self._wanted, self._served = client, head, wanted, served
        kind = self.kinds[wanted.chat]
        self._about = {
            "id": response_id, "object": kind, "created": int(time.time()), "model": served.model
        }  # fmt: skip
        self._abort: Callable[[], None] = lambda: None

    kinds = ("text_completion", "chat.completion")
    """The ``object`` field of a response to a completion and to a chat."""

    def submit(self, replica: EmulatedReplica) -> None:
        """Start generating."""
        wanted = self._wanted
        job = replica.submit(
            wanted.prompt, wanted.answer, self.on_token, wanted.finish_reason, wanted.priority
        )
        self._abort = lambda: replica.abort(job)

    def on_token(self, job: Job, is_last: bool) -> None:
        """Take in the latest token."""
        raise NotImplementedError

    def client_gone(self) -> None:
        """Stop generating: the client has disconnected."""
        self._abort()

    def client_slow(self) -> None:
        """Nothing stops: like vLLM, an emulated server buffers for slow clients."""

    def client_ready(self) -> None:
        """Nothing was stopped."""


class Streamed(Generation):
    """A response as an event stream: one event per token, or several tokens after the first."""

    kinds = ("text_completion", "chat.completion.chunk")

    def submit(self, replica: EmulatedReplica) -> None:
        """Send the head, and start generating."""
        self._merged, self._held = self._served.tokens_per_event, b""
        self._framed = not self._head.http10
        # Like vLLM, which sends status 200 before it begins to work.
        self._client.start_stream(self._head)
        # Only the token differs between events, so the rest is made once.
        before, _, after = self._event(_MARK, None).partition(_MARK.encode())
        length = len(before) + len(after) + tokenizer.TOKEN_BYTES
        self._before, self._after = before, after
        if self._framed:
            self._before, self._after = b"%x\r\n%b" % (length, before), after + b"\r\n"
        super().submit(replica)

    def on_token(self, job: Job, is_last: bool) -> None:
        """Send the latest token, and the end of the stream after the last."""
        parts: list[bytes] = []
        if job.request.generated == 1 and self._wanted.chat:
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
            self._client.write(parts[0] if len(parts) == 1 else b"".join(parts))
            return
        text = (self._held + job.token).decode()
        parts.append(self._frame(self._event(text, self._wanted.finish_reason)))
        if self._wanted.include_usage:
            parts.append(self._frame(_data(self._about | {"choices": [], "usage": usage(job)})))
        parts.append(self._frame(_DONE))
        self._client.end_stream(self._head, b"".join(parts))

    def _frame(self, event: bytes) -> bytes:
        return chunk(event) if self._framed else event

    def _role_event(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return _data(self._about | {"choices": [choice]})

    def _event(self, token: str, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self._wanted.chat:
            choice["delta"] = {"content": "\x01"}
        else:
            choice["text"] = "\x01"
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if not self._wanted.chat:
            choice["prompt_token_ids"] = None
        choice["token_ids"] = None
        return _data(self._about | {"choices": [choice]}).replace(b"\\u0001", token.encode())


class Whole(Generation):
    """A response in one piece."""

    def on_token(self, job: Job, is_last: bool) -> None:
        """Reply after the last token."""
        if not is_last:
            return
        text = tokenizer.decode(job.answer)
        choice: dict[str, Any] = {"index": 0}
        if self._wanted.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": self._wanted.finish_reason,
            "stop_reason": None,
        }
        body = self._about | {"choices": [choice], "usage": usage(job)}
        body["system_fingerprint"] = _FINGERPRINT
        self._client.reply_json(self._head, body)


def _data(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
