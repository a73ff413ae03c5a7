"""One run of a scenario: its traffic, then the simulation."""

from collections.abc import Callable
from functools import lru_cache

from tailrace.config import Scenario
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import simulate
from tailrace.workload.library import from_settings
from tailrace.workload.table import RequestTable


@lru_cache(maxsize=2)
def traffic(scenario: Scenario, rate: float | None, seed: int) -> RequestTable:
    """Return the requests of a scenario at a rate in requests/s (None: their own pace).

    Kept for the next policy: every policy gets the very same table.
    """
    return from_settings(scenario.workload, rate, seed)


def run(
    scenario: Scenario,
    policy: str,
    rate: float | None,
    seed: int,
    *,
    record_batches: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SimResult:
    """Simulate a scenario with one policy; ``progress`` is told how many requests have ended."""
    return simulate(
        scenario.cluster,
        traffic(scenario, rate, seed),
        policy,
        router=scenario.router,
        engine=scenario.engine,
        events=scenario.events,
        seed=seed,
        record_batches=record_batches,
        progress=progress,
    )
