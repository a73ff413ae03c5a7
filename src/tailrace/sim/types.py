"""Memory layout of the compiled engine: dtypes with a comment per field, and the arrays of a fleet.

A *fleet* is ``C`` independent clusters of up to ``N`` replicas, all in a handful of arrays whose
first axis is the cluster. One cluster is therefore one row everywhere, and copying a cluster is
copying rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.view.holding import HOLDING
from tailrace.view.ordering import ORDER

SARATHI, VLLM, VLLM_V1 = 0, 1, 2
SCHEDULER_CODES = {"sarathi": SARATHI, "vllm": VLLM, "vllm_v1": VLLM_V1}

#: One server: its configuration, what it is doing, and its totals.
SERVER = np.dtype(
    [
        # configuration
        ("scheduler", "i8"),
        ("num_blocks", "i8"),
        ("block_size", "i8"),
        ("batch_cap", "i8"),
        ("chunk_size", "i8"),
        ("max_batch_tokens", "i8"),
        ("watermark_blocks", "i8"),
        ("caching", "i8"),  # 1: block-level prefix cache
        ("explicit", "i8"),  # 1: each request has blocks of its own (see batching.py)
        ("counted", "i8"),  # 1: the blocks that decodes take are counted by phase; 0: by request
        ("extra_blocks", "i8"),  # taken along with each new block (vllm_v1)
        ("configured_speed", "f8"),
        ("compat", "i8"),  # 1: with Vidur's defects
        ("exact", "i8"),  # 1: no fast-forward
        ("ordered", "i8"),  # 1: serves by priority (vllm_v1), else first come, first served
        ("hidden", "i8"),  # 1: has no room for the request being routed, see router_queue.py
        # time
        ("speed", "f8"),
        ("pace", "f8"),  # speed with which the running stretch began; it keeps it to its end
        ("busy", "i8"),  # 1: an iteration is running
        ("start", "f8"),  # when it began, s
        ("until", "f8"),  # when it (or the stretch) ends, s
        ("ready_at", "f8"),  # idle with work since, s; inf: nothing to do
        # the running iteration
        ("steps", "i8"),  # equal decode iterations in one stretch
        ("decoding", "i8"),  # 1: the decodes take part
        ("tokens", "i8"),  # T
        ("work", "f8"),  # W
        ("batched", "i8"),  # requests in the batch
        ("parked", "i8"),  # decodes, the last of them, that sit this iteration out (by priority)
        ("parked_context", "i8"),  # tokens they have processed
        # requests
        ("queue_head", "i8"),  # first of the waiting requests, see batching.py; -1: none
        ("queue_tail", "i8"),
        ("queue_len", "i8"),
        ("n_slots", "i8"),  # requests that hold blocks
        ("n_decodes", "i8"),  # of those, the first ones: prompt done
        ("tick", "i8"),  # decode iterations so far
        ("context", "i8"),  # K: tokens processed by the decodes
        ("next_finish", "i8"),  # tick at which the next decode is done
        ("next_event", "i8"),  # not counted: tick at which a decode next needs or fills a block
        ("next_fill", "i8"),  # counted: tick at which a block must be made findable at once
        ("reached", "i8"),  # with caching: tick up to which growing extents are computed
        ("fresh", "i8"),  # counted vllm_v1: extra blocks due at the next decode iteration
        ("free_blocks", "i8"),
        ("extents_fresh", "i8"),  # extents used so far; those beyond need no clearing
        ("extents_spare", "i8"),  # first extent given back, linked by EXTENT.next; 0: none
        ("preempted_context", "i8"),  # tokens of answering requests that were preempted
        ("oldest", "i8"),  # by priority: requests without a first token as sent, -1: none
        ("newest", "i8"),
        ("event_head", "i8"),  # KV events on their way to the router, linked by KV_EVENT.next; -1
        ("event_tail", "i8"),
        ("active_at", "i8"),  # requests received and finished when active_blocks was counted last
        # totals
        ("requests", "i8"),
        ("iterations", "i8"),
        ("busy_s", "f8"),
        ("sum_tokens", "i8"),
        ("sum_context", "i8"),
        ("sum_work", "f8"),
        ("sum_batched", "i8"),
        ("preemptions", "i8"),
        ("partial_preemptions", "i8"),
        ("stuck", "i8"),  # 1: has work but can form no batch
    ]
)

#: Rows of the slot matrix [SLOT_ROWS, S] of a server: one column per resident request, in batch
#: order.
SLOT_REQUEST, SLOT_FINISH, SLOT_OFFSET, SLOT_CHUNK, SLOT_EVENT, SLOT_ROW = 0, 1, 2, 3, 4, 5
SLOT_ROWS = 6
# REQUEST: row of the request. FINISH: tick at which it is done. OFFSET: tokens processed minus
# tick, constant while it decodes. CHUNK: prompt tokens in the running iteration. EVENT: tick of its
# next block event, unless blocks are counted. ROW: its row of Server.held.

NOT_ARRIVED, WAITING, RUNNING, DONE, LOST = 0, 1, 2, 3, 4

#: The changing part of one request.
REQUEST_STATE = np.dtype(
    [
        ("arrived", "f8"),
        ("sent", "f8"),  # to the replica it is on now
        ("scheduled", "f8"),
        ("first", "f8"),
        ("done", "f8"),
        ("deadline", "f8"),  # for the first token; see cost_accounts.py
        ("priority", "i8"),  # at its server, lower goes first
        ("prompt", "i4"),  # tokens to prefill; grows when it is preempted
        ("output", "i4"),  # tokens to decode, shrinks likewise
        ("processed", "i4"),  # valid outside the decode slots
        ("blocks", "i4"),  # held, explicit only; of counted decodes: when their prompt ended
        ("next", "i4"),  # in the waiting queue
        ("child", "i4"),  # the same, by priority: its first child in the heap
        ("older", "i4"),  # by priority: neighbours as sent among those without a first token
        ("newer", "i4"),
        ("replica", "i4"),
        ("status", "i4"),
        ("restarts", "i4"),
        ("reroutes", "i4"),
        ("cached", "i4"),  # prompt tokens found cached at first admission; -1: not admitted yet
        ("believed", "i4"),  # what the router believed to be cached
        ("context", "i4"),  # tokens the router has seen of it, while it is preempted
        ("predicted", "i4"),  # output tokens the router predicted when it sent it
        ("early", "i4"),  # neighbours by deadline among those without a first token
        ("late", "i4"),
        ("overdue", "i4"),  # 1: counted as past its deadline
        ("charged", "i4"),  # tokens its client was charged; -1: will be; see router_queue.py
    ]
)

#: Consecutive KV blocks of a replica with prefix caching, see kvcache.py. Number 0 is no extent but
#: the head of the free list, a circle; elsewhere 0 means none.
EXTENT = np.dtype(
    [
        ("chain", "i4"),  # content, see chains.py; -1: none
        ("first", "i4"),  # number of its first block within the prompts
        ("count", "i4"),  # blocks
        ("refs", "i4"),  # requests that hold it
        ("prev", "i4"),  # neighbours in the free list
        ("next", "i4"),
        ("before", "i4"),  # neighbours on the chain, of the oldest of twins
        ("after", "i4"),
        ("older", "i4"),  # twins: extents of the same content
        ("younger", "i4"),
        ("rest", "i4"),  # what was split off its end, for those who hold both
        ("grower", "i4"),  # 1 + row of the request that makes it longer by decoding, 0: none
    ]
)

#: One cluster.
CLUSTER = np.dtype(
    [
        ("now", "f8"),
        ("table", "i8"),  # which request table it plays
        ("n_replicas", "i8"),
        ("n_requests", "i8"),
        ("next_root", "i8"),  # position in the list of requests without a parent
        ("heap_size", "i8"),
        ("next_event", "i8"),  # position in the list of cluster events
        ("unsettled", "i8"),  # requests not yet done or lost
        ("request", "i8"),  # being routed; -1: none
        ("scrape_s", "f8"),  # metrics interval; 0: always fresh; inf: never
        ("scrape_count", "i8"),  # number of the latest snapshot
        ("min_think_s", "f8"),  # inf without sessions
        ("prior_output", "f8"),
        ("static_prediction", "i8"),  # 1: predicted outputs come from the table
        ("batch_count", "i8"),  # recorded iterations in Fleet.batches
        ("news_count", "i8"),  # recorded news in Fleet.news
        ("order", ORDER),  # by which requests get their priorities
        ("holding", HOLDING),  # when requests wait at the router, see router_queue.py
        ("held", "i8"),  # requests that wait there
        ("held_head", "i8"),  # in the order of arrival, -1: none
        ("held_tail", "i8"),
        ("virtual", "f8"),  # what the client served last had been served before, tokens
        ("view_context", "i8"),  # 1: fill the view's context_tokens and moving averages
        ("view_prefix", "i8"),  # 1: fill the view's cached_tokens of all replicas
        ("learns", "i8"),  # when the prefix index learns of a prompt: LEARNS_SENT ...
        ("events_lag_s", "f8"),  # of LEARNS_EVENTS
        ("stuck", "i8"),  # 1: some replica has work but can form no batch
        ("serial", "i8"),  # number of its start: equal in copies, otherwise unique
        ("lowest", "i8"),  # all requests before this one are settled
        ("highest", "i8"),  # no request after this one has arrived
        # accounts, see cost_accounts.py
        ("accounts", "i8"),  # 1: they are kept
        ("in_system", "i8"),  # requests, and the sum of their arrival times, s
        ("in_system_since", "f8"),
        ("unanswered", "i8"),  # requests without a first token, and the sum of their arrivals, s
        ("unanswered_since", "f8"),
        ("overdue", "i8"),  # of those, the ones past their deadline, and the sum of these, s
        ("overdue_since", "f8"),
        ("deadline_next", "i8"),  # first unanswered request that is not overdue yet, -1: none
        ("deadline_last", "i8"),  # the one with the latest deadline
        ("paid_e2e", "f8"),  # of what has ended: seconds in the system
        ("paid_ttft", "f8"),  # seconds without a first token
        ("paid_late", "f8"),  # seconds past the deadline
        ("paid_soft", "f8"),  # first tokens, each by a logistic curve around its target
        ("paid_early", "f8"),  # first tokens, each by how far it came under its target, 0..1
        ("soft_centre", "f8"),  # of the logistic curves, as multiple of the target
        ("soft_scale", "f8"),  # its width, likewise
        ("late_share", "f8"),  # share of the target from which on a request counts as late
        ("early_share", "f8"),  # share of a target below which a latency is early
        ("e2e_target", "f8"),  # target of the end-to-end latency, s
        ("latency_limit", "f8"),  # end-to-end latency that raises an alarm, s; inf: none does
        ("paid_e2e_late", "f8"),  # of completed requests: seconds past that target
        ("paid_e2e_soft", "f8"),  # by the logistic curve
        ("paid_e2e_early", "f8"),  # by how far under the target, 0..1
        ("paid_tpot_late", "f8"),  # the same of the time per output token: seconds of the answer
        ("paid_tpot_soft", "f8"),
        ("paid_tpot_early", "f8"),
        ("paid_tail", "f8"),  # squared times to first token over their targets, s
        ("over_limit", "i8"),  # requests that ended past the limit
        ("lost", "i8"),  # requests that failed
        ("finished", "i8"),  # requests that were completed
        ("finished_tokens", "i8"),  # their output tokens
        ("ended_at", "f8"),  # when the last one ended, s
    ]
)

#: When the router's prefix index learns what a replica has cached.
LEARNS_SENT, LEARNS_FIRST_TOKEN, LEARNS_EVENTS = 0, 1, 2
LEARNS_CODES = {
    "sent": LEARNS_SENT,
    "first_token": LEARNS_FIRST_TOKEN,
    "events": LEARNS_EVENTS,
}
#: A client: tokens served, and requests that wait at the router.
FLOW = np.dtype([("served", "f8"), ("waiting", "i8")])

#: A KV event on its way to the router. Number 2 n: prompt n is prefilled; 2 n + 1: it is answered.
KV_EVENT = np.dtype([("at", "f8"), ("next", "i8")])

EVENT_SLOW, EVENT_DIE, EVENT_RETURN, EVENT_DRAIN = 0, 1, 2, 3
EVENT_CODES = {
    "slow": EVENT_SLOW,
    "die": EVENT_DIE,
    "return": EVENT_RETURN,
    "drain": EVENT_DRAIN,
}
EVENT = np.dtype([("at", "f8"), ("replica", "i8"), ("kind", "i8"), ("factor", "f8")])

#: The constant part of one request.
REQUEST_FACT = np.dtype(
    [
        ("arrival", "f8"),
        ("think", "f8"),
        ("ttft_slo", "f8"),
        ("tpot_slo", "f8"),
        ("predicted", "f8"),  # output tokens, when the predictor is static
        ("prefix_hash", "u8"),
        ("content_hash", "u8"),
        ("run_start", "i8"),
        ("piece_start", "i8"),
        ("prompt", "i4"),
        ("output", "i4"),
        ("session", "i4"),
        ("turn", "i4"),
        ("child", "i4"),  # its first follow-up, -1: none
        ("sibling", "i4"),  # next follow-up of its parent, -1: none
        ("run_count", "i4"),
        ("piece_count", "i4"),
        ("priority", "i4"),
        ("tenant", "i4"),  # number of its client, from 0
    ]
)

#: One piece of a prompt's content, see chains.py.
PIECE = np.dtype([("chain", "i4"), ("end", "i4")])

NEWS_FIRST_TOKEN, NEWS_FINISHED, NEWS_FAILED = 0, 1, 2
#: An event recorded for the hooks of policies written in Python.
NEWS = np.dtype([("at", "f8"), ("kind", "i8"), ("replica", "i8"), ("request", "i8")])

#: A future arrival that is not in the list of roots.
HEAP_ENTRY = np.dtype([("time", "f8"), ("request", "i8")])


class Tables(NamedTuple):
    """Request tables shared by the clusters of a fleet; ``G`` tables of up to ``R`` requests."""

    facts: NDArray[np.void]  #: [G, R] REQUEST_FACT
    roots: NDArray[np.int32]  #: [G, R] requests without a parent, by arrival
    n_roots: NDArray[np.int64]  #: [G]
    run_keys: NDArray[np.uint64]  #: [G, U] content path of each run
    run_tokens: NDArray[np.int32]  #: [G, U]
    pieces: NDArray[np.void]  #: [G, 2 U] PIECE, see chains.py
    events: NDArray[np.void]  #: [G, E] EVENT, padded with at = inf


class Fleet(NamedTuple):
    """State of ``C`` clusters. ``S`` slots per replica, ``B`` cached blocks, ``H`` hash buckets.

    Memory for extents that are never used is never touched, so it costs nothing.
    """

    clusters: NDArray[np.void]  #: [C] CLUSTER
    servers: NDArray[np.void]  #: [C, N] SERVER
    wake: NDArray[np.float64]  #: [C, N] time of the replica's next transition, s; inf: none
    slots: NDArray[np.int64]  #: [C, N, SLOT_ROWS, S]
    phase: NDArray[np.int64]  #: [C, N, block size] decodes that need a block at tick = index (mod)
    notices: NDArray[np.int64]  #: [C, 2, S + 1] first tokens, ends of an iteration; [., 0] = count
    requests: NDArray[np.void]  #: [C, R] REQUEST_STATE
    heap: NDArray[np.void]  #: [C, Q] HEAP_ENTRY
    extents: NDArray[np.void]  #: [C, N, B + 1] EXTENT
    buckets: NDArray[np.int32]  #: [C, N, H] first extent of a chain, 0: empty
    held: NDArray[np.int32]  #: [C, N, S, L + 4] extents of a resident request, see kvcache.py
    rows_free: NDArray[np.int64]  #: [C, N, S + 1] stack of unused rows of held; last = its size
    batches: NDArray[np.void]  #: [C, Z] BATCH, recorded iterations; Z = 0: do not record
    news: NDArray[np.void]  #: [C, Y] NEWS since the last decision; Y = 0: do not record
    key_scratch: NDArray[np.uint64]  #: [C, most runs of a request] working memory
    run_scratch: NDArray[np.int32]  #: the same
    in_flight_scratch: NDArray[np.int32]  #: [C, R] the same, see active_blocks.py
    # working memory of the look-ahead: a copy of one server
    ghost: NDArray[np.void]  #: [C, 1] SERVER
    ghost_slots: NDArray[np.int64]  #: [C, SLOT_ROWS, S]
    ghost_phase: NDArray[np.int64]  #: [C, block size]
    ghost_requests: NDArray[np.void]  #: [C, R or 0] REQUEST_STATE
    ghost_numbers: NDArray[np.int64]  #: [C, R or 0] which requests they stand for
    # what the router sees
    requests_view: NDArray[np.void]  #: [C] REQUEST_VIEW
    replicas_view: NDArray[np.void]  #: [C, N] REPLICA_VIEW
    router: NDArray[np.void]  #: [C] ROUTER
    costs: NDArray[np.void]  #: [C, N] COST
    last_replica: NDArray[np.int32]  #: [C, sessions]
    flows: NDArray[np.void]  #: [C, tenants] FLOW
    index_entries: NDArray[np.void]  #: [C, N, e + 1] prefix index, see view/prefix_index.py
    index_slots: NDArray[np.int32]  #: [C, N, s]
    index_totals: NDArray[np.void]  #: [C, N]
    kv_events: NDArray[np.void]  #: [C, 2 R] KV_EVENT; [C, 0] unless the index learns from KV events
    scores: NDArray[np.float64]  #: [C, N]
