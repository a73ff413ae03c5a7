"""Rules that follow the prefix cache within thresholds of load."""

import math

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.quantities import (
    in_flight_mean,
    in_flight_range,
    matched_blocks_share,
    matched_share,
    pending_uncached,
    recent_work,
    uncached,
)

#: Pending tokens from which replicas are alike for llm-d.
LLM_D_MOST_TOKENS = 4_194_304


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
def sglang_cache_aware(view, params, scores):
    """The longest match while the cluster is balanced; fewest in flight without one."""
    load_gap = params[0]
    load_ratio = params[1]
    match_rate = params[2]
    least, most = in_flight_range(view.replicas)
    balanced = most - least <= load_gap or most <= load_ratio * least
    follow = balanced and _best_match(view) > match_rate
    for i in range(scores.size):
        scores[i] = -matched_share(view, i) if follow else float(view.replicas[i]["in_flight"])


@inner
def aibrix_prefix(view, params, scores):
    """Longest match in whole per cent among the replicas that are not overloaded.

    The match counts among the least loaded ones only when the cluster is unbalanced.
    """
    load_gap = params[0]
    deviations = params[1]
    least, most = in_flight_range(view.replicas)
    balanced = most - least <= load_gap
    bound = _in_flight_bound(view.replicas, deviations) if balanced else float(least)
    for i in range(scores.size):
        in_flight = view.replicas[i]["in_flight"]
        per_cent = math.floor(100.0 * matched_share(view, i))
        scores[i] = in_flight
        if per_cent > 0 and in_flight <= bound:
            # Below all others; by match, and equal matches by requests in flight.
            scores[i] = -per_cent - 1.0 + in_flight / (most + 1.0)


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
    tokens_per_s = params[2]
    sticky_s = np.inf
    other_s = np.inf
    for i in range(scores.size):
        replica = view.replicas[i]
        scores[i] = min(pending_uncached(view, i), LLM_D_MOST_TOKENS)
        ttft_s = replica["queued_uncached"] / tokens_per_s
        if replica["available"] != 0:
            if matched_blocks_share(view, i) >= match_rate:
                sticky_s = min(sticky_s, ttft_s)
            else:
                other_s = min(other_s, ttft_s)
    if sticky_s < np.inf and sticky_s - other_s <= max_penalty_s:
        for i in range(scores.size):
            if matched_blocks_share(view, i) < match_rate:
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
def _in_flight_bound(replicas, deviations):
    """Mean plus some standard deviations of the requests in flight on the available replicas."""
    mean, count = in_flight_mean(replicas)
    squares = 0.0
    for replica in replicas:
        if replica["available"] != 0:
            squares += (replica["in_flight"] - mean) ** 2
    return mean + deviations * math.sqrt(squares / max(1, count))
