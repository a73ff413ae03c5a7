"""Changing traffic and servers: ``python benchmarks/autopilot_drift.py [--json]``.

Phases of three hours at 20 requests/s on the same four servers of mixed speed: chat, agents,
documents, agents with a server that has become slow, agents with smaller KV caches. The controller,
its test and its turns are those of the product, on a virtual clock; a round every five minutes, the
product's default, looks at the last half hour. The simulator's view of each server is off by 10 %
(standard deviation). Every phase begins with empty servers. Beside it: the best policy of each
phase, known beforehand, and the best fixed policy. Evaluation seeds.

``tailrace`` is the best policy of every phase. So there are portfolios without it
(``autopilot.policies``), of which the best policy differs by phase.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopilot import BLOCK_S, BLOCKS, TWIN_ERROR, WASHOUT_S, read_results, save_part
from autopilot_world import FASTER, SPEEDS, STRIDE, Twin, cluster, requests, scenario
from tailrace.autopilot.blocks import cycles_of
from tailrace.autopilot.controller import Findings, SimulatedCost, step
from tailrace.autopilot.state import PilotState
from tailrace.config import Cluster, Scenario
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.files import dumps
from tailrace.policy.base import BuiltinPolicy
from tailrace.router.settings import AutopilotSettings
from tailrace.seeds import Purpose, generator, seeds
from tailrace.sim.result import PENDING, SimResult
from tailrace.sim.simulator import Simulation

Floats = NDArray[np.float64]

HOURS = 3.0
ROUND_S, WINDOW_S = 300.0, 1800.0
POLICIES = (
    "tailrace", "least_predicted_ttft", "lmetric", "load_aware", "sticky_session",
    "sglang_cache_aware", "llm_d",
)  # fmt: skip
#: Policies that may be put in charge, and those of the settings with which a flight begins.
PORTFOLIOS = {
    "all": (POLICIES, ("tailrace", "lmetric", "load_aware")),
    "rules": (POLICIES[1:], ("least_predicted_ttft", "lmetric", "load_aware")),
    "two rules": (("lmetric", "sticky_session"), ("lmetric",)),
}
#: Documents are shortened to this share, for which the servers are fast enough.
DOCUMENTS = 0.15
SLOWED = 0.5
SMALL_BLOCKS = 8000
SETTINGS = AutopilotSettings(
    mode="act", every_s=ROUND_S, window_s=WINDOW_S, block_s=BLOCK_S,
    share=1 / BLOCKS, washout_s=WASHOUT_S,
)  # fmt: skip


def phases() -> dict[str, Scenario]:
    """Name and world of each phase."""
    speeds = tuple(FASTER["chat"] * speed for speed in SPEEDS)
    usual = cluster(speeds)
    slow = cluster((SLOWED * speeds[0], *speeds[1:]))
    small = Cluster(
        replicas=tuple(r.model_copy(update={"num_blocks": SMALL_BLOCKS}) for r in usual.expanded())
    )

    def world(workload: str, servers: Cluster, prompt_scale: float = 1.0) -> Scenario:
        base = scenario(workload, HOURS)
        traffic = base.workload.model_copy(update={"prompt_scale": prompt_scale})
        return base.model_copy(update={"cluster": servers, "workload": traffic})

    return {
        "chat": world("chat", usual),
        "agents": world("agents", usual),
        "documents": world("doc-qa", usual, DOCUMENTS),
        "agents, a slow server": world("agents", slow),
        "agents, small caches": world("agents", small),
    }


def fly(
    base: Scenario, portfolio: Sequence[str], state: PilotState, start: str, begin_s: float,
    seed: int,
) -> tuple[float, PilotState]:  # fmt: skip
    """One phase that begins at ``begin_s``; returns its mean cost, and the state at its end."""
    table = requests(base, seed)
    simulation = Simulation(base.cluster, table, router=base.router, engine=base.engine, seed=seed)
    twin = Twin.of(base, TWIN_ERROR, generator(seed, "twin"))
    policies = {name: policy_for(base, name) for name in portfolio}
    look_at = begin_s + ROUND_S
    over = False
    while not over:
        now = begin_s + simulation.now
        if now >= look_at:
            state = look(simulation.result(), twin, portfolio, state, start, begin_s, now)
            look_at += ROUND_S
        name = state.present or start
        if state.stage in ("canary", "guard"):
            turns = state.turns(SETTINGS.share, SETTINGS.block_s)
            name = state.candidate if turns.is_candidates(now) else name
        policy = policies[name]
        assert isinstance(policy, BuiltinPolicy)
        over = simulation.run_some(policy, STRIDE)
    return float(composite_cost_s(simulation.result()).mean()), state


def look(
    result: SimResult, twin: Twin, portfolio: Sequence[str], state: PilotState, start: str,
    begin_s: float, now: float,
) -> PilotState:  # fmt: skip
    """A round on the requests of the window that have ended."""
    done = result.requests
    arrived_s = begin_s + done["arrived_s"]
    recent = (done["status"] != PENDING) & (arrived_s >= now - WINDOW_S) & (arrived_s < now)
    cost_s = composite_cost_s(result)[recent]
    present = state.present or start
    simulated = {name: twin.costs(result, name, recent) for name in portfolio}
    if state.stage in ("canary", "guard"):
        turns = state.turns(SETTINGS.share, SETTINGS.block_s)
        found = cycles_of(
            turns, arrived_s[recent], cost_s, (arrived_s[recent], simulated[present]),
            washout_s=WASHOUT_S,
            begin_s=max(state.since, begin_s, now - WINDOW_S), end_s=now - BLOCK_S,
        )  # fmt: skip
        state = state.with_cycles(found)
    warm = len(cost_s) // 10
    prospects = [
        SimulatedCost(name, float(costs[warm:].mean())) for name, costs in simulated.items()
    ]
    error = float(simulated[present].mean() / cost_s.mean() - 1)
    shadowed = 1000 if state.stage == "shadow" else 0
    return step(state, Findings(now, start, prospects, error, shadowed), SETTINGS)


def over_all(regrets: dict[str, float]) -> float:
    """Return the geometric mean of costs relative to the best of each phase, less 1."""
    return float(np.expm1(np.mean(np.log1p(list(regrets.values())))))


def flown(
    portfolio: Sequence[str], starts: Sequence[str], fixed: dict[str, dict[str, float]], seed: int
) -> dict[str, Any]:
    """Fly through all phases with a portfolio, once from each policy of the settings."""
    costs = {name: {p: found[p] for p in portfolio} for name, found in fixed.items()}
    best = {name: min(found, key=found.__getitem__) for name, found in costs.items()}
    flights: dict[str, Any] = {}
    for start in starts:
        state, begin_s = PilotState(), 0.0
        regrets: dict[str, float] = {}
        steps: dict[float, str] = {}
        for name, base in phases().items():
            cost_s, state = fly(base, portfolio, state, start, begin_s, seed)
            regrets[name] = cost_s / costs[name][best[name]] - 1
            steps |= {s.at: s.what for s in state.steps if not s.about}
            begin_s += 3600 * HOURS
        flights[start] = {
            "more_than_the_best_of_each_phase": regrets,
            "more_over_all_phases": over_all(regrets),
            "steps": [[at / 3600, what] for at, what in sorted(steps.items())],
        }
    fixed_regrets = {
        policy: {name: found[policy] / found[best[name]] - 1 for name, found in costs.items()}
        for policy in portfolio
    }
    overall = {policy: over_all(regrets) for policy, regrets in fixed_regrets.items()}
    return {
        "best_of_each_phase": best,
        "best_fixed": min(overall, key=overall.__getitem__),
        "fixed_more_than_the_best_of_each_phase": fixed_regrets,
        "fixed_more_over_all_phases": overall,
        "started_with": flights,
    }


def main() -> None:
    """Fly through all phases, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tuning", action="store_true", help="on a tuning seed; nothing is kept")
    parser.add_argument("--portfolio", choices=list(PORTFOLIOS), action="append")
    given = parser.parse_args()
    purpose = Purpose.TUNING if given.tuning else Purpose.EVALUATION
    seed = seeds(purpose, 1, 710_000)[0]
    names = given.portfolio or list(PORTFOLIOS)
    tried = [p for p in POLICIES if any(p in PORTFOLIOS[name][0] for name in names)]
    fixed: dict[str, dict[str, float]] = {}
    for name, base in phases().items():
        table = requests(base, seed)
        fixed[name] = {
            policy: float(
                composite_cost_s(play(base, table, policy_for(base, policy), seed)).mean()
            )
            for policy in tried
        }
    # Portfolios that are left out stay as they are.
    found: dict[str, Any] = {} if given.tuning else read_results().get("drift_portfolios", {})
    for name in names:
        found[name] = {"fixed": fixed, **flown(*PORTFOLIOS[name], fixed, seed)}
        if not given.tuning:
            save_part({"drift_portfolios": found})
    print(dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
