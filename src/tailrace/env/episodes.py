"""Episodes: the cluster and traffic of a scenario and a training seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from tailrace import scenario as scenarios
from tailrace.config import Replica, Scenario
from tailrace.errors import TailraceError
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, generator, require
from tailrace.sim.allocation import Allocation, allocation_for
from tailrace.sim.build import why_not_compiled
from tailrace.sim.feasibility import check_cluster, check_requests
from tailrace.view.devices import resolved
from tailrace.workload.library import from_settings
from tailrace.workload.table import RequestTable

#: One scenario, several to draw from, or a function that makes one from a seed.
Worlds = str | Scenario | Sequence[str | Scenario] | Callable[[int], Scenario]
#: Draws from a function of scenarios, to find its largest cluster.
PROBES = 64


@dataclass(frozen=True)
class Episode:
    """A scenario with its servers and its requests."""

    scenario: Scenario
    seed: int
    replicas: Sequence[Replica]
    table: RequestTable

    @property
    def allocation(self) -> Allocation:
        """Array sizes that its cluster and table need."""
        events = len(self.scenario.events)
        return allocation_for(self.replicas, self.table, self.scenario.router, events)


class Episodes:
    """Makes episodes of ``decisions`` decisions from training seeds."""

    def __init__(self, worlds: Worlds, decisions: int) -> None:
        """Take scenarios by name or value, or a function of a seed."""
        if decisions < 1:
            raise TailraceError(f"an episode needs at least one decision, got {decisions}")
        self.decisions = decisions
        self._sampler: Callable[[int], Scenario] | None = None
        self._scenarios: list[Scenario] = []
        if callable(worlds):
            self._sampler = worlds
            return
        given = [worlds] if isinstance(worlds, str | Scenario) else list(worlds)
        if not given:
            raise TailraceError("an environment needs at least one scenario")
        loaded = [scenarios.load(w) if isinstance(w, str) else w for w in given]
        self._scenarios = [with_capacity(scenario) for scenario in loaded]

    def scenario(self, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        if self._sampler is not None:
            return self._sampler(seed)
        if len(self._scenarios) == 1:
            return self._scenarios[0]
        return self._scenarios[generator(seed, "scenario").integers(len(self._scenarios))]

    def make(self, seed: int) -> Episode:
        """Return the episode of a seed, which must be a training seed."""
        return self._lay_out(self.scenario(seed), require(seed, Purpose.TRAINING))

    def _lay_out(self, scenario: Scenario, seed: int) -> Episode:
        reason = why_not_compiled(scenario.cluster)
        if reason is not None:
            raise TailraceError(f"{scenario.name} cannot be an environment: {reason}")
        # One request more than decisions: the last one is observed but not decided.
        longer = scenario.with_workload(requests=self.decisions + 1)
        table = from_settings(longer.workload, resolve_rate(scenario), seed)
        replicas = resolved(scenario.cluster)
        check_cluster(replicas, scenario.events)
        check_requests(replicas, table)
        return Episode(scenario, seed, replicas, table)

    def largest(self, seed: int) -> Allocation:
        """Return sizes for the largest cluster among the scenarios, or among PROBES draws."""
        if self._sampler is None:
            episodes = [self._lay_out(scenario, seed) for scenario in self._scenarios]
        else:
            episodes = [self.make(seed + k) for k in range(PROBES)]
        return reduce(Allocation.joined, (episode.allocation for episode in episodes))
