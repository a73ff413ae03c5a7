"""One server through time: iterations end, batches are formed, requests arrive, it dies.

Time advances lazily. :func:`step` makes at most one transition towards a time
``t``: an iteration that ends at or before ``t`` ends, and a batch due *strictly before* ``t`` is
formed. So all arrivals of one instant are queued before a batch is formed at that instant.
"""

import numpy as np

from tailrace.compiled import inlined, inner, jit
from tailrace.sim import batching, kvcache, schedulers
from tailrace.sim.types import LOST, NOT_ARRIVED, SLOT_REQUEST, VLLM_V1, WAITING

NOTHING, FORMED, ENDED = 0, 1, 2


@inlined
def step(server, slots, phase, kv, requests, content, cost, t, notices):
    """Make one transition if one is due; return which. First tokens and ends go to ``notices``."""
    if server["busy"]:
        if server["until"] > t:
            return NOTHING
        _end_iteration(server, slots, phase, kv, requests, content, notices)
        return ENDED
    if server["ready_at"] >= t:
        return NOTHING
    if schedulers.form(server, slots, phase, kv, requests, content, cost, server["ready_at"]):
        return FORMED
    return NOTHING


@inlined
def _end_iteration(server, slots, phase, kv, requests, content, notices):
    notices[0, 0] = 0
    notices[1, 0] = 0
    end = server["until"]
    steps = server["steps"]
    decodes = server["n_decodes"]
    server["busy"] = 0
    _count_iterations(server, steps, end - server["start"])
    if server["decoding"]:
        if steps > 1 and server["counted"]:
            due = batching.blocks_due(server, phase, server["tick"] + 1, steps - 1)
            batching.take_counted(server, kv, due)
        server["context"] += (decodes - server["parked"]) * steps
        server["tick"] += steps
        server["reached"] = server["tick"]
        if server["parked"] > 0:
            batching.unpark(server, slots, phase)
        if server["tick"] >= server["next_finish"]:
            batching.retire_decodes(server, slots, phase, kv, requests, end, notices)
    else:
        server["reached"] = server["tick"]  # no decode has moved on
    if server["n_slots"] > server["n_decodes"]:
        batching.advance_prefills(server, slots, phase, kv, requests, content, end, notices)
    has_work = server["n_slots"] > 0 or server["queue_len"] > 0
    server["ready_at"] = end if has_work else np.inf


