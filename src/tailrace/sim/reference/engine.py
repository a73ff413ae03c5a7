"""The readable reference engine: one cluster, event by event.

Slow but obvious. It is the oracle of the compiled engine's tests, and runs what that one does not
support. The order of things at one instant: iterations end; the metrics snapshot is taken; cluster
events; requests lost by a death or held back are routed; arrivals are routed; batches are formed.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Engine, Event, RouterSettings
from tailrace.errors import TailraceError
from tailrace.policy.base import Policy, holding_of
from tailrace.sim.feasibility import check_cluster, check_requests
from tailrace.sim.reference.content import BlockNames
from tailrace.sim.reference.dispatch import Dispatcher, RecordedDispatcher
from tailrace.sim.reference.holding import HoldingDispatcher
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.routing import PolicyDispatcher
from tailrace.sim.reference.server import NEVER_S, Server, batch_rows
from tailrace.sim.result import (
    FAILED,
    FINISHED,
    REPLICA_RESULT,
    REQUEST_RESULT,
    SimResult,
)
from tailrace.view.devices import resolved
from tailrace.workload.table import RequestTable


class ReferenceEngine:
    """Simulates a request table on a cluster, with any number of policies in turn."""

    def __init__(
        self,
        cluster: Cluster,
        table: RequestTable,
        router: RouterSettings | None = None,
        engine: Engine | None = None,
        events: Sequence[Event] = (),
        seed: int = 0,
    ) -> None:
        self.table = table
        self.router = router or RouterSettings()
        self.engine = engine or Engine()
        self.events = sorted(events, key=lambda event: event.at_s)
        self.seed = seed
        self.replicas = resolved(cluster)
        check_cluster(self.replicas, self.events)
        if not self.engine.vidur_compat:
            check_requests(self.replicas, table)

    def run(
        self,
        policy: Policy | None = None,
        *,
        replicas: NDArray[np.integer] | Sequence[int] | None = None,
        dispatcher: Dispatcher | None = None,
        record_batches: bool = False,
    ) -> SimResult:
        """Run with a policy, with recorded ``replicas`` [R], or with a dispatcher of your own."""
        if replicas is not None:
            dispatcher = self._recorded(replicas)
        elif policy is not None:
            kind = PolicyDispatcher if holding_of(policy) is None else HoldingDispatcher
            dispatcher = kind(policy, self.table, self.replicas, self.router, self.seed)
        elif dispatcher is None:
            raise TailraceError("a run needs a policy, recorded replicas or a dispatcher")
        return ReferenceRun(self, dispatcher, record_batches).run()

    def _recorded(self, replicas: NDArray[np.integer] | Sequence[int]) -> RecordedDispatcher:
        if len(replicas) != len(self.table):
            raise TailraceError(
                f"{len(replicas)} recorded replicas were given for {len(self.table)} requests"
            )
        if any(event.kind == "die" for event in self.events):
            raise TailraceError("recorded replicas cannot be replayed when a replica dies")
        return RecordedDispatcher(replicas)


class ReferenceRun:
    """The changing state of one run."""

    def __init__(
        self, setup: ReferenceEngine, dispatcher: Dispatcher, record_batches: bool
    ) -> None:
        self.table = setup.table
        self.compat = setup.engine.vidur_compat
        self.dispatcher = dispatcher
        self.record_batches = record_batches
        content = BlockNames(self.table)
        self.servers = [
            Server(number, config, self.compat, content)
            for number, config in enumerate(setup.replicas)
        ]
        for server in self.servers:
            server.recorded = [] if record_batches else None
        self.results = np.zeros(len(self.table), REQUEST_RESULT)
        for field in ("arrived_s", "scheduled_s", "first_token_s", "finished_s"):
            self.results[field] = np.nan
        self.results["replica"] = -1
        self.decisions = 0
        self._events = list(setup.events)
        self._arrivals = self._first_arrivals()
        self._follow_ups = self.table.follow_ups()
        self._held_back: list[int] = []

    def run(self) -> SimResult:
        """Run to the end."""
        self.dispatcher.start(self.servers)
        while (now := self._next_instant()) < NEVER_S:
            self._step(now)
        self._check_none_is_stuck()
        return SimResult(
            table=self.table,
            requests=self.results,
            replicas=np.array([server.result() for server in self.servers], REPLICA_RESULT),
            decisions=self.decisions,
            batches=batch_rows(self.servers) if self.record_batches else None,
        )

    def _step(self, now: float) -> None:
        self.dispatcher.before(now)
        for server in self.servers:
            for batch in server.end_stages(now):
                self._end_batch(server, batch, now)
        self.dispatcher.ended(now)
        while self._events and self._events[0].at_s == now:
            self._apply(self._events.pop(0), now)
        arrivals = self._take_arrivals(now)
        if self._held_back and any(server.available for server in self.servers):
            arrivals += self._held_back
            self._held_back = []
        self._route(sorted(arrivals), now)
        for server in self.servers:
            for batch in server.form_batches(now):
                self._begin_batch(server, batch, now)

    # ---- time -----------------------------------------------------------------------------------

    def _first_arrivals(self) -> list[tuple[float, int]]:
        rows = self.table.rows
        arrivals = [
            (float(rows["arrival_s"][i]), int(i)) for i in np.flatnonzero(rows["parent"] < 0)
        ]
        heapq.heapify(arrivals)
        return arrivals

    def _next_instant(self) -> float:
        times = [server.next_end_s for server in self.servers]
        times.append(self.dispatcher.next_due())
        if self._arrivals:
            times.append(self._arrivals[0][0])
        if self._events:
            times.append(self._events[0].at_s)
        return min(times)

    def _take_arrivals(self, now: float) -> list[int]:
        arrived: list[int] = []
        while self._arrivals and self._arrivals[0][0] <= now:
            time, request_id = heapq.heappop(self._arrivals)
            self.results["arrived_s"][request_id] = time
            arrived.append(request_id)
        return arrived

    # ---- requests -------------------------------------------------------------------------------

    def _route(self, request_ids: list[int], now: float) -> None:
        if not any(server.available for server in self.servers):
            self._held_back.extend(request_ids)
            return
        requests = [self._new_request(request_id, now) for request_id in request_ids]
        for request, replica in self.dispatcher.sent(now, requests):
            if not 0 <= replica < len(self.servers):
                raise TailraceError(f"request {request.id} was sent to replica {replica}")
            self.decisions += 1
            result = self.results[request.id]
            result["replica"] = replica
            result["expected_cached"] = self.dispatcher.expected_cached(request.id)
            self.servers[replica].add(request)

    def _new_request(self, request_id: int, now: float) -> Request:
        row = self.table.rows[request_id]
        return Request(
            id=request_id,
            prompt=int(row["prompt_tokens"]),
            output=int(row["output_tokens"]),
            arrived_s=float(self.results["arrived_s"][request_id]),
            queued_s=now,
            priority=-int(row["priority"]),
        )

    def _begin_batch(self, server: Server, batch: Batch, now: float) -> None:
        for request in batch.requests:
            result = self.results[request.id]
            if math.isnan(result["scheduled_s"]):
                result["scheduled_s"] = now
                result["cached_tokens"] = server.scheduler.admission_hit(request)

    def _end_batch(self, server: Server, batch: Batch, now: float) -> None:
        for request, tokens in zip(batch.requests, batch.tokens, strict=True):
            if request.advance(tokens) and request.generated == 1:
                self.results["first_token_s"][request.id] = now
                self.dispatcher.first_token(server, request, now)
            if request.finished:
                self.dispatcher.finished(server, request, now)
                self._settle(request, FINISHED, now)
        server.scheduler.batch_ended(batch)
        self.dispatcher.batch_ended(server, batch, now)

    def _settle(self, request: Request, status: int, now: float) -> None:
        """Settle a request, finished or failed; its follow-ups arrive after their think times."""
        result = self.results[request.id]
        result["status"] = status
        result["finished_s"] = now
        result["restarts"] += request.restarts
        for child in self._follow_ups.get(request.id, ()):
            think_s = float(self.table.rows["think_s"][child])
            heapq.heappush(self._arrivals, (now + think_s, child))

    # ---- cluster events -------------------------------------------------------------------------

    def _apply(self, event: Event, now: float) -> None:
        server = self.servers[event.replica]
        if event.kind == "slow":
            server.speed = server.config.speed * event.factor
        elif event.kind == "drain":
            server.available = False
        elif event.kind == "return":
            server.available = True
            server.speed = server.config.speed
        else:
            self._kill(server, now)

    def _kill(self, server: Server, now: float) -> None:
        server.available = False
        lost = server.die(now)
        self.dispatcher.lost(server, lost, now)
        for request in lost:
            if request.generated > 0:
                self._settle(request, FAILED, now)
                continue
            result = self.results[request.id]
            result["reroutes"] += 1
            result["restarts"] += request.restarts
            result["scheduled_s"] = np.nan
            result["replica"] = -1
            result["cached_tokens"] = result["expected_cached"] = 0
            self._held_back.append(request.id)

    def _check_none_is_stuck(self) -> None:
        for server in self.servers:
            for request in server.requests():
                if not self.compat:
                    raise RuntimeError(
                        f"replica {server.number} cannot form a batch for request {request.id}"
                    )
                self.results["restarts"][request.id] += request.restarts
