"""The HTTP API of an emulated replica."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xxhash

from tailrace.config import Replica
from tailrace.emulate import metrics_page, tokenizer
from tailrace.emulate.connection import ApiError, EmulatedConnection, Listener, read_object
from tailrace.emulate.faults import Fault
from tailrace.emulate.other_apis import (
    MessageStreamed,
    MessageWhole,
    ResponseStreamed,
    ResponseWhole,
    StoredResponses,
    message_body,
)
from tailrace.emulate.replica import EmulatedReplica
from tailrace.emulate.request_body import Served, check_model, completion_prompt, read_generation
from tailrace.emulate.responses import Streamed, Whole
from tailrace.errors import TailraceError
from tailrace.net.server import HttpRequest, Work
from tailrace.sim.feasibility import check_requests
from tailrace.workload.table import RequestTable

VERSION = "0.32.0+emulated"
EMBEDDING_SIZE = 8
_GARBAGE = b"\x16\x03\x01\x00\xffthis is not HTTP\r\n\x00\xfe\r\n\r\n"

_Handler = Callable[["EmulatedService", EmulatedConnection, HttpRequest], Work | None]


class EmulatedService(Listener):
    """Speaks vLLM's HTTP for one replica. ``fault``: what is wrong with it at present."""

    def __init__(self, replica: EmulatedReplica, served: Served, *, old_names: bool) -> None:
        super().__init__()
        self.replica = replica
        self.fault: Fault | None = None
        self._served = served
        self._old_names = old_names
        self._ids = itertools.count()
        self._stored = StoredResponses()

    def respond(self, client: EmulatedConnection, request: HttpRequest) -> Work | None:
        """Respond as the path and the present fault say."""
        kind = self.fault.kind if self.fault is not None else ""
        if kind == "hang":
            return None
        if kind == "garbage":
            client.write(_GARBAGE)
            client.end(keep=False)
            return None
        if kind == "error" and self.fault is not None and request.path != b"/metrics":
            raise ApiError(self.fault.status, "emulated failure", "InternalServerError")
        methods = _ROUTES.get(request.path)
        if methods is None:
            client.reply(request.head, 404, b'{"detail":"Not Found"}')
            return None
        handler = methods.get(request.head.method)
        if handler is None:
            client.reply(request.head, 405, b'{"detail":"Method Not Allowed"}')
            return None
        return handler(self, client, request)

    def _generate(self, client: EmulatedConnection, request: HttpRequest, *, chat: bool) -> Work:
        body = read_object(request.body)
        wanted = read_generation(body, request.head.lower, self._served, chat=chat)
        prefix = "chatcmpl" if chat else "cmpl"
        response_id = f"{prefix}-{self.replica.number:02x}{next(self._ids):014x}"
        form = Streamed if wanted.streams else Whole
        generation = form(client, request.head, wanted, response_id, self._served)
        generation.submit(self.replica)
        return generation

    def _message(self, client: EmulatedConnection, request: HttpRequest) -> Work:
        body = message_body(read_object(request.body))
        wanted = read_generation(body, request.head.lower, self._served, chat=True)
        message_id = f"msg_{self.replica.number:02x}{next(self._ids):014x}"
        form = MessageStreamed if wanted.streams else MessageWhole
        generation = form(client, request.head, wanted, message_id, self._served)
        generation.submit(self.replica)
        return generation

    def _response(self, client: EmulatedConnection, request: HttpRequest) -> Work:
        body = self._stored.chat_body(read_object(request.body))
        wanted = read_generation(body, request.head.lower, self._served, chat=True)
        response_id = f"resp_{self.replica.number:02x}{next(self._ids):014x}"
        if body.get("store") is not False:
            self._stored.keep(response_id, body["messages"], wanted)
        form = ResponseStreamed if wanted.streams else ResponseWhole
        generation = form(client, request.head, wanted, response_id, self._served)
        generation.submit(self.replica)
        return generation

    def _rerank(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = read_object(request.body)
        check_model(body, self._served)
        query, documents = body.get("query"), body.get("documents")
        if not isinstance(query, str) or not isinstance(documents, list):
            raise ApiError(400, "query must be a text and documents a list")
        pairs = [(query, str(document)) for document in documents]
        results: list[dict[str, Any]] = [
            {"index": k, "document": {"text": pair[1]}, "relevance_score": _score(*pair)}
            for k, pair in enumerate(pairs)
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        used = {"total_tokens": _pair_tokens(pairs)}
        client.reply_json(
            request.head,
            {"id": f"rerank-{next(self._ids):016x}", "model": self._served.model, "usage": used,
             "results": results[: body.get("top_n") or None]}
        )  # fmt: skip

    def _score(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = read_object(request.body)
        check_model(body, self._served)
        first, second = (_texts(body.get(name)) for name in ("text_1", "text_2"))
        if not first or not second:
            raise ApiError(400, "text_1 and text_2 must be texts")
        pairs = [(first[k % len(first)], text) for k, text in enumerate(second)]
        data = [
            {"index": k, "object": "score", "score": _score(*pair)} for k, pair in enumerate(pairs)
        ]
        self._reply_data(client, request, "score", data, _pair_tokens(pairs))

    def _pool(self, client: EmulatedConnection, request: HttpRequest, *, kind: str) -> None:
        """Answer with numbers made of each prompt: a vector, or a class."""
        body = read_object(request.body)
        check_model(body, self._served)
        prompts = [completion_prompt(text) for text in _texts(body.get("input"))]
        if not prompts:
            raise ApiError(400, "input must be a text or a list of texts")
        vectors = [_embedding(prompt) for prompt in prompts]
        data = [
            {"index": k, "object": kind, "data": vector}
            if kind == "pooling"
            else {"index": k, "label": f"LABEL_{int(vector[0] > 0)}", "probs": [0.5, 0.5],
                  "num_classes": 2}
            for k, vector in enumerate(vectors)
        ]  # fmt: skip
        self._reply_data(client, request, kind, data, sum(map(tokenizer.count, prompts)))

    def _reply_data(
        self,
        client: EmulatedConnection,
        request: HttpRequest,
        kind: str,
        data: list[dict[str, Any]],
        tokens: int,
    ) -> None:
        used = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        client.reply_json(
            request.head,
            {"id": f"{kind}-{next(self._ids):016x}", "object": "list", "created": int(time.time()),
             "model": self._served.model, "data": data, "usage": used}
        )  # fmt: skip

    def _count_tokens(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = message_body(read_object(request.body))
        check_model(body, self._served)
        try:
            tokens = tokenizer.chat_tokens(body["messages"] or [], body.get("tools"))
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error)) from None
        client.reply_json(request.head, {"input_tokens": tokenizer.count(tokens)})

    def _embed(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = read_object(request.body)
        check_model(body, self._served)
        given = body.get("input")
        prompts = [completion_prompt(one) for one in _texts(given) or [given]]
        data = [
            {"index": k, "object": "embedding", "embedding": _embedding(prompt)}
            for k, prompt in enumerate(prompts)
        ]
        self._reply_data(client, request, "embd", data, sum(map(tokenizer.count, prompts)))

    def _models(self, client: EmulatedConnection, request: HttpRequest) -> None:
        served = self._served
        about = {"object": "model", "created": int(time.time()), "owned_by": "vllm"}
        models: list[dict[str, Any]] = [
            {"id": served.model, **about, "root": served.model, "parent": None,
             "max_model_len": served.max_model_len, "permission": []}
        ]  # fmt: skip
        models += [
            {"id": name, **about, "root": name, "parent": served.model, "permission": []}
            for name in served.adapters
        ]
        client.reply_json(request.head, {"object": "list", "data": models})

    def _health(self, client: EmulatedConnection, request: HttpRequest) -> None:
        client.reply(request.head, 200, b"")

    def _version(self, client: EmulatedConnection, request: HttpRequest) -> None:
        client.reply_json(request.head, {"version": VERSION})

    def _tokenize(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = read_object(request.body)
        check_model(body, self._served)
        if isinstance(body.get("messages"), list):
            answers = body.get("add_generation_prompt") is not False
            try:
                tokens = tokenizer.chat_tokens(
                    body["messages"], body.get("tools"), add_generation_prompt=answers
                )
            except ValueError as error:
                raise ApiError(400, str(error)) from None
        elif isinstance(body.get("prompt"), str):
            tokens = tokenizer.text_tokens(body["prompt"])
        else:
            raise ApiError(400, "prompt must be a text, or messages a list")
        client.reply_json(
            request.head,
            {"count": tokenizer.count(tokens), "max_model_len": self._served.max_model_len,
             "tokens": tokenizer.token_ids(tokens), "token_strs": None}
        )  # fmt: skip

    def _detokenize(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = read_object(request.body)
        ids = body.get("tokens")
        try:
            tokens = tokenizer.from_ids(ids if isinstance(ids, list) else [ids])
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        client.reply_json(request.head, {"prompt": tokenizer.decode(tokens)})

    def _metrics(self, client: EmulatedConnection, request: HttpRequest) -> None:
        self.replica.catch_up()
        page = metrics_page.page(self.replica, self._served.model, old_names=self._old_names)
        client.reply(request.head, 200, page, b"text/plain; version=0.0.4; charset=utf-8")


_ROUTES: dict[bytes, dict[bytes, _Handler]] = {
    b"/v1/chat/completions": {b"POST": partial(EmulatedService._generate, chat=True)},
    b"/v1/completions": {b"POST": partial(EmulatedService._generate, chat=False)},
    b"/v1/messages": {b"POST": EmulatedService._message},
    b"/v1/messages/count_tokens": {b"POST": EmulatedService._count_tokens},
    b"/v1/responses": {b"POST": EmulatedService._response},
    b"/v1/embeddings": {b"POST": EmulatedService._embed},
    **{
        path: {b"POST": EmulatedService._rerank}
        for path in (b"/rerank", b"/v1/rerank", b"/v2/rerank")
    },
    b"/score": {b"POST": EmulatedService._score},
    b"/v1/score": {b"POST": EmulatedService._score},
    b"/pooling": {b"POST": partial(EmulatedService._pool, kind="pooling")},
    b"/classify": {b"POST": partial(EmulatedService._pool, kind="classify")},
    b"/v1/models": {b"GET": EmulatedService._models},
    b"/health": {b"GET": EmulatedService._health},
    b"/ping": {b"GET": EmulatedService._health, b"POST": EmulatedService._health},
    b"/version": {b"GET": EmulatedService._version},
    b"/tokenize": {b"POST": EmulatedService._tokenize},
    b"/detokenize": {b"POST": EmulatedService._detokenize},
    b"/metrics": {b"GET": EmulatedService._metrics},
}


def max_model_len(config: Replica) -> int:
    """Return the most tokens (prompt and answer) that a replica surely finishes."""
    fits, too_many = 0, 2**27
    while too_many - fits > 1:
        total = (fits + too_many) // 2
        one = np.ones(1, np.int64)
        row = RequestTable.build(np.zeros(1), max(total - 2, 1) * one, 2 * one)
        try:
            check_requests([config], row)
            fits = total
        except TailraceError:
            too_many = total
    if fits < 3:
        raise TailraceError("a replica has too little KV memory for any request: raise num_blocks")
    return fits


def _embedding(prompt: bytes) -> list[float]:
    seed = xxhash.xxh3_64_intdigest(prompt)
    values = np.random.default_rng(seed).standard_normal(EMBEDDING_SIZE)
    return [round(float(value), 6) for value in values / np.linalg.norm(values)]


def _texts(given: Any) -> list[Any]:
    """Return one text or several as a list; token ids are one text."""
    if isinstance(given, list) and given and not _is_id(given[0]):
        return given
    return [given] if given else []


def _score(first: str, second: str) -> float:
    """Return how alike two texts are, by nothing but chance."""
    return round(xxhash.xxh3_64_intdigest(f"{first}\0{second}".encode()) / 2.0**64, 6)


def _pair_tokens(pairs: list[tuple[str, str]]) -> int:
    return sum(tokenizer.count(tokenizer.text_tokens(text)) for pair in pairs for text in pair)


def _is_id(value: object) -> bool:
    return isinstance(value, int)
