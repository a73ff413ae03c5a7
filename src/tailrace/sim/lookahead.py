"""Marginal-cost look-ahead: the near-optimal reference, and the teacher of the learned policy.

For each replica its own queue is simulated to the end, with and without the request at hand; the score
is the increase of the total cost of all requests there. So the harm done to others counts. Unfinished
answers are assumed to be as long as predicted (``lookahead``) or as they will really be
(``lookahead_oracle``). No further arrivals are assumed.

The copy is made of counts only: cached prefixes count as the router believes them, and the cache
itself is not rolled forward.
"""

import numpy as np

from tailrace.compiled import jit
from tailrace.sim import batching
from tailrace.sim import server as servers
from tailrace.sim.types import (
    REQUEST_STATE,
    SERVER,
    SLOT_FINISH,
    SLOT_OFFSET,
    SLOT_REQUEST,
    SLOT_ROWS,
)

LOOKAHEAD, LOOKAHEAD_ORACLE = 23, 24
#: An answer is expected to go on for at least this share of the predicted length.
LEAST_SHARE_LEFT = 0.25
E2E_WEIGHT, TTFT_WEIGHT, LATE_WEIGHT = 0.2, 1.0, 2.0


@jit
def marginal_costs(fleet, tables, content, kv, c, rule, scores):
    """Fill ``scores`` [n] with the increase of total cost, s, if the request at hand went there."""
    oracle = rule == LOOKAHEAD_ORACLE
    n = fleet.clusters[c]["n_replicas"]
    most = 1
    for r in range(n):
        server = fleet.servers[c, r]
        most = max(most, server["n_slots"] + server["queue_len"] + 1)
    ghosts = np.empty(most, REQUEST_STATE)
    numbers = np.empty(most, np.int64)
    slots = np.empty((SLOT_ROWS, fleet.slots.shape[3]), np.int64)
    phase = np.empty(fleet.phase.shape[2], np.int64)
    notices = np.empty((2, fleet.notices.shape[2]), np.int64)
    ghost = np.empty(1, SERVER)
    for r in range(n):
        scores[r] = np.inf
        if fleet.replicas_view[c, r]["available"] == 0:
            continue
        without = 0.0
        if fleet.servers[c, r]["n_slots"] + fleet.servers[c, r]["queue_len"] > 0:
            count = _copy(fleet, tables, c, r, oracle, ghost, slots, phase, ghosts, numbers)
            _roll(ghost[0], slots, phase, kv, ghosts, content, fleet.costs[c, r], notices)
            without = _total_cost(ghosts, numbers, count, content.facts)
        count = _copy(fleet, tables, c, r, oracle, ghost, slots, phase, ghosts, numbers)
        count = _add_newcomer(fleet, c, r, oracle, content.facts, ghost, ghosts, numbers, count)
        _roll(ghost[0], slots, phase, kv, ghosts, content, fleet.costs[c, r], notices)
        scores[r] = _total_cost(ghosts, numbers, count, content.facts) - without


@jit
def _predicted(fleet, c, oracle, facts, n):
    """Predicted output of request ``n``, tokens; the run's mean unless predictions are static."""
    if oracle:
        return np.int64(facts[n]["output"])
    if fleet.clusters[c]["static_prediction"]:
        return max(np.int64(facts[n]["predicted"]), 1)
    return max(np.int64(fleet.requests_view[c]["predicted_output"]), 1)


@jit
def _tokens_left(fleet, c, oracle, facts, n, generated):
    """Output tokens still to come of a request that has ``generated`` so many, at least 1."""
    predicted = _predicted(fleet, c, oracle, facts, n)
    if oracle:
        return max(predicted - generated, 1)
    least = np.int64(LEAST_SHARE_LEFT * predicted)
    return max(predicted - generated, least, 1)


@jit
def _copy(fleet, tables, c, r, oracle, ghost, slots, phase, ghosts, numbers):
    """Copy replica ``r`` into the scratch arrays with predicted outputs; returns its requests."""
    facts = tables.facts[fleet.clusters[c]["table"]]
    requests = fleet.requests[c]
    ghost[0] = fleet.servers[c, r]
    server = ghost[0]
    # Blocks are counted; the router knows the configured speed, not a slow-down.
    server["caching"] = 0
    server["explicit"] = 0
    server["exact"] = 0
    server["fresh"] = 0
    server["speed"] = server["configured_speed"]
    phase[:] = 0
    count = 0
    decodes = server["n_decodes"]
    resident = server["n_slots"]
    server["n_decodes"] = 0
    server["context"] = 0
    server["next_finish"] = batching.NO_TICK
    for i in range(resident):
        for k in range(SLOT_ROWS):
            slots[k, i] = fleet.slots[c, r, k, i]
        n = slots[SLOT_REQUEST, i]
        ghosts[count] = requests[n]
        numbers[count] = n
        slots[SLOT_REQUEST, i] = count
        request = ghosts[count]
        if i < decodes:
            request["processed"] = slots[SLOT_OFFSET, i] + server["tick"]
        _predict(fleet, c, oracle, facts, n, request)
        if i < decodes:
            batching.become_decode(server, slots, phase, ghosts, i)
        count += 1
    n = server["queue_head"] if server["queue_len"] > 0 else -1
    server["queue_len"] = 0
    while n >= 0:
        ghosts[count] = requests[n]
        numbers[count] = n
        _predict(fleet, c, oracle, facts, n, ghosts[count])
        batching.enqueue(server, ghosts, count)
        n = requests[n]["next"]
        count += 1
    return count


@jit
def _predict(fleet, c, oracle, facts, n, request):
    """Replace what a request still has to say by what the router expects."""
    answered = max(request["processed"], request["context"])
    generated = max(answered - facts[n]["prompt"], 0)
    left = _tokens_left(fleet, c, oracle, facts, n, generated)
    if request["processed"] > request["prompt"]:
        request["output"] = request["processed"] + left - request["prompt"]
    else:
        request["output"] = left


@jit
def _add_newcomer(fleet, c, r, oracle, facts, ghost, ghosts, numbers, count):
    n = fleet.clusters[c]["request"]
    ghosts[count] = fleet.requests[c, n]
    numbers[count] = n
    newcomer = ghosts[count]
    newcomer["believed"] = fleet.replicas_view[c, r]["cached_tokens"]
    newcomer["output"] = _predicted(fleet, c, oracle, facts, n)
    servers.receive(ghost[0], ghosts, fleet.costs[c, r], count, fleet.clusters[c]["now"])
    return count + 1


@jit
def _roll(server, slots, phase, kv, ghosts, content, cost, notices):
    while (
        servers.step(server, slots, phase, kv, ghosts, content, cost, np.inf, notices)
        != servers.NOTHING
    ):
        pass


@jit
def _total_cost(ghosts, numbers, count, facts):
    total = 0.0
    for k in range(count):
        request = ghosts[k]
        ttft = request["first"] - request["arrived"]
        late = max(ttft - facts[numbers[k]]["ttft_slo"], 0.0)
        e2e = request["done"] - request["arrived"]
        total += E2E_WEIGHT * e2e + TTFT_WEIGHT * ttft + LATE_WEIGHT * late
    return total
