"""A replica as its settings describe it: what it can do, and the view of it while it is idle."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Replica
from tailrace.view.cost_model import cost_rows, prefill_tokens_per_s
from tailrace.view.devices import cost_of, num_blocks_of
from tailrace.view.records import NEVER, REPLICA_VIEW


def is_caching(replica: Replica) -> bool:
    """Whether a replica has a prefix cache."""
    return replica.scheduler == "vllm_v1" and replica.prefix_caching


def is_chunked(replica: Replica) -> bool:
    """Whether a replica splits prompts into chunks."""
    return replica.scheduler in ("sarathi", "vllm_v1")


def token_budget(replica: Replica) -> int:
    """Return the maximum number of prompt tokens in one iteration."""
    return replica.chunk_size if is_chunked(replica) else replica.max_batch_tokens


def replica_costs(replicas: Sequence[Replica]) -> NDArray[np.void]:
    """Return the cost models [n] COST of a cluster's replicas."""
    return cost_rows([cost_of(replica) for replica in replicas])


def idle_views(replicas: Sequence[Replica]) -> NDArray[np.void]:
    """Return the views [n] REPLICA_VIEW of an idle cluster, before any metrics snapshot."""
    views = np.zeros(len(replicas), REPLICA_VIEW)
    views["available"] = 1
    views["metrics_at"] = NEVER
    for view, cost, replica in zip(views, replica_costs(replicas), replicas, strict=True):
        budget = token_budget(replica)
        speed = replica.speed if replica.assumed_speed is None else replica.assumed_speed
        view["speed"] = speed
        view["capacity_tokens"] = num_blocks_of(replica) * replica.block_size
        view["block_size"] = replica.block_size
        view["token_budget"] = budget
        view["batch_cap"] = replica.batch_cap
        view["prefill_tokens_per_s"] = prefill_tokens_per_s(cost, budget, speed)
    return views
