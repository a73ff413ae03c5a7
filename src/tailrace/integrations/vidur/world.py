"""Real Vidur decision by decision: reset, step, and the cost that accrued in between.

Vidur's event loop is driven from outside: it stands still at every routing decision until somebody
has chosen. The view, the observation and the accounts are those of the simulator's environments
(view/records.py, policy/learned/observation.py, sim/cost_accounts.py). Imports Vidur.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.env.reward import RewardSettings
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.router import RouterWatcher
from tailrace.integrations.vidur.setup import VidurSetup, setup_of
from tailrace.integrations.vidur.simulation import TableSimulator
from tailrace.learn.cost_ledger import CostLedger, spread
from tailrace.policy.learned.observation import observe
from tailrace.sim import cost_accounts, engine
from tailrace.sim.fleet import Step, begin, new_step
from tailrace.sim.result import SimResult
from tailrace.view.records import View


class _LedgerWatcher(RouterWatcher):
    """Enters into a ledger what the router observes."""

    def __init__(self, ledger: CostLedger) -> None:
        self._ledger = ledger

    def first_token(self, number: int, now: float) -> None:
        """Its first token has come."""
        self._ledger.first_token(number, now)

    def finished(self, number: int, now: float) -> None:
        """It is complete."""
        self._ledger.ended(number, now)


class VidurWorld:
    """A scenario, or your own Vidur settings, in real Vidur; the caller chooses the replicas.

    >>> world = VidurWorld("uniform-chat-80", requests=200)
    >>> view, done = world.reset(seed), False
    >>> while not done:
    ...     view, cost_s, done = world.step(choose(view))

    The costs of an episode add up to the latency cost of its requests. ``out`` shows the decision
    at hand and the last step as the simulator's environments do, so that their rewards
    (env/reward.py) can be had of it.
    """

    def __init__(
        self,
        scenario: Scenario | str | Path | VidurSetup = "demo",
        *,
        requests: int | None = None,
        rate: float | None = None,
        vidur: Any = None,
        reward: RewardSettings | None = None,
        latency_limit_s: float | None = None,
    ) -> None:
        """Take a scenario, its name or its file.

        ``requests`` per episode and their ``rate`` in requests/s are the scenario's unless given.
        ``vidur``: play Vidur's own settings instead, a ``SimulationConfig`` or its command line;
        what a router knows and the targets for latencies are then the scenario's. ``reward`` shapes
        the targets and curves; requests that take longer than ``latency_limit_s`` are counted.
        """
        if not isinstance(scenario, VidurSetup):
            if not isinstance(scenario, Scenario):
                scenario = scenarios.load(scenario)
            changes = {k: v for k, v in (("requests", requests), ("rate", rate)) if v is not None}
            scenario = scenario.with_workload(**changes)
        self.setup, self.notes = setup_of(scenario, vidur)
        """What is played, and what was changed of the scenario for that."""
        self.scenario = self.setup.scenario
        self.requests = requests or self.scenario.workload.requests
        self.replicas = self.scenario.cluster.size
        self.out: Step = new_step(1, self.replicas)
        """[1, ...] the observation of the decision at hand, and what the last step cost."""
        self._reward, self._latency_limit_s = reward, latency_limit_s
        self._simulator: TableSimulator | None = None
        self._ledger: CostLedger | None = None
        self._outputs: NDArray[np.int64] = np.zeros(0, np.int64)
        self._view: View | None = None

    def reset(self, seed: int) -> View:
        """Start an episode with the traffic of a seed; returns the view of its first decision."""
        table = self.setup.requests(self.requests, seed)
        self._ledger, self._outputs = (
            CostLedger(self._reward, self._latency_limit_s),
            table.rows["output_tokens"],
        )
        self._simulator = self.setup.simulator(table, seed)
        self._simulator.watch(_LedgerWatcher(self._ledger))
        begin(self.out, 0)
        self._move_on()
        assert self._view is not None
        return self._view

    def step(self, replica: int) -> tuple[View | None, float, bool]:
        """Send the request at hand to a replica and go on to the next decision.

        Returns its view (live records; None at the end), the composite cost in s that accrued in
        between, and whether the episode is over; its cost is then counted to its very end.
        """
        if self._simulator is None or self._view is None:
            raise TailraceError("the episode is over or has not begun: call reset()")
        if not 0 <= replica < self.replicas:
            raise TailraceError(f"a replica is a number from 0 to {self.replicas - 1}")
        self._simulator.assign(int(replica))
        self._move_on()
        return self._view, float(self.out.cost[0]), self._view is None

    def observation(self) -> dict[str, NDArray[Any]]:
        """What the router sees, as Tailrace's environments show it; the next step overwrites it."""
        return {
            "replicas": self.out.replica_obs[0],
            "request": self.out.request_obs[0],
            "mask": self.out.mask[0].view(np.int8),
        }

    def result(self) -> SimResult:
        """Return what has happened so far."""
        if self._simulator is None:
            raise TailraceError("nothing has happened yet: call reset()")
        return self._simulator.result()

    def _move_on(self) -> None:
        assert self._simulator is not None
        assert self._ledger is not None
        view = self._view = self._simulator.next_view()
        out = self.out
        if view is None:
            out.status[0] = engine.OVER
            now = max(float(out.time_before[0]), self._ledger.ended_at)
        else:
            out.status[0] = engine.NEEDS_DECISION
            now = float(view.request["now"])
            request, number = view.request, int(view.request["id"])
            slo_s, output = float(request["ttft_slo_s"]), int(self._outputs[number])
            pace_s = float(request["tpot_slo_s"])
            self._ledger.arrived(number, float(request["arrived_at"]), slo_s, output, pace_s)
            observe(view, out.replica_obs[0], out.request_obs[0])
            out.mask[0] = view.replicas["available"] != 0
        out.spread[0] = spread(self._simulator.replicas_view)
        accrued = self._ledger.accrued(now)
        out.terms[0] = accrued - out.terms_before[0]
        out.terms_before[0] = accrued
        out.cost[0] = cost_accounts.composite(out.terms[0])
        out.elapsed_s[0] = now - out.time_before[0]
        out.time_before[0] = now
