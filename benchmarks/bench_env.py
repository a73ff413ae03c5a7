"""Speed of the environments: decisions per second and core, observation and reward included.

    python benchmarks/bench_env.py [--json] [--quick]

The reference is 64 clusters, each that of the simulator's reference run (bench_sim.py: 4 replicas,
sarathi, chat at 80 % load), stepped together; shipped scenarios, whose servers have prefix caches,
stand beside it. The actions, least in flight by what was observed, are not counted. Rates are per
CPU second of one process. Making the traffic of new episodes is counted apart.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
from rich.console import Console

from bench_sim import CHAT_RPS_PER_REPLICA, cluster, machine
from tailrace.config import Scenario, Workload
from tailrace.env.single_env import RouterEnv
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.policy.learned.observation import REPLICA_FEATURES
from tailrace.scenario import load
from tailrace.seeds import Purpose, seeds

IN_FLIGHT = [feature.name for feature in REPLICA_FEATURES].index("in_flight")
SEED = seeds(Purpose.TRAINING, 1)[0]
CLUSTERS = 64

REFERENCE = Scenario(
    name="reference",
    cluster=cluster(4),
    workload=Workload(name="chat", arrivals="poisson", rate=0.8 * 4 * CHAT_RPS_PER_REPLICA),
)

say = Console(stderr=True).log


def vector_rates(scenario: Scenario, clusters: int, steps: int) -> dict[str, float]:
    """Decisions per CPU second of many clusters, and what a new episode costs per decision."""
    env = RouterVectorEnv(clusters, scenario, decisions=steps + 1)
    observation, _ = env.reset(seed=SEED)
    spent = 0.0
    for _ in range(steps):
        load_ = np.where(observation["mask"], observation["replicas"][:, :, IN_FLIGHT], np.inf)
        actions = load_.argmin(axis=1)
        begin = time.process_time()
        observation, *_ = env.step(actions)
        spent += time.process_time() - begin
    begin = time.process_time()
    env.step(actions)
    restart = time.process_time() - begin
    return {
        "decisions_per_s": clusters * steps / spent,
        "new_episode_us_per_decision": restart / (clusters * steps) * 1e6,
    }


def single_rate(scenario: Scenario, steps: int) -> float:
    """Decisions per CPU second of the single environment."""
    env = RouterEnv(scenario, decisions=steps)
    env.reset(seed=SEED)
    begin = time.process_time()
    for k in range(steps):
        env.step(k % 4)
    return steps / (time.process_time() - begin)


def measure(quick: bool) -> dict[str, Any]:
    """Everything, as plain data."""
    steps = 400 if quick else 2000
    report: dict[str, Any] = {"machine": machine(), "seed": SEED, "clusters": CLUSTERS}
    for scenario in (REFERENCE, load("uniform-chat-80")):  # without and with prefix caches
        vector_rates(scenario, CLUSTERS, 5)  # compile, and have the memory
    say("measuring the vector environment …")
    reference = [vector_rates(REFERENCE, CLUSTERS, steps) for _ in range(3)]
    report["decisions_per_s"] = max(rates["decisions_per_s"] for rates in reference)
    report["new_episode_us_per_decision"] = reference[0]["new_episode_us_per_decision"]
    report["scenarios"] = {
        name: vector_rates(load(name), CLUSTERS, steps)
        for name in ("uniform-chat-80", "mixed-speed", "hot-sessions", "scale-8")
    }
    report["clusters_decisions_per_s"] = {
        str(n): vector_rates(REFERENCE, n, steps)["decisions_per_s"] for n in (1, 8, 256)
    }
    say("measuring the single environment …")
    report["single_decisions_per_s"] = single_rate(REFERENCE, 10 * steps)
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--quick", action="store_true", help="a fifth of the decisions")
    arguments = parser.parse_args()
    report = measure(arguments.quick)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    Console().print_json(json.dumps(report))


if __name__ == "__main__":
    main()
