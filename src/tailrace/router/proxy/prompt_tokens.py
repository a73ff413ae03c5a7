"""Learns the token ids of prompts from the servers, off the request path.

KV events speak of token ids, which the router does not have. Once a response is complete, the
server that gave it is asked for the tokens of its prompt (``/tokenize``, which applies the chat
template as well). No request waits for that. A prompt that came as token ids needs no question.
"""

import asyncio
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from tailrace.net.client import FetchError
from tailrace.router.intake.tokens import tokenize_body
from tailrace.router.proxy.backends import Backend
from tailrace.router.settings import EventSettings
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.exact_caches import ExactCaches

TIMEOUT_S = 5.0
#: How long a server that failed is not asked again, s.
REST_S = 30.0
#: Prompts that are remembered as learned.
MOST_KNOWN = 65_536
#: Longer bodies are read in a thread.
_INLINE_BYTES = 32_768


class TokenizedPrompt(NamedTuple):
    """The tokens of one prompt."""

    ids: NDArray[np.int64]  #: [t]
    ends: NDArray[np.float64]  #: [t] share of the text that has been read after each token


class PromptLearner:
    """Asks for the tokens of finished prompts, a few at a time."""

    def __init__(self, caches: ExactCaches, settings: EventSettings) -> None:
        self.settings = settings
        self.skipped = 0
        """Prompts whose tokens were not asked for: too long, too many at a time."""
        self.failed = 0
        """Questions that failed."""
        self._caches = caches
        self._known: OrderedDict[int, None] = OrderedDict()  # end keys of prompts
        self._resting: dict[str, float] = {}  # by URL of a server: not before this time, s
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, backend: Backend, kind: str, body: bytes, attempt: Attempt, now: float) -> None:
        """Perhaps learn the tokens of a request that is complete."""
        arrival = attempt.arrival
        end_key = arrival.runs.end_key
        if (
            backend.index not in self._caches.mirrors
            or kind not in ("chat", "completion")
            or arrival.asked.prompts != 1
            or arrival.asked.has_media
            or arrival.asked.salt
            or end_key in self._known
            or self._resting.get(backend.settings.url, 0.0) > now
        ):
            return
        if not 0 < len(body) <= self.settings.prompt_bytes or (
            len(self._tasks) >= self.settings.prompts
        ):
            self.skipped += 1
            return
        work = self._learn(backend, kind, body, attempt, now)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _learn(
        self, backend: Backend, kind: str, body: bytes, attempt: Attempt, now: float
    ) -> None:
        try:
            tokens = await self._tokens(backend, kind, body)
        except (OSError, ValueError, TypeError, KeyError, TimeoutError):
            self.failed += 1
            self._resting[backend.settings.url] = now + REST_S
            return
        arrival = attempt.arrival
        runs = arrival.runs
        learned = self._caches.learn(
            backend.index, arrival.asked.model, runs.keys[:-1], runs.units[:-1], tokens.ids,
            tokens.ends,
        )  # fmt: skip
        if learned:
            self._known[runs.end_key] = None
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    async def _tokens(self, backend: Backend, kind: str, body: bytes) -> TokenizedPrompt:
        inline = len(body) <= _INLINE_BYTES
        question = _question(kind, body) if inline else await _apart(_question, kind, body)
        if isinstance(question, TokenizedPrompt):
            return question
        headers = {"content-type": "application/json"}
        response = await backend.pool.fetch("POST", "/tokenize", headers, question, TIMEOUT_S)
        if response.status != 200:
            raise FetchError(f"answers /tokenize with {response.status}")
        return _read(response.body) if inline else await _apart(_read, response.body)

    def close(self) -> None:
        """Cancel what is in progress."""
        for task in tuple(self._tasks):
            task.cancel()


async def _apart(function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def _question(kind: str, body: bytes) -> bytes | TokenizedPrompt:
    """Return the body for ``/tokenize``, or the tokens if the request names them itself."""
    prompt = orjson.loads(body).get("prompt") if kind == "completion" else None
    if type(prompt) is list:
        return _equal_parts(np.array(prompt, np.int64))
    question = tokenize_body(kind, body)
    if question is None:
        raise ValueError("the request has no single prompt")
    return orjson.dumps({**orjson.loads(question), "return_token_strs": True})


def _read(answer: bytes) -> TokenizedPrompt:
    """Read the answer of ``/tokenize``."""
    data = orjson.loads(answer)
    ids, texts = np.array(data["tokens"], np.int64), data.get("token_strs")
    if ids.ndim != 1:
        raise ValueError("no list of tokens")
    if not texts or len(texts) != ids.size:
        return _equal_parts(ids)
    # In the vocabularies of byte-level tokenizers a character stands for a byte.
    sizes = np.cumsum([len(text) for text in texts], dtype=np.float64)
    return TokenizedPrompt(ids, sizes / max(1.0, float(sizes[-1])))


def _equal_parts(ids: NDArray[np.int64]) -> TokenizedPrompt:
    return TokenizedPrompt(ids, np.arange(1, ids.size + 1) / max(1, ids.size))
