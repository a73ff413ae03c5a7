"""What is known of a request when it arrives, and where it was decided to go."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.router.intake.prompt_blocks import PromptBlocks
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state.sessions import Session
from tailrace.view.ordering import Order


@dataclass(slots=True)
class Decision:
    """The replica chosen for a request, and the reason."""

    replica: int
    policy: str
    """Name of the policy in charge, also if the fallback rule overruled it."""
    scores: NDArray[np.float64]
    """[n] of the policy that decided, lower is better."""
    runner_up: int
    """Second choice, -1: there was no other."""
    reason: str
    """What speaks most for the replica against the runner-up."""
    fell_back: str | None = None
    """Why the fallback rule decided: nan, range, guard, error or time; None: it did not."""
    shadow: int | None = None
    """What the shadow policy would have chosen."""
    took_s: float = 0.0
    """Time of the decision."""
    cached: int = 0
    """Tokens of the prompt that the replica is thought to have cached."""
    ttft_s: float = 0.0
    """Predicted time to first token on the replica, by the cost model."""
    shadow_ttft_s: float | None = None
    """How much later the first token is predicted at the shadow's choice; negative: earlier."""
    order: Order | None = None
    """Order of the policy in charge, for servers that serve by priority; None: it has none."""
    priority: int | None = None
    """Priority that the server is told, lower first; None: it is told none."""
    waited_s: float | None = None
    """How long the request waited at the router for room; None: it did not."""
    overtook: int = 0
    """Requests that had waited longer and still waited when this one was sent."""
    overtook_why: str = ""
    """Why it went before these, see queueing/fair_queue.py; empty: there were none."""
    overtaken: int = 0
    """Requests that came later and were sent before it."""


class Arrival:
    """A request that has arrived. Times are in seconds of the cluster's clock."""

    __slots__ = (
        "arrived_at", "asked", "attempts", "how_long", "id", "implicit", "predicted_output",
        "prompt_tokens", "runs", "session", "size", "turn",
    )  # fmt: skip

    id: int
    asked: RequestBody
    arrived_at: float
    size: int  #: of the prompt's text, bytes
    prompt_tokens: int
    how_long: str  #: how the length is known: ids, server, local, estimated or assumed
    runs: PromptBlocks
    session: Session | None
    implicit: bool  #: the session was recognised by its content, not by an id
    turn: int
    predicted_output: float  #: tokens, as the last decision saw it
    attempts: int  #: replicas it was sent to so far
