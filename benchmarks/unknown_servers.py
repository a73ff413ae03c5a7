"""What it costs not to know the servers' speed, and what is left of it once they are learned.

    python benchmarks/unknown_servers.py [--json]

Three routers with the same policy get the same requests. One is told how fast the servers are, one
takes them all for the default device, and one starts from there and learns. The first two minutes
are not counted. Servers are emulated and time is virtual (bench_routers.py), so the figures
depend on nothing but the seeds.
"""

import argparse
import json
from typing import Any

import numpy as np

from bench_routers import World
from tailrace import scenario as scenarios
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, seeds
from tailrace.view.objective import composite_cost
from tailrace.workload.library import from_settings

SCENARIOS = ("demo", "hot-sessions-mixed-speed", "mixed-speed", "holdout-devices")
KNOWLEDGE = {
    "told": {"told": True, "learn": False},
    "assumed": {"told": False, "learn": False},
    "learned": {"told": False, "learn": True},
}
COUNTED_FROM_S = 120.0


def cost(scenario: str, policy: str, seed: int, requests: int, **known: bool) -> float:
    """Mean composite cost in s of requests that arrive after two minutes."""
    loaded = scenarios.load(scenario)
    workload = loaded.workload.model_copy(update={"requests": requests})
    table = from_settings(workload, resolve_rate(loaded), seed)
    world = World(loaded, table, policy, 1, 0, by_session=False, books="own", **known)
    world.run()
    counted = world.arrived_s >= COUNTED_FROM_S
    ttft, e2e = world.ttft_s[counted], world.e2e_s[counted]
    late = np.maximum(ttft - table.rows["ttft_slo_s"][counted], 0.0)
    return float(composite_cost(e2e, ttft, late, np.zeros_like(ttft)).mean())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--scenario", nargs="*", default=SCENARIOS)
    parser.add_argument("--policy", default="tailrace")
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic, about")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.scenario:
        requests = int(options.seconds * resolve_rate(scenarios.load(name)))
        found[name] = {
            about: [
                cost(name, options.policy, seed, requests, **known)
                for seed in seeds(Purpose.EVALUATION, options.seeds)
            ]
            for about, known in KNOWLEDGE.items()
        }
        told = np.array(found[name]["told"])
        for about in ("assumed", "learned"):
            ratios = (np.array(found[name][about]) / told).round(4).tolist()
            found[name][f"{about} / told"] = ratios
        if not options.json:
            print(name, json.dumps(found[name]), flush=True)
    if options.json:
        print(json.dumps({"policy": options.policy, "seconds": options.seconds, **found}, indent=1))


if __name__ == "__main__":
    main()
