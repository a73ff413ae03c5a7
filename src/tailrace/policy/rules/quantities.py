"""Quantities shared by rules and observation; comparisons cover the available replicas.

Without a metrics snapshot (``metrics_at`` is NEVER) every load falls back to the router's own
ledger: a silent zero would make an unknown replica look idle.
"""

import math

import numpy as np

from tailrace.compiled import inner
from tailrace.view.records import NEVER, RECENT_WORK_S

#: Tokens per block of llm-d's prefix index, and the tokens of a prompt that it covers.
LLM_D_BLOCK = 64
LLM_D_TOKENS = 131_072


@inner
def has_metrics(replica):
    """Whether there is a metrics snapshot of this replica."""
    return replica["metrics_at"] > NEVER


@inner
def waiting(replica):
    """Requests in the server's queue by its last snapshot, else those without a token yet."""
    return replica["waiting"] if has_metrics(replica) else replica["queued"]


@inner
def waiting_now(replica):
    """Like ``waiting``, plus the requests sent since the snapshot."""
    if has_metrics(replica):
        return replica["waiting"] + replica["sent_requests"]
    return replica["queued"]


@inner
def running(replica):
    """Requests in the server's batch by its last snapshot, else those that are answering."""
    if has_metrics(replica):
        return replica["running"]
    return replica["in_flight"] - replica["queued"]


@inner
def kv_used(replica):
    """Share of KV memory held by requests by the last snapshot, else by the ledger, 0..1."""
    if has_metrics(replica):
        return replica["kv_used"]
    return min(1.0, in_flight_tokens(replica) / max(1.0, float(replica["capacity_tokens"])))


@inner
def in_flight_tokens(replica):
    """Tokens of all requests in flight: prompts of the queued, prompt and answer of the others."""
    return replica["queued_tokens"] + replica["context_tokens"]


@inner
def uncached(view, i):
    """Prompt tokens of the request that replica ``i`` would have to compute."""
    return view.request["prompt_tokens"] - view.replicas[i]["cached_tokens"]


@inner
def pending_uncached(view, i):
    """Prompt tokens to compute before the request's first token: the queued ones' and its own."""
    return view.replicas[i]["queued_uncached"] + uncached(view, i)


@inner
def matched_share(view, i):
    """Share of the prompt that replica ``i`` has cached, 0..1."""
    return view.replicas[i]["cached_tokens"] / max(1.0, float(view.request["prompt_tokens"]))


@inner
def matched_blocks_share(view, i):
    """Share of llm-d's index blocks that can be cached (never the last token's) that are, 0..1.

    Its index covers the first LLM_D_TOKENS tokens of a prompt.
    """
    prompt = min(view.request["prompt_tokens"], LLM_D_TOKENS)
    cached = min(view.replicas[i]["cached_tokens"], LLM_D_TOKENS)
    return min(1.0, (cached // LLM_D_BLOCK) / max(1.0, float((prompt - 1) // LLM_D_BLOCK)))


@inner
def recent_work(view, i):
    """Uncached prompt tokens sent to replica ``i``, faded up to now."""
    replica = view.replicas[i]
    age = max(0.0, view.request["now"] - replica["recent_at"])
    return replica["recent_work"] * math.exp(-age / RECENT_WORK_S)


@inner
def in_flight_range(replicas):
    """Least and most requests in flight on any available replica; (0, 0) if there is none."""
    least = np.int64(2**62)
    most = np.int64(0)
    for replica in replicas:
        if replica["available"] != 0:
            least = min(least, replica["in_flight"])
            most = max(most, replica["in_flight"])
    return min(least, most), most


@inner
def in_flight_mean(replicas):
    """Mean number of requests in flight over the available replicas, and their number."""
    total = 0.0
    count = 0
    for replica in replicas:
        if replica["available"] != 0:
            total += replica["in_flight"]
            count += 1
    return total / max(1, count), count


@inner
def usable_last(view):
    """The replica of the session's previous request if it is available, else -1."""
    last = view.request["last_replica"]
    if 0 <= last < view.replicas.size and view.replicas[last]["available"] != 0:
        return last
    return -1
