"""Distinct prompt blocks of the requests in flight, for rules that read them.

Blocks are named by all content up to their end, so the blocks that a prompt shares with a set of
prompts are its leading ones, as many as with the one it shares most with. The requests in flight
are those in a server's slots and queue; they are counted anew when one has come or gone.
"""

import numpy as np

from tailrace.compiled import inner
from tailrace.sim.types import DONE, LOST, SLOT_REQUEST, WAITING


@inner
def count(fleet, tables, c):
    """Fill ``active_blocks`` and ``new_blocks`` of the replicas for the current request."""
    cluster = fleet.clusters[c]
    table = cluster["table"]
    in_flight = fleet.in_flight_scratch[c]
    own = fleet.requests_view[c]["id"]
    for r in range(cluster["n_replicas"]):
        view, server = fleet.replicas_view[c, r], fleet.servers[c, r]
        size = server["block_size"]
        if server["n_slots"] == 0 and server["queue_len"] == 0:
            view["active_blocks"] = 0
            view["new_blocks"] = tables.facts[table, own]["prompt"] // size
            continue
        number = _list_in_flight(fleet, c, r, in_flight)
        came_and_went = server["requests"] + view["finished"]
        if server["active_at"] != came_and_went:
            server["active_at"] = came_and_went
            blocks = np.int64(0)
            for k in range(number):
                blocks += _unshared(tables, table, in_flight[k], in_flight[:k], size)
            view["active_blocks"] = blocks
        view["new_blocks"] = _unshared(tables, table, own, in_flight[:number], size)


@inner
def _list_in_flight(fleet, c, r, in_flight):
    """Write the requests on replica ``r`` to ``in_flight``; return how many there are."""
    server, requests, cluster = fleet.servers[c, r], fleet.requests[c], fleet.clusters[c]
    number = server["n_slots"]
    for i in range(number):
        in_flight[i] = fleet.slots[c, r, SLOT_REQUEST, i]
    if server["queue_len"] == 0:
        return number
    if not server["ordered"]:
        at = server["queue_head"]
        while at >= 0:
            in_flight[number] = at
            number += 1
            at = requests[at]["next"]
        return number
    low = cluster["lowest"]  # the queue is a heap: look at all requests that may be in it
    while requests[low]["status"] == DONE or requests[low]["status"] == LOST:
        low += 1
    cluster["lowest"] = low
    for n in range(low, cluster["highest"] + 1):
        if requests[n]["status"] == WAITING and requests[n]["replica"] == r:
            in_flight[number] = n
            number += 1
    return number


@inner
def _unshared(tables, table, n, others, size):
    """Full blocks of prompt ``n`` that the prompts of ``others`` lack."""
    fact = tables.facts[table, n]
    shared = np.int64(0)
    if fact["run_count"] > 0:  # else it shares nothing
        for k in range(others.size):
            shared = max(shared, _common_tokens(tables, table, n, others[k]))
    return fact["prompt"] // size - shared // size


@inner
def _common_tokens(tables, table, n, m):
    """Leading tokens that two prompts of a table have in common."""
    a, b = tables.facts[table, n], tables.facts[table, m]
    keys, lengths = tables.run_keys[table], tables.run_tokens[table]
    common = np.int64(0)
    for k in range(min(a["run_count"], b["run_count"])):
        i, j = a["run_start"] + k, b["run_start"] + k
        if keys[i] != keys[j]:
            break
        common += min(lengths[i], lengths[j])
        if lengths[i] != lengths[j]:
            break
    return common
