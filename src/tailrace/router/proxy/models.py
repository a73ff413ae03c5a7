"""``GET /v1/models``: the models of all healthy backends as one list."""

import asyncio
from typing import Any

import orjson

from tailrace.net.client import FetchError, Response
from tailrace.net.server import HttpRequest, error_body
from tailrace.router.proxy.backends import Backend

TIMEOUT_S = 5.0


class ModelsRequest:
    """Asks all backends and responds with the union; the work in progress of a connection."""

    def __init__(self, request: HttpRequest, backends: list[Backend]) -> None:
        self._request = request
        self._task = asyncio.get_running_loop().create_task(self._run(backends))

    async def _run(self, backends: list[Backend]) -> None:
        request = self._request
        key = request.head.lower.get(b"authorization")
        headers = {"authorization": key.decode("latin-1")} if key is not None else {}
        path = request.head.target.decode("latin-1")
        fetches = (b.pool.fetch("GET", path, headers, timeout_s=TIMEOUT_S) for b in backends)
        responses = await asyncio.gather(*fetches, return_exceptions=True)
        status, body = union([r for r in responses if isinstance(r, Response)])
        for error in responses:
            if isinstance(error, BaseException) and not isinstance(error, FetchError):
                raise error
        request.client.respond(request.head, status, body)

    def client_gone(self) -> None:
        """Cancel."""
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing to stop: the response is one piece."""

    def client_ready(self) -> None:
        """Nothing to resume."""


def union(responses: list[Response]) -> tuple[int, bytes]:
    """Return status and body for the responses of several backends; each model is listed once."""
    models: dict[str, Any] = {}
    good = False
    for response in responses:
        if response.status != 200:
            continue
        try:
            listed = orjson.loads(response.body)["data"]
            found = {str(model["id"]): model for model in listed}
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
        good = True
        models = found | models
    if good:
        return 200, orjson.dumps({"object": "list", "data": list(models.values())})
    refused = [r for r in responses if 400 <= r.status < 500]
    if refused:
        return refused[0].status, refused[0].body
    return 503, error_body(503, "no replica answered")
