"""Asks servers how long a prompt was in tokens (``/tokenize``), beside the traffic.

Most answers bring the server's own figure (``usage``), from which bytes per token are learned for
nothing. Streams bring it only if the client asks for it. Then, now and then, the prompt of a
request that is over is put to the server that had it: no request ever waits for that.
"""

import asyncio
from typing import TYPE_CHECKING

from tailrace.net.client import FetchError
from tailrace.router.intake.tokens import TOKENIZE, TokenCounter, TokenSettings, ask_server

if TYPE_CHECKING:
    from tailrace.router.proxy.backends import Target

#: Longer prompts are not asked about, in bytes: the answer holds every token's number.
MOST_BYTES = 65_536
#: A server that does not answer is left alone for so long, s.
REST_S = 600.0
TIMEOUT_S = 5.0
_KINDS = frozenset(("chat", "completion", "embedding"))
_MOST_MODELS = 1024


class Asker:
    """Puts prompts to servers, seldom."""

    def __init__(self, counter: TokenCounter, settings: TokenSettings) -> None:
        self.settings = settings
        self.asked = 0
        """Questions that were answered."""
        self.failed = 0
        """Questions that were not."""
        self._counter = counter
        self._due: dict[str, float] = {}  # by model: when one may be asked about again
        self._resting: dict[str, float] = {}  # by address of a server
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(
        self, target: "Target", kind: str, model: str, body: bytes, size: int, now: float
    ) -> None:
        """A request is over whose length the server has not told; perhaps ask about it.

        ``size``: bytes of the prompt's text.
        """
        if (
            not self.settings.asks
            or self._due.get(model, 0.0) > now
            or kind not in _KINDS
            or not 0 < size <= MOST_BYTES
            or self._resting.get(target.backend.url, 0.0) > now
        ):
            return
        if len(self._due) >= _MOST_MODELS:  # names come from clients
            self._due.clear()
        self._due[model] = now + self.settings.every_s
        work = self._ask(target, kind, model, body, size, now)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, target: "Target", kind: str, model: str, body: bytes, size: int, now: float
    ) -> None:
        async def post(path: str, question: bytes) -> bytes:
            headers = {"content-type": "application/json"}
            answer = await target.pool.fetch("POST", path, headers, question, TIMEOUT_S)
            if answer.status != 200:
                raise FetchError(f"answers {path} with {answer.status}")
            return answer.body

        count = await ask_server(post, kind, body)
        if count is None:
            self.failed += 1
            self._resting[target.backend.url] = now + REST_S
            return
        self.asked += 1
        self._counter.learn(model, size, count, TOKENIZE)

    def close(self) -> None:
        """Ask no more."""
        for task in tuple(self._tasks):
            task.cancel()
