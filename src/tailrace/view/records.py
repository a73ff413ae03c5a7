"""What a router can see when it decides: the types every policy reads.

Nothing here comes from inside a server. A field is the router's own book-keeping (ledger), the
latest metrics snapshot, its own prefix index, or configuration. The simulator, the Vidur plug-in
and the live router all fill these same records, so one policy runs in all of them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEVER = -np.inf

#: One replica as the router sees it. All fields are 8 bytes wide: no padding, cheap to copy.
REPLICA_VIEW = np.dtype(
    [
        # configuration
        ("available", "i8"),  # 1: may get requests; 0: dead or draining
        ("speed", "f8"),  # relative speed; 1 = as its cost model says
        ("capacity_tokens", "i8"),  # KV cache size
        ("block_size", "i8"),  # tokens per KV block
        ("token_budget", "i8"),  # tokens per iteration (chunk size)
        ("batch_cap", "i8"),  # maximum number of requests it runs at once
        ("prefill_tokens_per_s", "f8"),  # throughput of full prefill iterations, cost model
        # ledger: what the router sent and what has streamed back
        ("in_flight", "i8"),  # sent, not finished
        ("queued", "i8"),  # sent, no token back yet
        ("queued_tokens", "i8"),  # prompt tokens of the queued
        ("queued_uncached", "i8"),  # the same, less what the prefix index says is cached
        ("context_tokens", "i8"),  # prompt + streamed tokens of those that are answering
        ("answering_prompts", "i8"),  # the prompts' part of context_tokens
        ("active_blocks", "i8"),  # distinct full blocks of the prompts in flight, see below
        ("predicted_tokens", "i8"),  # output tokens of those in flight, as predicted when sent
        ("oldest_sent", "f8"),  # when the oldest queued was sent, s; only while there is one
        ("queued_since_sum", "f8"),  # sum of send times of the queued, s
        ("sent_tokens", "i8"),  # uncached prompt tokens sent since the metrics snapshot
        ("sent_requests", "i8"),  # requests sent since the metrics snapshot
        ("recent_work", "f8"),  # uncached prompt tokens sent, decaying over RECENT_WORK_S
        ("recent_at", "f8"),  # when recent_work was last updated, s
        ("finished", "i8"),  # requests finished so far
        ("finished_tokens", "i8"),  # their output tokens
        # ledger, moving averages: updated at every decision (ledger.look)
        ("streamed", "i8"),  # output tokens that had streamed back at the last decision
        ("recent_tokens", "f8"),  # output tokens streamed back, decaying over HISTORY_S
        ("recent_in_flight", "f8"),  # integral of in_flight over time, decaying over HISTORY_S
        # metrics snapshot
        ("metrics_at", "f8"),  # when it was taken, s; NEVER: there is none yet
        ("waiting", "i8"),  # requests in the server's queue
        ("running", "i8"),  # requests in the server's batch
        ("kv_used", "f8"),  # share of KV blocks held by requests, 0..1
        # prefix index
        ("cached_tokens", "i8"),  # prompt tokens of the current request, as the index believes
        ("index_tokens", "i8"),  # all tokens the index holds for this replica
        ("new_blocks", "i8"),  # full blocks of this prompt that active_blocks leaves out
    ]
)
# active_blocks and new_blocks are filled in only for rules that read them (Rule.uses_active).

#: The request being routed.
REQUEST_VIEW = np.dtype(
    [
        ("now", "f8"),  # s
        ("id", "i8"),
        ("arrived_at", "f8"),  # s; before ``now`` when it is routed again after a failure
        ("prompt_tokens", "i8"),
        ("predicted_output", "f8"),  # tokens
        ("session", "i8"),  # -1: none
        ("turn", "i8"),
        ("last_replica", "i8"),  # where the session's previous request went, -1: nowhere
        ("prefix_hash", "u8"),  # of the first PREFIX_HASH_TOKENS tokens of content
        ("priority", "i8"),
        ("ttft_slo_s", "f8"),
        ("tpot_slo_s", "f8"),
        ("content_hash", "u8"),  # of the whole prompt
    ]
)

#: Book-keeping of the router as a whole.
ROUTER = np.dtype(
    [
        ("rng", "u8"),  # state of the tie-breaking generator
        ("decisions", "i8"),  # made so far
        ("cursor", "i8"),  # round robin's next replica
        ("finished", "i8"),  # requests finished so far
        ("finished_tokens", "i8"),  # their output tokens: running mean = predicted output
        ("looked_at", "f8"),  # when the moving averages were last updated, s
        ("watched_s", "f8"),  # time observed so far, decaying over HISTORY_S: at most HISTORY_S
        ("recent_arrivals", "f8"),  # requests that arrived, decaying over HISTORY_S
    ]
)

#: Iteration time in ms: base + per_token*T + sum slope_k*max(T-knot_k, 0) + per_context*K
#: + per_prefill*W, divided by speed. Unused knots lie at infinity. See view/cost_model.py.
MAX_KNOTS = 4
COST = np.dtype(
    [
        ("base_ms", "f8"),
        ("per_token_ms", "f8"),
        ("per_context_ms", "f8"),
        ("per_prefill_ms", "f8"),
        ("knot", "f8", (MAX_KNOTS,)),
        ("slope_ms", "f8", (MAX_KNOTS,)),
    ]
)

PREFIX_HASH_TOKENS = 256
#: Time constants of the moving averages, s.
RECENT_WORK_S = 180.0
HISTORY_S = 20.0


class View(NamedTuple):
    """Everything a policy may look at for one decision over ``n`` replicas."""

    request: np.void  #: one REQUEST_VIEW
    replicas: NDArray[np.void]  #: [n] REPLICA_VIEW
    costs: NDArray[np.void]  #: [n] COST, the calibrated cost model of each replica
    router: np.void  #: one ROUTER; rules may advance ``rng`` and ``cursor``
