"""The open-loop load generator: requests leave at their times, whatever becomes of the others.

A turn of a session leaves its think time after the answer to the turn before has ended, well or
badly, as in the simulator.
"""

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import orjson

from tailrace.bench.prompts import Prompt, PromptWriter, Spoken, spoken
from tailrace.bench.result import LOAD_REQUEST, LoadResult
from tailrace.emulate import tokenizer
from tailrace.errors import TailraceError
from tailrace.net.client import Call, FetchError, Pool, failure_kind
from tailrace.net.heads import ResponseHead
from tailrace.net.origin import Origin
from tailrace.net.sse import StreamedResponse
from tailrace.sim.result import FAILED, FINISHED
from tailrace.workload.table import RequestTable

Api = Literal["completions", "chat"]

#: A request may leave this much early: event loops wake to the millisecond only.
EARLY_S = 0.0005
TICK_S = 0.2
SAMPLE_WORDS = 1024
#: In it Tailrace's router says where a request went.
REPLICA_HEADER = b"x-tailrace-replica"
DEFAULT_CHARS_PER_TOKEN = 4.0
_PATHS = {"completions": b"/v1/completions", "chat": b"/v1/chat/completions"}
JSON_LINE = b"content-type: application/json\r\n"
CONNECT_S = 10.0
#: The load decides how many connections there are: all are kept.
MAX_IDLE = 1_000_000
#: Time limit of requests before a load begins, s.
FETCH_S = 30.0


def run_load(url: str, table: RequestTable, **how: Any) -> LoadResult:
    """Do what :func:`load` does, with the same arguments, in an event loop of its own."""
    with asyncio.Runner(loop_factory=_fast_loop) as runner:
        return runner.run(load(url, table, **how))


