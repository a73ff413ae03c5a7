"""One server: a scheduler and the pipeline stages its batches run through."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import CostModel, Replica
from tailrace.errors import TailraceError
from tailrace.sim.reference.chunked import Sarathi, VllmV1
from tailrace.sim.reference.content import BlockNames
from tailrace.sim.reference.prefill_first import FasterTransformer, LightLlm, Orca, Vllm
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.scheduler import Scheduler
from tailrace.sim.result import BATCH, REPLICA_RESULT
from tailrace.view.cost_model import cost_rows, iteration_s

NEVER_S = float("inf")

_COUNTING: dict[str, Callable[[Replica, bool], Scheduler]] = {
    "sarathi": Sarathi,
    "vllm": Vllm,
    "orca": Orca,
    "faster_transformer": FasterTransformer,
    "lightllm": LightLlm,
}


def make_scheduler(config: Replica, compat: bool, content: BlockNames) -> Scheduler:
    """Return an empty scheduler of the kind a replica is configured with."""
    if config.scheduler == "vllm_v1":
        return VllmV1(config, compat, content)
    return _COUNTING[config.scheduler](config, compat)


class PipelineStage:
    """A pipeline stage: runs one batch at a time, first come first served."""

    def __init__(self) -> None:
        self.queue: deque[Batch] = deque()
        self.batch: Batch | None = None
        self.started_s = 0.0
        self.ends_s = NEVER_S

    def clear(self) -> None:
        """Drop everything."""
        self.queue.clear()
        self.batch = None
        self.ends_s = NEVER_S


class Server:
    """A replica: its scheduler, its pipeline stages and its totals."""

    def __init__(self, number: int, config: Replica, compat: bool, content: BlockNames) -> None:
        self.number = number
        self.config = config
        self.compat = compat
        self.speed = config.speed
        self.available = True
        self.scheduler = make_scheduler(config, compat, content)
        self.totals: Any = np.zeros(1, REPLICA_RESULT)[0]
        self.recorded: list[tuple[Any, ...]] | None = None
        self._content = content
        self._cost = cost_rows([_cost_model(config)])[0]
        self._stages = [PipelineStage() for _ in range(config.num_stages)]
        self._in_flight: list[Batch] = []
        self._has_news = False

    @property
    def next_end_s(self) -> float:
        """When the next stage is done with its batch."""
        return min(stage.ends_s for stage in self._stages)

    @property
    def in_flight(self) -> list[Batch]:
        """Running batches, oldest first."""
        return self._in_flight

    def requests(self) -> Iterator[Request]:
        """All requests on this server."""
        yield from self.scheduler.waiting
        yield from self.scheduler.running
        running = set(self.scheduler.running)
        for batch in self._in_flight:
            yield from (r for r in batch.requests if r not in running and not r.finished)

    def add(self, request: Request) -> None:
        """Add a request."""
        self.totals["requests"] += 1
        self.scheduler.add(request)
        self._has_news = True

    def form_batches(self, now: float) -> list[Batch]:
        """Form batches while fewer are running than there are stages; return the new ones."""
        formed: list[Batch] = []
        while self._has_news and len(self._in_flight) < len(self._stages):
            before = self.scheduler.preemptions
            batch = self.scheduler.next_batch()
            if batch is None:
                # After a preemption there may be room for the victim. Vidur does not look again
                # before something else happens at this server.
                self._has_news = self.scheduler.preemptions > before and not self.compat
                continue
            self._in_flight.append(batch)
            self._stages[0].queue.append(batch)
            formed.append(batch)
        self._has_news = False
        self._start_stages(now)
        return formed

    def end_stages(self, now: float) -> list[Batch]:
        """End what is done at ``now`` (s); return the batches that have passed the last stage."""
        ended: list[Batch] = []
        for number, stage in enumerate(self._stages):
            if stage.ends_s > now or stage.batch is None:
                continue
            batch = stage.batch
            self._add_busy(stage.ends_s - stage.started_s)
            stage.batch, stage.ends_s = None, NEVER_S
            if number + 1 < len(self._stages):
                self._stages[number + 1].queue.append(batch)
            else:
                self._in_flight.remove(batch)
                self._count(batch)
                ended.append(batch)
                self._has_news = True
        self._start_stages(now)
        return ended

    def die(self, now: float) -> list[Request]:
        """Drop everything; return the requests that were here, by id."""
        lost = sorted(self.requests(), key=lambda request: request.id)
        for stage in self._stages:
            if stage.batch is not None:
                self._add_busy(now - stage.started_s)
            stage.clear()
        if self.recorded is not None:
            self.recorded = [row for row in self.recorded if row[3] <= now]  # the rest is dropped
        self._in_flight.clear()
        self._settle_preemptions()
        self.scheduler = make_scheduler(self.config, self.compat, self._content)
        self._has_news = False
        return lost

    def result(self) -> Any:
        """Totals so far, a REPLICA_RESULT."""
        self._settle_preemptions()
        return self.totals

    def _settle_preemptions(self) -> None:
        self.totals["preemptions"] += self.scheduler.preemptions
        self.totals["partial_preemptions"] += self.scheduler.partial_preemptions
        self.scheduler.preemptions = self.scheduler.partial_preemptions = 0

    def _count(self, batch: Batch) -> None:
        self.totals["iterations"] += 1
        self.totals["tokens"] += batch.total_tokens
        self.totals["context"] += batch.context
        self.totals["prefill_work"] += batch.prefill_work
        self.totals["batched"] += len(batch.requests)

    def _add_busy(self, seconds: float) -> None:
        # Averaged over the stages, so that a replica is never busy for longer than the run.
        self.totals["busy_s"] += seconds / len(self._stages)

    def _start_stages(self, now: float) -> None:
        for number, stage in enumerate(self._stages):
            if stage.batch is None and stage.queue:
                stage.batch = stage.queue.popleft()
                stage.started_s = now
                stage.ends_s = now + self._stage_s(stage.batch)
                if self.recorded is not None:
                    self.recorded.append(self._record(number, stage, stage.batch))

    def _stage_s(self, batch: Batch) -> float:
        return float(
            iteration_s(
                self._cost,
                float(batch.total_tokens),
                float(batch.context),
                batch.prefill_work,
                len(self._stages) * self.speed,
            )
        )

    def _record(self, number: int, stage: PipelineStage, batch: Batch) -> tuple[Any, ...]:
        return (
            self.number,
            number,
            stage.started_s,
            stage.ends_s,
            1,
            batch.decodes,
            batch.prefills,
            batch.total_tokens,
            batch.context,
            batch.prefill_work,
        )


def batch_rows(servers: list[Server]) -> NDArray[np.void]:
    """All recorded iterations in order of their start, as BATCH rows [B]."""
    rows = [row for server in servers for row in server.recorded or ()]
    rows.sort(key=lambda row: (row[2], row[0], row[1]))
    return np.array(rows, BATCH)


def _cost_model(config: Replica) -> CostModel:
    if config.cost is None:
        raise TailraceError(f"device {config.device} has no cost model")
    return config.cost
