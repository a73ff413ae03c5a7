"""What a learned urgency could add to a constant order: ``python benchmarks/order_levels.py``.

`tailrace` places, and a constant order gives requests their priorities. At every few decisions the
request is tried with each of LEVELS as its own ``w``, in copies of the cluster on the same arrivals
(branching, as in learn/kernels.py): another level swaps it with requests that it waits with. Later
requests go where the first branch sent them. What accrues over the horizon, and until all requests
then in the system are done, is the cost of a level.

Two figures per scenario, as shares of the mean cost of a request:

- *best level*: the gain if every request got its cheapest level. It knows the future: a bound.
- *learned*: the gain of a network with one hidden layer that chooses a level from what the policy
  sees of the chosen replica and the request, trained on branches of some seeds and judged on
  branches of others.

``--base 0`` starts from first come, first served instead, to show that this training does learn to
order where there is something to learn. Tuning seeds only; needs torch.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tailrace import scenario as scenarios
from tailrace.compiled import jit
from tailrace.config import Scenario
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import traffic
from tailrace.learn.kernels import _arrived, _drain_cost, _load_memory, _roll_out, _save_memory
from tailrace.policy import registry
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.policy.learned.policy import learned_scores
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, seeds
from tailrace.sim import engine, fleet
from tailrace.sim.simulator import Simulation
from tailrace.view.ordering import Order, order_row
from tailrace.view.records import View
from tailrace.view.selection import NO_REPLICA, choose

LEVELS = (0.0, 5.0, 20.0, 50.0, 107.0, 400.0)
SCENARIOS = ("overload-recovery", "bursty-code", "mixed-lengths", "uniform-chat-95")
#: First tuning seed, number of those to train on and to judge on.
FIRST_SEED, TRAIN, JUDGE = 40, 3, 2
HORIZON_S = 20.0
GAP = 6
HIDDEN, EPOCHS, RATE, DECAY = 32, 400, 3e-3, 1e-3


#: Levels [K] chosen from features [K, F + G].
Choice = Callable[[NDArray[np.float32]], NDArray[np.int64]]


class Branches(NamedTuple):
    """``K`` decisions."""

    seen: NDArray[np.float32]  # [K, F + G] features of the chosen replica and of the request
    costs: NDArray[np.float64]  # [K, L] of each level, s
    mean_cost_s: float  # of a request of the run


@jit
def _branch(  # type: ignore[no-untyped-def]
    f,
    tables,
    twin,
    network,
    levels,
    base,
    horizon_s,
    replica_obs,
    request_obs,
    costs,
    memory,
    plan,
):
    """Fill ``costs`` [L] of the levels of the current request; returns the replica chosen."""
    n = f.clusters[0]["n_replicas"]
    replicas, scores = f.replicas_view[0, :n], f.scores[0, :n]
    view = View(f.requests_view[0], replicas, f.costs[0, :n], f.router[0])
    observe(view, replica_obs, request_obs)
    learned_scores(view, network, scores)
    r = choose(scores, replicas, f.router[0], False)
    _save_memory(network, memory)
    now = f.clusters[0]["now"]
    before = fleet.accrued_cost(f, tables, 0, now)
    arrived = _arrived(f.clusters[0])
    plan[:] = NO_REPLICA
    for k in range(levels.size):
        fleet.copy_cluster(f, 0, twin, 0)
        _load_memory(network, memory)
        twin.clusters[0]["order"]["w"] = levels[k]
        engine.assign(twin, tables, 0, r)
        twin.clusters[0]["order"]["w"] = base
        _roll_out(twin, tables, network, now + horizon_s, np.inf, plan)
        more = _arrived(twin.clusters[0]) - arrived
        accrued = fleet.accrued_cost(twin, tables, 0, now + horizon_s) - before
        costs[k] = accrued - more * before / max(arrived, 1)
        costs[k] += _drain_cost(twin, tables, now + horizon_s)
    _load_memory(network, memory)
    return r


def branches(scenario: Scenario, seed: int, order: Order) -> Branches:
    """Branch at every GAP-th decision of a run."""
    table = traffic(scenario, resolve_rate(scenario), seed)
    simulation = Simulation(
        scenario.cluster.served_by(order=True), table, router=scenario.router,
        engine=scenario.engine, events=scenario.events, seed=seed, lookahead=True,
    )  # fmt: skip
    f, tables = simulation.arrays
    f.clusters["order"] = order_row(order)
    twin, _ = simulation.copy().arrays
    policy = registry.get("tailrace")
    network = policy.params.copy()  # type: ignore[attr-defined]
    memory = np.zeros(int(network[a.MEMORY]), np.float32)
    replica_obs = np.zeros((scenario.cluster.size, N_REPLICA_FEATURES), np.float32)
    request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
    plan, costs = np.zeros(len(table), np.int64), np.zeros(len(LEVELS))
    seen, found = [], []
    decisions = 0
    while simulation.next_decision() is not None:
        if decisions % GAP:
            r = engine.choice(f, tables, 0, engine.LEARNED_CODE, network, False)
        else:
            r = _branch(f, tables, twin, network, np.array(LEVELS), order.w, HORIZON_S,
                        replica_obs, request_obs, costs, memory, plan)  # fmt: skip
            seen.append(np.concatenate([replica_obs[r], request_obs]))
            found.append(costs.copy())
        engine.assign(f, tables, 0, r)
        decisions += 1
    return Branches(np.array(seen), np.array(found), summarise(simulation.result()).cost_s)


def learn(parts: list[Branches], base: int) -> Choice:
    """Train a choice of levels to lower the expected cost of what was branched."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices; threads would wait for each other on a busy machine
    seen = torch.tensor(np.concatenate([p.seen for p in parts]))
    relative = [(p.costs - p.costs[:, [base]]) / p.mean_cost_s for p in parts]
    costs = torch.tensor(np.concatenate(relative), dtype=torch.float32)
    mean, std = seen.mean(0), seen.std(0).clamp(min=0.1)
    last = nn.Linear(HIDDEN, len(LEVELS))
    head = nn.Sequential(nn.Linear(seen.shape[1], HIDDEN), nn.GELU(), last)
    with torch.no_grad():
        last.weight.zero_()
        last.bias[base] = 2.0  # begins with the constant order
    optimiser = torch.optim.AdamW(head.parameters(), RATE, weight_decay=DECAY)
    for _ in range(EPOCHS):
        loss = (head((seen - mean) / std).softmax(-1) * costs).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return lambda x: head((torch.tensor(x) - mean) / std).argmax(-1).numpy()


