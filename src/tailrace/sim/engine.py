"""One cluster from decision to decision: events, arrivals, the router's view, and its choice.

:func:`next_decision` advances a cluster to its next routing decision and fills the view;
:func:`assign` carries a choice out; :func:`run` does both in a loop with a built-in rule.
"""

from typing import Any

import numpy as np

from tailrace.compiled import inlined, inner, jit
from tailrace.policy.learned.policy import learned_scores
from tailrace.policy.rules import CODE, LEARNED, score
from tailrace.sim import active_blocks, arrival_heap, clock, cost_accounts, lookahead, router_queue
from tailrace.sim import server as servers
from tailrace.sim.types import (
    EVENT_DIE,
    EVENT_DRAIN,
    EVENT_RETURN,
    EVENT_SLOW,
    LEARNS_EVENTS,
    LEARNS_SENT,
    NEWS_FAILED,
    Fleet,
    Tables,
)
from tailrace.view import ledger, prefix_index
from tailrace.view.holding import waiting_key
from tailrace.view.ordering import request_priority
from tailrace.view.records import View
from tailrace.view.selection import NO_REPLICA, any_available, choose

NEEDS_DECISION, OVER, LOG_FULL, LIMIT, STUCK = 0, 1, 2, 3, 4
LEARNED_CODE = LEARNED.code


# ---- cluster events -----------------------------------------------------------------------------


@inner
def _apply_event(fleet, tables, c, event):
    cluster = fleet.clusters[c]
    now = event["at"]
    r = event["replica"]
    server = fleet.servers[c, r]
    view = fleet.replicas_view[c, r]
    kind = event["kind"]
    if kind == EVENT_SLOW:
        servers.set_speed(server, fleet.costs[c, r], event["factor"], now)
    elif kind == EVENT_DRAIN:
        view["available"] = 0
    elif kind == EVENT_RETURN:
        view["available"] = 1
        servers.set_speed(server, fleet.costs[c, r], 1.0, now)
    elif kind == EVENT_DIE:
        _kill(fleet, tables, c, r, now)
        view["available"] = 0
    cluster["next_event"] += 1
    fleet.wake[c, r] = servers.wake_time(server)


@inner
def _kill(fleet, tables, c, r, now):
    """Kill a replica: answering requests are lost, the others are rerouted at once."""
    cluster = fleet.clusters[c]
    requests = fleet.requests[c]
    homeless, failed = servers.die(
        fleet.servers[c, r],
        fleet.slots[c, r],
        fleet.phase[c, r],
        clock.cache_of(fleet, c, r),
        requests,
        tables.facts[cluster["table"]],
        fleet.costs[c, r],
        now,
    )
    while homeless >= 0:
        following = requests[homeless]["next"]
        clock.notify(fleet, c, NEWS_FAILED, r, homeless, now)
        arrival_heap.push(fleet.heap[c], cluster, now, homeless)
        homeless = following
    while failed >= 0:
        following = requests[failed]["next"]
        clock.notify(fleet, c, NEWS_FAILED, r, failed, now)
        clock.settled(fleet, tables, c, failed, True)
        failed = following
    ledger.lost(fleet.replicas_view[c, r])
    prefix_index.forget(clock.index_of(fleet, c), r)


# ---- decisions ----------------------------------------------------------------------------------


@jit
def next_decision(fleet, tables, c):
    """Advance cluster ``c`` to its next routing decision and fill its view.

    Returns NEEDS_DECISION, OVER (every request is settled or can never be routed), LOG_FULL (empty
    Fleet.batches and call again) or STUCK.
    """
    return next_decision_before(fleet, tables, c, np.inf)


