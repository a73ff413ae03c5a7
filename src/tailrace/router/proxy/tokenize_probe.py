"""Learns bytes per token from a server's ``/tokenize``, off the request path.

Most responses report the prompt's length (``usage``), from which bytes per token are learned for
free. Streams report it only if the client asks for it. Otherwise, now and then, the prompt of a
request that is over is sent to the server that had it. No request ever waits for that.
"""

import asyncio

from tailrace.net.client import FetchError
from tailrace.router.intake.tokens import TOKENIZE, TokenCounter, TokenSettings, ask_server
from tailrace.router.proxy.backends import Backend

#: Longest request whose prompt is sent, in bytes: the response holds the id of every token.
MAX_PROBE_BYTES = 65_536
#: How long a server that failed is not asked again, s.
REST_S = 600.0
TIMEOUT_S = 5.0
_KINDS = frozenset(("chat", "completion", "embedding"))
_MOST_MODELS = 1024


class TokenizeProbe:
    """Sends a finished request's prompt to ``/tokenize``, at most once per model and interval."""

    def __init__(self, counter: TokenCounter, settings: TokenSettings) -> None:
        self.settings = settings
        self.failed = 0
        """Probes that failed."""
        self._counter = counter
        self._due: dict[str, float] = {}  # by model: time of the next probe, s
        self._resting: dict[str, float] = {}  # by URL of a server: not before this time, s
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(
        self, backend: Backend, kind: str, model: str, body: bytes, size: int, now: float
    ) -> None:
        """Perhaps probe the prompt of a finished request whose length was not reported.

        ``size``: bytes of the prompt's text.
        """
        if (
            not self.settings.asks
            or self._due.get(model, 0.0) > now
            or kind not in _KINDS
            or not size
            or not 0 < len(body) <= MAX_PROBE_BYTES
            or self._resting.get(backend.settings.url, 0.0) > now
        ):
            return
        if len(self._due) >= _MOST_MODELS:  # names come from clients
            self._due.clear()
        self._due[model] = now + self.settings.every_s
        work = self._ask(backend, kind, model, body, size, now)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, backend: Backend, kind: str, model: str, body: bytes, size: int, now: float
    ) -> None:
        async def post(path: str, prompt: bytes) -> bytes:
            headers = {"content-type": "application/json"}
            response = await backend.pool.fetch("POST", path, headers, prompt, TIMEOUT_S)
            if response.status != 200:
                raise FetchError(f"answers {path} with {response.status}")
            return response.body

        count = await ask_server(post, kind, body)
        if count is None:
            self.failed += 1
            self._resting[backend.settings.url] = now + REST_S
            return
        self._counter.learn(model, size, count, TOKENIZE)

    @property
    def pending(self) -> int:
        """Probes in progress."""
        return len(self._tasks)

    def close(self) -> None:
        """Cancel what is in progress."""
        for task in tuple(self._tasks):
            task.cancel()
