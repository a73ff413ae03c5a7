"""Requests that wait at the router of the compiled engine, by the rules of view/holding.py.

The twin of queueing/fair_queue.py, which the reference engine and the live router use. Waiting
requests are a list in the order in which they began to wait, linked by REQUEST_STATE.next; who goes
next is found by looking at all of them. While a request waits, its ``sent`` is when it began to,
and its ``priority`` is its key.
"""

import numpy as np

from tailrace.compiled import inlined, inner
from tailrace.view.holding import any_room, has_room, is_saturated
from tailrace.view.selection import any_available


@inlined
def is_free(fleet, c):
    """Whether a request that arrives now may be sent at once."""
    cluster = fleet.clusters[c]
    return cluster["held"] == 0 and any_room(
        cluster["holding"], fleet.replicas_view[c, : cluster["n_replicas"]]
    )


@inner
def push(fleet, facts, c, n, key):
    """Queue request ``n``; ``key`` as by view/holding.py."""
    cluster = fleet.clusters[c]
    request = fleet.requests[c, n]
    request["sent"] = cluster["now"]
    request["priority"] = key
    request["next"] = -1
    if cluster["held"] == 0:
        cluster["held_head"] = n
    else:
        fleet.requests[c, cluster["held_tail"]]["next"] = n
    cluster["held_tail"] = n
    cluster["held"] += 1
    flow = fleet.flows[c, facts[n]["tenant"]]
    if flow["waiting"] == 0:
        flow["served"] = max(flow["served"], cluster["virtual"])
    flow["waiting"] += 1


@inlined
def overdue_at(fleet, c):
    """When the request that has waited longest must go, s; inf: nobody waits, or can go."""
    cluster = fleet.clusters[c]
    replicas = fleet.replicas_view[c, : cluster["n_replicas"]]
    if cluster["held"] == 0 or not any_available(replicas):
        return np.inf
    return fleet.requests[c, cluster["held_head"]]["sent"] + cluster["holding"]["max_wait_s"]


@inner
def pop(fleet, facts, c):
    """Take out the request that goes now; -1: there is no room.

    Replicas without room are hidden from the decision (see :func:`hide`), unless the request must
    go because it has waited too long.
    """
    cluster = fleet.clusters[c]
    replicas = fleet.replicas_view[c, : cluster["n_replicas"]]
    if overdue_at(fleet, c) <= cluster["now"]:
        return _take_out(fleet, facts, c, -1, cluster["held_head"])
    if not any_room(cluster["holding"], replicas):
        return np.int64(-1)
    requests, flows = fleet.requests[c], fleet.flows[c]
    best = before_best = before = np.int64(-1)
    urgency, served, key = 0, 0.0, 0
    n = cluster["held_head"]
    while n >= 0:
        mine = facts[n]["priority"]
        used = flows[facts[n]["tenant"]]["served"]
        sooner = best < 0 or mine > urgency
        if not sooner and mine == urgency:
            sooner = used < served or (used == served and requests[n]["priority"] < key)
        if sooner:
            best, before_best = n, before
            urgency, served, key = mine, used, requests[n]["priority"]
        before = n
        n = np.int64(requests[n]["next"])
    hide(fleet, c)
    return _take_out(fleet, facts, c, before_best, best)


@inner
def _take_out(fleet, facts, c, before, n):
    """Take request ``n`` out of the list, behind ``before`` (-1: it is the first)."""
    cluster = fleet.clusters[c]
    requests = fleet.requests[c]
    after = requests[n]["next"]
    if before < 0:
        cluster["held_head"] = after
    else:
        requests[before]["next"] = after
    if after < 0:
        cluster["held_tail"] = before
    cluster["held"] -= 1
    fleet.flows[c, facts[n]["tenant"]]["waiting"] -= 1
    if requests[n]["charged"] == 0:
        requests[n]["charged"] = -1  # it waited: charged when it is sent
    return np.int64(n)


@inner
def hide(fleet, c):
    """Hide the replicas without room from the decision that follows."""
    cluster = fleet.clusters[c]
    replicas = fleet.replicas_view[c, : cluster["n_replicas"]]
    saturated = is_saturated(cluster["holding"], replicas)
    for r in range(replicas.size):
        if replicas[r]["available"] and not has_room(cluster["holding"], replicas[r], saturated):
            fleet.servers[c, r]["hidden"] = 1
    for r in range(replicas.size):
        if fleet.servers[c, r]["hidden"]:
            replicas[r]["available"] = 0


@inner
def sent(fleet, facts, c, n):
    """Request ``n`` is sent: show all replicas again, and charge its client if others wait."""
    cluster = fleet.clusters[c]
    for r in range(cluster["n_replicas"]):
        if fleet.servers[c, r]["hidden"]:
            fleet.servers[c, r]["hidden"] = 0
            fleet.replicas_view[c, r]["available"] = 1
    request = fleet.requests[c, n]
    if request["charged"] > 0 or (request["charged"] == 0 and cluster["held"] == 0):
        return
    request["charged"] = facts[n]["prompt"] + request["predicted"]
    flow = fleet.flows[c, facts[n]["tenant"]]
    cluster["virtual"] = max(flow["served"], cluster["virtual"])
    flow["served"] = cluster["virtual"] + request["charged"]


@inner
def finished(fleet, facts, c, n):
    """Correct what the client of request ``n`` was charged, now that its length is known."""
    charged = fleet.requests[c, n]["charged"]
    if charged > 0:
        flow = fleet.flows[c, facts[n]["tenant"]]
        flow["served"] += facts[n]["prompt"] + facts[n]["output"] - charged
