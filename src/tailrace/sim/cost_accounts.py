"""What the requests of a cluster have cost so far, exact at any moment and cheap to read.

A request costs while it is in the system, while it has no first token, and while it is past its
target without one. Each of these is a sum over requests of ``until - since``. What has ended is
added up; what is still going on is a count and a sum of starting times, so the total at time ``t``
is ``paid + count * t - sum``. Requests without a first token stand in a list by deadline, and its
overdue part grows as later times are read. Kept only where CLUSTER.accounts is set.
"""

import math

import numpy as np

from tailrace.compiled import inlined, inner, jit
from tailrace.view.objective import compiled_cost

#: The terms of a cluster's accounts, in the order of ``read``.
TERMS = (
    "e2e_s", "ttft_s", "late_s", "lost", "soft_late", "early", "finished", "finished_tokens",
    "e2e_late_s", "e2e_soft_late", "e2e_early",
    "tpot_late_s", "tpot_soft_late", "tpot_early",
    "over_limit", "tail_s",
)  # fmt: skip
N_TERMS = len(TERMS)
E2E, TTFT, LATE, LOST_REQUESTS, SOFT_LATE, EARLY, FINISHED, FINISHED_TOKENS = range(8)
E2E_LATE, E2E_SOFT_LATE, E2E_EARLY, TPOT_LATE, TPOT_SOFT_LATE, TPOT_EARLY, OVER_LIMIT = range(8, 15)
TAIL = 15
#: Target of the end-to-end latency, s, unless a reward has another.
E2E_TARGET_S = 10.0
#: Terms from this one on accrue when a request ends, the last one with its first token.
FIRST_OF_ENDED = E2E_LATE


@jit
def arrived(cluster, requests, facts, n):
    """Record the first arrival of a request at the router."""
    request = requests[n]
    at = request["arrived"]
    cluster["in_system"] += 1
    cluster["in_system_since"] += at
    cluster["unanswered"] += 1
    cluster["unanswered_since"] += at
    deadline = at + cluster["late_share"] * facts[n]["ttft_slo"]
    request["deadline"] = deadline
    request["overdue"] = 0
    before = cluster["deadline_last"]
    after = np.int64(-1)
    while before >= 0 and requests[before]["deadline"] > deadline:
        after = before
        before = np.int64(requests[before]["early"])
    request["early"] = before
    request["late"] = after
    if before >= 0:
        requests[before]["late"] = n
    if after >= 0:
        requests[after]["early"] = n
    else:
        cluster["deadline_last"] = n
    if after >= 0 and requests[after]["overdue"]:
        _mark(cluster, request)
    elif after == cluster["deadline_next"]:
        cluster["deadline_next"] = n


@inner
def _mark(cluster, request):
    request["overdue"] = 1
    cluster["overdue"] += 1
    cluster["overdue_since"] += request["deadline"]


@inner
def _unmark(cluster, request):
    request["overdue"] = 0
    cluster["overdue"] -= 1
    cluster["overdue_since"] -= request["deadline"]
    if cluster["overdue"] == 0:
        cluster["overdue_since"] = 0.0


@jit
def answered(cluster, requests, facts, n):
    """Record its first token."""
    request = requests[n]
    ttft = request["first"] - request["arrived"]
    slo = facts[n]["ttft_slo"]
    cluster["unanswered"] -= 1
    cluster["unanswered_since"] -= request["arrived"]
    if cluster["unanswered"] == 0:
        cluster["unanswered_since"] = 0.0
    cluster["paid_ttft"] += ttft
    cluster["paid_late"] += max(request["first"] - request["deadline"], 0.0)
    cluster["paid_tail"] += ttft * ttft / max(slo, 1e-9)
    over = (ttft - cluster["soft_centre"] * slo) / max(cluster["soft_scale"] * slo, 1e-9)
    cluster["paid_soft"] += 1.0 / (1.0 + math.exp(min(-over, 700.0)))
    cluster["paid_early"] += max(1.0 - ttft / max(cluster["early_share"] * slo, 1e-9), 0.0)
    _unlink(cluster, requests, n)


@inner
def _unlink(cluster, requests, n):
    request = requests[n]
    early, late = request["early"], request["late"]
    if early >= 0:
        requests[early]["late"] = late
    if late >= 0:
        requests[late]["early"] = early
    else:
        cluster["deadline_last"] = early
    if request["overdue"]:
        _unmark(cluster, request)
    elif cluster["deadline_next"] == n:
        cluster["deadline_next"] = late


