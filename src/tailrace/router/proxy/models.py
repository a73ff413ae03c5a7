"""``GET /v1/models``: the models of all healthy backends as one list."""

import asyncio
from typing import Any

import orjson

from tailrace.net.client import FetchError, Response
from tailrace.net.server import HttpRequest, error_body
from tailrace.router.proxy.backends import Target

PATH = b"/v1/models"
TIMEOUT_S = 5.0


class ModelsAnswer:
    """Asks all backends and answers with the union; a request under way for its connection."""

    def __init__(self, request: HttpRequest, targets: list[Target]) -> None:
        self._request = request
        self._task = asyncio.get_running_loop().create_task(self._run(targets))

    async def _run(self, targets: list[Target]) -> None:
        request = self._request
        key = request.head.lower.get(b"authorization")
        headers = {"authorization": key.decode("latin-1")} if key is not None else {}
        path = request.head.target.decode("latin-1")
        asked = (t.pool.fetch("GET", path, headers, timeout_s=TIMEOUT_S) for t in targets)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        status, body = merged([a for a in answers if isinstance(a, Response)])
        for error in answers:
            if isinstance(error, BaseException) and not isinstance(error, FetchError):
                raise error
        request.client.respond(request.head, status, body)

    def client_gone(self) -> None:
        """Ask no further."""
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing to stop: the answer is one piece."""

    def client_ready(self) -> None:
        """Nothing to go on with."""


def merged(answers: list[Response]) -> tuple[int, bytes]:
    """Return status and body for the answers of several backends; each model stands there once."""
    models: dict[str, Any] = {}
    good = False
    for answer in answers:
        if answer.status != 200:
            continue
        try:
            listed = orjson.loads(answer.body)["data"]
            found = {str(model["id"]): model for model in listed}
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
        good = True
        models = found | models
    if good:
        return 200, orjson.dumps({"object": "list", "data": list(models.values())})
    refused = [a for a in answers if 400 <= a.status < 500]
    if refused:
        return refused[0].status, refused[0].body
    return 503, error_body(503, "no replica answered")
