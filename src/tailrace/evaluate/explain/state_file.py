"""A hand-written state, as a router would see it.

The file lists the request and what the router knows of each replica; values left out are those of
an idle cluster. See examples/states/.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tailrace.config import MAX_REPLICAS, Positive, Replica, Settings, load_toml, parse
from tailrace.errors import TailraceError
from tailrace.view.records import HISTORY_S, REQUEST_VIEW, ROUTER, View
from tailrace.view.replicas import idle_views, replica_costs

Count = Annotated[int, Field(ge=0, le=2**40)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
#: "Now" in a state, s: late enough for anything to have happened before.
NOW_S = 1e9


class RequestState(Settings):
    """The request to be routed."""

    prompt_tokens: int = Field(default=1000, ge=1, le=2**30)
    """Length of its prompt."""
    predicted_output: Positive = 256.0
    """Predicted length of its answer, tokens."""
    waited_s: Seconds = 0.0
    """Since it arrived, if it could not be sent at once."""
    turn: Count = 0
    """Turns of its session before it."""
    in_session: bool = False
    """Whether it belongs to a session."""
    last_replica: int | None = Field(default=None, ge=0, lt=MAX_REPLICAS)
    """Where the session's previous request went, counted from 0."""
    ttft_slo_s: Positive = 1.0
    """Target for the time to first token."""
    tpot_slo_s: Positive = 0.05
    """Target for the time per output token."""


class ReplicaState(Replica):
    """One or several equal replicas, and what the router knows of them."""

    available: bool = True
    """Whether it may get requests."""
    queued: Count = 0
    """Requests sent to it that have no token back yet."""
    answering: Count = 0
    """Requests that are being answered."""
    queued_tokens: Count | None = None
    """Prompt tokens of the queued; default: 1000 each."""
    queued_uncached: Count | None = None
    """The same, less what is thought cached; default: all of them."""
    context_tokens: Count | None = None
    """Prompt and output tokens so far of the answering requests; default: 1000 each."""
    tokens_to_come: Count | None = None
    """Predicted output tokens still to come; default: as the request's for each queued one, and
    half of that for each answering one."""
    oldest_wait_s: Seconds = 0.0
    """How long the longest queued waits."""
    mean_wait_s: Seconds | None = None
    """How long the queued wait on average; default: half of the longest."""
    mean_in_flight: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Moving average of its requests in flight; default: as now."""
    tokens_per_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Output tokens streamed back per second of late."""
    recent_work: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Uncached prompt tokens sent of late."""
    cached_tokens: Count = 0
    """Of the prompt, thought cached here."""
    index_tokens: Count | None = None
    """Tokens the prefix index knows here; default: those cached."""
    metrics_age_s: Seconds | None = None
    """Age of the metrics snapshot; default: there is none."""
    waiting: Count = 0
    """Requests in the server's queue by the snapshot."""
    running: Count = 0
    """Requests in the server's batch by the snapshot."""
    kv_used: float = Field(default=0.0, ge=0, le=1)
    """Share of its KV memory in use by the snapshot."""


class State(Settings):
    """A routing decision to explain."""

    description: str = ""
    """What it is meant to show."""
    arrival_rate: Annotated[float, Field(ge=0, le=1e7)] = 0.0
    """Requests per second of late, all replicas together."""
    request: RequestState = RequestState()
    replicas: tuple[ReplicaState, ...] = Field(min_length=1)
    """The replicas, in order; each entry may stand for several."""


def read(path: Path) -> State:
    """Read a state from a TOML file."""
    try:
        state = parse(State, load_toml(path))
    except TailraceError as error:
        raise TailraceError(f"cannot use state {path}: {error}") from None
    n = sum(r.count for r in state.replicas)
    last = state.request.last_replica
    if last is not None and last >= n:
        raise TailraceError(
            f"cannot use state {path}: last_replica = {last}, but there are only {n} replicas, "
            "counted from 0"
        )
    if not any(r.available for r in state.replicas):
        raise TailraceError(f"cannot use state {path}: none of its replicas is available")
    for k, replica in enumerate(state.replicas):
        if replica.cached_tokens >= state.request.prompt_tokens:
            raise TailraceError(
                f"cannot use state {path}: replicas.{k}.cached_tokens must be below the prompt's "
                f"{state.request.prompt_tokens} tokens; one at least has to be computed"
            )
    return state


# ---- a view of it -------------------------------------------------------------------------------


def view_of(state: State) -> View:
    """Return what a router would see."""
    replicas = [r for r in state.replicas for _ in range(r.count)]
    rows = idle_views(replicas)
    for row, replica in zip(rows, replicas, strict=True):
        row["available"] = replica.available
        _fill_ledger(row, replica, state.request)
        if replica.metrics_age_s is not None:
            row["metrics_at"] = NOW_S - replica.metrics_age_s
            for name in ("waiting", "running", "kv_used"):
                row[name] = getattr(replica, name)
    request = np.zeros(1, REQUEST_VIEW)
    given = state.request
    in_session = given.in_session or given.last_replica is not None or given.turn > 0
    for name, value in {
        "now": NOW_S,
        "arrived_at": NOW_S - given.waited_s,
        "prompt_tokens": given.prompt_tokens,
        "predicted_output": given.predicted_output,
        "session": 0 if in_session else -1,
        "turn": given.turn,
        "last_replica": -1 if given.last_replica is None else given.last_replica,
        "ttft_slo_s": given.ttft_slo_s,
        "tpot_slo_s": given.tpot_slo_s,
    }.items():
        request[name] = value
    router = np.zeros(1, ROUTER)
    router["watched_s"] = HISTORY_S
    router["looked_at"] = NOW_S
    router["recent_arrivals"] = state.arrival_rate * HISTORY_S
    return View(request[0], rows, replica_costs(replicas), router[0])


def _fill_ledger(row: np.void, replica: ReplicaState, request: RequestState) -> None:
    queued, answering = replica.queued, replica.answering
    queued_tokens = _either(replica.queued_tokens, 1000 * queued)
    context = _either(replica.context_tokens, 1000 * answering)
    to_come = _either(
        replica.tokens_to_come, int(request.predicted_output * (queued + answering / 2))
    )
    mean_wait_s = _either(replica.mean_wait_s, replica.oldest_wait_s / 2)
    in_flight = queued + answering
    for name, value in {
        "in_flight": in_flight,
        "queued": queued,
        "queued_tokens": queued_tokens,
        "queued_uncached": _either(replica.queued_uncached, queued_tokens),
        # Nothing of the context counts as streamed, so that what is predicted is still to come.
        "context_tokens": context,
        "answering_prompts": context,
        "active_blocks": (queued_tokens + context) // int(row["block_size"]),
        "predicted_tokens": to_come,
        "oldest_sent": NOW_S - replica.oldest_wait_s,
        "queued_since_sum": queued * (NOW_S - mean_wait_s),
        "recent_work": replica.recent_work,
        "recent_at": NOW_S,
        "recent_tokens": replica.tokens_per_s * HISTORY_S,
        "recent_in_flight": _either(replica.mean_in_flight, in_flight) * HISTORY_S,
        "cached_tokens": replica.cached_tokens,
        "index_tokens": _either(replica.index_tokens, replica.cached_tokens),
        "new_blocks": request.prompt_tokens // int(row["block_size"]),
    }.items():
        row[name] = value


def _either(value: Any, default: Any) -> Any:
    return default if value is None else value
