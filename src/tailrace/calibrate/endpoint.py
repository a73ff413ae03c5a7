"""A live server as an endpoint of probes: OpenAI's completions over HTTP.

Prompts are random words, new ones for every request, so that no prefix cache helps. Nothing of
them, or of the answers, is kept.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping

import numpy as np
import orjson

from tailrace.bench.load import FETCH_S, JSON_LINE, StreamedCall, open_pool, served_models
from tailrace.calibrate.probes import Probe, Reply
from tailrace.emulate import tokenizer
from tailrace.errors import TailraceError
from tailrace.net.client import FetchError, Pool
from tailrace.net.engine_metrics import Snapshot, parse_metrics
from tailrace.net.sse import StreamedResponse

PATH = b"/v1/completions"
TIMEOUT_S = 120.0
#: Words of the two requests that show how many tokens a word takes.
_SAMPLES = (64, 512)


class LiveEndpoint:
    """A server at a URL. Use :meth:`open`, and ``close`` in the end."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._pool = open_pool(url, headers)
        self._options = b""
        self._words_per_token = 1.0
        self._extra_tokens = 0.0
        self.counts_tokens = True
        """Whether the server says how long prompts are."""
        self.max_model_len: int | None = None
        """Most tokens of prompt and answer, if the server says so."""

    async def open(self, model: str | None = None) -> None:
        """Find out what the server serves and how it counts tokens."""
        served, _ = await served_models(self._pool, self.url)
        known = next((m for m in served if model is None or m.get("id") == model), None)
        if known is None and model is None:
            raise TailraceError(f"{self.url} does not say which models it has; give --model")
        name = model or str((known or {}).get("id"))
        longest = (known or {}).get("max_model_len")
        self.max_model_len = longest if isinstance(longest, int) and longest > 0 else None
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        self._options = orjson.dumps(options | {"temperature": 0, "model": name})[1:]
        counts = []
        for words in _SAMPLES:
            (reply,) = await self.ask(Probe(1, words))
            if reply.failure is not None:
                raise TailraceError(f"{self.url} does not complete a prompt: {reply.failure}")
            counts.append(reply.prompt_tokens)
        self.counts_tokens = min(counts) > 0
        if self.counts_tokens and counts[1] > counts[0]:
            self._words_per_token = (_SAMPLES[1] - _SAMPLES[0]) / (counts[1] - counts[0])
            self._extra_tokens = counts[0] - _SAMPLES[0] / self._words_per_token

    async def close(self) -> None:
        """Close all connections."""
        self._pool.abort()
        await asyncio.sleep(0)  # the loop tells the connections that they are closed

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    async def metrics(self) -> Snapshot:
        """Return what the server's /metrics say; nothing, if it has none."""
        try:
            page = await self._pool.fetch("GET", "/metrics", timeout_s=FETCH_S)
        except FetchError:
            return Snapshot()
        return (
            parse_metrics(page.body.decode(errors="replace")) if page.status == 200 else Snapshot()
        )

    async def ask(self, probe: Probe) -> list[Reply]:
        """Send the prompts of a probe at once and wait for all answers."""
        calls = [_ProbeCall(self._pool, self._body(probe)) for _ in range(probe.batch)]
        for call in calls:
            call.sent_s = time.monotonic()
            call.start()
        await asyncio.wait([call.finished for call in calls], timeout=TIMEOUT_S)
        for call in calls:
            if not call.over:
                call.cancel()
                call.end("no answer in time")
        return [call.reply(probe) for call in calls]

    def _body(self, probe: Probe) -> bytes:
        words = max(1, round((probe.prompt - self._extra_tokens) * self._words_per_token))
        text = tokenizer.words(secrets.randbits(63), 0, words)
        return b'{"prompt":"%b","max_tokens":%d,%b' % (text, probe.outputs, self._options)


class _ProbeCall(StreamedCall):
    """One request of a probe. The clock of the response is read once per token."""

    def __init__(self, pool: Pool, body: bytes) -> None:
        head = pool.head(b"POST", PATH, len(body), JSON_LINE)
        super().__init__(pool, head, body, StreamedResponse(self._clock))
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s = 0.0
        self._times_s: list[float] = []
        self._failure: str | None = None

    def _clock(self) -> float:
        self._times_s.append(time.monotonic())
        return self._times_s[-1]

    def end(self, failure: str | None) -> None:
        """Finish; ``failure``: its kind, None: none."""
        self._failure = failure
        if not self.finished.done():
            self.finished.set_result(None)

    def reply(self, probe: Probe) -> Reply:
        """Return the measured times of the probe, or its failure."""
        answer, failure = self.answer, self._failure
        times = np.array(self._times_s)
        if failure is None and answer.tokens < probe.outputs:
            failure = f"{answer.tokens} instead of {probe.outputs} tokens"
        elif failure is None and answer.tokens != len(times):
            # Several tokens came in one event: take them as spread evenly.
            share = np.linspace(0, len(times) - 1, answer.tokens)
            times = np.interp(share, np.arange(len(times)), times)
        # A server that does not count tokens is assumed to have got the intended number.
        prompt = probe.prompt if answer.prompt_tokens is None else answer.prompt_tokens
        return Reply(self.sent_s, times, prompt, answer.cached_tokens or 0, failure)
