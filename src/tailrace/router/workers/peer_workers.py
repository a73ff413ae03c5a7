"""The workers of one router ask each other, so that any of them can answer for all.

Each worker has a second admin listener, a socket in a folder that only this user can open. Whoever
is asked on the public one asks all workers there, itself included, and puts the answers together.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tailrace.net.server import HttpRequest

#: For one worker's answer, s; one that is busy for longer is left out.
TIMEOUT_S = 2.0


class Told(NamedTuple):
    """What one worker has answered."""

    worker: int
    status: int
    body: bytes


class Siblings:
    """All workers of a router, seen from one of them."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder = folder
        self.number = number
        self.count = count

    @property
    def own_path(self) -> str:
        """Where this worker listens for the others."""
        return str(self._path(self.number))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    async def ask(self, method: str, path: str) -> list[Told]:
        """Ask all workers the same; those that do not answer are left out."""
        asked = (self._ask(number, method, path) for number in range(self.count))
        answers = await asyncio.gather(*asked)
        return [answer for answer in answers if answer is not None]

    async def _ask(self, number: int, method: str, path: str) -> Told | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path(number)))
                try:
                    writer.write(
                        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n"
                        "connection: close\r\n\r\n".encode("latin-1")
                    )
                    answer = await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None
        head, found, body = answer.partition(b"\r\n\r\n")
        return Told(number, int(head.split(b" ", 2)[1]), body) if found else None


class Gathering:
    """An admin request that all workers answer together; under way for its connection."""

    def __init__(
        self,
        request: HttpRequest,
        siblings: Siblings,
        path: str,
        merge: Callable[[list[Told]], tuple[int, bytes, bytes]],
    ) -> None:
        """``merge`` makes status, content type and body out of the answers."""
        self._request = request
        self._task = asyncio.get_running_loop().create_task(self._run(siblings, path, merge))

    async def _run(
        self,
        siblings: Siblings,
        path: str,
        merge: Callable[[list[Told]], tuple[int, bytes, bytes]],
    ) -> None:
        head = self._request.head
        method = "POST" if head.method == b"POST" else "GET"
        status, kind, body = merge(await siblings.ask(method, path))
        self._request.client.respond(head, status, body, content_type=kind)

    def client_gone(self) -> None:
        """Ask no further."""
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing to stop: the answer is one piece."""

    def client_ready(self) -> None:
        """Nothing to go on with."""
