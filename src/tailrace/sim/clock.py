"""Time: advance the replicas of a cluster to its next arrival or event.

Replicas influence each other only through routing, so in between each is advanced on its own. First
tokens, finished requests and metrics snapshots on the way are entered into the router's ledger.
"""

import numpy as np

from tailrace.compiled import inlined, inner
from tailrace.sim import arrival_heap, cost_accounts, router_queue
from tailrace.sim import server as servers
from tailrace.sim.kvcache import KvCache, PromptContent, private_path
from tailrace.sim.types import (
    LEARNS_EVENTS,
    LEARNS_FIRST_TOKEN,
    NEWS_FINISHED,
    NEWS_FIRST_TOKEN,
)
from tailrace.view import ledger, prefix_index
from tailrace.view.prefix_index import PrefixIndex


@inlined
def content_of(tables, table):
    """Content of the prompts of one table."""
    return PromptContent(tables.facts[table], tables.pieces[table])


@inlined
def cache_of(fleet, c, r):
    """KV blocks of one replica."""
    return KvCache(
        fleet.extents[c, r], fleet.buckets[c, r], fleet.held[c, r], fleet.rows_free[c, r]
    )


@inlined
def index_of(fleet, c):
    """Prefix index of one cluster's router."""
    return PrefixIndex(fleet.index_entries[c], fleet.index_slots[c], fleet.index_totals[c])


@inlined
def _advance_replica(fleet, tables, c, r, t):
    """Advance one replica to time ``t`` (s). False if the batch log is full before that."""
    cluster = fleet.clusters[c]
    content = content_of(tables, cluster["table"])
    server = fleet.servers[c, r]
    slots = fleet.slots[c, r]
    phase = fleet.phase[c, r]
    kv = cache_of(fleet, c, r)
    requests = fleet.requests[c]
    cost = fleet.costs[c, r]
    notices = fleet.notices[c]
    recording = fleet.batches.shape[1] > 0
    while True:
        if recording and cluster["batch_count"] == fleet.batches.shape[1]:
            return False
        if recording and server["busy"] and server["until"] <= t:
            _record_batch(fleet.batches[c], cluster, server, r)
        happened = servers.step(server, slots, phase, kv, requests, content, cost, t, notices)
        if happened == servers.NOTHING:
            break
        if happened == servers.ENDED:
            _update_ledger(fleet, tables, c, r)
    fleet.wake[c, r] = servers.wake_time(server)
    cluster["stuck"] |= server["stuck"]
    return True


@inlined
def _record_batch(batches, cluster, server, r):
    batch = batches[cluster["batch_count"]]
    batch["replica"] = r
    batch["start_s"] = server["start"]
    batch["end_s"] = server["until"]
    batch["iterations"] = server["steps"]
    batch["decodes"] = (server["n_decodes"] - server["parked"]) * server["decoding"]
    batch["prefills"] = server["batched"] - batch["decodes"]
    batch["tokens"] = server["tokens"]
    batch["context"] = (server["context"] - server["parked_context"]) * server["decoding"]
    batch["prefill_work"] = server["work"]
    cluster["batch_count"] += 1


@inlined
def _update_ledger(fleet, tables, c, r):
    """Enter first tokens and finished requests of an iteration into the router's records."""
    notices = fleet.notices[c]
    if notices[0, 0] == 0 and notices[1, 0] == 0:
        return
    cluster = fleet.clusters[c]
    requests = fleet.requests[c]
    facts = tables.facts[cluster["table"]]
    view = fleet.replicas_view[c, r]
    learns = cluster["learns"] if fleet.servers[c, r]["caching"] else -1
    for k in range(1, notices[0, 0] + 1):
        n = notices[0, k]
        request = requests[n]
        ledger.answering(view, facts[n]["prompt"], request["believed"], request["sent"])
        if cluster["accounts"]:
            cost_accounts.answered(cluster, requests, facts, n)
        notify(fleet, c, NEWS_FIRST_TOKEN, r, n, request["first"])
        if learns == LEARNS_FIRST_TOKEN:
            index_content(fleet, tables, c, r, n, 0, request["first"])
        elif learns == LEARNS_EVENTS:
            _publish(fleet, c, r, 2 * n, request["first"])
    for k in range(1, notices[1, 0] + 1):
        n = notices[1, k]
        fact = facts[n]
        predicted = requests[n]["predicted"]
        ledger.finished(view, fleet.router[c], fact["prompt"], predicted, fact["output"])
        notify(fleet, c, NEWS_FINISHED, r, n, requests[n]["done"])
        if learns == LEARNS_EVENTS:
            _publish(fleet, c, r, 2 * n + 1, requests[n]["done"])
        elif learns >= 0:
            index_content(fleet, tables, c, r, n, facts[n]["output"], requests[n]["done"])
        if cluster["holding"]["on"]:
            router_queue.finished(fleet, facts, c, n)
        settled(fleet, tables, c, n, False)