def gains(part: Branches, base: int, choice: Choice) -> dict[str, float]:
    """Return what the best and the learned level gain on branches, as shares of the mean cost."""
    rows = np.arange(len(part.costs))
    learned = choice(part.seen)
    relative = (part.costs[:, base][:, None] - part.costs) / part.mean_cost_s
    return {
        "differs": float((relative.max(1) > 1e-9).mean()),
        "best_level": float(relative.max(1).mean()),
        "learned": float(relative[rows, learned].mean()),
    }


def main() -> None:
    """Make the table and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=float, default=107.0, choices=LEVELS, help="constant w")
    parser.add_argument("--most", type=float, default=300.0, help="of the order, s")
    parser.add_argument("--requests", type=int, default=1200, help="of each run")
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS)
    parser.add_argument("-o", "--out", type=Path, help="write it to a file too")
    options = parser.parse_args()
    order, base = Order(w=options.base, most=options.most), LEVELS.index(options.base)
    numbers = seeds(Purpose.TUNING, TRAIN + JUDGE, FIRST_SEED)
    found: dict[str, list[Branches]] = {}
    for name in options.scenarios:
        scenario = scenarios.load(name).with_workload(requests=options.requests)
        found[name] = [branches(scenario, seed, order) for seed in numbers]
        print(name, len(found[name][0].costs), "branches per seed", file=sys.stderr)
    choice = learn([part for parts in found.values() for part in parts[:TRAIN]], base)
    table: dict[str, Any] = {
        "order": order.suffix, "levels": LEVELS, "tuning_seeds": numbers, "train": TRAIN,
        "requests": options.requests, "scenarios": {},
    }  # fmt: skip
    for name, parts in found.items():
        rows = [gains(part, base, choice) for part in parts[TRAIN:]]
        table["scenarios"][name] = {key: float(np.mean([r[key] for r in rows])) for key in rows[0]}
    text = json.dumps(table, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
