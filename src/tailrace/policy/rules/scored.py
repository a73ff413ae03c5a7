"""Rules that weigh load against cached prefix in one formula."""

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.quantities import (
    has_metrics,
    in_flight_mean,
    kv_used,
    matched_blocks_share,
    matched_share,
    pending_uncached,
    waiting,
)


@inner
def lmetric(view, _params, scores):
    """Pending uncached tokens times requests, both including the request itself."""
    for i in range(scores.size):
        scores[i] = pending_uncached(view, i) * (view.replicas[i]["in_flight"] + 1.0)


@inner
def dynamo(view, params, scores):
    """Blocks to prefill plus distinct prompt blocks in use, both with the request; no answers."""
    overlap_weight = params[0]
    for i in range(scores.size):
        replica = view.replicas[i]
        prefill = overlap_weight * pending_uncached(view, i) / replica["block_size"]
        scores[i] = prefill + replica["active_blocks"] + replica["new_blocks"]


@inner
def llm_d(view, params, scores):
    """Weighted sum of a short queue, free KV memory and cached prefix."""
    queue_weight = params[0]
    kv_weight = params[1]
    prefix_weight = params[2]
    shortest = np.inf
    longest = -np.inf
    for replica in view.replicas:
        if replica["available"] != 0:
            shortest = min(shortest, float(waiting(replica)))
            longest = max(longest, float(waiting(replica)))
    for i in range(scores.size):
        replica = view.replicas[i]
        queue = 1.0
        if longest > shortest:
            queue = (longest - waiting(replica)) / (longest - shortest)
        free = 1.0 - kv_used(replica)
        scores[i] = -(queue_weight * queue + kv_weight * free)
        scores[i] -= prefix_weight * matched_blocks_share(view, i)


@inner
def load_aware(view, params, scores):
    """Share of the prompt matched, less the relative excess of load over the mean."""
    load_weight = params[0]
    mean, _ = in_flight_mean(view.replicas)
    for i in range(scores.size):
        excess = (view.replicas[i]["in_flight"] - mean) / max(1.0, mean)
        scores[i] = load_weight * excess - matched_share(view, i)


@inner
def least_load(view, params, scores):
    """Seconds of prefill work ahead, plus a penalty that grows without bound as KV memory fills."""
    kv_weight = params[0]
    for i in range(scores.size):
        replica = view.replicas[i]
        used = min(kv_used(replica), 0.999)
        scores[i] = replica["queued_uncached"] / replica["prefill_tokens_per_s"]
        scores[i] += kv_weight * used / (1.0 - used)


@inner
def llumnix(view, _params, scores):
    """Most free blocks, less those the queue will take, per request in flight."""
    for i in range(scores.size):
        replica = view.replicas[i]
        held = float(replica["context_tokens"])
        if has_metrics(replica):
            held = kv_used(replica) * replica["capacity_tokens"]
        free = replica["capacity_tokens"] - held - replica["queued_tokens"]
        scores[i] = -np.inf
        if replica["in_flight"] > 0:
            scores[i] = -free / replica["block_size"] / replica["in_flight"]
