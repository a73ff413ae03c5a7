"""Execution-time predictors in Vidur: Tailrace's formula, and Vidur's own, kept. Imports Vidur.

Vidur ships no profiling data. With the formula it runs without any, and an iteration takes exactly
as long as in Tailrace's simulator. A predictor of Vidur's own is trained or loaded when it is made,
which takes far longer than an episode, so one is kept for all simulators of a process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vidur.config.config import BaseExecutionTimePredictorConfig
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry

from tailrace.config import Cluster, Replica, VidurSettings
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.interface import batch_tokens, replica_number
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


class MeteredPredictor:
    """A predictor that counts what each replica computes."""

    def __init__(self, replicas: int) -> None:
        self.numbers: Mapping[Any, int] = {}
        """Number of each replica by its Vidur id; others count round the replicas."""
        self.totals = np.zeros(replicas, REPLICA_RESULT)
        """[n] what each replica has computed so far."""

    def get_execution_time(self, batch: Any, stage: int) -> Any:
        """Return the time of one iteration."""
        replica_id = batch.replica_id
        number = self.numbers.get(replica_id, replica_number(replica_id) % len(self.totals))
        tokens, context, work = 0, 0, 0.0
        # Not Vidur's num_kv_tokens: its orca leaves those of new requests out.
        for request, count in zip(batch.requests, batch_tokens(batch), strict=True):
            tokens += count
            if request.is_prefill_complete:
                context += request.num_processed_tokens
            else:
                work += count * (request.num_processed_tokens + count / 2)
        predicted = self.predict(number, batch, stage, tokens, context, work)
        totals = self.totals[number]
        totals["iterations"] += 1
        totals["busy_s"] += predicted.total_time
        totals["tokens"] += tokens
        totals["context"] += context
        totals["prefill_work"] += work
        totals["batched"] += len(batch.requests)
        return predicted

    def predict(
        self, number: int, batch: Any, stage: int, tokens: int, context: int, work: float
    ) -> Any:
        """Return the time of an iteration of replica ``number``; see view/cost_model.py."""
        raise NotImplementedError


class FormulaPredictor(MeteredPredictor):
    """Takes the place of Vidur's predictor for replicas of one pipeline stage."""

    def __init__(self, predictor_config: TailraceExecutionTimePredictorConfig, **_: Any) -> None:
        """Vidur calls this, with more settings than are needed."""
        text = predictor_config.cluster
        replicas = (
            Cluster.model_validate_json(text).expanded()
            if text.startswith("{")
            else (Replica(device=text),)
        )
        super().__init__(len(replicas))
        self._costs = cost_rows([cost_of(replica) for replica in replicas])
        self._speeds = [replica.speed for replica in replicas]

    def predict(
        self,
        number: int,
        batch: Any,  # noqa: ARG002
        stage: int,  # noqa: ARG002
        tokens: int,
        context: int,
        work: float,
    ) -> IterationTime:
        """Evaluate the cost model."""
        seconds = float(
            iteration_s(
                self._costs[number], float(tokens), float(context), work, self._speeds[number]
            )
        )
        return IterationTime(seconds, seconds)


@dataclass(frozen=True)
class KeptPredictorConfig:
    """Stands in for the settings of a predictor that is made once per process."""

    settings: VidurSettings
    """By which the predictor is known."""
    replicas: int
    own: Any
    """Vidur's settings of the predictor."""

    @staticmethod
    def get_type() -> Any:
        """Return the key in the registry."""
        return TailraceType.TAILRACE_KEPT


class KeptPredictor(MeteredPredictor):
    """Asks a predictor of Vidur's own, which other simulators ask as well."""

    _kept: tuple[VidurSettings, Any] | None = None

    def __init__(self, predictor_config: KeptPredictorConfig, **settings: Any) -> None:
        """Vidur calls this, with the settings that its own predictors take."""
        super().__init__(predictor_config.replicas)
        kept = KeptPredictor._kept
        if kept is None or kept[0] != predictor_config.settings:
            own = predictor_config.own
            try:
                made = ExecutionTimePredictorRegistry.get(
                    own.get_type(), predictor_config=own, **settings
                )
            except Exception as error:  # whatever training one in Vidur may raise
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise TailraceError(
                    f"Vidur cannot make its execution-time predictor ({reason}); it is trained on "
                    "profiling data, which Vidur downloads. Tailrace's formula needs none: "
                    "--execution_time_predictor_config_type tailrace"
                ) from error
            kept = KeptPredictor._kept = predictor_config.settings, made
        self._own = kept[1]

    def __getattr__(self, name: str) -> Any:
        """Show what else the own predictor has."""
        if name == "_own":
            raise AttributeError(name)
        return getattr(self._own, name)

    def predict(
        self,
        number: int,  # noqa: ARG002
        batch: Any,
        stage: int,
        tokens: int,  # noqa: ARG002
        context: int,  # noqa: ARG002
        work: float,  # noqa: ARG002
    ) -> Any:
        """Ask it."""
        return self._own.get_execution_time(batch, stage)


def register() -> type[TailraceExecutionTimePredictorConfig]:
    """Make the predictors known to Vidur; returns the settings' class of the formula's."""
    ExecutionTimePredictorRegistry.register(TailraceType.TAILRACE, FormulaPredictor)
    ExecutionTimePredictorRegistry.register(TailraceType.TAILRACE_KEPT, KeptPredictor)
    return TailraceExecutionTimePredictorConfig
