"""A request table of Tailrace on a cluster of real Vidur. Imports Vidur."""

import atexit
import heapq
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import vidur.config as vidur_config
from numpy.typing import NDArray
from vidur.config.config import FixedRequestLengthGeneratorConfig, SyntheticRequestGeneratorConfig
from vidur.entities import Request
from vidur.events import RequestArrivalEvent
from vidur.events.global_schedule_event import GlobalScheduleEvent
from vidur.simulator import Simulator

from tailrace.config import Cluster, Replica, RouterSettings
from tailrace.errors import TailraceError
from tailrace.integrations.vidur import register
from tailrace.integrations.vidur.interface import holder
from tailrace.integrations.vidur.limits import replicas_for_vidur
from tailrace.integrations.vidur.predictor import (
    MeteredPredictor,
    TailraceExecutionTimePredictorConfig,
)
from tailrace.integrations.vidur.router import RouterWatcher, VidurRouter
from tailrace.integrations.vidur.scheduler import TailraceGlobalScheduler
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.sim.feasibility import check_cluster, check_requests
from tailrace.sim.result import FINISHED, REQUEST_RESULT, SimResult
from tailrace.view.bookkeeper import table_facts
from tailrace.view.records import View
from tailrace.workload.table import RequestTable

DEFAULT_ROUTER = RouterSettings()
#: The reference device; only its memory matters, and only to orca.
MODEL, DEVICE, NETWORK_DEVICE = "meta-llama/Llama-3-8B", "a100", "a100_dgx"


#: Settings of Vidur's metrics that keep it from writing anything.
SILENT = {
    "write_metrics": False,
    "enable_chrome_trace": False,
    "write_json_trace": False,
    "store_plots": False,
}


class TableRequest(Request):  # type: ignore[misc]
    """A request of Vidur that knows its row of the table."""

    def __init__(self, number: int, arrival_s: float, prompt: int, output: int) -> None:
        """Arrive at ``arrival_s``."""
        super().__init__(arrival_s, prompt, output)
        self.number = number


class TableSimulator(Simulator, RouterWatcher):  # type: ignore[misc]
    """Vidur's simulator with the requests of a table, and its loop from decision to decision.

    The follow-up of a request arrives its think time after the request has finished.
    """

    _scheduler: TailraceGlobalScheduler

    def __init__(
        self, settings: Any, replicas: Sequence[Replica], table: RequestTable,
        router: RouterSettings, seed: int,
    ) -> None:  # fmt: skip
        """Fill the event queue; nothing has happened yet."""
        self.table = table
        self.requests: list[Any] = [None] * len(table)
        """Vidur's requests [R]; None before a follow-up is known."""
        self.replica_of = np.full(len(table), -1, np.int64)
        self._due: list[tuple[float, int]] = []
        self._follow_ups = table.follow_ups()
        super().__init__(settings)
        # Vidur's main branch would write its output when Python ends, and keep the simulator alive.
        atexit.unregister(self._write_output)
        scheduler = self._scheduler
        facts = table_facts(table, router, seed)
        scheduler.router = VidurRouter(
            scheduler.servers, replicas, router, seed, lambda request: facts[request.number]
        )
        scheduler.router.watchers.append(self)
        self.predictor: MeteredPredictor = scheduler.servers[0]._execution_time_predictor
        self.predictor.numbers = {s.replica_id: n for n, s in enumerate(scheduler.servers)}

    # ---- arrivals -------------------------------------------------------------------------------

    def _init_event_queue(self) -> None:
        for number in np.flatnonzero(self.table.rows["parent"] < 0):
            self._add_event(self._arrival(int(number), float(self.table.rows["arrival_s"][number])))

    def _arrival(self, number: int, at: float) -> Any:
        row = self.table.rows[number]
        prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
        self.requests[number] = TableRequest(number, at, prompt, output)
        return RequestArrivalEvent(at, self.requests[number])

    def _add_events(self, events: list[Any]) -> None:
        super()._add_events(events)
        for at, number in self._due:
            self._add_event(self._arrival(number, at))
        self._due.clear()

    def decided(self, view: View, replica: int) -> None:
        """Remember where a request went."""
        self.replica_of[int(view.request["id"])] = replica

    def finished(self, number: int, now: float) -> None:
        """Let its follow-ups come."""
        for child in self._follow_ups.get(number, ()):
            self._due.append((now + float(self.table.rows["think_s"][child]), child))

    # ---- the run --------------------------------------------------------------------------------

    @property
    def replicas_view(self) -> NDArray[np.void]:
        """The router's records of the replicas [n]; live."""
        return self._scheduler.router.view.replicas

    def use(self, policy: Policy, seed: int) -> None:
        """Let a policy decide."""
        self._scheduler.use(policy, seed)

    def play(self) -> None:
        """Let Vidur run to the end by itself."""
        with self._evictions_explained():
            self.run()

    def next_view(self) -> View | None:
        """Handle events up to the next decision; None when there are no more."""
        with self._evictions_explained():
            while self._event_queue:
                _, event = self._event_queue[0]
                if isinstance(event, GlobalScheduleEvent) and self._scheduler.has_request:
                    return self._scheduler.look()
                heapq.heappop(self._event_queue)
                self._set_time(event._time)
                self._add_events(event.handle_event(self._scheduler, self._metric_store))
        return None

    def assign(self, replica: int) -> None:
        """Send the request of the last view to a replica."""
        self._scheduler.assign(replica)

    def watch(self, watcher: RouterWatcher) -> None:
        """Tell somebody else, too, what the router hears."""
        self._scheduler.router.watchers.append(watcher)

    @contextmanager
    def _evictions_explained(self) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            if not any(r is not None and r.num_restarts for r in self.requests):
                raise
            raise TailraceError(
                "vidur cannot go on after it has evicted a request: give the replicas more "
                "num_blocks, or less load"
            ) from None

    def result(self) -> SimResult:
        """Return what has happened so far."""
        done = np.zeros(len(self.table), REQUEST_RESULT)
        for name in ("arrived_s", "scheduled_s", "first_token_s", "finished_s"):
            done[name] = np.nan
        done["replica"] = self.replica_of
        for row, request in zip(done, self.requests, strict=True):
            if request is None or row["replica"] < 0:
                continue
            row["arrived_s"] = request.arrived_at
            row["restarts"] = request.num_restarts
            if request.scheduled:
                row["scheduled_s"] = request.scheduled_at
            if request.is_prefill_complete:
                row["first_token_s"] = request.prefill_completed_at
            if request.completed:
                row["finished_s"] = request.completed_at
                row["status"] = FINISHED
        totals = self.predictor.totals.copy()
        sent = self.replica_of[self.replica_of >= 0]
        totals["requests"] = np.bincount(sent, minlength=len(totals))
        return SimResult(self.table, done, totals, len(sent))


