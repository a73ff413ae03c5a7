"""Emulated clusters on a virtual clock for ``autopilot.py``: policies in turns, and a wrong twin.

The simulator is the world: its requests are what a live router would have seen. The twin simulates
the same arrivals on servers whose speeds it takes wrongly, as a calibration would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import play, policy_for, traffic
from tailrace.policy.base import BuiltinPolicy
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import Simulation
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

SPEEDS = (1.5, 1.0, 1.0, 0.6)
#: Chat at 20 requests/s would keep servers of these speeds near saturation, where a mean over two
#: hours is that of the worst minutes.
FASTER = {"chat": 1.2}
RATE_RPS = 20.0
#: Decisions between two looks at the clock: a policy begins its block up to this many late.
STRIDE = 16


def cluster(speeds: tuple[float, ...] = SPEEDS, factors: Floats | None = None) -> Cluster:
    """Servers of these speeds, times the factors [n]."""
    by = np.ones(len(speeds)) if factors is None else factors
    return Cluster(replicas=tuple(Replica(speed=s * f) for s, f in zip(speeds, by, strict=True)))


def scenario(workload: str, hours: float, rate_rps: float = RATE_RPS) -> Scenario:
    """A workload on four servers of mixed speed."""
    wanted = Workload(name=workload, requests=int(3600 * hours * rate_rps), rate=rate_rps)
    speeds = tuple(FASTER.get(workload, 1.0) * speed for speed in SPEEDS)
    return Scenario(cluster=cluster(speeds), workload=wanted)


def requests(base: Scenario, seed: int) -> RequestTable:
    """The requests of a scenario at its rate."""
    return traffic(base, base.workload.rate, seed)


def play_turns(
    base: Scenario, table: RequestTable, policy_at: Callable[[float], str], seed: int
) -> SimResult:
    """Simulate a table with the policy that ``policy_at`` names for each moment, in s."""
    simulation = Simulation(
        base.cluster, table, router=base.router, engine=base.engine, events=base.events, seed=seed
    )
    policies: dict[str, BuiltinPolicy] = {}
    over = False
    while not over:
        name = policy_at(simulation.now)
        if name not in policies:
            found = policy_for(base, name)
            assert isinstance(found, BuiltinPolicy)
            policies[name] = found
        over = simulation.run_some(policies[name], STRIDE)
    return simulation.result()


@dataclass(frozen=True)
class Twin:
    """The cluster as it is believed to be: speeds off by a random factor each."""

    base: Scenario
    factors: Floats

    @classmethod
    def of(cls, base: Scenario, deviation: float, rng: np.random.Generator) -> "Twin":
        """Draw factors with this standard deviation of their logarithms."""
        return cls(base, np.exp(deviation * rng.standard_normal(base.cluster.size)))

    def costs(
        self, result: SimResult, policy: str, only: NDArray[np.bool_] | None = None
    ) -> Floats:
        """Costs [r] of recorded requests under one policy, each arriving when it really did.

        ``only`` [R]: those that the log of the moment has.
        """
        chosen = np.arange(len(result.requests)) if only is None else np.flatnonzero(only)
        arrived = result.requests["arrived_s"][chosen]
        order = np.argsort(arrived, kind="stable")
        rows = result.table.rows[chosen[order]].copy()
        rows["arrival_s"], rows["parent"], rows["think_s"] = arrived[order], -1, 0.0
        rows["arrival_s"] -= rows["arrival_s"][0]
        table = RequestTable(rows, result.table.runs)
        replicas = tuple(
            replica.model_copy(update={"speed": replica.speed * factor})
            for replica, factor in zip(self.base.cluster.expanded(), self.factors, strict=True)
        )
        believed = self.base.model_copy(
            update={"cluster": Cluster(replicas=replicas), "events": ()}
        )
        costs = np.empty(len(order))
        costs[order] = composite_cost_s(play(believed, table, policy_for(believed, policy), 1))
        return costs
