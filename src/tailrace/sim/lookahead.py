"""Marginal-cost look-ahead: the near-optimal reference, and the teacher of the learned policy.

The queue of each replica is simulated to its end, with and without the current request; the score
is the increase of the total cost of all requests there, so delaying others counts. Output lengths
are the predicted (``lookahead``) or the true ones (``lookahead_oracle``). No further arrivals are
assumed.

The simulated copy ("ghost") only counts blocks: prefixes are cached as the router believes, the
cache itself does not change, and a block shared by several requests counts for each when freed.
"""

import numpy as np

from tailrace.compiled import inner, jit
from tailrace.policy.rules import CODE
from tailrace.sim import batching, schedulers
from tailrace.sim import server as servers
from tailrace.sim.types import (
    SLOT_CHUNK,
    SLOT_OFFSET,
    SLOT_REQUEST,
)
from tailrace.view.objective import compiled_cost
from tailrace.view.ordering import request_priority

LOOKAHEAD, LOOKAHEAD_ORACLE = CODE.lookahead, CODE.lookahead_oracle
#: At least this share of the predicted output is expected to be still to come.
LEAST_SHARE_LEFT = 0.25


@inner
def marginal_costs(fleet, content, kv, c, rule, scores):
    """Fill ``scores`` [n] with the increase of total cost, s, if the current request went there."""
    oracle = rule == LOOKAHEAD_ORACLE
    for r in range(fleet.clusters[c]["n_replicas"]):
        scores[r] = np.inf
        if fleet.replicas_view[c, r]["available"] == 0:
            continue
        without = 0.0
        if fleet.servers[c, r]["n_slots"] + fleet.servers[c, r]["queue_len"] > 0:
            count = _copy(fleet, content.facts, c, r, oracle)
            _roll(fleet, content, kv, c, r)
            without = _total_cost(fleet, content.facts, c, count)
        count = _copy(fleet, content.facts, c, r, oracle)
        _add_newcomer(fleet, content.facts, c, r, oracle, count)
        _roll(fleet, content, kv, c, r)
        scores[r] = _total_cost(fleet, content.facts, c, count + 1) - without


@inner
def _predicted(fleet, c, oracle, facts, n):
    """Predicted output of request ``n``, tokens; the run's mean unless predictions are static."""
    if oracle:
        return np.int64(facts[n]["output"])
    if fleet.clusters[c]["static_prediction"]:
        return max(np.int64(facts[n]["predicted"]), 1)
    return max(np.int64(fleet.requests_view[c]["predicted_output"]), 1)


@inner
def _tokens_left(fleet, c, oracle, facts, n, generated):
    """Output tokens still to come after ``generated`` ones, at least 1."""
    predicted = _predicted(fleet, c, oracle, facts, n)
    if oracle:
        return max(predicted - generated, 1)
    least = np.int64(LEAST_SHARE_LEFT * predicted)
    return max(predicted - generated, least, 1)


@jit
def _copy(fleet, facts, c, r, oracle):
    """Copy replica ``r`` to the ghost, with predicted outputs; return its number of requests."""
    requests = fleet.requests[c]
    slots = fleet.ghost_slots[c]
    phase = fleet.ghost_phase[c]
    ghosts = fleet.ghost_requests[c]
    numbers = fleet.ghost_numbers[c]
    fleet.ghost[c, 0] = fleet.servers[c, r]
    server = fleet.ghost[c, 0]
    # Blocks are counted; the router knows the configured speed, not a slow-down.
    server["caching"] = 0
    server["explicit"] = 0
    server["counted"] = 1
    server["exact"] = 0
    server["fresh"] = 0
    server["oldest"] = server["newest"] = -1
    server["speed"] = server["configured_speed"]
    # A stretch of decodes ends where a true output ends, which the router does not know.
    schedulers.interrupt(server, fleet.costs[c, r], fleet.clusters[c]["now"])
    _advance_to_running(server, fleet.phase[c, r], fleet.servers[c, r]["counted"])
    phase[:] = 0
    count = 0
    decodes = server["n_decodes"]
    resident = server["n_slots"]
    server["n_decodes"] = 0
    server["context"] = 0
    server["next_finish"] = batching.NO_TICK
    for i in range(resident):
        batching.copy_slot(fleet.slots[c, r], i, slots, i)
        n = slots[SLOT_REQUEST, i]
        ghosts[count] = requests[n]
        numbers[count] = n
        slots[SLOT_REQUEST, i] = count
        request = ghosts[count]
        request["older"] = request["newer"] = -1
        if i < decodes:
            request["processed"] = slots[SLOT_OFFSET, i] + server["tick"]
        _predict(fleet, c, oracle, facts, n, request)
        if not fleet.servers[c, r]["counted"]:
            server["free_blocks"] += _blocks_ahead(server, request, slots[SLOT_CHUNK, i])
        if i < decodes:
            batching.become_decode(server, slots, phase, ghosts, i)
        count += 1
    if server["busy"]:
        server["fresh"] = 0  # allocated when the running iteration was formed
    # A list has no children; of a heap, ``numbers`` is the list of what is still to be visited.
    first = count
    if server["queue_len"] > 0:
        numbers[count] = server["queue_head"]
        count += 1
    server["queue_len"] = 0
    while first < count:
        n = numbers[first]
        ghosts[first] = requests[n]
        ghosts[first]["older"] = ghosts[first]["newer"] = -1
        _predict(fleet, c, oracle, facts, n, ghosts[first])
        batching.enqueue(server, ghosts, first)
        if requests[n]["next"] >= 0:
            numbers[count] = requests[n]["next"]
            count += 1
        if server["ordered"] and requests[n]["child"] >= 0:
            numbers[count] = requests[n]["child"]
            count += 1
        first += 1
    return count


