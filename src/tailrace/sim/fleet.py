"""Many clusters at once: one kernel call takes every cluster of a fleet to its next decision.

Also what training needs of single clusters: let a rule route until a given time, read the cost
accrued by then, and copy a cluster.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inlined, inner, jit
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.sim import cost_accounts, engine
from tailrace.sim.kvcache import ROW_EXTENTS, ROW_HEAD
from tailrace.sim.types import DONE, LOST, SLOT_ROW, SLOT_ROWS
from tailrace.view.objective import compiled_cost
from tailrace.view.records import View

NO_ACTION, SKIP = -1, -2


class Step(NamedTuple):
    """Preallocated output of :func:`step_fleet` for ``C`` clusters of up to ``N`` replicas."""

    replica_obs: NDArray[np.float32]  #: [C, N, F]; zero beyond a cluster's last replica
    request_obs: NDArray[np.float32]  #: [C, G]
    mask: NDArray[np.bool_]  #: [C, N] replicas that may be chosen
    cost: NDArray[np.float64]  #: [C] composite cost, s, accrued since the last decision
    terms: NDArray[np.float64]  #: [C, N_TERMS] of sim/cost_accounts.py
    spread: NDArray[np.float64]  #: [C] coefficient of variation of requests in flight
    elapsed_s: NDArray[np.float64]  #: [C] since the last decision
    status: NDArray[np.int64]  #: [C] engine.NEEDS_DECISION, OVER or STUCK
    # state from one step to the next
    terms_before: NDArray[np.float64]  #: [C, N_TERMS]
    time_before: NDArray[np.float64]  #: [C]


def new_step(clusters: int, replicas: int) -> Step:
    """Return zeroed outputs."""
    return Step(
        replica_obs=np.zeros((clusters, replicas, N_REPLICA_FEATURES), np.float32),
        request_obs=np.zeros((clusters, N_REQUEST_FEATURES), np.float32),
        mask=np.zeros((clusters, replicas), np.bool_),
        cost=np.zeros(clusters),
        terms=np.zeros((clusters, cost_accounts.N_TERMS)),
        spread=np.zeros(clusters),
        elapsed_s=np.zeros(clusters),
        status=np.zeros(clusters, np.int64),
        terms_before=np.zeros((clusters, cost_accounts.N_TERMS)),
        time_before=np.zeros(clusters),
    )


# ---- decisions ----------------------------------------------------------------------------------


@jit
def step_fleet(fleet, tables, actions, step):
    """Carry out ``actions`` int64 [C], advance every cluster to its next decision and observe it.

    NO_ACTION leaves a cluster as it is, except that one without a current request moves on to its
    first; SKIP leaves its outputs alone too. At the end of a run (OVER) the cost is counted up to
    the end of the last request.
    """
    for c in range(actions.size):
        if actions[c] != SKIP:
            _step_cluster(fleet, tables, c, actions[c], step)


@jit
def next_available(mask, actions, chosen):
    """Fill ``chosen`` int64 [C] with ``actions`` [C], or the next available replicas after them.

    ``mask`` bool [C, N]: replicas that may be chosen. Counting goes up and around; a cluster
    without an available replica keeps its action. Returns False if an action is no replica.
    """
    replicas = mask.shape[1]
    for c in range(actions.size):
        if not 0 <= actions[c] < replicas:
            return False
        chosen[c] = actions[c]
        for k in range(replicas):
            around = (actions[c] + k) % replicas
            if mask[c, around]:
                chosen[c] = around
                break
    return True


@inlined
def _step_cluster(fleet, tables, c, action, step):
    cluster = fleet.clusters[c]
    if action != NO_ACTION:
        engine.assign(fleet, tables, c, action)
    step.status[c] = engine.NEEDS_DECISION
    if cluster["request"] < 0:
        step.status[c] = engine.next_decision_before(fleet, tables, c, np.inf)
    now = cluster["now"]
    if step.status[c] == engine.OVER:
        now = max(now, cluster["ended_at"])
    terms = step.terms[c]
    cost_accounts.read(cluster, fleet.requests[c], now, terms)
    for k in range(terms.size):
        accrued = terms[k]
        terms[k] = accrued - step.terms_before[c, k]
        step.terms_before[c, k] = accrued
    step.cost[c] = cost_accounts.composite(terms)
    step.elapsed_s[c] = now - step.time_before[c]
    step.time_before[c] = now
    n = cluster["n_replicas"]
    replicas = fleet.replicas_view[c, :n]
    step.spread[c] = _spread(replicas)
    view = View(fleet.requests_view[c], replicas, fleet.costs[c, :n], fleet.router[c])
    observe(view, step.replica_obs[c], step.request_obs[c])
    for r in range(n):
        step.mask[c, r] = replicas[r]["available"] != 0


@jit
def _spread(replicas):
    """Coefficient of variation of the requests in flight over the available replicas."""
    count, total, squares = 0, 0.0, 0.0
    for r in range(replicas.size):
        if replicas[r]["available"] != 0:
            load = float(replicas[r]["in_flight"])
            count += 1
            total += load
            squares += load * load
    if total == 0.0:
        return 0.0
    mean = total / count
    return np.sqrt(max(squares / count - mean * mean, 0.0)) / mean


@jit
def begin(step, c):
    """Reset the outputs of cluster ``c``, which starts again at time 0."""
    step.time_before[c] = 0.0
    step.terms_before[c, :] = 0.0
    step.replica_obs[c, :, :] = 0.0
    step.mask[c, :] = False


# ---- one cluster --------------------------------------------------------------------------------


@jit
def run_for(fleet, tables, c, rule, params, lowest_id_wins, until_s):
    """Let a rule take all decisions before the time ``until_s``.

    Returns LIMIT with the cluster at that time, or OVER if every request was settled by then, or
    STUCK or LOG_FULL. A current request is routed first, whenever it arrived.
    """
    cluster = fleet.clusters[c]
    while True:
        if cluster["request"] < 0:
            status = engine.next_decision_before(fleet, tables, c, until_s)
            if status == engine.LIMIT and cluster["unsettled"] == 0:
                return engine.OVER
            if status != engine.NEEDS_DECISION:
                return status
        choice = engine.choice(fleet, tables, c, rule, params, lowest_id_wins)
        engine.assign(fleet, tables, c, choice)


@jit
def follow(fleet, tables, rule, params, lowest_id_wins, until_s, step):
    """Run every cluster with a rule to its time ``until_s`` [C]; cost and terms go to ``step``.

    For a reference fleet on the same requests: the rule's cost over the same time.
    """
    for c in range(until_s.size):
        run_for(fleet, tables, c, rule, params, lowest_id_wins, until_s[c])
        terms = step.terms[c]
        cost_accounts.read(fleet.clusters[c], fleet.requests[c], until_s[c], terms)
        for k in range(terms.size):
            accrued = terms[k]
            terms[k] = accrued - step.terms_before[c, k]
            step.terms_before[c, k] = accrued
        step.cost[c] = cost_accounts.composite(terms)


@jit
def accrued_cost(fleet, _tables, c, t):
    """Composite cost in s of all requests of a cluster up to time ``t`` (s).

    ``t`` must not lie before the cluster's current time.
    """
    cluster = fleet.clusters[c]
    if not cluster["accounts"]:
        raise ValueError("this cluster keeps no accounts")
    requests = fleet.requests[c]
    cost_accounts.overdue_by(cluster, requests, t)
    return compiled_cost(
        cost_accounts.e2e_s(cluster, t),
        cost_accounts.ttft_s(cluster, t),
        cost_accounts.late_s(cluster, t),
        cluster["lost"],
    )


# ---- copies -------------------------------------------------------------------------------------


@jit
def copy_cluster(source, s, target, d):
    """Make cluster ``d`` of ``target`` a copy of cluster ``s`` of ``source``, on the same tables.

    ``target`` is the same fleet or has the same sizes. Only what can influence the future is
    copied: settled requests and unused memory are left out.
    """
    n = source.clusters[s]["n_replicas"]
    _copy_requests(source.clusters[s], source.requests[s], target.clusters[d], target.requests[d])
    target.clusters[d] = source.clusters[s]
    target.clusters[d]["batch_count"] = 0
    target.clusters[d]["news_count"] = 0
    target.requests_view[d] = source.requests_view[s]
    target.router[d] = source.router[s]
    for k in range(source.clusters[s]["heap_size"]):
        target.heap[d, k] = source.heap[s, k]
    for k in range(source.last_replica.shape[1]):
        target.last_replica[d, k] = source.last_replica[s, k]
    for k in range(source.flows.shape[1]):
        target.flows[d, k] = source.flows[s, k]
    for r in range(n):
        target.servers[d, r] = source.servers[s, r]
        target.replicas_view[d, r] = source.replicas_view[s, r]
        target.costs[d, r] = source.costs[s, r]
        target.wake[d, r] = source.wake[s, r]
        _copy_server(source, s, target, d, r)
        _copy_index(source, s, target, d, r)
        event = source.servers[s, r]["event_head"]
        while event >= 0:
            target.kv_events[d, event] = source.kv_events[s, event]
            event = source.kv_events[s, event]["next"]


@inner
def _copy_requests(cluster, requests, target, copies):
    """Copy the requests that may still change, and those the target has changed.

    If both clusters come from the same start, requests that arrived in neither are equal already.
    """
    low = cluster["lowest"]
    count = cluster["n_requests"]
    while low < count and (requests[low]["status"] == DONE or requests[low]["status"] == LOST):
        low += 1
    cluster["lowest"] = low
    high = count
    if cluster["serial"] == target["serial"]:
        high = max(cluster["highest"], target["highest"]) + 1
    else:
        low = 0
    for n in range(low, high):
        copies[n] = requests[n]


@inlined
def _copy_server(source, s, target, d, r):
    """Slots, block counts and, with prefix caching, extents of one replica."""
    server = source.servers[s, r]
    for k in range(SLOT_ROWS):
        for i in range(server["n_slots"]):
            target.slots[d, r, k, i] = source.slots[s, r, k, i]
    for k in range(source.phase.shape[2]):
        target.phase[d, r, k] = source.phase[s, r, k]
    if not server["explicit"]:
        return
    for k in range(source.rows_free.shape[2]):
        target.rows_free[d, r, k] = source.rows_free[s, r, k]
    if not server["caching"]:
        return
    for i in range(server["n_slots"]):
        row = source.slots[s, r, SLOT_ROW, i]
        for k in range(ROW_HEAD + source.held[s, r, row, ROW_EXTENTS]):
            target.held[d, r, row, k] = source.held[s, r, row, k]
    for k in range(server["extents_fresh"] + 1):
        target.extents[d, r, k] = source.extents[s, r, k]
    for k in range(source.buckets.shape[2]):
        target.buckets[d, r, k] = source.buckets[s, r, k]


@inlined
def _copy_index(source, s, target, d, r):
    """The router's prefix index of one replica."""
    target.index_totals[d, r] = source.index_totals[s, r]
    for k in range(source.index_totals[s, r]["fresh"] + 1):
        target.index_entries[d, r, k] = source.index_entries[s, r, k]
    for k in range(source.index_slots.shape[2]):
        target.index_slots[d, r, k] = source.index_slots[s, r, k]
