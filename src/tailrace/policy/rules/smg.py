"""Rules of the Shepherd model gateway (SMG), each behind its overload veto.

Before any policy decides, SMG drops replicas whose last load report shows too many waiting requests
or too little free KV memory; if that leaves none, the request goes to the fewest in flight. The
reports are the metrics snapshots of our router. vLLM reports neither waiting tokens nor a rate, so
the expected wait counts TOKENS_PER_REQUEST for each request and divides by TOKENS_PER_S. Requests
sent since the report count alike, whatever their length, until the next report: over HTTP the
gateway does not count their tokens, with or without a tokenizer (benchmarks/same_choice.py).
"""

import math

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.hashing import FIRST_HASH, draw
from tailrace.policy.rules.quantities import has_metrics, matched_share
from tailrace.view.selection import random_below

TOKENS_PER_REQUEST = 1024.0
TOKENS_PER_S = 2000.0
KV_WEIGHT_S = 0.15
MAX_KV_USED = 0.999
#: Expected waits closer together than this are a tie, s.
TIE_S = 1e-6
#: Requests in flight above the bounded load of ``smg_prefix_hash``.
SLACK = 10.0


@inner
def smg_expected_wait(view, params, scores):
    """Least expected wait among the replicas that are not vetoed."""
    veto_waiting = params[0]
    veto_kv = params[1]
    if _veto(view, veto_waiting, veto_kv, scores) > 0:
        _score_by_expected_wait(view, scores)


@inner
def smg_power_of_two(view, params, scores):
    """Two distinct random replicas that are not vetoed, by expected wait."""
    veto_waiting = params[0]
    veto_kv = params[1]
    eligible = _veto(view, veto_waiting, veto_kv, scores)
    if eligible == 0:
        return
    first, second = 0, 1
    if eligible > 2:
        first = random_below(view.router, eligible)
        second = random_below(view.router, eligible - 1)
        second += second >= first
    rank = 0
    for i in range(scores.size):
        if scores[i] < np.inf:
            if rank not in (first, second):
                scores[i] = np.inf
            rank += 1
    _score_by_expected_wait(view, scores)


@inner
def smg_prefix_hash(view, params, scores):
    """The owner by hash while its load is bounded; else fewest in flight of those within bounds."""
    load_factor = params[0]
    veto_waiting = params[1]
    veto_kv = params[2]
    eligible = _veto(view, veto_waiting, veto_kv, scores)
    if eligible == 0:
        return
    total = 0.0
    owner, owner_draw = -1, -1.0
    for i in range(scores.size):
        if scores[i] < np.inf:
            total += view.replicas[i]["in_flight"]
            number = draw(view.request["prefix_hash"], i, FIRST_HASH)
            if number > owner_draw:
                owner, owner_draw = i, number
    share = (total + 1.0) / eligible
    bound = max(load_factor * share, share + SLACK)
    passing = 0
    for i in range(scores.size):
        if scores[i] < np.inf:
            scores[i] = view.replicas[i]["in_flight"]
            passing += scores[i] <= bound
    if total == 0.0 or passing == 0 or scores[owner] <= bound:
        scores[owner] = -1.0


@inner
def smg_cache_aware(view, params, scores):
    """Least expected wait among the holders of the longest match that are not hot."""
    load_gap = params[0]
    load_ratio = params[1]
    match_rate = params[2]
    veto_waiting = params[3]
    veto_kv = params[4]
    eligible = _veto(view, veto_waiting, veto_kv, scores)
    if eligible == 0:
        return
    mean = 0.0
    best = 0.0
    for i in range(scores.size):
        if scores[i] < np.inf:
            mean += view.replicas[i]["in_flight"] / eligible
            best = max(best, matched_share(view, i))
    excess = min(load_gap, max(4.0, math.ceil(2.0 * math.sqrt(mean))))
    hot = max(load_ratio * mean, mean + excess)
    cool = 0  # replicas that are not hot
    holders = 0  # those of them that hold the longest match
    for i in range(scores.size):
        if scores[i] < np.inf and view.replicas[i]["in_flight"] <= hot:
            cool += 1
            holders += best > match_rate and matched_share(view, i) == best
    any_holder = best > match_rate
    for i in range(scores.size):
        # Without a match load does not matter beyond the expected wait itself.
        drop_hot = any_holder and cool > 0 and view.replicas[i]["in_flight"] > hot
        drop_others = holders > 0 and matched_share(view, i) < best
        if drop_hot or drop_others:
            scores[i] = np.inf
    _score_by_expected_wait(view, scores)


@inner
def _veto(view, veto_waiting, veto_kv, scores):
    """Score replicas that may get requests 0, others inf; return how many may.

    If all are vetoed the scores are the requests in flight.
    """
    eligible = 0
    for i in range(scores.size):
        replica = view.replicas[i]
        scores[i] = np.inf
        overloaded = has_metrics(replica) and (
            replica["waiting"] >= veto_waiting or replica["kv_used"] >= veto_kv
        )
        if replica["available"] != 0 and not overloaded:
            scores[i] = 0.0
            eligible += 1
    if eligible == 0:
        for i in range(scores.size):
            scores[i] = view.replicas[i]["in_flight"]
    return eligible


@inner
def _score_by_expected_wait(view, scores):
    """Replace finite scores by the expected wait, s; the request itself is not included.

    A replica without a report ranks behind the best one with a report, by its requests in flight.
    """
    best = np.inf
    for i in range(scores.size):
        replica = view.replicas[i]
        if scores[i] < np.inf and has_metrics(replica):
            known = replica["waiting"] + replica["running"]
            unreported = max(0, replica["in_flight"] - known - replica["sent_requests"])
            requests = known + unreported + replica["sent_requests"]
            used = min(max(replica["kv_used"], 0.0), MAX_KV_USED)
            scores[i] = requests * TOKENS_PER_REQUEST / TOKENS_PER_S
            scores[i] += KV_WEIGHT_S * used / (1.0 - used)
            best = min(best, scores[i])
    base = best if best < np.inf else 0.0
    for i in range(scores.size):
        replica = view.replicas[i]
        if scores[i] < np.inf:
            if not has_metrics(replica):
                scores[i] = base + replica["in_flight"] * TOKENS_PER_REQUEST / TOKENS_PER_S
            elif scores[i] - best <= TIE_S:
                scores[i] = best
