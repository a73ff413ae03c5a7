"""What is played in real Vidur: a scenario with Tailrace's cost formula, or Vidur's own settings.

Vidur is imported when something is played, not before, and a setup can be sent to a process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace import scenario as scenarios
from tailrace.config import Cluster, Scenario, VidurSettings, Workload
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.limits import nearest
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, seeds
from tailrace.workload.library import from_settings
from tailrace.workload.table import RequestTable

if TYPE_CHECKING:
    from tailrace.integrations.vidur.simulation import TableSimulator

#: Requests of Vidur's generator that an adapted scenario holds; of a short trace, the fewer.
ADAPTED_REQUESTS, ADAPTED_FEWER = 10_000, 1_000
#: No settings of Vidur's own.
SCENARIO_ONLY = VidurSettings()


@dataclass(frozen=True)
class VidurSetup:
    """A cluster and its traffic in Vidur."""

    scenario: Scenario
    """As Vidur can play it (limits.py), or what Vidur's own settings amount to."""
    own: VidurSettings = SCENARIO_ONLY
    """Vidur's own settings; without arguments the scenario is played."""
    load: float = 1.0
    """Multiple of the rate at which requests of Vidur's own settings arrive."""

    @property
    def is_own(self) -> bool:
        """Whether Vidur's own settings are played."""
        return bool(self.own.arguments)

    def requests(self, count: int, seed: int) -> RequestTable:
        """Return the first ``count`` requests of the traffic of a seed."""
        workload = self.scenario.workload.model_copy(update={"requests": count})
        if not self.is_own:
            return from_settings(workload, resolve_rate(self.scenario), seed)
        from tailrace.integrations.vidur import own

        return own.requests(self.own, count, seed, workload, self.load)

    def simulator(self, table: RequestTable, seed: int) -> "TableSimulator":
        """Return a table in Vidur at time 0, without a policy."""
        from tailrace.integrations.vidur import own, simulation

        router = self.scenario.router
        if self.is_own:
            return own.prepare(self.own, table, router=router, seed=seed)
        return simulation.prepare(self.scenario.cluster, table, router=router, seed=seed)


def setup_of(
    world: "Scenario | str | Path | VidurSetup", own: Any = None
) -> tuple[VidurSetup, list[str]]:
    """Return the setup of a scenario or of Vidur's own settings, and what was changed for it.

    ``own``: a ``SimulationConfig``, Vidur's command line as text or words, or VidurSettings. Its
    targets for latencies and its router are then the scenario's.
    """
    if isinstance(world, VidurSetup):
        return world, []
    scenario = world if isinstance(world, Scenario) else scenarios.load(world)
    if own is None:
        adapted, notes = nearest(scenario)
        return VidurSetup(with_capacity(adapted)), notes
    from tailrace.integrations.vidur.own import described, settings_of

    settings = settings_of(own)
    replicas = described(settings).replicas
    kind = replicas[0].model_copy(update={"count": len(replicas)})
    update = {
        "name": "vidur",
        "description": "",
        "cluster": Cluster(replicas=(kind,)),
        # Vidur's generator makes the requests, at its own pace.
        "workload": scenario.workload.model_copy(
            update={"name": "vidur", "rate": None, "load": None}
        ),
        "events": (),
        "capacity_rps": None,
    }
    return VidurSetup(scenario.model_copy(update=update), settings), []


def adapted_scenario(setup: VidurSetup, file: Path) -> tuple[Scenario, RequestTable, list[str]]:
    """Return the scenario that Vidur's own settings amount to, and how near it comes.

    Its replicas are Vidur's, with a cost model fitted to Vidur's predictor. Its requests, drawn by
    Vidur's generator, are returned too; they have to be written to ``file``.
    """
    from tailrace.integrations.vidur.own import described

    seed = seeds(Purpose.TRAINING, 1)[0]
    try:
        table = setup.requests(ADAPTED_REQUESTS, seed)
    except TailraceError:
        table = setup.requests(ADAPTED_FEWER, seed)
    span_s = float(table.rows["arrival_s"][-1])
    arrivals = {"rate": len(table) / span_s, "arrivals": "poisson"} if span_s > 0 else {
        "rate": None, "load": None, "arrivals": "trace"
    }  # fmt: skip
    workload = Workload.model_validate(
        setup.scenario.workload.model_dump()
        | {"name": str(file), "requests": len(table)}
        | arrivals
    )
    error = described(setup.own).mean_error
    note = (
        f"Tailrace's simulator plays an adapted scenario: replicas with a cost model within "
        f"{error:.1%} of Vidur's predictor on average, and {len(table)} requests of Vidur's "
        f"generator ({file})"
    )
    return setup.scenario.model_copy(update={"workload": workload}), table, [note]
