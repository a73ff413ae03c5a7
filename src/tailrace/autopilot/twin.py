"""The twin: the live servers in the simulator, fitted to the decision log, and what it predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
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
from tailrace.view.objective import LOST_COST_S
from tailrace.workload import decision_log
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: Share of a window that only fills queues and caches of the simulated servers.
WARM_UP = 0.1


@dataclass(frozen=True)
class Window:
    """The traffic of the last while."""

    recorded: RecordedTraffic
    start_s: float
    """Unix time of the first arrival."""
    lost_s: Floats
    """Unix times at which requests arrived that servers failed."""
    shadowed_s: Floats
    """Unix times of arrivals for which a shadow decided too."""

    @classmethod
    def read(cls, folder: Path, since: float, most: int) -> "Window":
        """Read the requests that arrived at Unix time ``since`` or later, the last ``most``."""
        found = decision_log.answered(folder, since=since, most=most)
        start_s = found.requests[0].line.arrived
        shadowed = [r.line.arrived for r in found.requests if r.outcome["shadow"] is not None]
        lost = [at for at in found.lost if at >= start_s]
        return cls(of_answered(found), start_s, np.array(lost), np.array(shadowed))

    @cached_property
    def as_recorded(self) -> RequestTable:
        """The requests at their recorded times, whatever the turn before does."""
        rows = self.recorded.table.rows.copy()
        rows["parent"], rows["think_s"] = -1, 0.0
        return RequestTable(rows, self.recorded.table.runs)

    @property
    def arrived_s(self) -> Floats:
        """Unix times of all arrivals [R + lost]."""
        return np.concatenate([self.start_s + self.recorded.outcomes["arrived_s"], self.lost_s])

    def costs_s(self) -> Floats:
        """Costs of all requests [R + lost], as they really were."""
        lost = np.full(len(self.lost_s), LOST_COST_S)
        return np.concatenate([composite_cost_s(self.recorded.result()), lost])


class Twin:
    """The servers as fitted to a window."""

    def __init__(self, model: ServerModel) -> None:
        self.model = model
        self._scenario = Scenario(cluster=model.cluster)

    @classmethod
    def fit(cls, window: Window, known: Replica) -> "Twin":
        """Fit every server; ``known``: what is known of all of them."""
        return cls(calibrate(window.recorded, known)[1])

    def fits(self, window: Window) -> bool:
        """Whether it has the servers of a window."""
        return self.model.cluster.size == window.recorded.replicas

    def error(self, window: Window) -> float:
        """Return simulated / recorded mean end-to-end time less 1, as every request was sent.

        Of requests that the fit has not seen, if it left some out.
        """
        recorded = window.recorded
        only = held_out(len(recorded.table)) if self.model.held_out else None
        found = fidelity(
            recorded, self.model.cluster, overhead_ms=self.model.overhead_ms, only=only
        )
        return {each.name: each.mean_error for each in found.latencies}["E2E"]

    def portfolio(self, policies: Sequence[str], present: str, *, orders: bool) -> list[str]:
        """Return the policies to try; ``orders``: servers take priorities (docs/order.md)."""
        chosen = list(policies) or candidates(self.model.cluster)
        if orders and not policies:
            chosen += [name + registry.ORDER_SUFFIX for name in chosen]
        return list(dict.fromkeys([present, *chosen]))

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
            found.append(SimulatedCost(policy, float(costs_s[begin:].mean())))
        return sorted(found, key=lambda p: p.cost_s)

    def predicted_s(self, window: Window, policy: str) -> Floats:
        """Return costs [R + lost] under one policy, with every request at its recorded time."""
        costs_s = self._costs_s(window.as_recorded, policy)
        return np.concatenate([costs_s, np.full(len(window.lost_s), costs_s.mean())])

    def _costs_s(self, table: RequestTable, policy: str) -> Floats:
        result = replayed(self._scenario, table, policy, 0, self.model.overhead_ms)
        return composite_cost_s(result)
