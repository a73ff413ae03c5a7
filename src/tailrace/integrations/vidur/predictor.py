"""Tailrace's cost formula as an execution-time predictor of Vidur. Imports Vidur.

Vidur 0.0.26 ships no profiling data. With this predictor it runs without any, and an iteration
takes exactly as long as in Tailrace's simulator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vidur.config.config import BaseExecutionTimePredictorConfig
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry

from tailrace.config import Cluster, Replica
from tailrace.integrations.vidur.scheduler import TailraceType
from tailrace.sim.result import REPLICA_RESULT
from tailrace.view.cost_model import cost_rows, iteration_s
from tailrace.view.devices import cost_of


class IterationTime(NamedTuple):
    """What Vidur reads of a prediction, s."""

    total_time: float
    model_time: float


@dataclass
class TailraceExecutionTimePredictorConfig(BaseExecutionTimePredictorConfig):  # type: ignore[misc]
    """Settings of the predictor, in Vidur's way."""

    cluster: str = field(
        default=Replica().device,
        metadata={"help": "Device preset of Tailrace, or a cluster of Tailrace as JSON."},
    )

    @staticmethod
    def get_type() -> Any:
        """Return the key in the registry."""
        return TailraceType.TAILRACE


class FormulaPredictor:
    """Takes the place of Vidur's predictor for replicas of one pipeline stage."""

    def __init__(self, predictor_config: TailraceExecutionTimePredictorConfig, **_: Any) -> None:
        """Vidur calls this, with more settings than are needed."""
        text = predictor_config.cluster
        replicas = (
            Cluster.model_validate_json(text).expanded()
            if text.startswith("{")
            else (Replica(device=text),)
        )
        self._costs = cost_rows([cost_of(replica) for replica in replicas])
        self._speeds = [replica.speed for replica in replicas]
        self.numbers: Mapping[Any, int] = {}
        """Number of each replica by its Vidur id; others count round the replicas."""
        self.totals = np.zeros(len(replicas), REPLICA_RESULT)
        """[n] what each replica has computed so far."""

    def get_execution_time(self, batch: Any, _stage: int) -> IterationTime:
        """Return the time of one iteration."""
        replica_id = batch.replica_id
        number = self.numbers.get(replica_id, replica_id.id % len(self._speeds))
        tokens, context, work = 0, 0, 0.0
        # Not Vidur's num_kv_tokens: its orca leaves those of new requests out.
        for request, count in zip(batch.requests, batch.num_q_tokens, strict=True):
            tokens += count
            if request.is_prefill_complete:
                context += request.num_processed_tokens
            else:
                work += count * (request.num_processed_tokens + count / 2)
        seconds = float(
            iteration_s(
                self._costs[number], float(tokens), float(context), work, self._speeds[number]
            )
        )
        totals = self.totals[number]
        totals["iterations"] += 1
        totals["busy_s"] += seconds
        totals["tokens"] += tokens
        totals["context"] += context
        totals["prefill_work"] += work
        totals["batched"] += len(batch.requests)
        return IterationTime(seconds, seconds)


def register() -> type[TailraceExecutionTimePredictorConfig]:
    """Make the predictor known to Vidur; returns the class of its settings."""
    ExecutionTimePredictorRegistry.register(TailraceType.TAILRACE, FormulaPredictor)
    return TailraceExecutionTimePredictorConfig