@inner
def _count_iterations(server, steps, seconds):
    server["iterations"] += steps
    server["busy_s"] += seconds
    server["sum_tokens"] += steps * server["tokens"]
    server["sum_work"] += server["work"]
    server["sum_batched"] += steps * server["batched"]
    if server["decoding"]:
        decodes = server["n_decodes"]
        context = server["context"] - server["parked_context"]
        server["sum_context"] += steps * context + decodes * (steps * (steps - 1) // 2)


@inner
def wake_time(server):
    """Time of the server's next transition, s."""
    return server["until"] if server["busy"] else server["ready_at"]


@inner
def receive(server, requests, cost, r, now):
    """Queue a request at ``now`` (s)."""
    request = requests[r]
    request["status"] = WAITING
    request["sent"] = now
    server["requests"] += 1
    tail = server["queue_tail"]
    if (
        server["scheduler"] == VLLM_V1
        and server["ordered"] == 0
        and server["queue_len"] > 0
        and tail > r
        and requests[tail]["sent"] == now
    ):
        # The router's queue sends several at one instant, not by number.
        batching.enqueue_sorted(server, requests, r)
    else:
        batching.enqueue(server, requests, r)
    if server["ordered"]:
        batching.note_sent(server, requests, r)
    if server["busy"]:
        schedulers.interrupt(server, cost, now)
    elif server["ready_at"] == np.inf:
        server["ready_at"] = now


@inner
def set_speed(server, cost, factor, now):
    """Run at ``factor`` times the configured speed from the next iteration on."""
    if server["busy"]:
        schedulers.interrupt(server, cost, now)
    server["speed"] = server["configured_speed"] * factor


@inner
def blocks_held(server, phase, cost, now):
    """Blocks held by requests at ``now`` (s)."""
    free = server["free_blocks"]
    if server["busy"] and server["steps"] > 1 and server["counted"]:
        ended = schedulers.steps_ended(server, cost, now)
        free -= batching.blocks_due(server, phase, server["tick"] + 1, ended)
    return server["num_blocks"] - free


@inner
def answering_context(server, cost, now):
    """Prompt and output tokens so far of the answering requests."""
    context = server["context"] + server["preempted_context"]
    if server["busy"] and server["steps"] > 1:
        context += server["n_decodes"] * schedulers.steps_ended(server, cost, now)
    return context


@inner
def oldest_sent(server, slots, requests):
    """When the oldest request without a first token was sent, s; inf: there is none.

    Prompts are prefilled in the order they were sent, and the queue behind them is in that order,
    unless the server goes by priority.
    """
    if server["ordered"]:
        return requests[server["oldest"]]["sent"] if server["oldest"] >= 0 else np.inf
    oldest = np.inf
    for i in range(server["n_decodes"], server["n_slots"]):
        request = requests[slots[SLOT_REQUEST, i]]
        if np.isnan(request["first"]):
            oldest = min(oldest, request["sent"])
    at = server["queue_head"] if server["queue_len"] > 0 else -1
    while at >= 0:
        request = requests[at]
        if np.isnan(request["first"]):
            return min(oldest, request["sent"])
        at = request["next"]  # preempted while answering
    return oldest


@inner
def die(server, slots, phase, kv, requests, facts, cost, now):
    """Die at ``now`` (s): answering requests are lost, the others may go elsewhere.

    Returns the heads of two lists linked by REQUEST_STATE.next: to be rerouted, and lost.
    """
    if server["busy"]:
        # The running iteration's work is lost, but its time was spent.
        ended = schedulers.steps_ended(server, cost, now)
        server["work"] = 0.0
        _count_iterations(server, ended, now - server["start"])
    here = -1
    if server["ordered"]:
        while server["queue_len"] > 0:
            r = batching.dequeue(server, requests)
            requests[r]["next"] = here
            here = r
    elif server["queue_len"] > 0:
        here = server["queue_head"]
    for i in range(server["n_slots"]):
        r = slots[SLOT_REQUEST, i]
        requests[r]["next"] = here
        here = r
    homeless = -1
    lost = -1
    while here >= 0:
        r = here
        request = requests[r]
        here = request["next"]
        if not np.isnan(request["first"]):
            request["status"] = LOST
            request["done"] = now
            request["next"] = lost
            lost = r
            continue
        request["status"] = NOT_ARRIVED
        request["scheduled"] = np.nan
        request["prompt"] = facts[r]["prompt"]
        request["output"] = facts[r]["output"]
        request["processed"] = 0
        request["blocks"] = 0
        request["cached"] = -1
        request["reroutes"] += 1
        request["next"] = homeless
        homeless = r
    empty(server, phase, kv)
    return homeless, lost


@jit
def empty(server, phase, kv):
    """Make a server empty, with a cold cache."""
    server["busy"] = 0
    server["until"] = np.inf
    server["ready_at"] = np.inf
    server["steps"] = 1
    server["queue_head"] = -1
    server["queue_tail"] = -1
    server["queue_len"] = 0
    server["oldest"] = -1
    server["newest"] = -1
    server["n_slots"] = 0
    server["n_decodes"] = 0
    server["parked"] = 0
    server["parked_context"] = 0
    server["context"] = 0
    server["preempted_context"] = 0
    server["event_head"] = -1
    server["event_tail"] = -1
    server["next_finish"] = batching.NO_TICK
    server["next_event"] = batching.NO_TICK
    server["next_fill"] = batching.NO_TICK
    server["reached"] = server["tick"]
    server["fresh"] = 0
    server["free_blocks"] = server["num_blocks"]
    phase[:] = 0
    kvcache.clear(server, kv)