@inlined
def notify(fleet, c, kind, r, n, at):
    """Record an event for the hooks of a Python policy, if there is one."""
    if fleet.news.shape[1] == 0:
        return
    cluster = fleet.clusters[c]
    news = fleet.news[c, cluster["news_count"]]
    news["at"] = at
    news["kind"] = kind
    news["replica"] = r
    news["request"] = n
    cluster["news_count"] += 1


@inlined
def settled(fleet, tables, c, n, lost):
    """Settle a request, finished or lost; its follow-ups arrive after their think times."""
    cluster = fleet.clusters[c]
    cluster["unsettled"] -= 1
    facts = tables.facts[cluster["table"]]
    if cluster["accounts"]:
        cost_accounts.ended(cluster, fleet.requests[c], facts, n, lost)
    child = facts[n]["child"]
    while child >= 0:
        arrival = fleet.requests[c, n]["done"] + facts[child]["think"]
        arrival_heap.push(fleet.heap[c], cluster, arrival, child)
        child = facts[child]["sibling"]


@inlined
def index_content(fleet, tables, c, r, n, output, now):
    """Insert a prompt and ``output`` tokens of its answer into the prefix index of a replica.

    Private prompts too: no other request shares them, but they displace others in the cache.
    """
    table = fleet.clusters[c]["table"]
    fact = tables.facts[table, n]
    count = max(fact["run_count"], 1)
    keys = fleet.key_scratch[c, :count]
    tokens = fleet.run_scratch[c, :count]
    keys[0] = private_path(n)
    tokens[0] = fact["prompt"]
    for k in range(fact["run_count"]):
        keys[k] = tables.run_keys[table, fact["run_start"] + k]
        tokens[k] = tables.run_tokens[table, fact["run_start"] + k]
    tokens[count - 1] += output
    capacity = fleet.replicas_view[c, r]["capacity_tokens"]
    prefix_index.insert(index_of(fleet, c), r, keys, tokens, capacity, now)


@inner
def _publish(fleet, c, r, event, at):
    """Put a KV event of a replica on its way; events of a replica stay in order."""
    server = fleet.servers[c, r]
    kv_events = fleet.kv_events[c]
    kv_events[event]["at"] = at
    kv_events[event]["next"] = -1
    if server["event_head"] < 0:
        server["event_head"] = event
    else:
        kv_events[server["event_tail"]]["next"] = event
    server["event_tail"] = event


@inner
def take_events(fleet, tables, c, now):
    """Enter the KV events that have reached the router by ``now`` (s) into its prefix index."""
    cluster = fleet.clusters[c]
    facts = tables.facts[cluster["table"]]
    lag = cluster["events_lag_s"]
    for r in range(cluster["n_replicas"]):
        server = fleet.servers[c, r]
        event = server["event_head"]
        while event >= 0 and fleet.kv_events[c, event]["at"] + lag <= now:
            n = event // 2
            output = facts[n]["output"] if event % 2 == 1 else 0
            at = fleet.kv_events[c, event]["at"] + lag
            index_content(fleet, tables, c, r, n, output, at)
            event = fleet.kv_events[c, event]["next"]
        server["event_head"] = event


