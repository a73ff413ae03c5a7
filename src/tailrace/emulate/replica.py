"""One emulated replica: a server of the reference simulator whose iterations are waited for.

Its state depends on the arrival times of requests only: iterations end at the
times the simulator says, and whatever is late is caught up with before anything else happens. A
busy machine can delay a token on its way out, but neither shift the next iteration nor add up.
"""

from collections.abc import Callable

import xxhash

from tailrace.config import Replica
from tailrace.emulate import tokenizer
from tailrace.emulate.clock import Clock
from tailrace.emulate.job import Job
from tailrace.emulate.metrics import Meter
from tailrace.emulate.timers import Handle
from tailrace.net.kv_events import BlocksRemoved, BlocksStored, Event
from tailrace.sim.reference.blocks import BlockPool
from tailrace.sim.reference.content import BlockId, BlockNames
from tailrace.sim.reference.request import Request
from tailrace.sim.reference.server import NEVER_S, Server


class LiveContent(BlockNames):
    """Block names of prompts that come as tokens: a chain of hashes, as in vLLM."""

    def __init__(self) -> None:
        self.names: dict[int, list[BlockId]] = {}
        self.tokens: dict[int, bytes] = {}
        """Prompt and output of each request, if events are told of."""

    def block_ids(self, request_id: int, block_size: int) -> list[BlockId]:  # noqa: ARG002
        """Names of the full blocks of prompt and output."""
        return self.names[request_id]

    def forget(self, request_id: int, block_size: int) -> None:  # noqa: ARG002
        """Drop the names of a request that has left its server."""
        self.names.pop(request_id, None)
        self.tokens.pop(request_id, None)


