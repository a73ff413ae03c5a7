"""A request on a server, and the batch of an iteration."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Request:
    """A request as its server sees it.

    The iteration that completes the prompt also gives the first output token, so ``processed``
    jumps by one more at that moment, and ``output - 1`` decode iterations follow.
    """

    id: int
    prompt: int
    """Tokens to prefill before the next output token; grows when the request is preempted."""
    output: int
    """Output tokens that come after ``prompt``; shrinks when the request is preempted."""
    arrived_s: float
    """When it arrived at the router."""
    queued_s: float
    """When it reached its server; servers order requests by (queued_s, id)."""
    processed: int = 0
    """Tokens whose work is done, or was found in the cache, since the last (re)start."""
    prefilled: bool = False
    generated: int = 0
    """Output tokens so far; a preemption does not take them back."""
    restarts: int = 0
    priority: int = 0
    """Lower goes first, on servers that go by it."""

    @property
    def total(self) -> int:
        """Prompt and output together; no preemption changes it."""
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        """Whether the last output token is out."""
        return self.processed == self.total

    def next_tokens(self, budget: int) -> int:
        """Tokens it can use in the next iteration, at most ``budget``."""
        wanted = 1 if self.prefilled else self.prompt - self.processed
        return max(0, min(wanted, budget))

    def advance(self, tokens: int) -> bool:
        """Account for a finished iteration; return whether it gave an output token."""
        self.processed += tokens
        if not self.prefilled and self.processed == self.prompt:
            self.prefilled = True
            self.processed += 1
        if self.prefilled:
            self.generated += 1
        return self.prefilled

    def restart(self, shrink_partial: bool) -> None:
        """Lose all KV entries: what was processed has to be prefilled again.

        With ``shrink_partial`` a partly prefilled prompt is cut to the part prefilled, and the rest
        counts as output: Vidur's defect.
        """
        if self.prefilled or shrink_partial:
            self.prompt, self.output = self.processed, self.total - self.processed
        self.processed = 0
        self.prefilled = False
        self.restarts += 1


@dataclass(slots=True, eq=False)
class Batch:
    """Work of one iteration: requests and the tokens each of them contributes."""

    requests: Sequence[Request]
    tokens: Sequence[int]
    decodes: int = field(init=False)
    prefills: int = field(init=False)
    prefill_tokens: int = field(init=False)
    total_tokens: int = field(init=False)
    """T of the cost model."""
    context: int = field(init=False)
    """K: tokens processed before this iteration by its decodes."""
    prefill_work: float = field(init=False)
    """W: sum over prefill chunks of chunk*(context + chunk/2)."""

    def __post_init__(self) -> None:
        self.total_tokens = sum(self.tokens)
        self.decodes = self.prefills = self.prefill_tokens = self.context = 0
        self.prefill_work = 0.0
        for request, tokens in zip(self.requests, self.tokens, strict=True):
            if request.prefilled:
                self.decodes += 1
                self.context += request.processed
            else:
                self.prefills += 1
                self.prefill_tokens += tokens
                self.prefill_work += tokens * (request.processed + tokens / 2)