@inner
def next_decision_before(fleet, tables, c, until):
    """Like :func:`next_decision`, but go no further than the time ``until`` (s).

    Returns LIMIT, with the cluster at that time, if there is no decision before it.
    """
    cluster = fleet.clusters[c]
    table = cluster["table"]
    holds = cluster["holding"]["on"] != 0
    while True:
        if cluster["held"] > 0 and clock.next_time(fleet, tables, c) > cluster["now"]:
            clock.scrape_if_live(fleet, c)  # the one before may have gone just now
            n = router_queue.pop(fleet, tables.facts[table], c)
            if n >= 0:
                _fill_view(fleet, tables, c, n, cluster["now"])
                cluster["request"] = n
                return NEEDS_DECISION
        t = clock.advance_to_next_time(fleet, tables, c, until)
        if np.isnan(t):
            return LOG_FULL
        if cluster["stuck"]:
            return STUCK
        if t == np.inf:
            return OVER
        cluster["now"] = t
        if t == until:
            return LIMIT
        if (
            cluster["next_event"] < tables.events.shape[1]
            and tables.events[table, cluster["next_event"]]["at"] <= t
        ):
            _apply_event(fleet, tables, c, tables.events[table, cluster["next_event"]])
            continue
        if holds and clock.next_time(fleet, tables, c) > t:
            continue  # some iteration has ended, or somebody has waited too long
        n = _take_arrival(fleet, tables, c, t)
        if not any_available(fleet.replicas_view[c, : cluster["n_replicas"]]):
            _hold(fleet, tables, c, n)
            continue
        if holds:
            if not router_queue.is_free(fleet, c):
                _queue(fleet, tables, c, n)
                continue
            router_queue.hide(fleet, c)
        _fill_view(fleet, tables, c, n, t)
        cluster["request"] = n
        return NEEDS_DECISION


@inlined
def _take_arrival(fleet, tables, c, t):
    """Take the next arrival; of several at one instant, the request of lowest number."""
    cluster = fleet.clusters[c]
    table = cluster["table"]
    root = np.int64(2**62)
    if cluster["next_root"] < tables.n_roots[table]:
        candidate = np.int64(tables.roots[table, cluster["next_root"]])
        if tables.facts[table, candidate]["arrival"] <= t:
            root = candidate
    heap = fleet.heap[c]
    if cluster["heap_size"] > 0 and heap[0]["time"] <= t and heap[0]["request"] < root:
        n = arrival_heap.pop(heap, cluster)
    else:
        n = root
        cluster["next_root"] += 1
    request = fleet.requests[c, n]
    if np.isnan(request["arrived"]):
        request["arrived"] = t
        cluster["highest"] = max(cluster["highest"], n)
        if cluster["accounts"]:
            cost_accounts.arrived(cluster, fleet.requests[c], tables.facts[table], n)
    return n


@inner
def _hold(fleet, tables, c, n):
    """Hold a request that no replica can take until one returns; if none will, it stays pending."""
    cluster = fleet.clusters[c]
    events = tables.events[cluster["table"]]
    for k in range(cluster["next_event"], events.size):
        if events[k]["kind"] == EVENT_RETURN and events[k]["at"] < np.inf:
            arrival_heap.push(fleet.heap[c], cluster, events[k]["at"], n)
            return
    fleet.requests[c, n]["replica"] = NO_REPLICA


@inner
def _queue(fleet, tables, c, n):
    """Let a request wait at the router until a replica has room."""
    cluster = fleet.clusters[c]
    fact = tables.facts[cluster["table"], n]
    if cluster["learns"] == LEARNS_EVENTS:
        clock.take_events(fleet, tables, c, cluster["now"])
    for r in range(cluster["n_replicas"]):
        _look_up_prefix(fleet, tables, c, r, n)
    replicas = fleet.replicas_view[c, : cluster["n_replicas"]]
    arrived = fleet.requests[c, n]["arrived"]
    key = waiting_key(cluster["holding"], arrived, fact["prompt"], fact["ttft_slo"], replicas)
    router_queue.push(fleet, tables.facts[cluster["table"]], c, n, key)


