"""Fills the arrays of the compiled engine from settings and request tables."""

import itertools
from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Engine, Event, Replica, RouterSettings
from tailrace.sim import server as servers
from tailrace.sim.allocation import Allocation, allocation_for, is_explicit, new_fleet, new_tables
from tailrace.sim.chains import cut, new_scratch
from tailrace.sim.cost_accounts import E2E_TARGET_S
from tailrace.sim.kvcache import KvCache
from tailrace.sim.types import EVENT_CODES, LEARNS_CODES, SCHEDULER_CODES, Fleet, Tables
from tailrace.view.devices import num_blocks_of
from tailrace.view.prefix_index import PrefixIndex, forget
from tailrace.view.replicas import idle_views, is_caching, replica_costs
from tailrace.view.selection import mix
from tailrace.workload.predict import predicted_output
from tailrace.workload.prefix import content_hash, content_keys, prefix_hash
from tailrace.workload.table import RequestTable

_serial_numbers = itertools.count(1)
# glibc gives freed memory back to the kernel beyond twice the largest block that was ever freed. A
# simulation frees some megabytes; asking for them again costs a tenth of the time of a short one.
np.empty(16 << 20, np.uint8)


def why_not_compiled(cluster: Cluster) -> str | None:
    """Say why the compiled engine does not cover a cluster; None if it does."""
    for replica in cluster.replicas:
        if replica.scheduler not in SCHEDULER_CODES:
            return f"scheduler {replica.scheduler} runs on the reference engine only"
        if replica.num_stages > 1:
            return "pipeline stages run on the reference engine only"
        if replica.scheduler == "vllm_v1" and replica.chunk_size < replica.batch_cap:
            return "vllm_v1 with chunk_size below batch_cap runs on the reference engine only"
    return None


def build_tables(
    tables: Sequence[RequestTable], events: Sequence[Event], router: RouterSettings, seed: int
) -> Tables:
    """Lay out request tables for the engine, padded to the longest."""
    room = Allocation(
        requests=max(len(t) for t in tables),
        runs=max(len(t.runs) for t in tables),
        events=len(events),
    )
    laid_out = new_tables(room, len(tables))
    for g, table in enumerate(tables):
        lay_out(laid_out, g, table, events, router, seed)
    return laid_out


def lay_out(
    tables: Tables,
    g: int,
    table: RequestTable,
    events: Sequence[Event],
    router: RouterSettings,
    seed: int,
) -> None:
    """Write ``table`` into tables large enough for it, as number ``g``."""
    _fill_facts(tables.facts[g, : len(table)], table, router, seed)
    without_parent = np.flatnonzero(table.rows["parent"] < 0)
    tables.n_roots[g] = len(without_parent)
    tables.roots[g, : len(without_parent)] = without_parent
    tables.run_keys[g, : len(table.runs)] = content_keys(table)
    tables.run_tokens[g, : len(table.runs)] = table.runs["tokens"]
    cut(
        tables.facts[g, : len(table)],
        tables.run_keys[g],
        tables.run_tokens[g],
        tables.pieces[g],
        new_scratch(len(table.runs)),
    )
    tables.events[g]["at"] = np.inf
    for k, event in enumerate(sorted(events, key=lambda e: e.at_s)):
        kind = EVENT_CODES[event.kind]
        tables.events[g, k] = (event.at_s, event.replica, kind, event.factor)


def _fill_facts(
    facts: NDArray[np.void], table: RequestTable, router: RouterSettings, seed: int
) -> None:
    rows = table.rows
    for target, source in (
        ("arrival", "arrival_s"),
        ("think", "think_s"),
        ("ttft_slo", "ttft_slo_s"),
        ("tpot_slo", "tpot_slo_s"),
        ("run_start", "run_start"),
        ("prompt", "prompt_tokens"),
        ("output", "output_tokens"),
        ("session", "session"),
        ("turn", "turn"),
        ("run_count", "run_count"),
        ("priority", "priority"),
    ):
        facts[target] = rows[source]
    predicted = predicted_output(table, router.predictor, router.predictor_sigma, seed)
    if predicted is not None:
        facts["predicted"] = predicted
    facts["prefix_hash"] = prefix_hash(table)
    facts["content_hash"] = content_hash(table)
    facts["tenant"] = np.unique(rows["tenant"], return_inverse=True)[1]
    facts["child"] = facts["sibling"] = -1
    children = np.flatnonzero(rows["parent"] >= 0)
    children = children[np.argsort(rows["parent"][children], kind="stable")]
    parents = rows["parent"][children]
    is_first = np.diff(parents, prepend=-1) > 0
    facts["child"][parents[is_first]] = children[is_first]
    later = np.flatnonzero(~is_first)
    facts["sibling"][children[later - 1]] = children[later]