def chained_names(tokens: bytes, block_size: int) -> list[BlockId]:
    """Return names of the full blocks: equal names mean equal tokens from the start on."""
    size = block_size * tokenizer.TOKEN_BYTES
    names: list[BlockId] = []
    before = 0
    for block in range(len(tokens) // size):
        before = xxhash.xxh3_64_intdigest(tokens[block * size : (block + 1) * size], before)
        names.append((before, block))
    return names


class CacheEvents:
    """Gathers what a prefix cache stores and evicts, in the form of KV events.

    As vLLM does, blocks that a prompt has found cached are reported as stored once more.
    """

    def __init__(
        self, content: LiveContent, block_size: int, on_events: Callable[[list[Event]], None]
    ) -> None:
        self._content, self._block_size, self._on_events = content, block_size, on_events
        self._gathered: list[Event] = []

    def stored(self, request_id: int, first: int, end: int) -> None:
        """Blocks ``first`` to ``end - 1`` of a request are cached."""
        names = [name for name, _ in self._content.names[request_id][:end]]
        size = self._block_size * tokenizer.TOKEN_BYTES
        tokens = tokenizer.token_ids(self._content.tokens[request_id][first * size : end * size])
        parent = names[first - 1] if first else None
        self._gathered.append(BlocksStored(names[first:], parent, tokens, self._block_size))

    def removed(self, name: BlockId) -> None:
        """A block is evicted."""
        self._gathered.append(BlocksRemoved([name[0]]))

    def flush(self) -> None:
        """Pass on what was gathered."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._on_events(gathered)


class EmulatedReplica:
    """A server that takes real time. ``config`` has cost model and ``num_blocks`` filled in."""

    def __init__(self, number: int, config: Replica, clock: Clock, meter: Meter) -> None:
        self.number = number
        self.config = config
        self.meter = meter
        self._clock = clock
        self.content = LiveContent()
        self.server = Server(number, config, compat=False, content=self.content)
        self._names_blocks = isinstance(self.server.scheduler.memory, BlockPool)
        self._cache_events: CacheEvents | None = None
        self._jobs: dict[int, Job] = {}
        self.leaving: set[Request] = set()
        """Aborted requests that a running iteration still holds."""
        self._next_id = 0
        self._now_s = 0.0
        self._forms_at_s = NEVER_S
        self._timer: Handle | None = None
        self._timer_s = NEVER_S
        self._frozen = False

    def tell(self, on_events: Callable[[list[Event]], None]) -> None:
        """Call ``on_events`` with what the prefix cache stores and evicts, per iteration."""
        self._cache_events = CacheEvents(self.content, self.config.block_size, on_events)
        self._listen_to_cache()

    def _listen_to_cache(self) -> None:
        memory = self.server.scheduler.memory
        if isinstance(memory, BlockPool):
            memory.listener = self._cache_events

    @property
    def is_frozen(self) -> bool:
        """Whether it has stopped working."""
        return self._frozen

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.server.scheduler.waiting)

    @property
    def running(self) -> int:
        """Requests that have been admitted."""
        return len(self._jobs) - self.waiting

    @property
    def kv_used(self) -> float:
        """Share of KV blocks that requests hold, 0..1."""
        memory = self.server.scheduler.memory
        return memory.used / memory.total

    @property
    def preemptions(self) -> int:
        """Preemptions so far."""
        return int(self.server.totals["preemptions"]) + self.server.scheduler.preemptions

    def submit(
        self,
        prompt: bytes,
        answer: bytes,
        on_token: Callable[[Job, bool], None],
        finish_reason: str = "length",
        priority: int = 0,
    ) -> Job:
        """A prompt arrives now; ``on_token`` is called for every token of ``answer``.

        Lower priorities go first if it serves by priority.
        """
        now = self.catch_up()
        prompt_tokens, output_tokens = tokenizer.count(prompt), tokenizer.count(answer)
        request = Request(self._next_id, prompt_tokens, output_tokens, now, now, priority=priority)
        self._next_id += 1
        job = Job(request, answer, on_token, prompt_tokens, output_tokens, finish_reason)
        self._jobs[request.id] = job
        if self._names_blocks:
            names = chained_names(prompt + answer, self.config.block_size)
            self.content.names[request.id] = names
            if self._cache_events is not None:
                self.content.tokens[request.id] = prompt + answer
        self.server.add(request)
        self._forms_at_s = now
        if not self._frozen:
            self._clock.call_soon(self._settle)
        return job

    def abort(self, job: Job) -> None:
        """Its client has gone: it leaves the queue now, or its batch when the iteration ends."""
        if job.request.id not in self._jobs or job.aborted:
            return
        self.catch_up()
        if job.request.id in self._jobs:
            job.aborted = True
            self.leaving.add(job.request)
            self._drop_leaving_from_queue()

    def catch_up(self) -> float:
        """Let everything happen that is due by now; returns the emulated time in s."""
        self._now_s = max(self._now_s, self._clock.now())
        if not self._frozen:
            self._advance(self._now_s)
        return self._now_s

    def set_speed(self, factor: float) -> None:
        """Change the speed to a multiple of the configured one, from the next iteration on."""
        self.catch_up()
        self.server.speed = self.config.speed * factor

    def freeze(self) -> None:
        """Stop working; nothing comes out until ``clear``."""
        self.catch_up()
        self._frozen = True

    def clear(self) -> None:
        """Lose everything, the cache included, and be ready for new requests."""
        now = self.catch_up()
        self.server.die(now)
        self._jobs.clear()
        self.leaving.clear()
        self.content.names.clear()
        self.content.tokens.clear()
        self._listen_to_cache()
        self._forms_at_s = NEVER_S
        self._frozen = False
        self._arm()

    # ---- time -----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Play everything before ``now`` (s), and the ends of iterations at ``now``.

        Batches that are due at ``now`` wait for other requests of that moment: see ``_settle``.
        """
        while True:
            if self._forms_at_s < now:
                self._form_batches()
            elif self.server.next_end_s <= now:
                self._end_iterations(self.server.next_end_s, now)
            else:
                return

    def _wake(self) -> None:
        self._timer_s = NEVER_S
        if self._frozen:
            return
        self.catch_up()
        if self._forms_at_s < NEVER_S:
            self._clock.call_soon(self._settle)
        self._arm()

    def _settle(self) -> None:
        if self._forms_at_s < NEVER_S and not self._frozen:
            self._form_batches()
        self._arm()

    def _arm(self) -> None:
        """Have the end of the running iteration announced."""
        ends_s = self.server.next_end_s
        if ends_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = ends_s
        self._timer = self._clock.call_at(ends_s, self._wake) if ends_s < NEVER_S else None

    # ---- iterations -----------------------------------------------------------------------------

    def _form_batches(self) -> None:
        now, self._forms_at_s = self._forms_at_s, NEVER_S
        for batch in self.server.form_batches(now):
            for request in batch.requests:
                job = self._jobs[request.id]
                if job.scheduled_s is None:
                    job.scheduled_s = now
                    job.cached_tokens = self.server.scheduler.admission_hit(request)
                    self.meter.admitted(job.prompt_tokens, job.cached_tokens)
        if self._cache_events is not None:
            self._cache_events.flush()
        if self.leaving:
            self._drop_leaving_from_queue()

    def _end_iterations(self, end_s: float, now: float) -> None:
        self._forms_at_s = end_s
        for batch in self.server.end_stages(end_s):
            news: list[Job] = []
            for request, tokens in zip(batch.requests, batch.tokens, strict=True):
                gave_token = request.advance(tokens)
                if request in self.leaving:
                    _cut(request)
                    self._leave(self._jobs[request.id])
                elif gave_token:
                    news.append(self._jobs[request.id])
            self.server.scheduler.batch_ended(batch)
            self.meter.iteration(batch.total_tokens, batch.prefill_tokens, len(news), now - end_s)
            for job in news:
                self._emit(job, end_s)

    def _emit(self, job: Job, now: float) -> None:
        self.meter.token(job.request.arrived_s, job.last_s, now)
        if job.first_s is None:
            job.first_s = now
        job.last_s = now
        is_last = job.request.finished
        if is_last:
            self._leave(job)
            self.meter.finished(job)
        job.on_token(job, is_last)

    def _leave(self, job: Job) -> None:
        del self._jobs[job.request.id]
        if job.aborted:
            self.leaving.discard(job.request)
            self.meter.aborted()

    def _drop_leaving_from_queue(self) -> None:
        waiting = self.server.scheduler.waiting
        for request in [request for request in waiting if request in self.leaving]:
            waiting.remove(request)
            self.content.forget(request.id, self.config.block_size)
            self._leave(self._jobs[request.id])


def _cut(request: Request) -> None:
    """End a request where it is, so that its scheduler lets go of it."""
    request.prompt = min(request.prompt, request.processed)
    request.output = request.processed - request.prompt
