"""Changing traffic and servers: ``python benchmarks/autopilot_drift.py [--json]``.

Phases of three hours at 20 requests/s on four servers of mixed speed: chat, agents, documents, a
server that has become slow, smaller KV caches. The controller, its test and its turns are those of
the product, on a virtual clock; a round every ten minutes looks at the last half hour. The
simulator's view of each server is off by 10 % (standard deviation). Every phase begins with empty
servers. Beside it: the best policy of each phase, known beforehand, and the best fixed policy.
Evaluation seeds.
"""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopilot import BLOCK_S, BLOCKS, TWIN_ERROR, WASHOUT_S, save_part
from autopilot_world import STRIDE, Twin, cluster, requests, scenario
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
ROUND_S, WINDOW_S = 600.0, 1800.0
POLICIES = ("tailrace", "load_aware", "lmetric", "sglang_cache_aware", "llm_d")
SETTINGS = AutopilotSettings(
    mode="act", policies=POLICIES, every_s=ROUND_S, window_s=WINDOW_S, block_s=BLOCK_S,
    share=1 / BLOCKS, washout_s=WASHOUT_S,
)  # fmt: skip


def phases() -> dict[str, Scenario]:
    """Name and world of each phase."""
    slow = scenario("chat", HOURS)
    speeds = tuple(r.speed for r in slow.cluster.expanded())
    slow = slow.model_copy(update={"cluster": cluster((0.6 * speeds[0], *speeds[1:]))})
    small = scenario("agents", HOURS)
    replicas = tuple(r.model_copy(update={"num_blocks": 4000}) for r in small.cluster.expanded())
    small = small.model_copy(update={"cluster": Cluster(replicas=replicas)})
    return {
        "chat": scenario("chat", HOURS),
        "agents": scenario("agents", HOURS),
        "documents": scenario("doc-qa", HOURS),
        "chat, a slow server": slow,
        "agents, small caches": small,
    }


def fly(
    base: Scenario, state: PilotState, start: str, begin_s: float, seed: int
) -> tuple[float, PilotState]:
    """One phase that begins at ``begin_s``; returns its mean cost, and the state at its end."""
    table = requests(base, seed)
    simulation = Simulation(base.cluster, table, router=base.router, engine=base.engine, seed=seed)
    twin = Twin.of(base, TWIN_ERROR, generator(seed, "twin"))
    policies = {name: policy_for(base, name) for name in POLICIES}
    look_at = begin_s + ROUND_S
    over = False
    while not over:
        now = begin_s + simulation.now
        if now >= look_at:
            state = look(simulation.result(), twin, state, start, begin_s, now)
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
    result: SimResult, twin: Twin, state: PilotState, start: str, begin_s: float, now: float
) -> PilotState:
    """A round on the requests of the window that have ended."""
    done = result.requests
    arrived_s = begin_s + done["arrived_s"]
    recent = (done["status"] != PENDING) & (arrived_s >= now - WINDOW_S) & (arrived_s < now)
    cost_s = composite_cost_s(result)[recent]
    present = state.present or start
    simulated = {name: twin.costs(result, name, recent) for name in POLICIES}
    if state.stage in ("canary", "guard"):
        turns = state.turns(SETTINGS.share, SETTINGS.block_s)
        found = cycles_of(
            turns, arrived_s[recent], cost_s, simulated[present], washout_s=WASHOUT_S,
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


def main() -> None:
    """Fly through all phases, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    seed = seeds(Purpose.EVALUATION, 1, 710_000)[0]
    worlds = phases()
    fixed: dict[str, dict[str, float]] = {}
    for name, base in worlds.items():
        table = requests(base, seed)
        fixed[name] = {
            policy: float(
                composite_cost_s(play(base, table, policy_for(base, policy), seed)).mean()
            )
            for policy in POLICIES
        }
    best_fixed = min(
        POLICIES, key=lambda p: np.mean([np.log(costs[p]) for costs in fixed.values()])
    )
    flights: dict[str, Any] = {}
    for start in ("tailrace", "load_aware"):
        state, begin_s = PilotState(), 0.0
        regrets: dict[str, float] = {}
        for name, base in worlds.items():
            cost_s, state = fly(base, state, start, begin_s, seed)
            regrets[name] = cost_s / min(fixed[name].values()) - 1
            begin_s += 3600 * HOURS
        flights[start] = {
            "more_than_the_best_of_each_phase": regrets,
            "steps": [[s.at / 3600, s.what] for s in state.steps if "turns" not in s.what],
        }
    found = {
        "fixed": fixed,
        "best_fixed": best_fixed,
        "best_fixed_more_than_the_best_of_each_phase": {
            name: costs[best_fixed] / min(costs.values()) - 1 for name, costs in fixed.items()
        },
        "started_with": flights,
    }
    save_part({"drift": found})
    print(dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
