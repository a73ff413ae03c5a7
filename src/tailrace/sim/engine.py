"""A cluster through time: arrivals, events, metrics snapshots, decisions.

:func:`next_decision` moves a cluster to its next routing decision and fills what the router sees;
:func:`assign` carries a choice out; :func:`run` does both in a loop with a built-in rule. Replicas
influence each other only through routing, so between two decisions each is advanced on its own.
"""

import numpy as np

from tailrace.compiled import inlined, jit
from tailrace.policy import ledger, prefix
from tailrace.policy.choose import NO_REPLICA, choose
from tailrace.policy.prefix import PrefixIndex
from tailrace.policy.rules import score
from tailrace.policy.view import View
from tailrace.sim import lookahead, pending
from tailrace.sim import server as servers
from tailrace.sim.kvcache import Content, KvCache
from tailrace.sim.types import (
    EVENT_DIE,
    EVENT_DRAIN,
    EVENT_RETURN,
    EVENT_SLOW,
    NEWS_FAILED,
    NEWS_FINISHED,
    NEWS_FIRST_TOKEN,
)

NEEDS_DECISION, OVER, LOG_FULL, LIMIT, STUCK = 0, 1, 2, 3, 4


@inlined
def content_of(tables, table):
    """What the prompts of one table consist of."""
    return Content(tables.facts[table], tables.run_keys[table], tables.run_tokens[table])


@inlined
def cache_of(fleet, c, r):
    """Block book-keeping of one replica."""
    return KvCache(fleet.blocks[c, r], fleet.buckets[c, r], fleet.held[c, r], fleet.rows_free[c, r])


@inlined
def index_of(fleet, c):
    """The prefix index of one cluster's router."""
    return PrefixIndex(fleet.index_entries[c], fleet.index_slots[c], fleet.index_totals[c])


# ---- time ---------------------------------------------------------------------------------------


@inlined
def _advance_replica(fleet, tables, c, r, t):
    """Bring one replica to time ``t`` (s). False if the batch log is full before that."""
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
            _hear(fleet, tables, c, r)
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
    batch["decodes"] = server["n_decodes"] * server["decoding"]
    batch["prefills"] = server["batched"] - batch["decodes"]
    batch["tokens"] = server["tokens"]
    batch["context"] = server["context"] * server["decoding"]
    batch["prefill_work"] = server["work"]
    cluster["batch_count"] += 1


@inlined
def _hear(fleet, tables, c, r):
    """What the router learns from the end of an iteration: first tokens and finished answers."""
    notices = fleet.notices[c]
    if notices[0, 0] == 0 and notices[1, 0] == 0:
        return
    cluster = fleet.clusters[c]
    requests = fleet.requests[c]
    facts = tables.facts[cluster["table"]]
    view = fleet.replicas_view[c, r]
    for k in range(1, notices[0, 0] + 1):
        n = notices[0, k]
        request = requests[n]
        ledger.answering(view, facts[n]["prompt"], request["believed"], request["sent"])
        _tell(fleet, c, NEWS_FIRST_TOKEN, r, n, request["first"])
    for k in range(1, notices[1, 0] + 1):
        n = notices[1, k]
        ledger.finished(view, fleet.router[c], facts[n]["output"])
        _tell(fleet, c, NEWS_FINISHED, r, n, requests[n]["done"])
        if facts[n]["run_count"] > 0 and fleet.servers[c, r]["caching"]:
            _index_content(fleet, tables, c, r, n, facts[n]["output"], requests[n]["done"])
        _settled(fleet, tables, c, n)


@inlined
def _tell(fleet, c, kind, r, n, at):
    """Keep a piece of news for a policy written in Python, if one listens."""
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
def _settled(fleet, tables, c, n):
    """A request ended, well or badly: its follow-up arrives after the think time."""
    cluster = fleet.clusters[c]
    cluster["unsettled"] -= 1
    facts = tables.facts[cluster["table"]]
    child = facts[n]["child"]
    if child >= 0:
        arrival = fleet.requests[c, n]["done"] + facts[child]["think"]
        pending.push(fleet.heap[c], cluster, arrival, child)


@inlined
def _index_content(fleet, tables, c, r, n, output, now):
    """Tell the prefix index that a prompt, continued by ``output`` tokens, is on a replica."""
    table = fleet.clusters[c]["table"]
    fact = tables.facts[table, n]
    start = fact["run_start"]
    count = fact["run_count"]
    tokens = fleet.run_scratch[c, :count]
    for k in range(count):
        tokens[k] = tables.run_tokens[table, start + k]
    tokens[count - 1] += output
    keys = tables.run_keys[table, start : start + count]
    capacity = fleet.replicas_view[c, r]["capacity_tokens"]
    prefix.insert(index_of(fleet, c), r, keys, tokens, capacity, now)


@inlined
def _advance_all(fleet, tables, c, t):
    for r in range(fleet.clusters[c]["n_replicas"]):
        if fleet.wake[c, r] <= t and not _advance_replica(fleet, tables, c, r, t):
            return False
    return True


