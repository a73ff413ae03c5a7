"""A prompt on its way through an emulated replica."""

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.emulate import tokenizer
from tailrace.sim.reference.request import Request


@dataclass(slots=True, eq=False)
class Job:
    """One prompt and the output it gets. Times are emulated seconds."""

    request: Request
    answer: bytes
    """All tokens of its output, four bytes each."""
    on_token: Callable[["Job", bool], None]
    """Called with (job, whether it was the last) after every token."""
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    cached_tokens: int = 0
    aborted: bool = False

    @property
    def token(self) -> bytes:
        """The latest token."""
        end = self.request.generated * tokenizer.TOKEN_BYTES
        return self.answer[end - tokenizer.TOKEN_BYTES : end]