def prepare(
    cluster: Cluster, table: RequestTable, *, router: RouterSettings = DEFAULT_ROUTER, seed: int = 0
) -> TableSimulator:
    """Return a table on a cluster of Vidur at time 0, without a policy."""
    scheduler_config = register()
    quieten()
    replicas = replicas_for_vidur(cluster)
    check_cluster(replicas)
    check_requests(replicas, table)
    with tempfile.TemporaryDirectory() as folder:  # Vidur writes its settings somewhere
        settings = _settings(replicas, scheduler_config, folder)
        simulator = TableSimulator(settings, replicas, table, router, seed)
    _check_slots(replicas[0], simulator)
    return simulator


def quieten() -> None:
    """Let Vidur log warnings only: it tells several things about every run."""
    logging.getLogger("vidur").setLevel(logging.WARNING)


def simulate(
    cluster: Cluster,
    table: RequestTable,
    policy: str | Policy,
    *,
    router: RouterSettings = DEFAULT_ROUTER,
    seed: int = 0,
    watchers: Sequence[RouterWatcher] = (),
) -> SimResult:
    """Route a whole table with one policy in real Vidur; its own loop runs."""
    simulator = prepare(cluster, table, router=router, seed=seed)
    simulator.use(registry.get(policy) if isinstance(policy, str) else policy, seed)
    for watcher in watchers:
        simulator.watch(watcher)
    simulator.play()
    return simulator.result()


def _settings(replicas: Sequence[Replica], scheduler_config: Any, folder: str) -> Any:
    """Return Vidur's settings of such a cluster."""
    first = replicas[0]
    forms = {
        "sarathi": lambda: vidur_config.SarathiSchedulerConfig(
            batch_size_cap=first.batch_cap, chunk_size=first.chunk_size
        ),
        "vllm": lambda: vidur_config.VllmSchedulerConfig(
            batch_size_cap=first.batch_cap, max_tokens_in_batch=first.max_batch_tokens
        ),
        "orca": lambda: vidur_config.OrcaSchedulerConfig(batch_size_cap=first.batch_cap),
    }
    described = {"replicas": [r.model_dump(mode="json") for r in replicas]}
    lengths = FixedRequestLengthGeneratorConfig(max_tokens=first.max_request_tokens)
    cluster = vidur_config.ClusterConfig(
        num_replicas=len(replicas),
        replica_config=vidur_config.ReplicaConfig(
            model_name=MODEL,
            num_pipeline_stages=1,
            tensor_parallel_size=1,
            device=DEVICE,
            network_device=NETWORK_DEVICE,
        ),
        # The table's router takes the place of the one these would give.
        global_scheduler_config=scheduler_config(policy="", device=Replica().device),
        replica_scheduler_config=forms[first.scheduler](),
    )
    memory = {
        "block_size": first.block_size,
        "num_blocks": first.num_blocks,
        "watermark_blocks_fraction": first.watermark,
    }
    for name, value in memory.items():
        setattr(holder(cluster, name), name, value)
    return vidur_config.SimulationConfig(
        cluster_config=cluster,
        request_generator_config=SyntheticRequestGeneratorConfig(length_generator_config=lengths),
        execution_time_predictor_config=TailraceExecutionTimePredictorConfig(
            cluster=json.dumps(described)
        ),
        metrics_config=vidur_config.MetricsConfig(**SILENT, output_dir=folder),
    )


def _check_slots(replica: Replica, simulator: TableSimulator) -> None:
    """Raise if Vidur's memory planner lets orca run fewer requests than the settings do."""
    if replica.scheduler != "orca":
        return
    assert replica.num_blocks is not None
    slots = replica.num_blocks // (replica.max_request_tokens // replica.block_size)
    most = int(simulator._scheduler.servers[0]._max_batch_size)
    if most < min(replica.batch_cap, slots):
        raise TailraceError(
            f"Vidur's orca runs at most {most} requests of {replica.max_request_tokens} tokens on "
            f"its reference device: set batch_cap = {most} or lower max_request_tokens"
        )
