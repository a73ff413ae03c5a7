"""Workers of one router ask each other, so that any of them can answer an admin request for all.

Each worker has a second admin listener, a socket in a folder that only this user can open. A worker
that is asked on the public listener asks all workers there, itself included, and merges their
responses. A change it makes itself, and then asks all of them to take it over.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson

from tailrace.net.server import HttpRequest
from tailrace.router.admin import AdminResponse, error

#: For one worker's response, s; one that is busy for longer is left out.
TIMEOUT_S = 2.0


class WorkerResponse(NamedTuple):
    """What one worker responded."""

    worker: int
    status: int
    body: bytes


#: Makes status, content type and body out of the workers' responses.
Merge = Callable[[list[WorkerResponse]], tuple[int, bytes, bytes]]


class PeerWorkers:
    """All workers of a router, seen from one of them."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder = folder
        self.number = number
        self.count = count

    @property
    def own_path(self) -> str:
        """The socket on which this worker listens for the others."""
        return str(self._path(self.number))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    async def ask(self, method: str, path: str) -> list[WorkerResponse]:
        """Send a request to all workers; those that do not respond are left out."""
        requests = (self._ask(number, method, path) for number in range(self.count))
        responses = await asyncio.gather(*requests)
        return [response for response in responses if response is not None]

    async def _ask(self, number: int, method: str, path: str) -> WorkerResponse | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path(number)))
                try:
                    writer.write(
                        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n"
                        "connection: close\r\n\r\n".encode("latin-1")
                    )
                    response = await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None
        head, found, body = response.partition(b"\r\n\r\n")
        return WorkerResponse(number, int(head.split(b" ", 2)[1]), body) if found else None


class PeerRequest:
    """An admin request that all workers answer together; the work in progress of a connection."""

    def __init__(self, request: HttpRequest, peers: PeerWorkers, path: str, merge: Merge) -> None:
        self._request = request
        self._task = asyncio.get_running_loop().create_task(self._run(peers, path, merge))

    async def _run(self, peers: PeerWorkers, path: str, merge: Merge) -> None:
        head = self._request.head
        method = "POST" if head.method == b"POST" else "GET"
        status, kind, body = merge(await peers.ask(method, path))
        self._request.client.respond(head, status, body, content_type=kind)

    def client_gone(self) -> None:
        """Cancel."""
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing to stop: the response is one piece."""

    def client_ready(self) -> None:
        """Nothing to resume."""


class PeerChange:
    """An admin request that changed something; it is answered once all workers have applied it.

    A worker that is busy for longer takes the change over when it looks after its time limits. One
    that cannot take it over is reported.
    """

    def __init__(self, request: HttpRequest, peers: PeerWorkers, response: AdminResponse) -> None:
        self._request = request
        self._task = asyncio.get_running_loop().create_task(self._run(peers, response))

    async def _run(self, peers: PeerWorkers, response: AdminResponse) -> None:
        if response.status == 200:
            answers = await peers.ask("POST", "/catch-up")
            behind = [(a.worker, why) for a in answers if (why := orjson.loads(a.body)["behind"])]
            if behind:
                workers = "; ".join(f"worker {worker}: {why}" for worker, why in behind)
                response = error(
                    500,
                    "the change is made, but not all workers could take it over; they keep their "
                    f"former settings and try again: {workers}",
                )
        status, kind, body, extra = response
        client = self._request.client
        client.respond(self._request.head, status, body, content_type=kind, extra=extra)

    def client_gone(self) -> None:
        """Cancel; what was changed stays so."""
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing to stop: the response is one piece."""

    def client_ready(self) -> None:
        """Nothing to resume."""