@jit
def ended(cluster, requests, facts, n, lost):
    """Record its end: complete, or lost while it was answering."""
    request = requests[n]
    cluster["in_system"] -= 1
    cluster["in_system_since"] -= request["arrived"]
    if cluster["in_system"] == 0:
        cluster["in_system_since"] = 0.0
    cluster["paid_e2e"] += request["done"] - request["arrived"]
    cluster["ended_at"] = max(cluster["ended_at"], request["done"])
    e2e = request["done"] - request["arrived"]
    if e2e > cluster["latency_limit"]:
        cluster["over_limit"] += 1
    if lost:
        cluster["lost"] += 1
        return
    output = facts[n]["output"]
    cluster["finished"] += 1
    cluster["finished_tokens"] += output
    target = cluster["e2e_target"]
    cluster["paid_e2e_late"] += max(e2e - target, 0.0)
    cluster["paid_e2e_soft"] += _soft(cluster, e2e / target)
    cluster["paid_e2e_early"] += _early(cluster, e2e / target)
    pace = facts[n]["tpot_slo"]
    if output > 1 and pace > 0.0:
        answer = request["done"] - request["first"]
        share = answer / (pace * (output - 1))
        cluster["paid_tpot_late"] += max(answer - pace * (output - 1), 0.0)
        cluster["paid_tpot_soft"] += _soft(cluster, share)
        cluster["paid_tpot_early"] += _early(cluster, share)


@inlined
def _soft(cluster, share):
    """Logistic curve, 0 to 1, at a latency given as a multiple of its target."""
    over = (share - cluster["soft_centre"]) / max(cluster["soft_scale"], 1e-9)
    return 1.0 / (1.0 + math.exp(min(-over, 700.0)))


@inlined
def _early(cluster, share):
    """How far a latency, as a multiple of its target, lies under ``early_share`` of it, 0 to 1."""
    return max(1.0 - share / max(cluster["early_share"], 1e-9), 0.0)


@inner
def overdue_by(cluster, requests, t):
    """Mark exactly the requests whose deadline is before ``t`` (s)."""
    n = cluster["deadline_next"]
    while n >= 0 and requests[n]["deadline"] < t:
        _mark(cluster, requests[n])
        n = np.int64(requests[n]["late"])
    cluster["deadline_next"] = n
    n = np.int64(requests[n]["early"]) if n >= 0 else cluster["deadline_last"]
    while n >= 0 and requests[n]["overdue"] and requests[n]["deadline"] >= t:
        _unmark(cluster, requests[n])
        cluster["deadline_next"] = n
        n = np.int64(requests[n]["early"])


@jit
def e2e_s(cluster, t):
    """Seconds all requests together have been in the system by ``t``."""
    return cluster["paid_e2e"] + (cluster["in_system"] * t - cluster["in_system_since"])


@jit
def ttft_s(cluster, t):
    """Seconds all requests together have been without a first token by ``t``."""
    return cluster["paid_ttft"] + (cluster["unanswered"] * t - cluster["unanswered_since"])


@jit
def late_s(cluster, t):
    """Seconds all requests together have been past their deadline by ``t``; see overdue_by."""
    return cluster["paid_late"] + (cluster["overdue"] * t - cluster["overdue_since"])


@jit
def read(cluster, requests, t, terms):
    """Fill ``terms`` [N_TERMS] with what has accrued by ``t`` (s), not before the cluster's now."""
    overdue_by(cluster, requests, t)
    terms[E2E] = e2e_s(cluster, t)
    terms[TTFT] = ttft_s(cluster, t)
    terms[LATE] = late_s(cluster, t)
    terms[LOST_REQUESTS] = cluster["lost"]
    terms[SOFT_LATE] = cluster["paid_soft"]
    terms[EARLY] = cluster["paid_early"]
    terms[FINISHED] = cluster["finished"]
    terms[FINISHED_TOKENS] = cluster["finished_tokens"]
    terms[E2E_LATE] = cluster["paid_e2e_late"]
    terms[E2E_SOFT_LATE] = cluster["paid_e2e_soft"]
    terms[E2E_EARLY] = cluster["paid_e2e_early"]
    terms[TPOT_LATE] = cluster["paid_tpot_late"]
    terms[TPOT_SOFT_LATE] = cluster["paid_tpot_soft"]
    terms[TPOT_EARLY] = cluster["paid_tpot_early"]
    terms[OVER_LIMIT] = cluster["over_limit"]
    terms[TAIL] = cluster["paid_tail"]


@jit
def composite(terms):
    """Composite cost in s of accrued terms [N_TERMS]."""
    return compiled_cost(terms[E2E], terms[TTFT], terms[LATE], terms[LOST_REQUESTS])
