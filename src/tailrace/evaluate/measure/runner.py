"""One run of a scenario: its traffic, then the simulation."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy, Policy, user_code
from tailrace.sim.build import why_not_compiled
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import Simulation, simulate, uses_reference
from tailrace.workload.library import from_settings
from tailrace.workload.table import RequestTable


@lru_cache(maxsize=2)
def traffic(scenario: Scenario, rate: float | None, seed: int) -> RequestTable:
    """Return the requests of a scenario at a rate in requests/s (None: their own pace).

    Kept for the next policy: every policy gets the very same table.
    """
    return from_settings(scenario.workload, rate, seed)


def policy_for(scenario: Scenario, name: str) -> Policy:
    """Return the policy of a name, or raise if there is none or it cannot run this scenario."""
    file, _, rest = name.partition(":")
    if file.endswith(".py") and "=" in rest:
        raise TailraceError(
            f"cannot read '{name}': a policy file takes no parameters on the command line; "
            f"write them into {file}"
        )
    with user_code(name):
        policy = registry.get(name)
    in_engine = isinstance(policy, BuiltinPolicy) and policy.rule.in_engine
    if in_engine and uses_reference(scenario.cluster, scenario.engine):
        reason = why_not_compiled(scenario.cluster) or "the settings ask for the reference engine"
        raise TailraceError(f"{policy.name} needs the compiled engine: {reason}")
    return policy


def default_policies(scenario: Scenario) -> tuple[list[str], list[str]]:
    """Return the shipped policy and the rules that can run a scenario, and those that cannot."""
    reference = uses_reference(scenario.cluster, scenario.engine)
    rules = registry.rules()
    left_out = [rule.name for rule in rules if reference and rule.in_engine]
    able = [rule.name for rule in rules if rule.name not in left_out]
    return [registry.SHIPPED_NAME, *able], left_out


def simulation(
    scenario: Scenario, rate: float | None, seed: int, *, lookahead: bool = False
) -> Simulation:
    """Return a scenario at time 0, to be played decision by decision on the compiled engine."""
    return Simulation(
        scenario.cluster,
        traffic(scenario, rate, seed),
        router=scenario.router,
        engine=scenario.engine,
        events=scenario.events,
        seed=seed,
        lookahead=lookahead,
    )


def run(
    scenario: Scenario,
    policy: str,
    rate: float | None,
    seed: int,
    *,
    record_batches: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SimResult:
    """Simulate a scenario with one policy; ``progress`` gets how many requests have ended."""
    table, driver = traffic(scenario, rate, seed), policy_for(scenario, policy)
    return play(scenario, table, driver, seed, record_batches=record_batches, progress=progress)


def play(
    scenario: Scenario, table: RequestTable, policy: Policy, seed: int, **how: Any
) -> SimResult:
    """Simulate any requests on a scenario's cluster, with its router, engine and events.

    ``how`` is passed on to :func:`tailrace.sim.simulator.simulate`.
    """
    how |= {"router": scenario.router, "engine": scenario.engine, "events": scenario.events}
    return simulate(scenario.cluster, table, policy, seed=seed, **how)
