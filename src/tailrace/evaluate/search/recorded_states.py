"""Decisions of a run as a learned policy would have seen them, with the costs that followed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import play
from tailrace.evaluate.measure.runner import traffic as requests_of
from tailrace.policy.base import Policy
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.seeds import generator
from tailrace.view.records import View


@dataclass(frozen=True)
class RecordedStates:
    """``K`` decisions: the replica that was chosen, and the cost that followed."""

    replica_obs: NDArray[np.float32]  #: [K, F] of the chosen replica
    request_obs: NDArray[np.float32]  #: [K, G]
    spread: NDArray[np.float64]  #: [F] mean deviation of a feature among the replicas at a time
    cost_s: NDArray[np.float64]  #: [K] composite cost of the request


class StateRecorder(Policy):
    """Lets another policy decide and records the observations."""

    def __init__(self, driver: Policy, requests: int, epsilon: float, seed: int) -> None:
        """A share ``epsilon`` of the choices is random, so that bad choices are seen too."""
        self.name = driver.name
        self.lowest_id_wins = driver.lowest_id_wins
        self._driver, self._epsilon = driver, epsilon
        self._rng = generator(seed, "recorder")
        self._all: dict[int, NDArray[np.float32]] = {}
        self.request_obs = np.zeros((requests, N_REQUEST_FEATURES), np.float32)
        self.replica_obs = np.zeros((requests, N_REPLICA_FEATURES), np.float32)
        self.spread = np.zeros(N_REPLICA_FEATURES)

    def reset(self, n_replicas: int, seed: int) -> None:
        """Start the driver's run."""
        self._driver.reset(n_replicas, seed)

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return the driver's scores [n], or random ones."""
        n, request = len(view.replicas), int(view.request["id"])
        seen = np.zeros((n, N_REPLICA_FEATURES), np.float32)
        observe(view, seen, self.request_obs[request])
        self._all[request] = seen
        self.spread += seen[view.replicas["available"] != 0].std(axis=0) / len(self.request_obs)
        if self._rng.random() < self._epsilon:
            return self._rng.random(n)
        return self._driver.scores(view)

    def sent(self, replica: int, request_id: int, now: float) -> None:
        """Keep the observation of the chosen replica."""
        del now
        self.replica_obs[request_id] = self._all.pop(request_id)[replica]


def record(traffic: Traffic, make: Callable[[], Policy], epsilon: float) -> RecordedStates:
    """Play traffic with a policy and return its decisions."""
    scenario = traffic.scenario
    table = requests_of(scenario, traffic.rate_rps, traffic.seed)
    recorder = StateRecorder(make(), len(table), epsilon, traffic.seed)
    result = play(scenario, table, recorder, traffic.seed)
    sent = result.requests["replica"] >= 0
    cost = composite_cost_s(result)
    return RecordedStates(
        recorder.replica_obs[sent], recorder.request_obs[sent], recorder.spread, cost[sent]
    )
