"""What an emulated replica answers to each path."""

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import xxhash

from tailrace.config import Replica
from tailrace.emulate import metrics, tokenizer
from tailrace.emulate.faults import Fault
from tailrace.emulate.http import ApiError, Connection, HttpRequest, read_object
from tailrace.emulate.replica import EmulatedReplica, Job
from tailrace.emulate.request_body import Served, check_model, completion_prompt, read_generation
from tailrace.emulate.responses import Streamed, Whole
from tailrace.errors import TailraceError
from tailrace.sim.feasibility import check_requests
from tailrace.workload.table import RequestTable

VERSION = "0.32.0+emulated"
EMBEDDING_SIZE = 8
_GARBAGE = b"\x16\x03\x01\x00\xffthis is not HTTP\r\n\x00\xfe\r\n\r\n"

_Answer = Callable[["Service", Connection, HttpRequest], None]


class Service:
    """Speaks vLLM's HTTP for one replica. ``fault``: what is wrong with it at present."""

    def __init__(self, replica: EmulatedReplica, served: Served, *, old_names: bool) -> None:
        self.replica = replica
        self.fault: Fault | None = None
        self.connections: dict[Connection, Job | None] = {}
        self._served = served
        self._old_names = old_names
        self._ids = itertools.count()

    # ---- connections ----------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """A client has connected."""
        self.connections[connection] = None

    def closed(self, connection: Connection) -> None:
        """A client has gone: what it waits for is not worked on any more."""
        job = self.connections.pop(connection, None)
        if job is not None:
            self.replica.abort(job)

    def drop_all(self) -> None:
        """Close all connections at once."""
        for connection in list(self.connections):
            connection.abort()

    # ---- requests -------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        """Answer a request as its path and the present fault say."""
        kind = self.fault.kind if self.fault is not None else ""
        if kind == "hang":
            return
        if kind == "garbage":
            connection.write(_GARBAGE)
            connection.close()
            return
        if kind == "error" and self.fault is not None and request.path != "/metrics":
            raise ApiError(self.fault.status, "emulated failure", "InternalServerError")
        methods = _ROUTES.get(request.path)
        if methods is None:
            connection.reply(404, b'{"detail":"Not Found"}')
        elif request.method not in methods:
            connection.reply(405, b'{"detail":"Method Not Allowed"}')
        else:
            methods[request.method](self, connection, request)

    def _generate(self, connection: Connection, request: HttpRequest, *, chat: bool) -> None:
        body = read_object(request.body)
        asked = read_generation(body, request.headers, self._served, chat=chat)
        prefix = "chatcmpl" if chat else "cmpl"
        answer_id = f"{prefix}-{self.replica.number:02x}{next(self._ids):014x}"
        form = Streamed if asked.streams else Whole
        answer = form(connection, asked, answer_id, self._served)

        def told(job: Job, is_last: bool) -> None:
            if is_last:
                self.connections[connection] = None
            answer.told(job, is_last)

        self.connections[connection] = self.replica.submit(
            asked.prompt, asked.answer, told, asked.finish_reason
        )

    def _embed(self, connection: Connection, request: HttpRequest) -> None:
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
        connection.reply_json(
            {"id": f"embd-{next(self._ids):016x}", "object": "list", "created": int(time.time()),
             "model": self._served.model, "data": data, "usage": used}
        )  # fmt: skip

    def _models(self, connection: Connection, request: HttpRequest) -> None:
        del request
        about = {
            "id": self._served.model, "object": "model", "created": int(time.time()),
            "owned_by": "vllm", "root": self._served.model, "parent": None,
            "max_model_len": self._served.max_model_len, "permission": [],
        }  # fmt: skip
        connection.reply_json({"object": "list", "data": [about]})

    def _health(self, connection: Connection, request: HttpRequest) -> None:
        del request
        connection.reply(200, b"")

    def _version(self, connection: Connection, request: HttpRequest) -> None:
        del request
        connection.reply_json({"version": VERSION})

    def _tokenize(self, connection: Connection, request: HttpRequest) -> None:
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
        connection.reply_json(
            {"count": tokenizer.count(tokens), "max_model_len": self._served.max_model_len,
             "tokens": tokenizer.token_ids(tokens), "token_strs": None}
        )  # fmt: skip

    def _detokenize(self, connection: Connection, request: HttpRequest) -> None:
        body = read_object(request.body)
        ids = body.get("tokens")
        try:
            tokens = tokenizer.from_ids(ids if isinstance(ids, list) else [ids])
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        connection.reply_json({"prompt": tokenizer.decode(tokens)})

    def _metrics(self, connection: Connection, request: HttpRequest) -> None:
        del request
        self.replica.catch_up()
        page = metrics.page(self.replica, self._served.model, old_names=self._old_names)
        connection.reply(200, page, "text/plain; version=0.0.4; charset=utf-8")


_ROUTES: dict[str, dict[str, _Answer]] = {
    "/v1/chat/completions": {"POST": partial(Service._generate, chat=True)},
    "/v1/completions": {"POST": partial(Service._generate, chat=False)},
    "/v1/embeddings": {"POST": Service._embed},
    "/v1/models": {"GET": Service._models},
    "/health": {"GET": Service._health},
    "/ping": {"GET": Service._health, "POST": Service._health},
    "/version": {"GET": Service._version},
    "/tokenize": {"POST": Service._tokenize},
    "/detokenize": {"POST": Service._detokenize},
    "/metrics": {"GET": Service._metrics},
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