@inlined
def _fill_view(fleet, tables, c, n, now):
    cluster = fleet.clusters[c]
    table = cluster["table"]
    fact = tables.facts[table, n]
    view = fleet.requests_view[c]
    view["now"] = now
    view["id"] = n
    view["arrived_at"] = fleet.requests[c, n]["arrived"]
    view["prompt_tokens"] = fact["prompt"]
    if cluster["static_prediction"]:
        view["predicted_output"] = fact["predicted"]
    else:
        view["predicted_output"] = ledger.mean_output(fleet.router[c], cluster["prior_output"])
    session = fact["session"]
    view["session"] = session
    view["turn"] = fact["turn"]
    view["last_replica"] = fleet.last_replica[c, session] if session >= 0 else -1
    view["prefix_hash"] = fact["prefix_hash"]
    view["content_hash"] = fact["content_hash"]
    view["priority"] = fact["priority"]
    view["ttft_slo_s"] = fact["ttft_slo"]
    view["tpot_slo_s"] = fact["tpot_slo"]
    if cluster["learns"] == LEARNS_EVENTS:
        clock.take_events(fleet, tables, c, now)
    if cluster["view_prefix"]:
        for r in range(cluster["n_replicas"]):
            _look_up_prefix(fleet, tables, c, r, n)
    if cluster["view_context"]:
        _look_at_streams(fleet, c, now)


@inlined
def _look_at_streams(fleet, c, now):
    """Update what the router knows of streaming responses, and its moving averages."""
    replicas = fleet.replicas_view[c, : fleet.clusters[c]["n_replicas"]]
    for r in range(replicas.size):
        server = fleet.servers[c, r]
        replicas[r]["context_tokens"] = servers.answering_context(server, fleet.costs[c, r], now)
        if replicas[r]["queued"] > 0:
            oldest = servers.oldest_sent(server, fleet.slots[c, r], fleet.requests[c])
            replicas[r]["oldest_sent"] = oldest
    ledger.look(replicas, fleet.router[c], now)


