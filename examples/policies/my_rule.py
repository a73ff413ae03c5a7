"""A rule in one file: finish the pending work soonest, but do not pile up requests."""

import numpy as np


def scores(view, requests_weight=0.02):
    """Seconds until this prompt is prefilled, plus a little for every request in flight."""
    replicas = view.replicas
    own = view.request["prompt_tokens"] - replicas["cached_tokens"]
    wait_s = (replicas["queued_uncached"] + own) / replicas["prefill_tokens_per_s"]
    full = replicas["in_flight"] >= replicas["batch_cap"]
    return np.where(full, np.inf, wait_s + requests_weight * replicas["in_flight"])
