"""The router's own book-keeping: what it sent where, and what has come back.

Small functions over REPLICA_VIEW and ROUTER records, called by whoever moves requests: the compiled
engine, the reference engine, the Vidur plug-in and the live router. ``cached`` is always the number
of prompt tokens the router *believed* to be cached when it sent the request.
"""

import math

from tailrace.compiled import jit
from tailrace.policy.view import RECENT_WORK_S


@jit
def fade_recent_work(replica, now):
    """Bring the fading sum of recent work up to ``now`` (s)."""
    if now > replica["recent_at"]:
        replica["recent_work"] *= math.exp((replica["recent_at"] - now) / RECENT_WORK_S)
        replica["recent_at"] = now


@jit
def sent(replica, prompt, cached, now):
    """A request of ``prompt`` tokens leaves for this replica at ``now`` (s)."""
    uncached = prompt - cached
    replica["in_flight"] += 1
    replica["queued"] += 1
    replica["queued_tokens"] += prompt
    replica["queued_uncached"] += uncached
    replica["queued_since_sum"] += now
    replica["sent_tokens"] += uncached
    replica["sent_requests"] += 1
    fade_recent_work(replica, now)
    replica["recent_work"] += uncached


@jit
def answering(replica, prompt, cached, sent_at):
    """Its first token has come back; ``context_tokens`` is kept by whoever counts tokens."""
    replica["queued"] -= 1
    replica["queued_tokens"] -= prompt
    replica["queued_uncached"] -= prompt - cached
    replica["queued_since_sum"] -= sent_at


@jit
def finished(replica, router, output):
    """An answering request ended after ``output`` tokens."""
    replica["in_flight"] -= 1
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
    replica["recent_work"] = 0.0


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
def mean_output(router, prior):
    """Running mean of finished outputs in tokens; ``prior`` counts as one finished request."""
    return (router["finished_tokens"] + prior) / (router["finished"] + 1)
