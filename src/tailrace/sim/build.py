"""From settings and request tables to the arrays of the compiled engine."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Engine, Event, Replica, Router
from tailrace.policy.choose import mix
from tailrace.policy.prefix import new_index
from tailrace.policy.view import NEVER, REPLICA_VIEW, REQUEST_VIEW, ROUTER
from tailrace.sim import server as servers
from tailrace.sim.cost import cost_rows, prefill_tokens_per_s
from tailrace.sim.devices import cost_of, num_blocks_of
from tailrace.sim.kvcache import KvCache
from tailrace.sim.result import BATCH
from tailrace.sim.types import (
    BLOCK,
    CLUSTER,
    EVENT,
    EVENT_CODES,
    HEAP_ENTRY,
    NEWS,
    REQUEST_FACT,
    REQUEST_STATE,
    SCHEDULER_CODES,
    SERVER,
    SLOT_ROWS,
    Fleet,
    Tables,
)
from tailrace.workload.predict import predicted_output
from tailrace.workload.prefix import content_keys, prefix_hash
from tailrace.workload.table import RequestTable


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
    tables: Sequence[RequestTable], events: Sequence[Event], router: Router, seed: int
) -> Tables:
    """Lay out request tables for the engine, padded to the longest."""
    count = len(tables)
    rows = max(len(t) for t in tables)
    runs = max(len(t.runs) for t in tables)
    facts = np.zeros((count, rows), REQUEST_FACT)
    roots = np.zeros((count, rows), np.int32)
    n_roots = np.zeros(count, np.int64)
    run_keys = np.zeros((count, runs), np.uint64)
    run_tokens = np.zeros((count, runs), np.int32)
    for g, table in enumerate(tables):
        _fill_facts(facts[g, : len(table)], table, router, seed)
        without_parent = np.flatnonzero(table.rows["parent"] < 0)
        n_roots[g] = len(without_parent)
        roots[g, : len(without_parent)] = without_parent
        run_keys[g, : len(table.runs)] = content_keys(table).run_key
        run_tokens[g, : len(table.runs)] = table.runs["tokens"]
    timeline = np.zeros((count, len(events)), EVENT)
    for k, event in enumerate(sorted(events, key=lambda e: e.at_s)):
        timeline[:, k] = (event.at_s, event.replica, EVENT_CODES[event.kind], event.factor)
    return Tables(facts, roots, n_roots, run_keys, run_tokens, timeline)


def _fill_facts(facts: NDArray[np.void], table: RequestTable, router: Router, seed: int) -> None:
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
    facts["child"] = -1
    children = np.flatnonzero(rows["parent"] >= 0)
    facts["child"][rows["parent"][children]] = children


def build_fleet(
    cluster: Cluster,
    tables: Sequence[RequestTable],
    laid_out: Tables,
    router: Router,
    engine: Engine,
    seeds: Sequence[int],
    *,
    record_batches: int = 0,
    record_news: bool = False,
    lookahead: bool = False,
) -> Fleet:
    """Return ``len(seeds)`` equal clusters at time 0; cluster c plays table ``c % len(tables)``."""
    replicas = cluster.expanded()
    c, n = len(seeds), len(replicas)
    rows = laid_out.facts.shape[1]
    slots = max(r.batch_cap for r in replicas)
    blocks = max((num_blocks_of(r) for r in replicas if _caching(r)), default=0)
    buckets = 1 << max(2 * blocks - 1, 1).bit_length()
    explicit = any(_explicit(r) for r in replicas)
    longest = max(_longest_row(replicas, t) for t in tables) if explicit else 0
    may_wait = laid_out.events.shape[1] > 0
    queue = rows if may_wait else max(int((t.rows["parent"] >= 0).sum()) for t in tables)
    sessions = max(int(t.rows["session"].max()) + 1 for t in tables)
    has_content = blocks > 0 and laid_out.run_keys.shape[1] > 0
    index = new_index(c * n, router.index_entries if has_content else 1)
    fleet = Fleet(
        clusters=np.zeros(c, CLUSTER),
        servers=np.zeros((c, n), SERVER),
        wake=np.full((c, n), np.inf),
        slots=np.zeros((c, n, SLOT_ROWS, slots), np.int64),
        phase=np.zeros((c, n, max(r.block_size for r in replicas)), np.int64),
        notices=np.zeros((c, 2, slots + 1), np.int64),
        requests=np.zeros((c, rows), REQUEST_STATE),
        heap=np.zeros((c, queue + 1), HEAP_ENTRY),
        blocks=np.zeros((c, n, blocks), BLOCK),
        buckets=np.zeros((c, n, buckets), np.int32),
        held=np.zeros((c, n, slots if explicit else 0, longest), np.int32),
        rows_free=np.zeros((c, n, slots + 1), np.int64),
        batches=np.zeros((c, record_batches), BATCH),
        news=np.zeros((c, 3 * rows + 1 if record_news else 0), NEWS),
        run_scratch=np.zeros((c, int(laid_out.facts["run_count"].max())), np.int32),
        ghost=np.zeros((c, 1), SERVER),
        ghost_slots=np.zeros((c, SLOT_ROWS, slots), np.int64),
        ghost_phase=np.zeros((c, max(r.block_size for r in replicas)), np.int64),
        ghost_requests=np.zeros((c, rows if lookahead else 0), REQUEST_STATE),
        ghost_numbers=np.zeros((c, rows if lookahead else 0), np.int64),
        requests_view=np.zeros(c, REQUEST_VIEW),
        replicas_view=np.zeros((c, n), REPLICA_VIEW),
        router=np.zeros(c, ROUTER),
        costs=np.broadcast_to(cost_rows([cost_of(r) for r in replicas]), (c, n)).copy(),
        last_replica=np.full((c, sessions), -1, np.int32),
        index_entries=index.entries.reshape(c, n, -1),
        index_slots=index.slots.reshape(c, n, -1),
        index_totals=index.totals.reshape(c, n),
        scores=np.zeros((c, n)),
    )
    for number, seed in enumerate(seeds):
        _start_cluster(fleet, number, laid_out, tables, router, seed)
        for r, replica in enumerate(replicas):
            _start_server(fleet, number, r, replica, engine)
    return fleet


def _caching(replica: Replica) -> bool:
    return replica.scheduler == "vllm_v1" and replica.prefix_caching


def _explicit(replica: Replica) -> bool:
    return replica.scheduler == "vllm_v1" and (
        replica.prefix_caching or replica.preallocate_tokens > 0
    )


def _longest_row(replicas: Sequence[Replica], table: RequestTable) -> int:
    """Most blocks a request can hold."""
    rows = table.rows
    tokens = int((rows["prompt_tokens"].astype(np.int64) + rows["output_tokens"]).max())
    return max(
        -(-tokens // r.block_size) + -(-r.preallocate_tokens // r.block_size) + 1 for r in replicas
    )


def _start_cluster(
    fleet: Fleet,
    c: int,
    laid_out: Tables,
    tables: Sequence[RequestTable],
    router: Router,
    seed: int,
) -> None:
    table = tables[c % len(tables)]
    cluster = fleet.clusters[c]
    cluster["table"] = c % len(tables)
    cluster["n_replicas"] = fleet.servers.shape[1]
    cluster["n_requests"] = cluster["unsettled"] = len(table)
    cluster["request"] = -1
    cluster["view_context"] = cluster["view_prefix"] = 1
    cluster["scrape_s"] = router.staleness_s
    cluster["scrape_count"] = -1
    thinks = table.rows["think_s"][table.rows["parent"] >= 0]
    cluster["min_think_s"] = thinks.min() if len(thinks) else np.inf
    cluster["prior_output"] = router.prior_output_tokens
    cluster["static_prediction"] = router.predictor != "mean"
    with np.errstate(over="ignore"):  # the hash is meant to wrap around
        fleet.router[c]["rng"] = mix(np.uint64(seed))
    requests = fleet.requests[c]
    facts = laid_out.facts[cluster["table"]]
    for name in ("arrived", "sent", "scheduled", "first", "done"):
        requests[name] = np.nan
    requests["prompt"] = facts["prompt"]
    requests["output"] = facts["output"]
    requests["next"] = requests["replica"] = requests["cached"] = -1


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
    server["caching"] = _caching(replica)
    server["explicit"] = _explicit(replica)
    server["extra_blocks"] = -(-replica.preallocate_tokens // replica.block_size)
    server["configured_speed"] = server["speed"] = replica.speed
    server["compat"] = engine.vidur_compat
    server["exact"] = engine.exact
    kv = KvCache(fleet.blocks[c, r], fleet.buckets[c, r], fleet.held[c, r], fleet.rows_free[c, r])
    servers.empty(server, fleet.phase[c, r], kv)
    view = fleet.replicas_view[c, r]
    view["available"] = 1
    view["speed"] = replica.speed
    view["capacity_tokens"] = blocks * replica.block_size
    view["block_size"] = replica.block_size
    chunked = replica.scheduler in ("sarathi", "vllm_v1")
    view["token_budget"] = replica.chunk_size if chunked else replica.max_batch_tokens
    view["batch_cap"] = replica.batch_cap
    view["prefill_tokens_per_s"] = prefill_tokens_per_s(
        fleet.costs[c, r], view["token_budget"], replica.speed
    )
    view["metrics_at"] = NEVER