def build_fleet(
    cluster: Cluster,
    tables: Sequence[RequestTable],
    laid_out: Tables,
    router: RouterSettings,
    engine: Engine,
    seeds: Sequence[int],
    *,
    record_batches: int = 0,
    record_news: bool = False,
    lookahead: bool = False,
) -> Fleet:
    """Return ``len(seeds)`` equal clusters at time 0; cluster c plays table ``c % len(tables)``."""
    replicas = cluster.expanded()
    events = laid_out.events.shape[1]
    needs = [allocation_for(replicas, table, router, events) for table in tables]
    fleet = new_fleet(
        reduce(Allocation.joined, needs),
        len(seeds),
        record_batches=record_batches,
        record_news=record_news,
        lookahead=lookahead,
    )
    for c, seed in enumerate(seeds):
        g = c % len(tables)
        set_up(fleet, laid_out, c, g, replicas, tables[g], router, engine, seed)
    return fleet


def set_up(
    fleet: Fleet,
    laid_out: Tables,
    c: int,
    g: int,
    replicas: Sequence[Replica],
    table: RequestTable,
    router: RouterSettings,
    engine: Engine,
    seed: int,
) -> None:
    """Reset cluster ``c`` to time 0, to play table number ``g``."""
    n = len(replicas)
    for array in (
        *(fleet.clusters, fleet.servers, fleet.requests),
        *(fleet.replicas_view, fleet.router, fleet.flows),
    ):
        # As bytes: NumPy would write records field by field, ten times as slowly.
        array[c : c + 1].view(np.uint8)[...] = 0
    fleet.wake[c] = np.inf
    fleet.last_replica[c] = -1
    fleet.costs[c, :n] = replica_costs(replicas)
    fleet.replicas_view[c, :n] = idle_views(replicas)
    index = PrefixIndex(fleet.index_entries[c], fleet.index_slots[c], fleet.index_totals[c])
    _start_cluster(fleet, c, g, laid_out, table, router, seed)
    fleet.clusters[c]["n_replicas"] = n
    for r, replica in enumerate(replicas):
        _start_server(fleet, c, r, replica, engine)
        forget(index, r)


def _start_cluster(
    fleet: Fleet,
    c: int,
    g: int,
    laid_out: Tables,
    table: RequestTable,
    router: RouterSettings,
    seed: int,
) -> None:
    cluster = fleet.clusters[c]
    cluster["table"] = g
    cluster["n_requests"] = cluster["unsettled"] = len(table)
    cluster["request"] = cluster["highest"] = -1
    cluster["held_head"] = cluster["held_tail"] = -1
    cluster["deadline_next"] = cluster["deadline_last"] = -1
    cluster["serial"] = next(_serial_numbers)
    cluster["soft_centre"], cluster["soft_scale"], cluster["early_share"] = 1.0, 0.1, 0.5
    cluster["late_share"] = 1.0
    cluster["e2e_target"], cluster["latency_limit"] = E2E_TARGET_S, np.inf
    cluster["view_context"] = cluster["view_prefix"] = cluster["accounts"] = 1
    cluster["learns"] = LEARNS_CODES[router.prefix_learns]
    cluster["events_lag_s"] = router.events_lag_s
    cluster["scrape_s"] = router.staleness_s
    cluster["scrape_count"] = -1
    thinks = table.rows["think_s"][table.rows["parent"] >= 0]
    cluster["min_think_s"] = thinks.min() if len(thinks) else np.inf
    cluster["prior_output"] = router.prior_output_tokens
    cluster["static_prediction"] = router.predictor != "mean"
    with np.errstate(over="ignore"):  # the hash wraps around
        fleet.router[c]["rng"] = mix(np.uint64(seed))
    requests = fleet.requests[c]
    facts = laid_out.facts[cluster["table"]]
    for name in ("arrived", "sent", "scheduled", "first", "done"):
        requests[name] = np.nan
    requests["prompt"] = facts["prompt"]
    requests["output"] = facts["output"]
    requests["next"] = requests["child"] = requests["replica"] = requests["cached"] = -1
    requests["early"] = requests["late"] = -1


def _start_server(fleet: Fleet, c: int, r: int, replica: Replica, engine: Engine) -> None:
    server = fleet.servers[c, r]
    blocks = num_blocks_of(replica)
    server["scheduler"] = SCHEDULER_CODES[replica.scheduler]
    server["num_blocks"] = blocks
    server["block_size"] = replica.block_size
    server["batch_cap"] = replica.batch_cap
    server["chunk_size"] = replica.chunk_size
    server["max_batch_tokens"] = replica.max_batch_tokens
    server["watermark_blocks"] = int(replica.watermark * blocks)
    server["caching"] = is_caching(replica)
    server["explicit"] = is_explicit(replica)
    server["counted"] = not is_explicit(replica) or replica.preallocate_tokens == 0
    server["extra_blocks"] = -(-replica.preallocate_tokens // replica.block_size)
    server["configured_speed"] = server["speed"] = replica.speed
    server["compat"] = engine.vidur_compat
    server["exact"] = engine.exact
    server["ordered"] = replica.scheduling_policy == "priority"
    kv = KvCache(fleet.extents[c, r], fleet.buckets[c, r], fleet.held[c, r], fleet.rows_free[c, r])
    servers.empty(server, fleet.phase[c, r], kv)
