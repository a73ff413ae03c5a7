"""Requests that wait at the router of the reference engine, by the rules of view/holding.py."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tailrace.policy.base import holding_of
from tailrace.queueing.fair_queue import FairQueue
from tailrace.sim.reference.request import Request
from tailrace.sim.reference.routing import PolicyDispatcher
from tailrace.sim.reference.server import Server
from tailrace.view import ledger
from tailrace.view.holding import any_room, has_room, holding_row, is_saturated, waiting_key


class HoldingDispatcher(PolicyDispatcher):
    """Routes with a policy that lets requests wait while no replica has room."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        holding = holding_of(self.policy)
        assert holding is not None
        self._max_wait_s = holding.max_wait_s
        self._holding = holding_row(holding)
        self._queue: FairQueue[Request] = FairQueue()
        self._charged: dict[int, int] = {}  # tokens its client was charged, by request

    def next_due(self) -> float:
        """Return when the request that has waited longest must be sent, s."""
        if not any(server.available for server in self.servers):
            return math.inf
        return min((queued.since + self._max_wait_s for queued in self._queue), default=math.inf)

    def sent(self, now: float, requests: Sequence[Request]) -> Iterator[tuple[Request, int]]:
        """Give out arrivals if there is room and nobody waits; then those that wait, by turns."""
        for request in requests:
            if not self._queue and self._has_room(now):
                yield self._send(request, now, waited=False)
            else:
                self._push(request, now)
        while self._queue:
            queued = self._queue.pop_overdue(now, self._max_wait_s)
            limited = queued is None
            if queued is None and self._has_room(now):
                queued = self._queue.pop()
            if queued is None:
                return
            request = replace(queued.item, queued_s=now)
            yield self._send(request, now, waited=True, limited=limited)

    def _has_room(self, now: float) -> bool:
        if self.settings.staleness_s == 0:
            self.take_snapshot(now)
        self._show_available()
        return bool(any_room(self._holding, self.views))

    def _show_available(self) -> None:
        for view, server in zip(self.views, self.servers, strict=True):
            view["available"] = server.available

    def _push(self, request: Request, now: float) -> None:
        facts = self.facts[request.id]
        self._take_events(now)
        self._show_cached(facts)
        key = waiting_key(
            self._holding, request.arrived_s, facts.prompt_tokens, facts.ttft_slo_s, self.views
        )
        self._queue.push(
            request, flow=self._flow(request), priority=-facts.priority, key=int(key), since=now
        )

    def _flow(self, request: Request) -> str:
        return str(self.table.rows["tenant"][request.id])

    def _send(
        self, request: Request, now: float, *, waited: bool, limited: bool = True
    ) -> tuple[Request, int]:
        full: list[Server] = []
        if limited:
            saturated = is_saturated(self._holding, self.views)
            full = [
                server
                for server, view in zip(self.servers, self.views, strict=True)
                if server.available and not has_room(self._holding, view, saturated)
            ]
        for server in full:
            server.available = False
        (replica,) = self.route(now, [request])
        for server in full:
            server.available = True
        if (waited or self._queue) and request.id not in self._charged:
            predicted = ledger.whole_tokens(self.request_view["predicted_output"])
            self._charged[request.id] = self.facts[request.id].prompt_tokens + predicted
            self._queue.serve(self._flow(request), 1.0, self._charged[request.id])
        return request, replica

    def finished(self, server: Server, request: Request, now: float) -> None:
        """Correct what its client was charged, now that its length is known."""
        super().finished(server, request, now)
        charged = self._charged.get(request.id)
        if charged is not None:
            facts = self.facts[request.id]
            used = facts.prompt_tokens + facts.output_tokens
            self._queue.correct(self._flow(request), 1.0, used - charged)
