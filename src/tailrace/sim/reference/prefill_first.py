"""The schedulers that never split a prompt: vllm, orca, faster_transformer, lightllm."""

from collections.abc import Sequence

from tailrace.config import Replica
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.scheduler import CountingScheduler


def whole_prompts(requests: Sequence[Request]) -> Batch | None:
    """Batch of requests that each run their whole prompt, or one token if that is done."""
    if not requests:
        return None
    return Batch(requests, [r.next_tokens(r.total) for r in requests])


class Vllm(CountingScheduler):
    """New prompts first, in batches of their own; otherwise everything decodes."""

    def __init__(self, config: Replica, compat: bool) -> None:
        super().__init__(config, compat)
        self._batch_limit = config.batch_cap // config.num_stages

    def next_batch(self) -> Batch | None:
        """Form a batch of prompts if the head of the queue can be admitted, else of decodes."""
        return whole_prompts(self._admit_prompts() or self._decode())

    def _admit_prompts(self) -> list[Request]:
        batch: list[Request] = []
        longest = 0
        while self.waiting and len(batch) < self._batch_limit:
            head = self.waiting[0]
            longest = max(longest, head.prompt)
            if (
                not self.can_admit_prompt(head)
                or (len(batch) + 1) * longest > self.config.max_batch_tokens
                or self.resident_count >= self.config.batch_cap
            ):
                break
            batch.append(self.admit(self.blocks_for(head.prompt)))
        return batch

    def _decode(self) -> list[Request]:
        batch: list[Request] = []
        self.ready.sort(key=lambda request: request.queued_s)
        while self.ready and len(batch) < self._batch_limit:
            request = self.ready.pop(0)
            if self.make_room_for_token(request):
                batch.append(request)
        return batch


class Orca(CountingScheduler):
    """Everything that runs plus new prompts in one batch; memory for the longest request each."""

    def next_batch(self) -> Batch | None:
        """Form a batch of all running requests, then new ones while memory lasts."""
        cap = self.config.batch_cap
        batch, self.ready = self.ready[:cap], self.ready[cap:]
        return whole_prompts(batch + self.admit_while_room(cap - len(batch)))

    def admit_while_room(self, most: int) -> list[Request]:
        """Admit up to ``most`` requests, each with memory for the longest possible one."""
        blocks = self.config.max_request_tokens // self.config.block_size
        admitted: list[Request] = []
        while self.waiting and len(admitted) < most and self.memory.free >= blocks:
            admitted.append(self.admit(blocks))
        return admitted


class FasterTransformer(Orca):
    """A batch runs until all its members are done; no request joins it."""

    def __init__(self, config: Replica, compat: bool) -> None:
        super().__init__(config, compat)
        self._members: dict[int, list[Request]] = {}

    def next_batch(self) -> Batch | None:
        """Continue a batch that is not done, or form a new one."""
        if not self.ready:
            members = self.admit_while_room(self.config.batch_cap)
            for request in members:
                self._members[request.id] = members
            return whole_prompts(members)
        members = self._members[self.ready[0].id]
        self.ready = [request for request in self.ready if self._members[request.id] is not members]
        return whole_prompts([request for request in members if not request.finished])

    def batch_ended(self, batch: Batch) -> None:
        """Release the memory of a batch when its last member is done.

        Vidur releases only the blocks of those that took part in the last iteration.
        """
        unfinished = [request for request in batch.requests if not request.finished]
        self.ready.extend(unfinished)
        if unfinished:
            return
        members = self._members[batch.requests[0].id]
        for request in batch.requests if self.compat else members:
            self.memory.release(request.id)
        for request in members:
            del self._members[request.id]


class LightLlm(CountingScheduler):
    """Prompts when nothing runs or enough decode iterations have passed; blocks of one token."""

    def __init__(self, config: Replica, compat: bool) -> None:
        super().__init__(config, compat)
        self._decodes_since_prefill = 0

    def next_batch(self) -> Batch | None:
        """Form a batch of prompts or of decodes."""
        if not self.ready:
            admitted = self._admit_prompts()
            if admitted:
                self._decodes_since_prefill = 0
            return whole_prompts(admitted)
        if self._decodes_since_prefill >= self.config.max_waiting_iters:
            self._decodes_since_prefill = 0
            if admitted := self._admit_prompts():
                return whole_prompts(admitted)
        self._decodes_since_prefill += 1
        batch, self.ready = self.ready, []
        for request in batch:
            self.memory.take(request.id, 1)
        return whole_prompts(batch)

    def _admit_prompts(self) -> list[Request]:
        batch: list[Request] = []
        tokens = 0
        growth = [(r.processed, max(0, r.total - 1 - r.processed)) for r in self.ready]
        while self.waiting:
            head = self.waiting[0]
            growth.append((head.prompt + 1, max(0, head.output - 2)))
            if (
                tokens + head.prompt > self.config.max_batch_tokens
                or self.resident_count >= self.config.batch_cap
                or peak_tokens(growth) >= self.memory.total
            ):
                break
            tokens += head.prompt
            batch.append(self.admit(head.prompt))
        return batch


def peak_tokens(growth: Sequence[tuple[int, int]]) -> int:
    """Most tokens held at once by requests of (held now, still to come) that grow in step."""
    peak = held = 0
    for count, (now, left) in enumerate(sorted(growth, key=lambda pair: -pair[1]), start=1):
        held += now
        peak = max(peak, held + count * left)
    return peak
