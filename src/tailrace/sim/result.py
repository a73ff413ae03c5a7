"""What a simulation returns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.table import RequestTable

PENDING, FINISHED, FAILED = 0, 1, 2

#: Outcome of one request, in the order of the request table. Times in s from the start; NaN:
#: never.
REQUEST_RESULT = np.dtype(
    [
        ("arrived_s", "f8"),  # differs from the table for turns that wait for their parent
        ("scheduled_s", "f8"),  # start of the first iteration it took part in (on its last replica)
        ("first_token_s", "f8"),  # end of the iteration that completed its prompt
        ("finished_s", "f8"),  # end of its last iteration, or the moment it failed
        ("replica", "i4"),  # last replica it was sent to, -1: none
        ("status", "i4"),  # PENDING (never routed: no replica came back), FINISHED or FAILED
        ("restarts", "i4"),  # preemptions by recompute
        ("reroutes", "i4"),  # sent again because its replica died before the first token
        ("cached_tokens", "i4"),  # prompt tokens found in the prefix cache at first admission
        ("expected_cached", "i4"),  # what the router believed when it sent the request
    ]
)

#: Totals of one replica.
REPLICA_RESULT = np.dtype(
    [
        ("requests", "i8"),  # sent to it (a request routed again counts at both)
        ("iterations", "i8"),
        ("busy_s", "f8"),  # time spent in iterations
        ("tokens", "i8"),  # sum of T: tokens computed
        ("context", "i8"),  # sum of K: context tokens of decodes
        ("prefill_work", "f8"),  # sum of W: chunk*(context + chunk/2)
        ("batched", "i8"),  # sum over iterations of requests in the batch
        ("preemptions", "i8"),
        ("partial_preemptions", "i8"),  # of those, victims that were only partly prefilled
    ]
)

#: One iteration, or a fast-forwarded stretch of equal decode iterations.
BATCH = np.dtype(
    [
        ("replica", "i4"),
        ("stage", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("iterations", "i4"),
        ("decodes", "i4"),  # decoding requests in the batch
        ("prefills", "i4"),  # prefilling requests in the batch
        ("tokens", "i4"),  # T per iteration
        ("context", "i8"),  # K of the first iteration
        ("prefill_work", "f8"),  # W
    ]
)


@dataclass(frozen=True)
class SimResult:
    """Per-request and per-replica outcome of one run."""

    table: RequestTable
    requests: NDArray[np.void]  #: [R] REQUEST_RESULT
    replicas: NDArray[np.void]  #: [n] REPLICA_RESULT
    decisions: int  #: routing decisions taken
    batches: NDArray[np.void] | None = None  #: [B] BATCH, if recorded
