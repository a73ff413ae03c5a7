"""Rules that follow the prefix cache within thresholds of load."""

import math

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.quantities import (
    in_flight_mean,
    in_flight_range,
    matched_share,
    pending_uncached,
    recent_work,
    uncached,
)


@inner
def cache_aware(view, params, scores):
    """Least load when unbalanced; else the longest match, or the smallest tree without one."""
    load_gap = params[0]
    load_ratio = params[1]
    match_rate = params[2]
    least, most = in_flight_range(view.replicas)
    if most - least > load_gap and most > load_ratio * least:
        for i in range(scores.size):
            scores[i] = view.replicas[i]["in_flight"]
    elif _best_match(view) > match_rate:
        for i in range(scores.size):
            scores[i] = -matched_share(view, i)
    else:
        for i in range(scores.size):
            scores[i] = view.replicas[i]["index_tokens"]


@inner
def aibrix_prefix(view, params, scores):
    """Longest match among the replicas that are not overloaded; else fewest in flight."""
    load_gap = params[0]
    deviations = params[1]
    least, most = in_flight_range(view.replicas)
    bound = -1.0  # unbalanced: no match counts
    if most - least <= load_gap:
        bound = _in_flight_bound(view.replicas, deviations)
    for i in range(scores.size):
        in_flight = view.replicas[i]["in_flight"]
        matched = view.replicas[i]["cached_tokens"]
        scores[i] = in_flight
        if matched > 0 and in_flight <= bound:
            # Below all others; by match, and equal matches by requests in flight.
            scores[i] = -matched - 1.0 + in_flight / (most + 1.0)


@inner
def preble(view, params, scores):
    """The replica with most of the prefix if that is most of the prompt; else the least cost."""
    exploit_share = params[0]
    eviction_weight = params[1]
    best = _best_match(view)
    for i in range(scores.size):
        replica = view.replicas[i]
        tokens = recent_work(view, i)
        if best <= exploit_share:
            missed = uncached(view, i)
            evicted = max(0, replica["index_tokens"] + missed - replica["capacity_tokens"])
            tokens += eviction_weight * evicted + missed
        scores[i] = tokens / replica["prefill_tokens_per_s"]
        if best > exploit_share and matched_share(view, i) < best:
            scores[i] = np.inf


@inner
def llm_d_sticky(view, params, scores):
    """Fewest tokens to prefill, among the replicas with the prefix unless they are far slower."""
    match_rate = params[0]
    max_penalty_s = params[1]
    sticky_s = np.inf
    other_s = np.inf
    for i in range(scores.size):
        replica = view.replicas[i]
        scores[i] = pending_uncached(view, i)
        ttft_s = replica["queued_uncached"] / replica["prefill_tokens_per_s"]
        if replica["available"] != 0:
            if _matched_blocks_share(view, i) >= match_rate:
                sticky_s = min(sticky_s, ttft_s)
            else:
                other_s = min(other_s, ttft_s)
    if sticky_s < np.inf and sticky_s - other_s <= max_penalty_s:
        for i in range(scores.size):
            if _matched_blocks_share(view, i) < match_rate:
                scores[i] = np.inf


@inner
def _best_match(view):
    """Largest share of the prompt that any available replica has cached."""
    best = 0.0
    for i in range(view.replicas.size):
        if view.replicas[i]["available"] != 0:
            best = max(best, matched_share(view, i))
    return best


@inner
def _matched_blocks_share(view, i):
    """Share of the blocks that can be cached at all (never the last token's) that are, 0..1."""
    replica = view.replicas[i]
    blocks = (view.request["prompt_tokens"] - 1) // replica["block_size"]
    return replica["cached_tokens"] / max(1.0, float(blocks * replica["block_size"]))


@inner
def _in_flight_bound(replicas, deviations):
    """Mean plus some standard deviations of the requests in flight on the available replicas."""
    mean, count = in_flight_mean(replicas)
    squares = 0.0
    for replica in replicas:
        if replica["available"] != 0:
            squares += (replica["in_flight"] - mean) ** 2
    return mean + deviations * math.sqrt(squares / max(1, count))