@inlined
def _advance_all(fleet, tables, c, t):
    for r in range(fleet.clusters[c]["n_replicas"]):
        if fleet.wake[c, r] <= t and not _advance_replica(fleet, tables, c, r, t):
            return False
    return True


@inner
def _scrape(fleet, c, now):
    for r in range(fleet.clusters[c]["n_replicas"]):
        server = fleet.servers[c, r]
        held = servers.blocks_held(server, fleet.phase[c, r], fleet.costs[c, r], now)
        ledger.scraped(
            fleet.replicas_view[c, r],
            server["queue_len"],
            server["n_slots"],
            held / server["num_blocks"],
            now,
        )


@inner
def scrape_if_live(fleet, c):
    """Take a snapshot now if snapshots are never old (``staleness_s`` = 0)."""
    if fleet.clusters[c]["scrape_s"] == 0.0:
        _scrape(fleet, c, fleet.clusters[c]["now"])


@inlined
def next_time(fleet, tables, c):
    """Time of the next known arrival or cluster event, s; inf: none."""
    cluster = fleet.clusters[c]
    table = cluster["table"]
    t = np.inf
    if cluster["next_root"] < tables.n_roots[table]:
        t = tables.facts[table, tables.roots[table, cluster["next_root"]]]["arrival"]
    if cluster["heap_size"] > 0:
        t = min(t, fleet.heap[c, 0]["time"])
    if cluster["next_event"] < tables.events.shape[1]:
        t = min(t, tables.events[table, cluster["next_event"]]["at"])
    return t


@inner
def _safe_horizon(clusters, servers_, c, think):
    """Time in s before which no session can send a turn that is not known yet.

    ``think``: least time in s between the end of a turn and the next one.
    """
    horizon = np.inf
    for r in range(clusters[c]["n_replicas"]):
        server = servers_[c, r]
        if server["busy"]:
            horizon = min(horizon, server["until"] + think)
        elif server["ready_at"] < np.inf:
            # A batch is formed once time has moved past the moment it is due.
            horizon = min(horizon, np.nextafter(server["ready_at"], np.inf))
    return horizon


@inner
def _ends(clusters, servers_, c, t):
    """Whether an iteration of some replica ends at ``t`` (s)."""
    for r in range(clusters[c]["n_replicas"]):
        if servers_[c, r]["busy"] and servers_[c, r]["until"] == t:
            return True
    return False


@inner
def _due_scrape(cluster, t):
    """Number of the last metrics snapshot due by ``t`` (s), or -1 if it has been taken."""
    interval = cluster["scrape_s"]
    if interval == 0.0 or interval == np.inf or t == np.inf:
        return -1
    count = np.int64(np.floor(t / interval))
    if count * interval > t:
        count -= 1
    return count if count > cluster["scrape_count"] else -1


@inlined
def advance_to_next_time(fleet, tables, c, until):
    """Advance to the next arrival or event, or to ``until`` (s) if that comes first.

    While requests wait at the router, also to the next end of an iteration, which may make room.
    Returns the time reached, s; inf at the end, NaN if the batch log is full.
    """
    cluster = fleet.clusters[c]
    while True:
        t = min(next_time(fleet, tables, c), until)
        target = t
        ends = False
        if cluster["held"] > 0:
            t = min(t, max(router_queue.overdue_at(fleet, c), cluster["now"]))
            target = min(t, _safe_horizon(fleet.clusters, fleet.servers, c, 0.0))
            ends = _ends(fleet.clusters, fleet.servers, c, target)
        elif cluster["min_think_s"] < np.inf:
            target = min(t, _safe_horizon(fleet.clusters, fleet.servers, c, cluster["min_think_s"]))
        count = _due_scrape(cluster, target)
        if count >= 0:
            target = count * cluster["scrape_s"]
        if not _advance_all(fleet, tables, c, target):
            return np.nan
        if count >= 0:
            cluster["scrape_count"] = count
            _scrape(fleet, c, target)
        elif target == t or ends:
            if cluster["scrape_s"] == 0.0 and target < np.inf:
                _scrape(fleet, c, target)
            return target
