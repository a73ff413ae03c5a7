"""The router's own book-keeping: what it sent where, and what has come back.

Functions over REPLICA_VIEW and ROUTER records, called by the compiled engine, the Python
book-keeper and the live router. ``cached`` is always the number of prompt tokens the router
*believed* to be cached when it sent the request.
"""

import math

from tailrace.compiled import inner, jit
from tailrace.view.records import HISTORY_S, RECENT_WORK_S


@inner
def fade_recent_work(replica, now):
    """Decay the sum of recent work up to ``now`` (s)."""
    if now > replica["recent_at"]:
        replica["recent_work"] *= math.exp((replica["recent_at"] - now) / RECENT_WORK_S)
        replica["recent_at"] = now


@jit
def sent(replica, prompt, cached, predicted, now):
    """Record a request of ``prompt`` and ``predicted`` output tokens as sent at ``now`` (s)."""
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
    """Record the first token of a request; ``context_tokens`` is kept where tokens are counted."""
    replica["queued"] -= 1
    replica["answering_prompts"] += prompt
    replica["queued_tokens"] -= prompt
    replica["queued_uncached"] -= prompt - cached
    replica["queued_since_sum"] -= sent_at
    if replica["queued"] == 0:
        replica["queued_since_sum"] = 0.0  # rounding errors do not accumulate


@jit
def finished(replica, router, prompt, predicted, output):
    """Record the end of a request after ``output`` tokens; ``predicted`` as when it was sent."""
    replica["in_flight"] -= 1
    replica["answering_prompts"] -= prompt
    replica["predicted_tokens"] -= predicted
    replica["finished"] += 1
    replica["finished_tokens"] += output
    router["finished"] += 1
    router["finished_tokens"] += output


@jit
def cancelled(replica, prompt, predicted, streamed):
    """Record that an answering request ended early, after ``streamed`` tokens.

    They count as throughput, but not as a finished answer to learn lengths from.
    """
    replica["in_flight"] -= 1
    replica["answering_prompts"] -= prompt
    replica["predicted_tokens"] -= predicted
    replica["finished_tokens"] += streamed


@jit
def lost(replica):
    """Record that a replica died with all its requests, which the caller reroutes or fails."""
    replica["in_flight"] = 0
    replica["queued"] = 0
    replica["queued_tokens"] = 0
    replica["queued_uncached"] = 0
    replica["queued_since_sum"] = 0.0
    replica["context_tokens"] = 0
    replica["answering_prompts"] = 0
    replica["active_blocks"] = 0
    replica["predicted_tokens"] = 0
    replica["streamed"] = replica["finished_tokens"]
    replica["recent_work"] = 0.0


@jit
def look(replicas, router, now):
    """Update the moving averages for a decision at ``now`` (s); ``context_tokens`` must be current.

    All decay by the same factor, so a mean is the ratio of two of them and is unbiased from the
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
def add(view, other, keep):
    """Add another router worker's record of a replica; its moving averages decay by ``keep``.

    Of the metrics snapshot, the newer one counts.
    """
    if other["queued"] > 0 and (view["queued"] == 0 or other["oldest_sent"] < view["oldest_sent"]):
        view["oldest_sent"] = other["oldest_sent"]
    view["in_flight"] += other["in_flight"]
    view["queued"] += other["queued"]
    view["queued_tokens"] += other["queued_tokens"]
    view["queued_uncached"] += other["queued_uncached"]
    view["queued_since_sum"] += other["queued_since_sum"]
    view["context_tokens"] += other["context_tokens"]
    view["answering_prompts"] += other["answering_prompts"]
    view["active_blocks"] += other["active_blocks"]
    view["predicted_tokens"] += other["predicted_tokens"]
    view["sent_tokens"] += other["sent_tokens"]
    view["sent_requests"] += other["sent_requests"]
    fade = math.exp((other["recent_at"] - view["recent_at"]) / RECENT_WORK_S)
    view["recent_work"] += other["recent_work"] * fade
    view["finished"] += other["finished"]
    view["finished_tokens"] += other["finished_tokens"]
    view["streamed"] += other["streamed"]
    view["recent_tokens"] += other["recent_tokens"] * keep
    view["recent_in_flight"] += other["recent_in_flight"] * keep
    if other["metrics_at"] > view["metrics_at"]:
        view["metrics_at"] = other["metrics_at"]
        view["waiting"] = other["waiting"]
        view["running"] = other["running"]
        view["kv_used"] = other["kv_used"]


@jit
def scraped(replica, waiting, running, kv_used, now):
    """Record a metrics snapshot taken at ``now`` (s)."""
    replica["metrics_at"] = now
    replica["waiting"] = waiting
    replica["running"] = running
    replica["kv_used"] = kv_used
    replica["sent_tokens"] = 0
    replica["sent_requests"] = 0


@jit
def whole_tokens(predicted):
    """Round a predicted output length to tokens, which the ledger can add and subtract exactly."""
    return int(min(predicted + 0.5, 1e9))


@jit
def mean_output(router, prior):
    """Running mean of finished outputs in tokens; ``prior`` counts as one finished request."""
    return (router["finished_tokens"] + prior) / (router["finished"] + 1)
