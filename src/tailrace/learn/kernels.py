"""Compiled loops of training: label decisions with a teacher, and try every choice at a decision.

Both let a policy drive a cluster and write what was seen into preallocated arrays.
"""

import numpy as np

from tailrace.compiled import jit
from tailrace.policy.choose import NO_REPLICA, choose, random_below, random_u64
from tailrace.policy.observation import observe
from tailrace.policy.view import View
from tailrace.sim import clock, engine, fleet, lookahead


@jit
def _random_unit(router):
    """Uniform random number in [0, 1)."""
    return np.float64(random_u64(router) >> np.uint64(11)) * 2.0**-53


@jit
def _random_replica(replicas, router):
    """A random available replica."""
    available = 0
    chosen = NO_REPLICA
    for r in range(replicas.size):
        if replicas[r]["available"]:
            available += 1
            if random_below(router, available) == 0:
                chosen = r
    return chosen


@jit
def _at_decision(f, tables, c):
    """Whether there is a request at hand, after moving on to the next one if need be."""
    if f.clusters[c]["request"] >= 0:
        return True
    return engine.next_decision(f, tables, c) == engine.NEEDS_DECISION


@jit
def label(f, tables, c, driver, params, teacher, epsilon, replica_obs, request_obs, mask, costs):
    """Let ``driver`` route while ``teacher`` says what each choice would have cost.

    Fills replica_obs [K, n, F], request_obs [K, G], mask [K, n] and costs [K, n] (s), one row per
    decision; a share ``epsilon`` of the choices is random, so that the student sees states it would
    not get into. Returns the number of rows filled: less than K at the end of the traffic.
    """
    n = f.clusters[c]["n_replicas"]
    replicas = f.replicas_view[c, :n]
    for k in range(costs.shape[0]):
        if not _at_decision(f, tables, c):
            return k
        view = View(f.requests_view[c], replicas, f.costs[c, :n], f.router[c])
        observe(view, replica_obs[k], request_obs[k])
        content = clock.content_of(tables, f.clusters[c]["table"])
        kv = clock.cache_of(f, c, 0)
        lookahead.marginal_costs(f, content, kv, c, teacher, costs[k])
        for r in range(n):
            mask[k, r] = replicas[r]["available"] != 0
        if _random_unit(f.router[c]) < epsilon:
            choice = _random_replica(replicas, f.router[c])
        elif driver == teacher:
            choice = choose(costs[k], replicas, f.router[c], False)
        else:
            choice = engine.choice(f, tables, c, driver, params, False)
        engine.assign(f, tables, c, choice)
    return costs.shape[0]


@jit
def drive(f, tables, c, driver, params, decisions):
    """Let ``driver`` take some decisions; True: there is a request at hand, False: it is over."""
    for _ in range(decisions):
        if not _at_decision(f, tables, c):
            return False
        engine.assign(f, tables, c, engine.choice(f, tables, c, driver, params, False))
    return _at_decision(f, tables, c)


@jit
def branch(f, tables, c, twin, driver, params, horizon_s, replica_obs, request_obs, mask, costs):
    """Try every replica for the request at hand and go on with ``driver`` for ``horizon_s``.

    ``twin`` is a fleet of one cluster, used as working memory. Fills one row of observations,
    mask [n] and costs [n]: what accrued over the horizon, in s, on the very same arrivals.
    """
    n = f.clusters[c]["n_replicas"]
    replicas = f.replicas_view[c, :n]
    view = View(f.requests_view[c], replicas, f.costs[c, :n], f.router[c])
    observe(view, replica_obs, request_obs)
    now = f.clusters[c]["now"]
    before = fleet.accrued_cost(f, tables, c, now)
    for r in range(n):
        mask[r] = replicas[r]["available"] != 0
        costs[r] = 0.0
        if not mask[r]:
            continue
        fleet.copy_cluster(f, c, twin, 0)
        engine.assign(twin, tables, 0, r)
        fleet.run_for(twin, tables, 0, driver, params, False, now + horizon_s)
        costs[r] = fleet.accrued_cost(twin, tables, 0, now + horizon_s) - before