async def load(
    url: str,
    table: RequestTable,
    *,
    api: Api = "completions",
    model: str | None = None,
    chars_per_token: float | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    stretch: float = 1.0,
    salt: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> LoadResult:
    """Send the requests of a table to an OpenAI endpoint and wait until all have ended.

    ``model``: default: the server's; without ``chars_per_token`` its /tokenize counts the tokens of
    prompts. ``stretch`` multiplies arrival and think times. ``salt``: other texts with the same
    sharing.
    """
    pool = open_pool(url, headers)
    try:
        if model is None:
            model = await _first_model(pool, url)
        words_per_token, calibration = await _calibrate(pool, model, chars_per_token)
        pool.made = 0
        writer = PromptWriter(table, words_per_token, salt)
        run = _Load(pool, table, writer, api, model, timeout_s, stretch, salt)
        await run.run(progress)
    finally:
        pool.abort()
        await asyncio.sleep(0)  # the loop tells the connections that they are closed
    return LoadResult(
        table,
        run.requests,
        tuple(run.kinds),
        tuple(run.labels),
        pool.made,
        words_per_token,
        calibration,
    )


def open_pool(url: str, headers: Mapping[str, str] | None = None) -> Pool:
    """Return a pool of connections to an OpenAI endpoint, with or without /v1 in its address."""
    try:
        origin = Origin.parse(url if "//" in url else f"http://{url}")
    except ValueError:
        raise TailraceError(f"'{url}' is no address; give one like http://127.0.0.1:8080") from None
    origin = origin._replace(prefix=origin.prefix.removesuffix("/v1"))
    headers = {"user-agent": "tailrace-bench"} | dict(headers or {})
    if any("\r" in text or "\n" in text for pair in headers.items() for text in pair):
        raise TailraceError("a header must not contain a line break")
    return Pool(origin, connect_s=CONNECT_S, headers=headers, max_idle=MAX_IDLE)


class _Load:
    """The state of a load under way."""

    def __init__(
        self,
        pool: Pool,
        table: RequestTable,
        writer: PromptWriter,
        api: Api,
        model: str,
        timeout_s: float,
        stretch: float,
        salt: int,
    ) -> None:
        self.pool, self._table, self._writer = pool, table, writer
        self._api, self._path = api, _PATHS[api]
        self._timeout_s, self._stretch, self._salt = timeout_s, stretch, salt
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        options |= {"temperature": 0, "model": model}
        self._options = orjson.dumps(options)[1:]
        self.requests = np.zeros(len(table), LOAD_REQUEST)
        for name in ("due_s", "sent_s", "first_s", "last_s", "ended_s"):
            self.requests[name] = np.nan
        for name in ("failure", "replica", "prompt_tokens", "output_tokens", "cached_tokens"):
            self.requests[name] = -1
        self.kinds: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        parents = table.rows["parent"]
        self._follow_ups = table.follow_ups()
        self._due = [
            (float(table.rows["arrival_s"][row]) * stretch, int(row))
            for row in np.flatnonzero(parents < 0)
        ]
        heapq.heapify(self._due)
        self._so_far: dict[int, Spoken] = {}
        self._under_way: dict[int, _LoadCall] = {}
        self._left = len(table)
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._start_s = time.monotonic()

    def now(self) -> float:
        """Real seconds since the start."""
        return time.monotonic() - self._start_s

    async def run(self, progress: Callable[[int], None]) -> None:
        """Send everything and wait for the end."""
        self._start_s = time.monotonic()
        self._send_due()
        try:
            while self._left:
                try:
                    await asyncio.wait_for(self._over.wait(), TICK_S)
                except TimeoutError:
                    self._give_up_late()
                progress(len(self._table) - self._left)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _send_due(self) -> None:
        """Send what is due, and come back for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][0] <= self.now() + EARLY_S:
            due_s, row = heapq.heappop(self._due)
            self._send(row, due_s)
        if self._due:
            delay_s = max(self._due[0][0] - self.now(), 0.0)
            step_s = math.ceil((delay_s - EARLY_S) * 1e3) * 1e-3
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(step_s, 0.0), self._send_due)

    def _send(self, row: int, due_s: float) -> None:
        prompt = self._writer.write(row, self._so_far.pop(row, None))
        body = self._body(row, prompt)
        head = self.pool.head(b"POST", self._path, len(body), JSON_LINE + self._headers(row))
        asking = _LoadCall(self, row, head, body, prompt if row in self._follow_ups else None)
        record = self.requests[row]
        record["due_s"] = due_s
        record["sent_s"] = self.now()
        self._under_way[row] = asking
        asking.start()

    def _body(self, row: int, prompt: Prompt) -> bytes:
        if self._api == "chat":
            content = b'"messages":%b' % prompt.messages()
        else:
            content = b'"prompt":"%b"' % prompt.text()
        output = int(self._table.rows["output_tokens"][row])
        return b'{%b,"max_tokens":%d,%b' % (content, output, self._options)

    def _headers(self, row: int) -> bytes:
        """Header lines that Tailrace's router reads; other servers ignore them."""
        about = self._table.rows[row]
        lines = f"x-slo-ttft-ms: {about['ttft_slo_s'] * 1e3:g}\r\n"
        if about["session"] >= 0:
            lines += f"x-session-id: {self._salt}-{about['session']}\r\n"
        if about["priority"]:
            lines += f"x-priority: {-about['priority']}\r\n"  # there the lower number is first
        return lines.encode()

    def settle(self, asking: "_LoadCall", failure: str | None) -> None:
        """A request is over: enter it, and plan its follow-up."""
        row, answer, now = asking.row, asking.answer, self.now()
        del self._under_way[row]
        record = self.requests[row]
        record["ended_s"] = now
        record["status"] = FINISHED if failure is None else FAILED
        if failure is not None:
            record["failure"] = self.kinds.setdefault(failure, len(self.kinds))
        if asking.replica is not None:
            record["replica"] = self.labels.setdefault(asking.replica, len(self.labels))
        if answer.first_s is not None:
            record["first_s"], record["last_s"] = answer.first_s, answer.last_s
            record["output_tokens"] = answer.tokens
        for name, known in (
            ("prompt_tokens", answer.prompt_tokens),
            ("cached_tokens", answer.cached_tokens),
        ):
            if known is not None:
                record[name] = known
        self._left -= 1
        for child in self._follow_ups.get(row, ()):
            if failure is None and asking.prompt is not None:
                text = orjson.dumps(answer.text)[1:-1]
                self._so_far[child] = spoken(asking.prompt, text, answer.tokens)
            think_s = float(self._table.rows["think_s"][child]) * self._stretch
            heapq.heappush(self._due, (now + think_s, child))
            if self._due[0][1] == child:
                self._send_due()
        if self._left == 0:
            self._over.set()

    def _give_up_late(self) -> None:
        latest = self.now() - self._timeout_s
        for row, asking in list(self._under_way.items()):
            if self.requests["sent_s"][row] < latest:
                asking.cancel()
                self.settle(asking, "timeout")


class StreamedCall(Call):
    """A request whose response streams; ``end`` of a subclass is called when it is over."""

    __slots__ = ("answer",)

    def __init__(self, pool: Pool, head: bytes, body: bytes, answer: StreamedResponse) -> None:
        super().__init__(pool, b"POST", head, body)
        self.answer = answer

    def began(self, head: ResponseHead) -> None:
        """Take the status."""
        self.answer.code = head.status

    def received(self, data: bytes) -> None:
        """Read events."""
        self.answer.feed(data)

    def ended(self) -> None:
        """End with a complete response."""
        self.end(self.answer.failure())

    def broken(self, why: str, *, connecting: bool) -> None:
        """End with a failure."""
        self.end(failure_kind(why, connecting=connecting))

    def end(self, failure: str | None) -> None:
        """Take in that it is over; ``failure``: its kind, None: none."""
        raise NotImplementedError


class _LoadCall(StreamedCall):
    """One request of the load."""

    __slots__ = ("_load", "prompt", "replica", "row")

    def __init__(
        self, load: _Load, row: int, head: bytes, body: bytes, prompt: Prompt | None
    ) -> None:
        answer = StreamedResponse(load.now, keep_text=prompt is not None)
        super().__init__(load.pool, head, body, answer)
        self._load = load
        self.row = row
        self.prompt = prompt
        self.replica: str | None = None

    def began(self, head: ResponseHead) -> None:
        """Take status and replica from the head."""
        super().began(head)
        label = head.lower.get(REPLICA_HEADER)
        if label is not None:
            self.replica = label.decode("latin-1")

    def end(self, failure: str | None) -> None:
        """Record what came of it."""
        self._load.settle(self, failure)


async def served_models(pool: Pool, url: str) -> tuple[list[dict[str, Any]], int]:
    """Return what a server says about each of its models, and its HTTP status."""
    try:
        response = await pool.fetch("GET", "/v1/models", timeout_s=FETCH_S)
    except FetchError as error:
        raise TailraceError(f"no answer from {url} ({error}): is it running?") from None
    try:
        served = orjson.loads(response.body)["data"]
        return [about for about in served if isinstance(about, dict)], response.status
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return [], response.status


async def _first_model(pool: Pool, url: str) -> str:
    served, status = await served_models(pool, url)
    if not served or "id" not in served[0]:
        raise TailraceError(
            f"{url} does not say which models it has (/v1/models: HTTP {status}); give --model"
        )
    return str(served[0]["id"])


async def _calibrate(pool: Pool, model: str, chars_per_token: float | None) -> tuple[float, str]:
    """Return words per token of the server, and where that comes from."""
    chars_per_word = tokenizer.TOKEN_BYTES
    if chars_per_token is not None:
        return chars_per_token / chars_per_word, "chars_per_token"
    text = tokenizer.words(0, 0, SAMPLE_WORDS).decode()
    body = orjson.dumps({"model": model, "prompt": text, "add_special_tokens": False})
    try:
        headers = {"content-type": "application/json"}
        response = await pool.fetch("POST", "/tokenize", headers, body, FETCH_S)
        count = int(orjson.loads(response.body)["count"]) if response.status == 200 else 0
    except (FetchError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        count = 0
    if count > 0:
        return SAMPLE_WORDS / count, "/tokenize"
    return DEFAULT_CHARS_PER_TOKEN / chars_per_word, "assumed"


def _fast_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # slower, but it works
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
