"""How many replicas placing and order save: ``python benchmarks/plan_saving.py [--json]``.

For each case the fewest replicas with which a policy keeps the P99 of the time to first token, or
the share of requests within their targets, on every seed: what ``tailrace plan --order`` finds.
Each policy places alone and with its tuned order at the servers. Tuning seeds; the learned policy
saw none of them, orders were tuned on others. Needs are kept in ``--folder``, so that an
interrupted search goes on where it stopped.
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
from tailrace.evaluate.search.sizing import Kind, Wanted, plan, targets_s
from tailrace.files import atomic_path
from tailrace.seeds import Purpose, seeds

SUBJECT = "tailrace"
#: Best rules of earlier searches, and what most people use.
RULES = ("tolerant_sticky", "llm_d_sticky", "lmetric", "load_aware")
PLAIN = ("least_outstanding", "round_robin")
ORDER = "+order:tuned"
SEEDS, MOST, REQUESTS = 2, 160, 5000


@dataclass(frozen=True)
class Case:
    """A workload, a rate and an objective."""

    workload: str
    rate_rps: float
    objective: str
    limit: float

    @property
    def title(self) -> str:
        """In words."""
        aim = f"{self.limit:.0%} within targets"
        if self.objective == "ttft_p99_s":
            aim = f"P99 TTFT {self.limit:g} s"
        return f"{self.workload}, {self.rate_rps:g}/s, {aim}"


CASES = tuple(
    Case(workload, rate, kind, limit)
    for kind, limit in (("ttft_p99_s", 1.0), ("attainment", 0.99))
    for rate in (60.0, 240.0)
    for workload in ("chat", "agents", "sessions-hot")
)


def needed(case: Case, policy: str) -> float | None:
    """Return the fewest replicas; None: more than MOST."""
    replica = Replica()
    scenario = Scenario(
        cluster=Cluster(replicas=(replica,)),
        workload=Workload(name=case.workload, rate=case.rate_rps, requests=REQUESTS),
    )
    objectives = (ServiceObjective(case.objective, case.limit),)
    tried = targets_s(scenario, objectives)
    wanted = Wanted(scenario, objectives, tuple(seeds(Purpose.TUNING, SEEDS)), MOST, tried)
    (need,) = plan(wanted, [Kind(replica.device, replica)], [policy], jobs=1)
    return need.found.price if need.found else None


def figures(case: Case, replicas: dict[str, float | None]) -> dict[str, Any]:
    """Return replicas by policy, and what the subject saves against the best rule."""

    def fewest(policies: list[str]) -> str | None:
        known = {p: replicas[p] for p in policies if replicas.get(p) is not None}
        return min(known, key=lambda p: known[p] or 0.0, default=None)

    placing = fewest([*RULES, *PLAIN])
    ordering = fewest([rule + ORDER for rule in RULES])
    saved = {}
    for name, policy, other in (
        ("placing", SUBJECT, placing),
        ("order", SUBJECT + ORDER, SUBJECT),
        ("placing and order", SUBJECT + ORDER, placing),
    ):
        mine, theirs = replicas.get(policy), replicas.get(other or "")
        saved[name] = None if mine is None or theirs is None else theirs - mine
    return {
        **vars(case),
        "replicas": replicas,
        "best_rule": placing,
        "best_rule_with_order": ordering,
        "saved": saved,
    }


def markdown(cases: list[dict[str, Any]]) -> str:
    """Return the table of docs/cli.md."""
    lines = [
        "| case | `tailrace` | + order | best rule | + order | saved by placing | order | both |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in cases:
        case = Case(*(found[k] for k in ("workload", "rate_rps", "objective", "limit")))
        price, saved = found["replicas"], found["saved"]

        def named(policy: str | None, price: dict[str, Any] = price) -> str:
            return "-" if policy is None else f"{price[policy]:g} (`{policy.removesuffix(ORDER)}`)"

        cells = [
            *(_number(price[p]) for p in (SUBJECT, SUBJECT + ORDER)),
            *(named(found[k]) for k in ("best_rule", "best_rule_with_order")),
            *(_number(saved[k]) for k in ("placing", "order", "placing and order")),
        ]
        lines.append(f"| {case.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return f"over {MOST}" if value is None else f"{value:g}"


def main() -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/plan"), help="keep needs there")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("-o", "--out", type=Path, help="write them to a file too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "needs.json"
    known: dict[str, float | None] = json.loads(path.read_text()) if path.is_file() else {}
    policies = [SUBJECT, SUBJECT + ORDER, *(p for r in RULES for p in (r, r + ORDER)), *PLAIN]
    cases = []
    for case in CASES:
        for policy in policies:
            key = f"{case.title}: {policy}"
            if key not in known:
                known[key] = needed(case, policy)
                with atomic_path(path) as temporary:
                    temporary.write_text(json.dumps(known, indent=1))
                print(key, known[key], file=sys.stderr, flush=True)
        cases.append(figures(case, {p: known[f"{case.title}: {p}"] for p in policies}))
        result = {
            "machine": platform.processor() or platform.machine(),
            "seeds": list(seeds(Purpose.TUNING, SEEDS)),
            "requests": REQUESTS,
            "cases": cases,
        }
        if options.out:
            with atomic_path(options.out) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print(markdown(cases))


if __name__ == "__main__":
    main()
