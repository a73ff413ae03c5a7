"""The installed Vidur's interface, found by looking at it instead of at its version. Imports Vidur.

Versions differ in where settings stand and in what methods take. What follows holds for 0.0.25 and
0.0.26 of PyPI, which are tested, and for the code of Vidur's main branch (7d47513), which cannot be
installed from PyPI. :func:`check` raises if something is missing that Tailrace builds on.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from vidur.entities import Batch
from vidur.types import ReplicaSchedulerType

from tailrace.errors import TailraceError

#: What is subclassed, called or overridden, as "module: name".
_NEEDED = (
    "vidur.simulator: Simulator._init_event_queue",
    "vidur.simulator: Simulator._add_event",
    "vidur.simulator: Simulator._add_events",
    "vidur.simulator: Simulator._set_time",
    "vidur.simulator: Simulator.run",
    "vidur.scheduler: BaseGlobalScheduler.schedule",
    "vidur.scheduler: BaseGlobalScheduler.sort_requests",
    "vidur.scheduler: GlobalSchedulerRegistry.register",
    "vidur.execution_time_predictor: ExecutionTimePredictorRegistry.register",
    "vidur.request_generator: RequestGeneratorRegistry.get",
    "vidur.events: RequestArrivalEvent",
    "vidur.events.global_schedule_event: GlobalScheduleEvent.handle_event",
    "vidur.config: SimulationConfig.create_from_cli_args",
    "vidur.config.config: BaseGlobalSchedulerConfig",
    "vidur.config.config: BaseExecutionTimePredictorConfig",
    "vidur.config.config: SyntheticRequestGeneratorConfig",
    "vidur.entities: Request.is_prefill_complete",
    "vidur.entities: Request.num_processed_tokens",
)


@cache
def check() -> None:
    """Raise if the installed Vidur lacks something that Tailrace builds on."""
    for needed in _NEEDED:
        module, _, names = needed.partition(": ")
        try:
            found: Any = import_module(module)
            for name in names.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            raise TailraceError(
                f"the installed vidur has no {names} in {module}, on which Tailrace builds; "
                "versions 0.0.25 and 0.0.26 have it"
            ) from None


def schedulers() -> tuple[str, ...]:
    """Return the names of Vidur's replica schedulers."""
    return tuple(str(member) for member in ReplicaSchedulerType)


def branch() -> str:
    """Return what the installed Vidur looks like: ``canary``, ``main`` or ``pypi``.

    Only the canary branch has vLLM's V1 scheduler, and only main counts the tokens of a batch in
    one list.
    """
    if "vllm_v1" in schedulers():
        return "canary"
    return "main" if "num_tokens" in inspect.signature(Batch).parameters else "pypi"


def holder(cluster: Any, setting: str) -> Any:
    """Return the part of a ``ClusterConfig`` that holds a setting of the KV memory.

    0.0.26 has them in the cache's settings, 0.0.25 and main in those of the replica scheduler, and
    0.0.25 the block size in those of the replica.
    """
    parts = ("cache_config", "replica_scheduler_config", "replica_config")
    for part in (getattr(cluster, name, None) for name in parts):
        if hasattr(part, setting):
            return part
    raise TailraceError(f"the installed vidur has no setting {setting} of a cluster's KV memory")


def total_blocks(server: Any) -> int:
    """Return the blocks of KV memory of a replica scheduler."""
    for part in ("_cache_config", "_config"):
        blocks = getattr(getattr(server, part, None), "num_blocks", None)
        if blocks:
            return int(blocks)
    return int(server._num_total_blocks)


def batch_tokens(batch: Any) -> Sequence[int]:
    """Return the tokens that each request of a batch computes."""
    tokens: Sequence[int] = batch.num_q_tokens if hasattr(batch, "num_q_tokens") else (
        batch.num_tokens
    )  # fmt: skip
    return tokens


def new_batch(members: Sequence[Any], tokens: Sequence[int], replica_id: Any) -> Any:
    """Return a batch of requests that compute ``tokens`` each."""
    if "num_tokens" in inspect.signature(Batch).parameters:
        return Batch(replica_id, members, tokens)
    kv = [m.num_processed_tokens + n for m, n in zip(members, tokens, strict=True)]
    return Batch(replica_id, members, tokens, kv)


def replica_number(replica_id: Any) -> int:
    """Return the number in a replica's id, which is an object in 0.0.26 and a number elsewhere."""
    return int(getattr(replica_id, "id", replica_id))
