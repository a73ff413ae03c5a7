"""How long a live decision takes: ``python benchmarks/bench_decide.py [--json]``.

Each policy decides for a stream of requests with 1 KB bodies that share a system prompt, on a busy
fleet. ``decide`` is the decision alone, ``all`` everything the router's books cost per request:
reading the body, arrival, decision, sending, first token and end. The look-ahead cannot run live;
it is measured in the simulator for comparison. Wall-clock time counts what else the machine does,
``cpu`` only this thread.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from tailrace.config import Cluster, Replica
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.router.asked import read_asked
from tailrace.router.decide import Chooser, ChooserSettings
from tailrace.router.fleet import Fleet, Flight
from tailrace.router.settings import BackendSettings
from tailrace.sim import engine as kernel
from tailrace.sim.simulator import Simulation
from tailrace.workload.library import make

POLICIES = ("round_robin", "load_aware", "least_predicted_ttft", "preble", "tailrace")
SIZES = (8, 32, 128)
LOOKAHEAD_SIZES = (8, 32)
IN_FLIGHT = 8  # per replica
SYSTEM = "You are a careful assistant who answers in few words. " * 12


class Clock:
    """Wall-clock and thread time of calls, s."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def call(self, work: Callable[[], Any]) -> Any:
        """Run and measure."""
        wall, cpu = time.perf_counter(), time.thread_time()
        result = work()
        self.cpu.append(time.thread_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return result

    def figures(self) -> dict[str, float]:
        """Percentiles in microseconds."""
        return {
            f"{name}_p{q}_us": float(np.percentile(values, q) * 1e6)
            for name, values in (("wall", self.wall), ("cpu", self.cpu))
            for q in (50, 99)
        }


def live(policy: str, replicas: int, decisions: int) -> dict[str, Any]:
    """Measure a policy in front of so many replicas."""
    fleet = Fleet([BackendSettings(url=f"http://h:{i + 1}") for i in range(replicas)])
    chooser = Chooser(fleet, ChooserSettings(policy=policy))
    flights: list[Flight] = []
    decide, everything = Clock(), Clock()

    def one(body: bytes) -> None:
        arrival = fleet.arrive(read_asked("/v1/chat/completions", {}, body))
        decision = decide.call(lambda: chooser.choose(arrival))
        flights.append(fleet.open(arrival, decision.replica, decision))
        if len(flights) > IN_FLIGHT * replicas:
            flight = flights.pop(0)
            flight.tokens(1)
            flight.usage(250, 100, None)
            flight.close("done")

    for i in range(decisions + IN_FLIGHT * replicas):
        if i == IN_FLIGHT * replicas:
            decide, everything = Clock(), Clock()
        body = orjson.dumps(
            {
                "model": "m",
                "stream": True,
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"Question {i}: " + "what is that? " * 22},
                ],
            }
        )
        everything.call(lambda body=body: one(body))  # type: ignore[misc]
    return {
        "policy": policy,
        "replicas": replicas,
        "decide": decide.figures(),
        "all": everything.figures(),
        "fallbacks": {k: v for k, v in chooser.counts.items() if k.startswith("fallback")},
    }


def lookahead(replicas: int, decisions: int) -> dict[str, Any]:
    """Measure the look-ahead's choice in the simulator."""
    policy = registry.get("lookahead")
    assert isinstance(policy, BuiltinPolicy)
    table = make("chat", decisions, 8.0 * replicas, 0)
    cluster = Cluster(replicas=(Replica(count=replicas),))
    simulation = Simulation(cluster, table, lookahead=True)
    fleet, tables = simulation.arrays
    rule, clock = policy.rule, Clock()
    warm = False
    while simulation.next_decision() is not None:

        def choice() -> int:
            return int(kernel.choice(fleet, tables, 0, rule.code, policy.params, False))

        if not warm:
            choice()
            warm = True
        simulation.assign(clock.call(choice))
    return {"policy": "lookahead (simulator)", "replicas": replicas, "decide": clock.figures()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--decisions", type=int, default=3000, help="measured per policy and size")
    parser.add_argument("--replicas", type=int, nargs="*", default=SIZES)
    options = parser.parse_args()
    results = [live(p, n, options.decisions) for n in options.replicas for p in POLICIES]
    results += [lookahead(n, options.decisions) for n in LOOKAHEAD_SIZES if n in options.replicas]
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'policy':24}{'replicas':>9}{'decide, us: wall p50':>22}{'p99':>8}{'cpu p50':>9}"
          f"{'p99':>8}{'all p50':>9}{'p99':>8}")  # fmt: skip
    for r in results:
        d, a = r["decide"], r.get("all")
        line = (
            f"{r['policy']:24}{r['replicas']:>9}{d['wall_p50_us']:>22.1f}{d['wall_p99_us']:>8.1f}"
        )
        line += f"{d['cpu_p50_us']:>9.1f}{d['cpu_p99_us']:>8.1f}"
        if a is not None:
            line += f"{a['cpu_p50_us']:>9.1f}{a['cpu_p99_us']:>8.1f}"
        print(line)


if __name__ == "__main__":
    main()
