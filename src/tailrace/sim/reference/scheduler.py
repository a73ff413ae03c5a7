"""Base of all schedulers: a waiting queue, KV memory, and preemption."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tailrace.config import Replica
from tailrace.sim.reference.blocks import BlockCounter, BlockPool
from tailrace.sim.reference.request import Batch, Request


class Scheduler(ABC):
    """Forms the batches of one server. ``compat``: with Vidur's defects."""

    memory: BlockCounter | BlockPool

    def __init__(self, config: Replica, compat: bool) -> None:
        self.config = config
        self.compat = compat
        self.waiting: list[Request] = []
        self.preemptions = 0
        self.partial_preemptions = 0

    @abstractmethod
    def next_batch(self) -> Batch | None:
        """Form the next batch; None: there is nothing to run now."""

    @abstractmethod
    def batch_ended(self, batch: Batch) -> None:
        """Called when the requests of a batch have advanced by one iteration."""

    @property
    @abstractmethod
    def running(self) -> Sequence[Request]:
        """Requests between two iterations, without those of a running batch."""

    @property
    def resident_count(self) -> int:
        """Requests that hold KV blocks."""
        return len(self.memory.held)

    def add(self, request: Request) -> None:
        """Add a new request at the end of the queue."""
        self.waiting.append(request)

    def cached_tokens(self, request: Request) -> int:  # noqa: ARG002 (vllm_v1 has a cache)
        """Prompt tokens the server has in its prefix cache."""
        return 0

    def admission_hit(self, request: Request) -> int:  # noqa: ARG002
        """Tokens a request of the latest batch took from the cache when it was admitted."""
        return 0

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away and put it back into the queue."""
        self.preemptions += 1
        self.partial_preemptions += not request.prefilled
        self.memory.release(request.id)
        request.restart(shrink_partial=self.compat)
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Put a preempted request at the head of the queue."""
        self.waiting.insert(0, request)


class CountingScheduler(Scheduler):
    """A scheduler whose memory is a number of blocks, and whose running requests are a list."""

    memory: BlockCounter

    def __init__(self, config: Replica, compat: bool) -> None:
        super().__init__(config, compat)
        assert config.num_blocks is not None
        self.memory = BlockCounter(config.num_blocks)
        self.ready: list[Request] = []
        self.watermark_blocks = int(config.watermark * config.num_blocks)

    @property
    def running(self) -> Sequence[Request]:
        """In the order of the batches that ended."""
        return self.ready

    def batch_ended(self, batch: Batch) -> None:
        """Release the blocks of finished requests; the others are ready for the next batch."""
        for request in batch.requests:
            if request.finished:
                self.memory.release(request.id)
            else:
                self.ready.append(request)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks needed for a number of tokens."""
        return -(-tokens // self.config.block_size)

    def can_admit_prompt(self, request: Request) -> bool:
        """Whether the whole prompt fits and leaves the watermark free."""
        return self.memory.free - self.blocks_for(request.prompt) >= self.watermark_blocks

    def admit(self, blocks: int) -> Request:
        """Admit the head of the queue with a number of blocks."""
        request = self.waiting.pop(0)
        self.memory.take(request.id, blocks)
        return request

    def make_room_for_token(self, request: Request) -> bool:
        """Give a decoding request, just taken off ``ready``, the block its next token may need.

        While no block is free (even if none is needed) the last of ``ready`` is preempted, or
        the request itself if there is no other; False then.
        """
        while self.memory.free < 1:
            victim = self.ready.pop() if self.ready else request
            self.preempt(victim)
            if victim is request:
                return False
        if request.processed > self.memory.held[request.id] * self.config.block_size:
            self.memory.take(request.id, 1)
        return True
