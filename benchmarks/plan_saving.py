"""How many replicas the learned policy saves: ``python benchmarks/plan_saving.py [--json]``.

For each case the fewest replicas with which a policy keeps the P99 of the time to first token on
every seed, for the learned policy and for every rule: what `tailrace plan` finds with all rules as
opponents. Tuning seeds; the learned policy saw none of them.
"""

import argparse
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.evaluate.search.capacity import ServiceObjective
from tailrace.evaluate.search.sizing import Kind, Need, Wanted, plan, targets_s
from tailrace.files import atomic_path
from tailrace.policy import registry
from tailrace.seeds import Purpose, seeds

SUBJECT = "tailrace"
SEEDS, MOST = 3, 80
#: Seconds of traffic, about.
TRAFFIC_S = 170


@dataclass(frozen=True)
class Case:
    """A workload, a rate and a limit."""

    workload: str
    rate_rps: float
    ttft_p99_s: float


CASES = (
    Case("chat", 60, 1.0),
    Case("chat", 60, 0.5),
    Case("sessions-hot", 60, 1.0),
    Case("sessions-hot", 60, 0.3),
    Case("agents", 30, 1.0),
)


def needs_of(case: Case, policies: list[str], jobs: int | None) -> list[Need]:
    """Search for each policy."""
    replica = Replica()
    scenario = Scenario(
        cluster=Cluster(replicas=(replica,)),
        workload=Workload(
            name=case.workload,
            rate=case.rate_rps,
            requests=int(TRAFFIC_S * case.rate_rps),
        ),
    )
    objectives = (ServiceObjective("ttft_p99_s", case.ttft_p99_s),)
    tried = targets_s(scenario, objectives)
    wanted = Wanted(scenario, objectives, tuple(seeds(Purpose.TUNING, SEEDS)), MOST, tried)
    return plan(wanted, [Kind(replica.device, replica)], policies, jobs=jobs)


def figures(case: Case, needs: list[Need]) -> dict[str, Any]:
    """Prices by policy, and what the subject saves against the best rule and the usual ones."""
    price = {need.policy: need.found.price if need.found else None for need in needs}
    rules = {p: v for p, v in price.items() if p != SUBJECT and v is not None}
    best = min(rules, key=lambda p: rules[p])
    own = price[SUBJECT]
    return {
        **vars(case),
        "replicas": price,
        "best_rule": best,
        "rules_as_cheap": [p for p, v in rules.items() if own is not None and v <= own],
        "saved_vs_best_rule": None if own is None else 1 - own / rules[best],
    }


def main() -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("-o", "--out", type=Path, help="write them to a file too")
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    rules = [rule.name for rule in registry.rules() if not rule.in_engine]
    policies = [SUBJECT, *rules]
    found = []
    for case in CASES:
        found.append(figures(case, needs_of(case, policies, options.jobs)))
        if not options.json:
            print(line(found[-1]), flush=True)
    result = {
        "machine": platform.processor() or platform.machine(),
        "seeds": list(seeds(Purpose.TUNING, SEEDS)),
        "traffic_s": TRAFFIC_S,
        "cases": found,
    }
    if options.out:
        with atomic_path(options.out) as path:
            path.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()


def line(case: dict[str, Any]) -> str:
    """One case in a line."""
    price = case["replicas"]
    shown = ("load_aware", "lmetric", "least_outstanding", "round_robin")
    others = ", ".join(f"{p} {_price(price[p])}" for p in shown)
    return (
        f"{case['workload']} {case['rate_rps']:g}/s, P99 TTFT {case['ttft_p99_s']:g} s: "
        f"{SUBJECT} {_price(price[SUBJECT])}, "
        f"best rule {case['best_rule']} {_price(price[case['best_rule']])}, {others}"
    )


def _price(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


if __name__ == "__main__":
    main()
