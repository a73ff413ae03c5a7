"""Anthropic's messages and OpenAI's responses, in vLLM's form, as bytes."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import orjson

from tailrace.emulate import tokenizer
from tailrace.emulate.connection import ApiError
from tailrace.emulate.job import Job
from tailrace.emulate.replica import EmulatedReplica
from tailrace.emulate.request_body import GenerationRequest
from tailrace.emulate.responses import Generation
from tailrace.net.framing import chunk

#: Responses that one server remembers.
MOST_STORED = 1000


def message_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request that a request for /v1/messages stands for."""
    system, messages = body.get("system"), body.get("messages")
    head = [{"role": "system", "content": system}] if system else []
    return {**body, "messages": [*head, *messages] if isinstance(messages, list) else messages}


class StoredResponses:
    """Conversations of the latest responses of one server, by their ids."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[Any]] = OrderedDict()

    def chat_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat request that a request for /v1/responses stands for."""
        previous, given = body.get("previous_response_id"), body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if previous is not None:
            if previous not in self._kept:
                raise ApiError(404, f"Response with id '{previous}' not found.", "NotFoundError")
            messages = [*self._kept[previous], *(messages or [])]
        if body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *(messages or [])]
        return {**body, "messages": messages, "max_tokens": body.get("max_output_tokens")}

    def keep(self, response_id: str, messages: Any, wanted: GenerationRequest) -> None:
        """Store a response together with what led to it."""
        answer = {"role": "assistant", "content": tokenizer.decode(wanted.answer)}
        self._kept[response_id] = [*messages, answer]
        if len(self._kept) > MOST_STORED:
            self._kept.popitem(last=False)


class _Events(Generation):
    """A response as a stream of named events."""

    def submit(self, replica: EmulatedReplica) -> None:
        """Start generating; the head goes first."""
        self._client.start_stream(self._head)
        super().submit(replica)

    def on_token(self, job: Job, is_last: bool) -> None:
        """Send the latest token, with the beginning before it and the end behind it."""
        events = self.first(job) if job.request.generated == 1 else []
        events.append(self.token(job.token.decode()))
        if is_last:
            events += self.last(job)
        data = b"".join(self._frame(event) for event in events)
        if is_last:
            self._client.end_stream(self._head, data)
        else:
            self._client.write(data)

    def _frame(self, event: dict[str, Any]) -> bytes:
        text = b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
        return text if self._head.http10 else chunk(text)

    def first(self, job: Job) -> list[dict[str, Any]]:
        """Return the events before the first token."""
        raise NotImplementedError

    def token(self, text: str) -> dict[str, Any]:
        """Return the event of a token."""
        raise NotImplementedError

    def last(self, job: Job) -> list[dict[str, Any]]:
        """Return the events behind the last token."""
        raise NotImplementedError


def _message(about: Mapping[str, Any], job: Job, text: str | None) -> dict[str, Any]:
    """Return a message; ``text`` None: it has only begun."""
    output = 0 if text is None else job.request.generated
    return {
        "id": about["id"], "type": "message", "role": "assistant", "model": about["model"],
        "content": [] if text is None else [{"type": "text", "text": text}],
        "stop_reason": None if text is None else "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": job.prompt_tokens, "output_tokens": output,
                  "cache_read_input_tokens": job.cached_tokens},
    }  # fmt: skip


class MessageWhole(Generation):
    """A message in one piece."""

    def on_token(self, job: Job, is_last: bool) -> None:
        """Reply after the last token."""
        if is_last:
            text = tokenizer.decode(job.answer)
            self._client.reply_json(self._head, _message(self._about, job, text))


class MessageStreamed(_Events):
    """A message as events."""

    def first(self, job: Job) -> list[dict[str, Any]]:
        """Return the events before the first token."""
        block = {"type": "text", "text": ""}
        return [
            {"type": "message_start", "message": _message(self._about, job, None)},
            {"type": "content_block_start", "index": 0, "content_block": block},
        ]

    def token(self, text: str) -> dict[str, Any]:
        """Return the event of a token."""
        delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": 0, "delta": delta}

    def last(self, job: Job) -> list[dict[str, Any]]:
        """Return the events behind the last token."""
        delta = {"stop_reason": "end_turn", "stop_sequence": None}
        used = {"output_tokens": job.request.generated}
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": delta, "usage": used},
            {"type": "message_stop"},
        ]


def _response(about: Mapping[str, Any], job: Job, text: str | None) -> dict[str, Any]:
    """Return a response; ``text`` None: it has only begun."""
    response: dict[str, Any] = {
        "id": about["id"], "created_at": about["created"], "object": "response",
        "model": about["model"], "status": "in_progress" if text is None else "completed",
        "output": [], "usage": None,
    }  # fmt: skip
    if text is not None:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        response["output"] = [
            {"type": "message", "role": "assistant", "status": "completed", "content": content}
        ]
        output = job.request.generated
        response["usage"] = {
            "input_tokens": job.prompt_tokens, "output_tokens": output,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "total_tokens": job.prompt_tokens + output,
        }  # fmt: skip
    return response


class ResponseWhole(Generation):
    """A response of the responses API in one piece."""

    def on_token(self, job: Job, is_last: bool) -> None:
        """Reply after the last token."""
        if is_last:
            text = tokenizer.decode(job.answer)
            self._client.reply_json(self._head, _response(self._about, job, text))


class ResponseStreamed(_Events):
    """A response of the responses API as events."""

    def first(self, job: Job) -> list[dict[str, Any]]:
        """Return the events before the first token."""
        response = _response(self._about, job, None)
        return [{"type": f"response.{name}", "response": response}
                for name in ("created", "in_progress")]  # fmt: skip

    def token(self, text: str) -> dict[str, Any]:
        """Return the event of a token."""
        return {"type": "response.output_text.delta", "output_index": 0, "delta": text}

    def last(self, job: Job) -> list[dict[str, Any]]:
        """Return the events behind the last token."""
        text = tokenizer.decode(job.answer)
        return [
            {"type": "response.output_text.done", "text": text},
            {"type": "response.completed", "response": _response(self._about, job, text)},
        ]
