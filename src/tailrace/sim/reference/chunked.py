"""The schedulers that split prompts into chunks: sarathi and vllm_v1."""

import bisect
from collections.abc import Sequence

from tailrace.config import Replica
from tailrace.sim.reference.blocks import BlockPool
from tailrace.sim.reference.content import BlockNames
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.scheduler import CountingScheduler, Scheduler


class Sarathi(CountingScheduler):
    """Decodes first, then prompts in chunks up to a token budget; memory for whole prompts."""

    def __init__(self, config: Replica, compat: bool) -> None:
        super().__init__(config, compat)
        self._batch_limit = config.batch_cap // config.num_stages

    def next_batch(self) -> Batch | None:
        """Form a batch of all decodes, the rest of partly prefilled prompts, and new prompts."""
        requests, begun = self._decode()
        tokens = [1] * len(requests)
        budget = self.config.chunk_size - len(requests)
        skipped: list[Request] = []
        for request in begun:
            chunk = request.next_tokens(budget)
            if chunk == 0:
                skipped.append(request)
                continue
            requests.append(request)
            tokens.append(chunk)
            budget -= chunk
        self.ready = sorted(skipped + self.ready, key=lambda request: request.queued_s)
        while self.waiting and budget > 0 and self._may_admit(self.waiting[0], len(requests)):
            request = self.admit(self.blocks_for(self.waiting[0].prompt))
            requests.append(request)
            tokens.append(request.next_tokens(budget))
            budget -= tokens[-1]
        return Batch(requests, tokens) if requests else None

    def _decode(self) -> tuple[list[Request], list[Request]]:
        """Take requests off ``ready``: those that decode now, and the partly prefilled ones."""
        decodes: list[Request] = []
        begun: list[Request] = []
        while self.ready and len(decodes) < self._batch_limit:
            request = self.ready.pop(0)
            if not request.prefilled:
                begun.append(request)
            elif self.make_room_for_token(request):
                decodes.append(request)
        return decodes, begun

    def _may_admit(self, request: Request, batch_size: int) -> bool:
        # Partly prefilled prompts may exceed a batch's limit (only with several pipeline stages);
        # Vidur tests for equality and then admits without limit.
        full = batch_size == self._batch_limit if self.compat else batch_size >= self._batch_limit
        return (
            not full
            and self.resident_count < self.config.batch_cap
            and self.can_admit_prompt(request)
        )


class VllmV1(Scheduler):
    """Running requests first, in order of admission, then new ones; blocks taken chunk by chunk.

    The queue is in the order of arrival, or by priority: then the least urgent running request is
    preempted when memory runs out, instead of the one admitted last.
    """

    memory: BlockPool

    def __init__(self, config: Replica, compat: bool, content: BlockNames) -> None:
        super().__init__(config, compat)
        assert config.num_blocks is not None
        extra_blocks = -(-config.preallocate_tokens // config.block_size)
        self.memory = BlockPool(
            config.num_blocks, config.block_size, extra_blocks, config.prefix_caching
        )
        self._by_priority = config.scheduling_policy == "priority"
        self._content = content
        self._admitted: list[Request] = []
        self._hits: dict[int, int] = {}

    @property
    def running(self) -> Sequence[Request]:
        """In order of admission."""
        return self._admitted

    def add(self, request: Request) -> None:
        """Insert a new request; the queue is ordered by (time, id), by priority before that."""
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Put a preempted request back to its place in the queue."""
        bisect.insort(self.waiting, request, key=self._place)

    def _place(self, request: Request) -> tuple[int, float, int]:
        priority = request.priority if self._by_priority else 0
        return priority, request.queued_s, request.id

    def cached_tokens(self, request: Request) -> int:
        """Prompt tokens found in the prefix cache, the last block included."""
        return len(self._chain(request, request.prompt)) * self.config.block_size

    def admission_hit(self, request: Request) -> int:
        """Tokens a request of the latest batch took from the cache when it was admitted."""
        return self._hits.get(request.id, 0)

    def next_batch(self) -> Batch | None:
        """Form a batch of running requests, and of new ones if no request was preempted."""
        requests: list[Request] = []
        tokens: list[int] = []
        preemptions_before = self.preemptions
        budget = self.config.chunk_size
        while len(requests) < len(self._admitted) and budget > 0:
            request = self._admitted[len(requests)]
            chunk = request.next_tokens(budget)
            preempted: list[Request] = []
            has_room = self._make_room(request, chunk, preempted)
            for victim in preempted:
                if victim in requests:  # what it was given goes back
                    at = requests.index(victim)
                    del requests[at]
                    budget += tokens.pop(at)
            if not has_room:
                break
            requests.append(request)
            tokens.append(chunk)
            budget -= chunk
        self._hits.clear()
        if self.preemptions == preemptions_before:
            self._admit_into(requests, tokens, budget)
        return Batch(requests, tokens) if requests else None

    def batch_ended(self, batch: Batch) -> None:
        """Release the requests that have finished."""
        for request in batch.requests:
            if request.finished:
                self.memory.release(request.id)
                self._content.forget(request.id, self.config.block_size)
        self._admitted = [request for request in self._admitted if not request.finished]

    def _make_room(self, request: Request, tokens: int, preempted: list[Request]) -> bool:
        """Get blocks for a running request, preempting others; False: it went too."""
        names = self._names(request)
        while not self.memory.grow(request.id, names, request.processed, tokens):
            victim = self._admitted[-1]
            if self._by_priority:
                victim = max(self._admitted, key=lambda r: (r.priority, r.queued_s))
            self._admitted.remove(victim)
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit_into(self, requests: list[Request], tokens: list[int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self._admitted) < self.config.batch_cap:
            request = self.waiting[0]
            # At least one token must be computed to get an output, so a prompt that is cached to
            # its end computes its last block again.
            hits = self._chain(request, request.prompt - 1)
            cached = len(hits) * self.config.block_size
            chunk = min(request.prompt - cached, budget)
            if not self.memory.grow(request.id, self._names(request), cached, chunk, hits):
                break
            self.waiting.pop(0)
            request.processed = cached
            self._hits[request.id] = cached
            self._admitted.append(request)
            requests.append(request)
            tokens.append(chunk)
            budget -= chunk

    def _names(self, request: Request) -> Sequence[tuple[int, int]]:
        return self._content.block_ids(request.id, self.config.block_size)

    def _chain(self, request: Request, tokens: int) -> list[int]:
        limit = tokens // self.config.block_size
        return self.memory.cached_chain(self._names(request), limit)