@inlined
def _advance_with_metrics(fleet, tables, c, t):
    """Bring all replicas to ``t`` (s), taking the last metrics snapshot due on the way."""
    cluster = fleet.clusters[c]
    interval = cluster["scrape_s"]
    if interval == np.inf:
        return _advance_all(fleet, tables, c, t)
    if interval > 0.0 and t < np.inf:
        count = np.int64(np.floor(t / interval))
        if count * interval > t:
            count -= 1
        if count > cluster["scrape_count"]:
            if not _advance_all(fleet, tables, c, count * interval):
                return False
            cluster["scrape_count"] = count
            _scrape(fleet, c, count * interval)
    if not _advance_all(fleet, tables, c, t):
        return False
    if interval == 0.0 and t < np.inf:
        _scrape(fleet, c, t)
    return True


@jit
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


@inlined
def _next_time(fleet, tables, c):
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


@inlined
def _safe_horizon(fleet, c):
    """Before this time, s, no session can send a turn that is not known yet."""
    cluster = fleet.clusters[c]
    earliest = np.inf
    for r in range(cluster["n_replicas"]):
        if fleet.servers[c, r]["busy"]:
            earliest = min(earliest, fleet.servers[c, r]["until"])
    return earliest + cluster["min_think_s"]


@inlined
def _form_before(fleet, tables, c, limit):
    """Let idle replicas with work begin, if they are to do so before ``limit`` (s)."""
    for r in range(fleet.clusters[c]["n_replicas"]):
        server = fleet.servers[c, r]
        if not server["busy"] and server["ready_at"] < limit:
            just_after = np.nextafter(server["ready_at"], np.inf)
            if not _advance_replica(fleet, tables, c, r, just_after):
                return False
    return True


@inlined
def _advance_to_next_time(fleet, tables, c):
    """Move to the next arrival or event. Returns its time in s, inf at the end, NaN if the log is full."""
    cluster = fleet.clusters[c]
    while cluster["min_think_s"] < np.inf:
        t = _next_time(fleet, tables, c)
        if not _form_before(fleet, tables, c, t):
            return np.nan
        horizon = _safe_horizon(fleet, c)
        if t <= horizon:
            break
        if not _advance_with_metrics(fleet, tables, c, horizon):
            return np.nan
    t = _next_time(fleet, tables, c)
    if not _advance_with_metrics(fleet, tables, c, t):
        return np.nan
    return t


# ---- cluster events -----------------------------------------------------------------------------


@jit
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


@jit
def _kill(fleet, tables, c, r, now):
    """A replica dies: what had begun to answer has failed, the rest is routed again at once."""
    cluster = fleet.clusters[c]
    requests = fleet.requests[c]
    homeless, failed = servers.die(
        fleet.servers[c, r],
        fleet.slots[c, r],
        fleet.phase[c, r],
        cache_of(fleet, c, r),
        requests,
        tables.facts[cluster["table"]],
        fleet.costs[c, r],
        now,
    )
    while homeless >= 0:
        following = requests[homeless]["next"]
        _tell(fleet, c, NEWS_FAILED, r, homeless, now)
        pending.push(fleet.heap[c], cluster, now, homeless)
        homeless = following
    while failed >= 0:
        following = requests[failed]["next"]
        _tell(fleet, c, NEWS_FAILED, r, failed, now)
        _settled(fleet, tables, c, failed)
        failed = following
    ledger.lost(fleet.replicas_view[c, r])
    prefix.forget(index_of(fleet, c), r)


# ---- decisions ----------------------------------------------------------------------------------


@jit
def next_decision(fleet, tables, c):
    """Move cluster ``c`` to its next routing decision and fill its view.

    Returns NEEDS_DECISION, OVER (every request is settled or can never be routed), LOG_FULL (empty
    Fleet.batches and call again) or STUCK.
    """
    cluster = fleet.clusters[c]
    table = cluster["table"]
    while True:
        t = _advance_to_next_time(fleet, tables, c)
        if np.isnan(t):
            return LOG_FULL
        if cluster["stuck"]:
            return STUCK
        if t == np.inf:
            return OVER
        cluster["now"] = t
        if (
            cluster["next_event"] < tables.events.shape[1]
            and tables.events[table, cluster["next_event"]]["at"] <= t
        ):
            _apply_event(fleet, tables, c, tables.events[table, cluster["next_event"]])
            continue
        n = _take_arrival(fleet, tables, c, t)
        if not _any_available(fleet, c):
            _hold(fleet, tables, c, n)
            continue
        _fill_view(fleet, tables, c, n, t)
        cluster["request"] = n
        return NEEDS_DECISION


