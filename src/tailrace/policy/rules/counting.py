"""Rules that only count requests or tokens."""

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.quantities import pending_uncached, running, waiting_now
from tailrace.view.selection import random_below


@inner
def random(_view, _params, scores):
    """Score all replicas alike, so that the tie is broken uniformly."""
    scores[:] = 0.0


@inner
def round_robin(view, _params, scores):
    """The first available replica from the cursor on; the cursor moves past it."""
    n = scores.size
    cursor = view.router["cursor"]
    for i in range(n):
        scores[i] = (i - cursor) % n
    for step in range(n):
        i = (cursor + step) % n
        if view.replicas[i]["available"] != 0:
            view.router["cursor"] = (i + 1) % n
            return


@inner
def vidur_lor(view, _params, scores):
    """Fewest waiting requests."""
    for i in range(scores.size):
        scores[i] = waiting_now(view.replicas[i])


@inner
def least_outstanding(view, _params, scores):
    """Fewest requests in flight."""
    for i in range(scores.size):
        scores[i] = view.replicas[i]["in_flight"]


@inner
def power_of_two(view, _params, scores):
    """Score two distinct random replicas by requests in flight, all others inf."""
    available = 0
    for i in range(scores.size):
        available += view.replicas[i]["available"] != 0
    first, second = 0, 1
    if available > 2:
        first = random_below(view.router, available)
        second = random_below(view.router, available - 1)
        second += second >= first
    rank = 0
    for i in range(scores.size):
        scores[i] = np.inf
        if view.replicas[i]["available"] != 0:
            if rank in (first, second):
                scores[i] = view.replicas[i]["in_flight"]
            rank += 1


@inner
def vllm_dp(view, params, scores):
    """Waiting requests count four times."""
    waiting_weight = params[0]
    for i in range(scores.size):
        replica = view.replicas[i]
        scores[i] = waiting_weight * waiting_now(replica) + running(replica)


@inner
def least_pending_prefill(view, _params, scores):
    """Fewest prompt tokens sent and not yet prefilled."""
    for i in range(scores.size):
        scores[i] = view.replicas[i]["queued_tokens"]


@inner
def least_pending_uncached(view, _params, scores):
    """Fewest uncached prompt tokens to compute, the request's own included."""
    for i in range(scores.size):
        scores[i] = pending_uncached(view, i)
