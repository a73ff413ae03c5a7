"""``GET /v1/models``: the models that a client can use, as one list or one by one."""

import asyncio
from urllib.parse import unquote

import orjson

from tailrace.net.client import FetchError, Response
from tailrace.net.server import HttpRequest, error_body
from tailrace.router.access import refusals
from tailrace.router.access.keyring import Client
from tailrace.router.proxy.backends import Backend
from tailrace.router.proxy.catalogue import Entry, ModelCatalogue, read_list

TIMEOUT_S = 5.0
PATH = b"/v1/models"


def respond(request: HttpRequest, client: Client | None, models: dict[str, Entry]) -> None:
    """Respond with the models of a list that the client may use."""
    models = {
        name: entry for name, entry in models.items() if client is None or client.may_use(name)
    }
    head, wanted = request.head, request.path[len(PATH) + 1 :]
    if request.path == PATH:
        body = orjson.dumps({"object": "list", "data": list(models.values())})
        request.client.respond(head, 200, body)
        return
    name = unquote(wanted.decode("latin-1"), errors="replace")
    if name in models:
        request.client.respond(head, 200, orjson.dumps(models[name]))
    else:
        refused = refusals.no_model(name, sorted(models))
        body = error_body(404, refused.why, refused.code, refused.param)
        request.client.respond(head, 404, body)


class ModelsRequest:
    """Asks all backends with the client's key; the work in progress of a connection.

    For a router without clients, in front of servers that list their models only for requests with
    a key.
    """

    def __init__(
        self, request: HttpRequest, backends: list[Backend], catalogue: ModelCatalogue
    ) -> None:
        self._request = request
        self._catalogue = catalogue
        self._task = asyncio.get_running_loop().create_task(self._run(backends))

    async def _run(self, backends: list[Backend]) -> None:
        request = self._request
        key = request.head.lower.get(b"authorization")
        headers = {"authorization": key.decode("latin-1")} if key is not None else {}
        path = PATH.decode()
        fetches = (b.pool.fetch("GET", path, headers, timeout_s=TIMEOUT_S) for b in backends)
        responses = await asyncio.gather(*fetches, return_exceptions=True)
        for error in responses:
            if isinstance(error, BaseException) and not isinstance(error, FetchError):
                raise error
        good = [r for r in responses if isinstance(r, Response)]
        lists = [read_list(r.body) for r in good if r.status == 200]
        found: dict[str, Entry] = {}
        for listed in lists:
            found = (listed or {}) | found
        if any(listed is not None for listed in lists):
            respond(request, None, self._catalogue.with_aliases(found))
            return
        refused = [r for r in good if 400 <= r.status < 500]
        if refused:
            request.client.respond(request.head, refused[0].status, refused[0].body)
        else:
            request.client.respond(request.head, 503, error_body(503, "no replica answered"))

    def client_gone(self) -> None:
        """Cancel."""
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing to stop: the response is one piece."""

    def client_ready(self) -> None:
        """Nothing to resume."""