@inlined
def _take_arrival(fleet, tables, c, t):
    """The request that arrives next; of several at one instant, the one with the lowest number."""
    cluster = fleet.clusters[c]
    table = cluster["table"]
    root = np.int64(2**62)
    if cluster["next_root"] < tables.n_roots[table]:
        candidate = np.int64(tables.roots[table, cluster["next_root"]])
        if tables.facts[table, candidate]["arrival"] <= t:
            root = candidate
    heap = fleet.heap[c]
    if cluster["heap_size"] > 0 and heap[0]["time"] <= t and heap[0]["request"] < root:
        n = pending.pop(heap, cluster)
    else:
        n = root
        cluster["next_root"] += 1
    request = fleet.requests[c, n]
    if np.isnan(request["arrived"]):
        request["arrived"] = t
    return n


@inlined
def _any_available(fleet, c):
    for r in range(fleet.clusters[c]["n_replicas"]):
        if fleet.replicas_view[c, r]["available"]:
            return True
    return False


@jit
def _hold(fleet, tables, c, n):
    """No replica can take the request: it waits at the router until one returns, if one does."""
    cluster = fleet.clusters[c]
    events = tables.events[cluster["table"]]
    for k in range(cluster["next_event"], events.size):
        if events[k]["kind"] == EVENT_RETURN and events[k]["at"] < np.inf:
            pending.push(fleet.heap[c], cluster, events[k]["at"], n)
            return
    fleet.requests[c, n]["replica"] = NO_REPLICA


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
    view["priority"] = fact["priority"]
    view["ttft_slo_s"] = fact["ttft_slo"]
    view["tpot_slo_s"] = fact["tpot_slo"]
    for r in range(cluster["n_replicas"]):
        if cluster["view_context"]:
            context = servers.answering_context(fleet.servers[c, r], fleet.costs[c, r], now)
            fleet.replicas_view[c, r]["context_tokens"] = context
        if cluster["view_prefix"]:
            _look_up_prefix(fleet, tables, c, r, n)


@inlined
def _look_up_prefix(fleet, tables, c, r, n):
    """What the prefix index believes replica ``r`` has cached of request ``n``."""
    table = fleet.clusters[c]["table"]
    fact = tables.facts[table, n]
    replica = fleet.replicas_view[c, r]
    replica["cached_tokens"] = 0
    if fact["run_count"] == 0 or not fleet.servers[c, r]["caching"]:
        return
    index = index_of(fleet, c)
    start = fact["run_start"]
    keys = tables.run_keys[table, start : start + fact["run_count"]]
    tokens = tables.run_tokens[table, start : start + fact["run_count"]]
    size = fleet.servers[c, r]["block_size"]
    matched = prefix.match_tokens(index, r, keys, tokens)
    # At least one token has to be computed to get an answer.
    computable = (fact["prompt"] - 1) // size * size
    replica["cached_tokens"] = min(matched // size * size, computable)
    replica["index_tokens"] = prefix.held_tokens(index, r)


@inlined
def assign(fleet, tables, c, r):
    """Send the request at hand to replica ``r``."""
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
    fleet.router[c]["decisions"] += 1
    ledger.sent(view, fact["prompt"], view["cached_tokens"], now)
    if fact["session"] >= 0:
        fleet.last_replica[c, fact["session"]] = r
    if fact["run_count"] > 0 and fleet.servers[c, r]["caching"]:
        _index_content(fleet, tables, c, r, n, 0, now)
    servers.receive(fleet.servers[c, r], fleet.requests[c], fleet.costs[c, r], n, now)
    fleet.wake[c, r] = servers.wake_time(fleet.servers[c, r])
    cluster["request"] = -1


@inlined
def decide(fleet, tables, c, rule, params, lowest_id_wins):
    """Choice of a built-in rule for the request at hand."""
    n = fleet.clusters[c]["n_replicas"]
    scores = fleet.scores[c, :n]
    replicas = fleet.replicas_view[c, :n]
    if rule >= lookahead.LOOKAHEAD:
        content = content_of(tables, fleet.clusters[c]["table"])
        lookahead.marginal_costs(fleet, content, cache_of(fleet, c, 0), c, rule, scores)
    else:
        view = View(fleet.requests_view[c], replicas, fleet.costs[c, :n], fleet.router[c])
        score(rule, view, params, scores)
    return choose(scores, replicas, fleet.router[c], lowest_id_wins)


@jit
def run(fleet, tables, c, rule, params, lowest_id_wins, limit):
    """Let a built-in rule route until the end, or for at most ``limit`` decisions."""
    for _ in range(limit):
        if fleet.clusters[c]["request"] < 0:
            status = next_decision(fleet, tables, c)
            if status != NEEDS_DECISION:
                return status
        assign(fleet, tables, c, decide(fleet, tables, c, rule, params, lowest_id_wins))
    return LIMIT


@jit
def replay(fleet, tables, c, replicas):
    """Send every request to its recorded replica; ``replicas`` int64 [R]."""
    while True:
        status = next_decision(fleet, tables, c)
        if status != NEEDS_DECISION:
            return status
        assign(fleet, tables, c, replicas[fleet.clusters[c]["request"]])