@inner
def _advance_to_running(server, phase, counted):
    """Move an interrupted stretch on to its running iteration: the tokens before it are streamed.

    ``phase`` and ``counted`` are the real server's.
    """
    if server["busy"] == 0 or server["steps"] == 1:
        return
    ended = server["steps"] - 1
    if counted:
        server["free_blocks"] -= batching.blocks_due(server, phase, server["tick"] + 1, ended)
    server["tick"] += ended
    server["steps"] = 1


@inner
def _blocks_ahead(server, request, chunk):
    """Blocks a request holds for tokens to come (preallocation), which a ghost does not count.

    ``chunk``: its prompt tokens in the running iteration.
    """
    prompt, processed = request["prompt"], request["processed"]
    if server["busy"] or processed <= prompt:
        computed = processed + (chunk if processed <= prompt else 1)
        counted = batching.ceil_div(computed, server["block_size"])
    else:
        counted = batching.decode_blocks(server, prompt, processed)
    return max(request["blocks"] - counted, 0)


@inner
def _predict(fleet, c, oracle, facts, n, request):
    """Replace a request's remaining output by what the router expects, at least one token."""
    answered = max(request["processed"], request["context"])
    generated = max(answered - facts[n]["prompt"], 0)
    left = _tokens_left(fleet, c, oracle, facts, n, generated)
    decoded = max(request["processed"] - request["prompt"], 0)
    output = _within_memory(fleet.ghost[c, 0], request["prompt"], left + decoded)
    request["output"] = max(output, decoded + 1)


@inner
def _within_memory(server, prompt, output):
    """Limit an output to the server's KV memory: a longer one would never end."""
    room = (server["num_blocks"] - server["watermark_blocks"]) * server["block_size"]
    return max(min(output, room - prompt - server["block_size"]), 1)


@inner
def _add_newcomer(fleet, facts, c, r, oracle, count):
    """Send the current request to the ghost."""
    n = fleet.clusters[c]["request"]
    ghosts = fleet.ghost_requests[c]
    ghosts[count] = fleet.requests[c, n]
    fleet.ghost_numbers[c, count] = n
    ghosts[count]["believed"] = fleet.replicas_view[c, r]["cached_tokens"]
    output = _predicted(fleet, c, oracle, facts, n)
    ghosts[count]["output"] = _within_memory(fleet.ghost[c, 0], ghosts[count]["prompt"], output)
    ghosts[count]["priority"] = request_priority(
        fleet.clusters[c]["order"], fleet.requests_view[c], fleet.replicas_view[c, r]
    )
    now = fleet.clusters[c]["now"]
    servers.receive(fleet.ghost[c, 0], ghosts, fleet.costs[c, r], count, now)


@inner
def _roll(fleet, content, kv, c, r):
    """Run the ghost until all its requests have finished."""
    happened = servers.FORMED
    while happened != servers.NOTHING:
        happened = servers.step(
            fleet.ghost[c, 0],
            fleet.ghost_slots[c],
            fleet.ghost_phase[c],
            kv,
            fleet.ghost_requests[c],
            content,
            fleet.costs[c, r],
            np.inf,
            fleet.notices[c],
        )


@inner
def _total_cost(fleet, facts, c, count):
    """Composite cost in s of all requests on the ghost."""
    total = 0.0
    for k in range(count):
        request = fleet.ghost_requests[c, k]
        ttft = request["first"] - request["arrived"]
        late = max(ttft - facts[fleet.ghost_numbers[c, k]]["ttft_slo"], 0.0)
        e2e = request["done"] - request["arrived"]
        total += compiled_cost(e2e, ttft, late, 0)
    return total
