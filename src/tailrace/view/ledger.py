"""The router's own book-keeping: what it sent where, and what has come back.

Small functions over REPLICA_VIEW and ROUTER records, called by whoever moves requests: the compiled
engine, the reference engine, the Vidur plug-in and the live router. ``cached`` is always the number
of prompt tokens the router *believed* to be cached when it sent the request.
"""

import math

from tailrace.compiled import jit
from tailrace.view.records import HISTORY_S, RECENT_WORK_S


@jit
def fade_recent_work(replica, now):
    """Bring the fading sum of recent work up to ``now`` (s)."""
    if now > replica["recent_at"]:
        replica["recent_work"] *= math.exp((replica["recent_at"] - now) / RECENT_WORK_S)
        replica["recent_at"] = now


@jit
def sent(replica, prompt, cached, predicted, now):
    """A request of ``prompt`` tokens, ``predicted`` to get so many back, leaves at ``now`` (s)."""
    uncached = prompt - cached
    replica["in_flight"] += 1
    replica["queued"] += 1
    replica["queued_tokens"] += prompt
    replica["queued_uncached"] += uncached
    replica["queued_since_sum"] += now
    replica["predicted_tokens"] += predicted
    replica["sent_tokens"] += uncached
    replica["sent_requests"] += 1
    fade_recent_work(replica, now)
    replica["recent_work"] += uncached


@jit
def answering(replica, prompt, cached, sent_at):
    """Its first token has come back; ``context_tokens`` is kept by whoever counts tokens."""
    replica["queued"] -= 1
    replica["answering_prompts"] += prompt
    replica["queued_tokens"] -= prompt
    replica["queued_uncached"] -= prompt - cached
    replica["queued_since_sum"] -= sent_at
    if replica["queued"] == 0:
        replica["queued_since_sum"] = 0.0  # no rounding errors are carried on


@jit
def finished(replica, router, prompt, predicted, output):
    """An answering request ended after ``output`` tokens; ``predicted`` as when it was sent."""
    replica["in_flight"] -= 1
    replica["answering_prompts"] -= prompt
    replica["predicted_tokens"] -= predicted
    replica["finished"] += 1
    replica["finished_tokens"] += output
    router["finished"] += 1
    router["finished_tokens"] += output


@jit
def lost(replica):
    """The replica died: nothing it held is in flight any more. The caller routes again or fails."""
    replica["in_flight"] = 0
    replica["queued"] = 0
    replica["queued_tokens"] = 0
    replica["queued_uncached"] = 0
    replica["queued_since_sum"] = 0.0
    replica["context_tokens"] = 0
    replica["answering_prompts"] = 0
    replica["predicted_tokens"] = 0
    replica["streamed"] = replica["finished_tokens"]
    replica["recent_work"] = 0.0


@jit
def look(replicas, router, now):
    """Bring the moving averages up to a decision at ``now`` (s); ``context_tokens`` are current.

    Each fades by the same factor, so a mean is the ratio of two of them and is right from the
    first second on.
    """
    keep = math.exp(min(0.0, router["looked_at"] - now) / HISTORY_S)
    weight_s = HISTORY_S * (1.0 - keep)
    router["looked_at"] = now
    router["watched_s"] = router["watched_s"] * keep + weight_s
    router["recent_arrivals"] = router["recent_arrivals"] * keep + 1.0
    for i in range(replicas.size):
        replica = replicas[i]
        streamed = (
            replica["finished_tokens"] + replica["context_tokens"] - replica["answering_prompts"]
        )
        recent = replica["recent_tokens"] * keep + (streamed - replica["streamed"])
        replica["recent_tokens"] = recent
        replica["streamed"] = streamed
        replica["recent_in_flight"] = (
            replica["recent_in_flight"] * keep + replica["in_flight"] * weight_s
        )


@jit
def scraped(replica, waiting, running, kv_used, now):
    """A metrics snapshot taken at ``now`` (s) has arrived."""
    replica["metrics_at"] = now
    replica["waiting"] = waiting
    replica["running"] = running
    replica["kv_used"] = kv_used
    replica["sent_tokens"] = 0
    replica["sent_requests"] = 0


@jit
def whole_tokens(predicted):
    """A predicted output length as a number of tokens the ledger can add and take away exactly."""
    return int(min(predicted + 0.5, 1e9))


@jit
def mean_output(router, prior):
    """Running mean of finished outputs in tokens; ``prior`` counts as one finished request."""
    return (router["finished_tokens"] + prior) / (router["finished"] + 1)
