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
from tailrace.router.intake.tokens import TOKENIZE, tokenize_body
from tailrace.router.proxy.backends import Backend
from tailrace.router.settings import EventSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.exact_caches import ROOT, ExactCaches

TIMEOUT_S = 5.0
#: How long a server that failed is not asked again, s.
REST_S = 30.0
#: Prompts that are remembered as learned.
MOST_KNOWN = 65_536
#: Answers about one prompt that say nothing of others.
_REFUSALS = frozenset((400, 413, 422))
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
        """Prompts whose tokens were not asked for: too long, too many at a time, no single text."""
        self.failed = 0
        """Questions that failed."""
        self._caches = caches
        self._known: OrderedDict[int, int] = OrderedDict()  # last block of prompts, by end key
        self._resting: dict[str, float] = {}  # by URL of a server: not before this time, s
        self._tasks: set[asyncio.Task[None]] = set()

    def wants(self, backend: Backend, kind: str, arrival: Arrival, now: float) -> bool:
        """Whether the tokens of a request's prompt would be of use, and can be asked for."""
        asked = arrival.asked
        return (
            backend.index in self._caches.mirrors
            and kind in ("chat", "completion")
            and asked.prompts == 1
            and not asked.has_media
            and not asked.salt
            and not self._knows(arrival.runs.end_key)
            and self._resting.get(backend.settings.url, 0.0) <= now
        )

    def _knows(self, end_key: int) -> bool:
        """Whether the tokens of a prompt have been learned, and are remembered."""
        last = self._known.get(end_key)
        return last is not None and (last == ROOT or last in self._caches.runs)

    def offer(self, backend: Backend, kind: str, body: bytes, attempt: Attempt, now: float) -> bool:
        """Perhaps learn the tokens of a request that is complete; return whether that has begun.

        If its length was not reported, that is learned as well.
        """
        if not self.wants(backend, kind, attempt.arrival, now):
            return False
        if not 0 < len(body) <= self.settings.prompt_bytes or (
            len(self._tasks) >= self.settings.prompts
        ):
            self.skipped += 1
            return False
        work = self._learn(backend, kind, body, attempt, now)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _learn(
        self, backend: Backend, kind: str, body: bytes, attempt: Attempt, now: float
    ) -> None:
        inline = len(body) <= _INLINE_BYTES
        try:
            tokens = _question(kind, body) if inline else await _apart(_question, kind, body)
        except (ValueError, TypeError, OverflowError):
            self.skipped += 1  # it is a prompt in a form of its own, no fault of the server
            return
        try:
            if not isinstance(tokens, TokenizedPrompt):
                answer = await self._ask(backend, tokens)
                if answer is None:
                    return
                tokens = _read(answer) if inline else await _apart(_read, answer)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, TimeoutError):
            self.failed += 1
            self._rest(backend, now)
            return
        arrival = attempt.arrival
        runs, asked = arrival.runs, arrival.asked
        if attempt.reported_prompt is None and arrival.size:
            self._caches.cluster.counter.learn(asked.model, arrival.size, tokens.ids.size, TOKENIZE)
        last = self._caches.learn(
            backend.index, asked.model, runs.keys[:-1], runs.units[:-1], tokens.ids, tokens.ends
        )
        if last is not None:
            self._known[runs.end_key] = last
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    async def _ask(self, backend: Backend, question: bytes) -> bytes | None:
        """Return the answer of ``/tokenize``; None: the server refuses this prompt."""
        headers = {"content-type": "application/json"}
        response = await backend.pool.fetch("POST", "/tokenize", headers, question, TIMEOUT_S)
        if response.status in _REFUSALS:
            self.failed += 1
            return None
        if response.status != 200:
            raise FetchError(f"answers /tokenize with {response.status}")
        return bytes(response.body)

    def _rest(self, backend: Backend, now: float) -> None:
        """Do not ask a server for a while."""
        resting = {url: until for url, until in self._resting.items() if until > now}
        self._resting = {**resting, backend.settings.url: now + REST_S}

    def close(self) -> None:
        """Cancel what is in progress."""
        for task in tuple(self._tasks):
            task.cancel()


async def _apart(function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def _question(kind: str, body: bytes) -> bytes | TokenizedPrompt:
    """Return the body for ``/tokenize``, or the tokens if the request names them itself."""
    data = orjson.loads(body)
    prompt = data.get("prompt") if kind == "completion" else None
    if type(prompt) is list:
        if len(prompt) == 1 and type(prompt[0]) in (list, str):
            prompt = prompt[0]
        if type(prompt) is list:
            ids = np.array(prompt, np.int64)
            if ids.ndim != 1:
                raise ValueError("no list of tokens")
            return _equal_parts(ids)
        body = orjson.dumps({**data, "prompt": prompt})
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
