"""The twin: the live servers in the simulator, fitted to the decision log, and what it predicts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.assess.assessment import ServerModel, calibrate, candidates, held_out
from tailrace.autopilot.controller import SimulatedCost
from tailrace.config import Replica, Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.policy import registry
from tailrace.replay.fidelity import fidelity
from tailrace.replay.recorded import RecordedTraffic, of_answered
from tailrace.replay.what_if import replayed
from tailrace.workload import decision_log
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: Share of a window that only fills queues and caches of the simulated servers.
WARM_UP = 0.1
#: Requests per replica that servers are fitted to, the latest.
FITTED_REQUESTS = 1000
#: Best policies that are also tried with order and with a queue, and with which.
WITH_ORDER = 3
ORDER, QUEUE = registry.ORDER_SUFFIX, registry.QUEUE_SUFFIX + ":max_queued=4,w=100"
#: Rule that shows how much could be gained, and the most requests it replays: it takes
#: milliseconds per decision.
LOOK_AHEAD, LOOK_AHEAD_REQUESTS = "lookahead", 3000


def with_order(prospects: Sequence[SimulatedCost], *, orders: bool) -> list[str]:
    """Return the best policies that only place, with a queue at the router and with order.

    ``orders``: servers take priorities (docs/order.md).
    """
    plain = [p.policy for p in prospects if not registry.split_order(p.policy)[1]]
    suffixes = (ORDER, QUEUE) if orders else (QUEUE,)
    return [name + suffix for name in plain[:WITH_ORDER] for suffix in suffixes]


@dataclass(frozen=True)
class Window:
    """The traffic of the last while."""

    recorded: RecordedTraffic
    start_s: float
    """Unix time of the first arrival."""
    shadowed_s: Floats
    """Unix times of arrivals for which a shadow decided too."""

    @classmethod
    def read(cls, folder: Path, since: float, most: int) -> "Window":
        """Read the requests that arrived at Unix time ``since`` or later, the last ``most``."""
        found = decision_log.answered(folder, since=since, most=most)
        start_s = found.requests[0].line.arrived
        shadowed = [r.line.arrived for r in found.requests if r.outcome["shadow"] is not None]
        return cls(of_answered(found), start_s, np.array(shadowed))

    @cached_property
    def as_recorded(self) -> RequestTable:
        """The requests at their recorded times, whatever the turn before does."""
        rows = self.recorded.table.rows.copy()
        rows["parent"], rows["think_s"] = -1, 0.0
        return RequestTable(rows, self.recorded.table.runs)

    @cached_property
    def latest(self) -> RecordedTraffic:
        """The last requests of each replica, as many as a fit looks at.

        A fit takes the first ones of what it gets, and servers change. A replica that gets few
        requests keeps older ones. Replicas do not influence each other: what was sent where is
        recorded.
        """
        recorded = self.recorded
        kept = np.zeros(len(recorded.outcomes), np.bool_)
        for number in range(recorded.replicas):
            kept[np.flatnonzero(recorded.outcomes["replica"] == number)[-FITTED_REQUESTS:]] = True
        if kept.all():
            return recorded
        rows = recorded.table.rows[kept].copy()
        rows["arrival_s"] -= rows["arrival_s"][0]
        parent = rows["parent"]
        has_parent = (parent >= 0) & kept[parent]
        rows["think_s"] = np.where(has_parent, rows["think_s"], 0.0)
        rows["parent"] = np.where(has_parent, np.cumsum(kept)[parent] - 1, -1)
        table = RequestTable(rows, recorded.table.runs)
        return replace(recorded, table=table, outcomes=recorded.outcomes[kept])

    @property
    def arrived_s(self) -> Floats:
        """Unix times of all arrivals [R]."""
        arrived_s: Floats = self.start_s + self.recorded.outcomes["arrived_s"]
        return arrived_s


class Twin:
    """The servers as fitted to a window."""

    def __init__(self, model: ServerModel) -> None:
        self.model = model
        self._scenario = Scenario(cluster=model.cluster)

    @classmethod
    def fit(cls, window: Window, known: Replica) -> "Twin":
        """Fit every server; ``known``: what is known of all of them."""
        return cls(calibrate(window.latest, known)[1])

    def fits(self, window: Window) -> bool:
        """Whether it has the servers of a window."""
        return self.model.cluster.size == window.recorded.replicas

    def error(self, window: Window) -> float:
        """Return simulated / recorded mean end-to-end time less 1, as every request was sent.

        Of requests that the fit has not seen, if it left some out.
        """
        recorded = window.latest
        only = held_out(len(recorded.table)) if self.model.held_out else None
        found = fidelity(
            recorded, self.model.cluster, overhead_ms=self.model.overhead_ms, only=only
        )
        return {each.name: each.mean_error for each in found.latencies}["E2E"]

    def portfolio(self, policies: Sequence[str], present: str) -> list[str]:
        """Return the policies to try first: those of the settings, or `tailrace` and all rules."""
        return list(dict.fromkeys([present, *(policies or candidates(self.model.cluster))]))

    def prospects(self, window: Window, policies: Sequence[str]) -> list[SimulatedCost]:
        """Return what each policy would have cost in a window; those that cannot run are left out.

        Follow-ups come their think time after the simulated end of the turn before.
        """
        table, found = window.recorded.table, []
        begin = int(WARM_UP * len(table))
        for policy in policies:
            try:
                costs_s = self._costs_s(table, policy)
            except TailraceError:
                continue
            cost_s = float(costs_s[begin:].mean())
            if np.isfinite(cost_s):
                found.append(SimulatedCost(policy, cost_s))
        return sorted(found, key=lambda p: p.cost_s)

    def gap(self, window: Window, policy: str) -> float:
        """Return by which share a look-ahead costs less than a policy on the last requests.

        It knows the future of the servers, so this is more than any policy can gain.
        """
        rows = self._last(window)
        table = RequestTable(rows, window.recorded.table.runs)
        begin = int(WARM_UP * len(rows))
        ahead, own = (self._costs_s(table, name)[begin:].mean() for name in (LOOK_AHEAD, policy))
        return 1 - float(ahead / own)

    @staticmethod
    def _last(window: Window) -> NDArray[np.void]:
        rows = window.as_recorded.rows[-LOOK_AHEAD_REQUESTS:].copy()
        rows["arrival_s"] -= rows["arrival_s"][0]
        return rows

    def predicted_s(self, window: Window, policy: str) -> Floats:
        """Return costs [R] under one policy, with every request at its recorded time."""
        return self._costs_s(window.as_recorded, policy)

    def _costs_s(self, table: RequestTable, policy: str) -> Floats:
        result = replayed(self._scenario, table, policy, 0, self.model.overhead_ms)
        return composite_cost_s(result)
