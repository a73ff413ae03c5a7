"""Compiled loops of training: label decisions with a teacher, and try several choices at one.

Both let a policy drive a cluster and write what was seen into preallocated arrays. ``network`` is
the packed vector of the network in training (see policy/learned/architecture.py): its prior's
scores and its memory are recorded whichever policy drives.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.observation import observe
from tailrace.policy.learned.policy import learned_scores, prior_scores
from tailrace.sim import clock, engine, fleet, lookahead
from tailrace.sim import server as servers
from tailrace.view.objective import compiled_cost
from tailrace.view.records import View
from tailrace.view.selection import NO_REPLICA, choose, random_below, random_u64

#: Cost of all choices but the teacher's own, where that one names no costs.
NOT_CHOSEN = 1.0


class Rows(NamedTuple):
    """``K`` decisions to be filled in; the arrays of learn/samples.Samples, with its shapes."""

    replica_obs: NDArray[np.float32]
    request_obs: NDArray[np.float32]
    mask: NDArray[np.bool_]
    prior: NDArray[np.float64]
    memory: NDArray[np.float32]
    tried: NDArray[np.bool_]
    costs: NDArray[np.float64]


@inner
def _random_unit(router):
    """Uniform random number in [0, 1)."""
    return np.float64(random_u64(router) >> np.uint64(11)) * 2.0**-53


@inner
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


@inner
def _at_decision(f, tables, c):
    """Advance to the next decision unless there is one; return whether there is."""
    if f.clusters[c]["request"] >= 0:
        return True
    return engine.next_decision(f, tables, c) == engine.NEEDS_DECISION


@inner
def _record_observation(f, c, network, out, k):
    """Fill row ``k`` with what is known at the current decision."""
    n = f.clusters[c]["n_replicas"]
    replicas = f.replicas_view[c, :n]
    view = View(f.requests_view[c], replicas, f.costs[c, :n], f.router[c])
    observe(view, out.replica_obs[k], out.request_obs[k])
    prior_scores(view, network, out.prior[k])
    for r in range(n):
        out.mask[k, r] = replicas[r]["available"] != 0
    _save_memory(network, out.memory[k])


@inner
def _save_memory(network, memory):
    floats = network.view(np.float32)
    start = np.int64(network[a.M])
    for k in range(memory.size):
        memory[k] = floats[start + k]


@inner
def _load_memory(network, memory):
    floats = network.view(np.float32)
    start = np.int64(network[a.M])
    for k in range(memory.size):
        floats[start + k] = memory[k]


@jit
def label(
    f,
    tables,
    c,
    behaviour,
    behaviour_params,
    teacher,
    teacher_params,
    behaviour_differs,
    network,
    epsilon,
    out,
):
    """Let ``behaviour`` route while ``teacher`` says what each choice would have cost.

    ``behaviour_differs``: the two are not the same policy. Fills all of ``out`` (Rows) but
    ``tried``, one row per decision. A share ``epsilon`` of the choices is random, so that the
    student sees states it would not get into by itself. A teacher that does not look ahead gives no
    costs: its choice costs nothing, the others NOT_CHOSEN. Returns the number of rows filled, less
    than K at the end of the traffic.
    """
    costs = out.costs
    n = f.clusters[c]["n_replicas"]
    replicas = f.replicas_view[c, :n]
    looks_ahead = teacher == lookahead.LOOKAHEAD or teacher == lookahead.LOOKAHEAD_ORACLE
    for k in range(costs.shape[0]):
        if not _at_decision(f, tables, c):
            return k
        _record_observation(f, c, network, out, k)
        if looks_ahead:
            content = clock.content_of(tables, f.clusters[c]["table"])
            kv = clock.cache_of(f, c, 0)
            lookahead.marginal_costs(f, content, kv, c, teacher, costs[k])
            wanted = choose(costs[k], replicas, f.router[c], False)
        else:
            wanted = engine.choice(f, tables, c, teacher, teacher_params, False)
            for r in range(n):
                costs[k, r] = NOT_CHOSEN if r != wanted else 0.0
        choice = wanted
        if behaviour_differs:
            choice = engine.choice(f, tables, c, behaviour, behaviour_params, False)
        if _random_unit(f.router[c]) < epsilon:
            choice = _random_replica(replicas, f.router[c])
        engine.assign(f, tables, c, choice)
    return costs.shape[0]


@jit
def route(f, tables, c, policy, params, decisions):
    """Let ``policy`` take ``decisions`` decisions; False if the traffic ends with them."""
    for _ in range(decisions):
        if not _at_decision(f, tables, c):
            return False
        engine.assign(f, tables, c, engine.choice(f, tables, c, policy, params, False))
    return _at_decision(f, tables, c)


@jit
def unbalance(f, tables, c, decisions):
    """Send about three in four requests to one random replica; returns like :func:`route`."""
    n = f.clusters[c]["n_replicas"]
    replicas = f.replicas_view[c, :n]
    favourite = NO_REPLICA
    for _ in range(decisions):
        if not _at_decision(f, tables, c):
            return False
        if favourite == NO_REPLICA:
            favourite = _random_replica(replicas, f.router[c])
        choice = favourite
        if not replicas[choice]["available"] or random_below(f.router[c], 4) == 0:
            choice = _random_replica(replicas, f.router[c])
        engine.assign(f, tables, c, choice)
    return _at_decision(f, tables, c)


@jit
def branch(
    f,
    tables,
    c,
    twin,
    network,
    candidates,
    horizon_s,
    logit_margin,
    tail_weight,
    out,
    k,
    after,
    plan,
):
    """Try the network's ``candidates`` best replicas for the current request, and go on with it.

    ``twin`` is a fleet of one cluster, used as working memory, as are ``after`` [M] and ``plan``
    [requests]. Fills row ``k`` of ``out`` (Rows). Its costs are what accrues over ``horizon_s`` on
    the very same arrivals, plus what the requests then in the system go on to cost if nothing else
    arrives, plus ``tail_weight`` times :func:`tail_s`. A session's next request comes sooner if the
    answer before it does, so every arrival is credited with what one has cost on average: cost per
    request counts, not per second.

    One small difference soon changes every later choice, and then chance decides what a branch
    costs. So the network's own choice goes first, and the other branches send later requests where
    that one sent them, unless the network by now prefers another replica by more than
    ``logit_margin`` (a difference of logits; 0: always follow the network, inf: never).
    """
    n = f.clusters[c]["n_replicas"]
    replicas = f.replicas_view[c, :n]
    tried, costs = out.tried[k], out.costs[k]
    _record_observation(f, c, network, out, k)
    view = View(f.requests_view[c], replicas, f.costs[c, :n], f.router[c])
    learned_scores(view, network, costs)
    first = _mark_candidates(costs, out.mask[k], candidates, tried)
    _save_memory(network, after)
    now = f.clusters[c]["now"]
    before = fleet.accrued_cost(f, tables, c, now)
    arrived = _arrived(f.clusters[c])
    facts = tables.facts[f.clusters[c]["table"]]
    baseline = before
    if tail_weight > 0.0:
        baseline += tail_weight * tail_s(f.requests[c], facts, 0, f.clusters[c]["highest"], 0.0)
    baseline /= max(arrived, 1)
    plan[:] = NO_REPLICA
    for step in range(n):
        r = (first + step) % n
        costs[r] = 0.0
        if not tried[r]:
            continue
        fleet.copy_cluster(f, c, twin, 0)
        _load_memory(network, after)
        engine.assign(twin, tables, 0, r)
        end = now + horizon_s
        _roll_out(twin, tables, network, end, logit_margin, plan)
        more = _arrived(twin.clusters[0]) - arrived
        costs[r] = fleet.accrued_cost(twin, tables, 0, end) - before - baseline * more
        costs[r] += _drain_cost(twin, tables, end)
        if tail_weight > 0.0:
            low, high = twin.clusters[0]["lowest"], twin.clusters[0]["highest"]
            costs[r] += tail_weight * tail_s(twin.requests[0], facts, low, high, now)
    _load_memory(network, out.memory[k])


@jit
def tail_s(requests, facts, low, high, since):
    """Sum of squared times to first token over their targets, s, of requests ``low`` to ``high``.

    Only first tokens after ``since`` count. The composite cost grows linearly with a wait; this
    term makes one long wait worse than many short ones.
    """
    total = 0.0
    for n in range(low, high + 1):
        ttft = requests[n]["first"] - requests[n]["arrived"]
        if requests[n]["first"] > since and ttft > 0.0:
            total += ttft * ttft / facts[n]["ttft_slo"]
    return total


@inner
def _roll_out(twin, tables, network, until_s, logit_margin, plan):
    """Route until ``until_s`` by the ``plan`` [requests]; new choices are added to it."""
    cluster = twin.clusters[0]
    n = cluster["n_replicas"]
    replicas = twin.replicas_view[0, :n]
    scores = twin.scores[0, :n]
    while True:
        if cluster["request"] < 0:
            status = engine.next_decision_before(twin, tables, 0, until_s)
            if status != engine.NEEDS_DECISION:
                return
        request = cluster["request"]
        planned = plan[request]
        if planned >= 0 and replicas[planned]["available"] and logit_margin == np.inf:
            engine.assign(twin, tables, 0, planned)
            continue
        view = View(twin.requests_view[0], replicas, twin.costs[0, :n], twin.router[0])
        learned_scores(view, network, scores)
        choice = choose(scores, replicas, twin.router[0], False)
        if planned < 0:
            plan[request] = choice
        elif replicas[planned]["available"] and scores[planned] - scores[choice] <= logit_margin:
            choice = planned
        engine.assign(twin, tables, 0, choice)


@inner
def _mark_candidates(scores, mask, candidates, tried):
    """Mark the ``candidates`` possible choices of lowest score in ``tried``; return the lowest."""
    first = 0
    for r in range(scores.size):
        tried[r] = False
    for k in range(candidates):
        best = -1
        for r in range(scores.size):
            if mask[r] and not tried[r] and (best < 0 or scores[r] < scores[best]):
                best = r
        if best >= 0:
            tried[best] = True
        if k == 0:
            first = max(best, 0)
    return first


@jit
def _arrived(cluster):
    return cluster["finished"] + cluster["lost"] + cluster["in_system"]


@inner
def _drain_cost(twin, tables, end):
    """Cost in s, from the time ``end`` on, of what is in the system if nothing else arrives."""
    requests = twin.requests[0]
    cluster = twin.clusters[0]
    content = clock.content_of(tables, cluster["table"])
    for r in range(cluster["n_replicas"]):
        happened = servers.FORMED
        while happened != servers.NOTHING:
            happened = servers.step(
                twin.servers[0, r],
                twin.slots[0, r],
                twin.phase[0, r],
                clock.cache_of(twin, 0, r),
                requests,
                content,
                twin.costs[0, r],
                np.inf,
                twin.notices[0],
            )
    total = 0.0
    for n in range(cluster["lowest"], cluster["highest"] + 1):
        request = requests[n]
        if np.isnan(request["arrived"]) or not request["done"] > end:
            continue
        # Added up in two parts: the order of the sum is part of what training reproduces.
        total += compiled_cost(request["done"] - end, 0.0, 0.0, 0)
        first = request["first"]
        if first > end:
            late = max(first - max(request["deadline"], end), 0.0)
            total += compiled_cost(0.0, first - end, late, 0)
    return total