@inlined
def _look_up_prefix(fleet, tables, c, r, n):
    """Look up how much of request ``n`` the prefix index believes cached on replica ``r``."""
    table = fleet.clusters[c]["table"]
    fact = tables.facts[table, n]
    replica = fleet.replicas_view[c, r]
    replica["cached_tokens"] = 0
    if not fleet.servers[c, r]["caching"]:
        return
    index = clock.index_of(fleet, c)
    replica["index_tokens"] = prefix_index.held_tokens(index, r)
    if fact["run_count"] == 0:
        return
    start = fact["run_start"]
    keys = tables.run_keys[table, start : start + fact["run_count"]]
    tokens = tables.run_tokens[table, start : start + fact["run_count"]]
    size = fleet.servers[c, r]["block_size"]
    matched = prefix_index.match_tokens(index, r, keys, tokens)
    # At least one prompt token has to be computed to produce an output token.
    computable = (fact["prompt"] - 1) // size * size
    replica["cached_tokens"] = min(matched // size * size, computable)


@inlined
def _assign(fleet, tables, c, r):
    cluster = fleet.clusters[c]
    n = cluster["request"]
    now = cluster["now"]
    fact = tables.facts[cluster["table"], n]
    request = fleet.requests[c, n]
    view = fleet.replicas_view[c, r]
    if not cluster["view_prefix"]:
        _look_up_prefix(fleet, tables, c, r, n)
    request["replica"] = r
    request["believed"] = view["cached_tokens"]
    request["predicted"] = ledger.whole_tokens(fleet.requests_view[c]["predicted_output"])
    request["priority"] = request_priority(cluster["order"], fleet.requests_view[c], view)
    if cluster["holding"]["on"]:
        router_queue.sent(fleet, tables.facts[cluster["table"]], c, n)
    fleet.router[c]["decisions"] += 1
    ledger.sent(view, fact["prompt"], view["cached_tokens"], request["predicted"], now)
    if fact["session"] >= 0:
        fleet.last_replica[c, fact["session"]] = r
    if fleet.servers[c, r]["caching"] and cluster["learns"] == LEARNS_SENT:
        clock.index_content(fleet, tables, c, r, n, 0, now)
    servers.receive(fleet.servers[c, r], fleet.requests[c], fleet.costs[c, r], n, now)
    fleet.wake[c, r] = servers.wake_time(fleet.servers[c, r])
    cluster["request"] = -1


@jit
def assign(fleet, tables, c, r):
    """Send the current request to replica ``r``."""
    _assign(fleet, tables, c, r)


@inlined
def _rate(fleet, tables, c, rule, params):
    """Fill the scores by a rule of policy/rules."""
    n = fleet.clusters[c]["n_replicas"]
    if rule == CODE.dynamo:
        active_blocks.count(fleet, tables, c)
    replicas, costs = fleet.replicas_view[c, :n], fleet.costs[c, :n]
    view = View(fleet.requests_view[c], replicas, costs, fleet.router[c])
    score(rule, view, params, fleet.scores[c, :n])


@inlined
def _rate_learned(fleet, c, params):
    n = fleet.clusters[c]["n_replicas"]
    replicas, costs = fleet.replicas_view[c, :n], fleet.costs[c, :n]
    view = View(fleet.requests_view[c], replicas, costs, fleet.router[c])
    learned_scores(view, params, fleet.scores[c, :n])


@inlined
def _rate_ahead(fleet, tables, c, rule):
    scores = fleet.scores[c, : fleet.clusters[c]["n_replicas"]]
    content = clock.content_of(tables, fleet.clusters[c]["table"])
    lookahead.marginal_costs(fleet, content, clock.cache_of(fleet, c, 0), c, rule, scores)


@inlined
def _choose(fleet, c, lowest_id_wins):
    n = fleet.clusters[c]["n_replicas"]
    return choose(fleet.scores[c, :n], fleet.replicas_view[c, :n], fleet.router[c], lowest_id_wins)


@jit
def choice(fleet, tables, c, rule, params, lowest_id_wins):
    """Return a built-in rule's choice for the current request; its scores are in Fleet.scores."""
    if rule == lookahead.LOOKAHEAD or rule == lookahead.LOOKAHEAD_ORACLE:
        _rate_ahead(fleet, tables, c, rule)
    elif rule == LEARNED_CODE:
        _rate_learned(fleet, c, params)
    else:
        _rate(fleet, tables, c, rule, params)
    return _choose(fleet, c, lowest_id_wins)


def run(
    fleet: Fleet, tables: Tables, c: int, rule: int, params: Any, lowest_id_wins: bool, limit: int
) -> Any:
    """Let a built-in rule route until the end, or for at most ``limit`` decisions.

    A loop for each kind of policy, so that the first run compiles only what it needs: a network
    takes as long to compile as the servers, and a look-ahead half as long.
    """
    if rule == LEARNED_CODE:
        return _run_learned(fleet, tables, c, params, lowest_id_wins, limit)
    if rule in (lookahead.LOOKAHEAD, lookahead.LOOKAHEAD_ORACLE):
        return _run_ahead(fleet, tables, c, rule, lowest_id_wins, limit)
    return _run(fleet, tables, c, rule, params, lowest_id_wins, limit)


@jit
def _run(fleet, tables, c, rule, params, lowest_id_wins, limit):
    for _ in range(limit):
        if fleet.clusters[c]["request"] < 0:
            status = next_decision_before(fleet, tables, c, np.inf)
            if status != NEEDS_DECISION:
                return status
        _rate(fleet, tables, c, rule, params)
        _assign(fleet, tables, c, _choose(fleet, c, lowest_id_wins))
    return LIMIT


@jit
def _run_learned(fleet, tables, c, params, lowest_id_wins, limit):
    for _ in range(limit):
        if fleet.clusters[c]["request"] < 0:
            status = next_decision_before(fleet, tables, c, np.inf)
            if status != NEEDS_DECISION:
                return status
        _rate_learned(fleet, c, params)
        _assign(fleet, tables, c, _choose(fleet, c, lowest_id_wins))
    return LIMIT


@jit
def _run_ahead(fleet, tables, c, rule, lowest_id_wins, limit):
    for _ in range(limit):
        if fleet.clusters[c]["request"] < 0:
            status = next_decision_before(fleet, tables, c, np.inf)
            if status != NEEDS_DECISION:
                return status
        _rate_ahead(fleet, tables, c, rule)
        _assign(fleet, tables, c, _choose(fleet, c, lowest_id_wins))
    return LIMIT


@jit
def replay(fleet, tables, c, replicas):
    """Send every request to its recorded replica; ``replicas`` int64 [R]."""
    while True:
        status = next_decision_before(fleet, tables, c, np.inf)
        if status != NEEDS_DECISION:
            return status
        _assign(fleet, tables, c, replicas[fleet.clusters[c]["request"]])
