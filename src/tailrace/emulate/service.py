"""The HTTP API of an emulated replica."""

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import xxhash

from tailrace.config import Replica
from tailrace.emulate import metrics_page, tokenizer
from tailrace.emulate.connection import ApiError, EmulatedConnection, Listener, read_object
from tailrace.emulate.faults import Fault
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

    def _embed(self, client: EmulatedConnection, request: HttpRequest) -> None:
        body = read_object(request.body)
        check_model(body, self._served)
        given = body.get("input")
        inputs = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
        prompts = [completion_prompt(one) for one in inputs]
        data = [
            {"index": k, "object": "embedding", "embedding": _embedding(prompt)}
            for k, prompt in enumerate(prompts)
        ]
        tokens = sum(map(tokenizer.count, prompts))
        used = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        client.reply_json(
            request.head,
            {"id": f"embd-{next(self._ids):016x}", "object": "list", "created": int(time.time()),
             "model": self._served.model, "data": data, "usage": used}
        )  # fmt: skip

    def _models(self, client: EmulatedConnection, request: HttpRequest) -> None:
        about = {
            "id": self._served.model, "object": "model", "created": int(time.time()),
            "owned_by": "vllm", "root": self._served.model, "parent": None,
            "max_model_len": self._served.max_model_len, "permission": [],
        }  # fmt: skip
        client.reply_json(request.head, {"object": "list", "data": [about]})

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
    b"/v1/embeddings": {b"POST": EmulatedService._embed},
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


def _is_id(value: object) -> bool:
    return isinstance(value, int)
