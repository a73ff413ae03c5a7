"""Distinct prompt blocks of the requests in flight, for rules that read them.

Blocks are named by all content up to their end, so the blocks that a prompt shares with a set of
prompts are its leading ones, as many as with the one it shares most with. Counted anew for a
decision: the requests in flight are those in a server's slots and queue.
"""

import numpy as np

from tailrace.compiled import inner, jit
from tailrace.sim.types import SLOT_REQUEST

ALL = 2**62


@jit
def count(fleet, tables, c):
    """Fill ``active_blocks`` and ``new_blocks`` of the replicas for the current request."""
    cluster = fleet.clusters[c]
    for r in range(cluster["n_replicas"]):
        view = fleet.replicas_view[c, r]
        view["new_blocks"] = _unshared(fleet, tables, c, r, fleet.requests_view[c]["id"], ALL)
        view["active_blocks"] = _active(fleet, tables, c, r)


@inner
def _active(fleet, tables, c, r):
    """Distinct full blocks of the prompts on replica ``r``: each adds what those before lack."""
    blocks = np.int64(0)
    server = fleet.servers[c, r]
    for i in range(server["n_slots"]):
        blocks += _unshared(fleet, tables, c, r, fleet.slots[c, r, SLOT_REQUEST, i], i)
    at = server["queue_head"] if server["queue_len"] > 0 else -1
    place = server["n_slots"]
    while at >= 0:
        blocks += _unshared(fleet, tables, c, r, at, place)
        at = fleet.requests[c, at]["next"]
        place += 1
    return blocks


@inner
def _unshared(fleet, tables, c, r, n, before):
    """Full blocks of prompt ``n`` that the first ``before`` requests on replica ``r`` lack."""
    server = fleet.servers[c, r]
    size = server["block_size"]
    facts = tables.facts[fleet.clusters[c]["table"]]
    own = facts[n]["prompt"] // size
    if facts[n]["run_count"] == 0:
        return own  # it shares nothing
    shared = np.int64(0)
    for i in range(min(server["n_slots"], before)):
        other = fleet.slots[c, r, SLOT_REQUEST, i]
        shared = max(shared, _common_tokens(tables, fleet.clusters[c]["table"], n, other))
    at = server["queue_head"] if server["queue_len"] > 0 else -1
    place = server["n_slots"]
    while at >= 0 and place < before:
        shared = max(shared, _common_tokens(tables, fleet.clusters[c]["table"], n, at))
        at = fleet.requests[c, at]["next"]
        place += 1
    return own - shared // size


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
