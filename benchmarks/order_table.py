"""What order and a queue at the router are worth: ``python benchmarks/order_table.py``.

Every rule places alone, with a tuned order at the servers (``+order``), with a tuned queue at the
router (``+queue``), and with both, on scenarios where targets are missed. Weights and limits are
tuned for each rule on tuning seeds, over all scenarios at once; the table is made on evaluation
seeds. Beside them the queues of routers in use. Runs are kept in ``--folder``, so that an
interrupted table goes on where it stopped.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import run
from tailrace.evaluate.measure.tail import extremes
from tailrace.files import atomic_path
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, seeds

RULES = (
    *("tailrace", "linear_es", "load_aware", "lmetric", "least_pending_uncached"),
    *("tolerant_sticky", "llm_d_sticky"),
)
STANDARD = (
    *("bursty-code", "overload-recovery", "uniform-chat-95", "mixed-lengths"),
    *("hot-sessions-overload", "agents"),
)
#: Coding agents on eight replicas, prompts an eighth as long: most of the load is uncached prefill.
CODING = Scenario(
    name="coding-agents",
    cluster=Cluster(replicas=(Replica(count=8),)),
    workload=Workload(name="coding-agents", prompt_scale=0.125, rate=12.0),
)
WEIGHTS = (3, 10, 30, 100)
LIMITS = (
    *("max_in_flight=8", "max_in_flight=32", "max_queued=1", "max_queued=4"),
    *("max_prefill_s=0.1", "max_prefill_s=0.5"),
)
#: Orders of those that wait, tried with the best limit; the limits are tried with the first.
ORDERS = ("w=10", "order=fcfs", "w=100")
#: Queues of routers in use, each with the rule it comes with.
RIVALS = {
    "Dynamo, fcfs": "dynamo+queue:max_prefill_s=0.5",
    "Dynamo, wspt": "dynamo+queue:max_prefill_s=0.5,order=wspt",
    "llm-d flow control, fcfs": "llm_d+queue:max_saturation=1",
    "llm-d flow control, edf": "llm_d+queue:max_saturation=1,order=edf",
    "SkyLB selective pushing": "load_aware+queue:max_queued=1",
    "max_in_flight, fcfs": "load_aware+queue:max_in_flight=32",
}
FIGURES = ("cost_s", "missed", "ttft_p99_s", "longest_ttft_s", "requests_per_s", "hit_rate")
WARMUP = 0.1


class Runs:
    """Figures of runs, kept in a file."""

    def __init__(self, folder: Path, requests: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"runs-{requests}.jsonl"
        self._requests = requests
        self._known: dict[str, list[float]] = {}
        if self._path.is_file():
            self._known = dict(json.loads(line) for line in self._path.read_text().splitlines())

    def figures(self, scenario: Scenario, policy: str, seed: int) -> list[float]:
        """Return the FIGURES of a policy on one seed of a scenario."""
        key = f"{scenario.name} {policy} {seed}"
        if key not in self._known:
            workload = scenario.workload.model_copy(update={"requests": self._requests})
            sized = scenario.model_copy(update={"workload": workload})
            result = run(sized, policy, resolve_rate(sized), seed)
            summary = summarise(result, WARMUP)
            self._known[key] = [
                summary.cost_s,
                1 - summary.slo_attainment,
                summary.ttft_s.p99 or math.nan,
                extremes(result, WARMUP, 30.0).longest_ttft_s,
                summary.requests_per_s,
                summary.prefix_hit_rate,
            ]
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._known[key]]) + "\n")
        return self._known[key]

    def make(self, worlds: Sequence[Scenario], policies: Sequence[str], of: Sequence[int]) -> None:
        """Run what is not known yet, all policies on the same traffic in turn."""
        for world in worlds:
            for seed in of:
                for policy in policies:
                    self.figures(world, policy, seed)

    def means(self, scenario: Scenario, policy: str, of: Sequence[int]) -> dict[str, float]:
        """Return the mean FIGURES over seeds; of the longest time to first token, the longest."""
        found = np.array([self.figures(scenario, policy, seed) for seed in of])
        row = dict(zip(FIGURES, found.mean(axis=0).tolist(), strict=True))
        row["longest_ttft_s"] = float(found[:, FIGURES.index("longest_ttft_s")].max())
        return row


def best_of(runs: Runs, worlds: Sequence[Scenario], policies: Sequence[str], count: int) -> str:
    """Return the policy of least cost, as the geometric mean over scenarios, on tuning seeds."""
    of = seeds(Purpose.TUNING, count)
    runs.make(worlds, policies, of)

    def score(policy: str) -> float:
        logs = [math.log(runs.means(world, policy, of)["cost_s"]) for world in worlds]
        return sum(logs) / len(logs)

    return min(policies, key=score)


def ordered(rule: str) -> list[str]:
    """Return a rule with the orders that are tried."""
    return [f"{rule}+order:w={w}" for w in WEIGHTS]


def limited(rule: str) -> list[str]:
    """Return a rule with the limits that are tried."""
    return [f"{rule}+queue:{limit},{ORDERS[0]}" for limit in LIMITS]


def tuned(runs: Runs, worlds: Sequence[Scenario], count: int) -> dict[str, dict[str, str]]:
    """Return every rule in its four forms."""
    of = seeds(Purpose.TUNING, count)
    runs.make(worlds, [p for rule in RULES for p in (*ordered(rule), *limited(rule))], of)
    queues = {}
    for rule in RULES:
        base = best_of(runs, worlds, limited(rule), count).removesuffix("," + ORDERS[0])
        queues[rule] = [f"{base},{how}" for how in ORDERS]
    runs.make(worlds, [p for tried in queues.values() for p in tried], of)
    forms = {}
    for rule in RULES:
        order = best_of(runs, worlds, ordered(rule), count)
        queue = best_of(runs, worlds, queues[rule], count)
        both = order + queue.removeprefix(rule)
        forms[rule] = {"plain": rule, "order": order, "queue": queue, "both": both}
    return forms


def tables(folder: Path, requests: int, count: int, tuning: int) -> Iterator[dict[str, Any]]:
    """Tune, then measure everything; a table after each evaluation seed, over those so far."""
    runs = Runs(folder, requests)
    worlds = [*(scenarios.load(name) for name in STANDARD), CODING]
    forms = tuned(runs, worlds, tuning)
    policies = [p for form in forms.values() for p in form.values()] + list(RIVALS.values())
    for k in range(1, count + 1):
        of = seeds(Purpose.EVALUATION, k)
        runs.make(worlds, policies, of)
        rows = {
            world.name: {policy: runs.means(world, policy, of) for policy in policies}
            for world in worlds
        }
        yield {
            "requests": requests,
            "evaluation_seeds": of,
            "tuning_seeds": seeds(Purpose.TUNING, tuning),
            "forms": forms,
            "rivals": RIVALS,
            "scenarios": rows,
            "summary": summary_of(forms, RIVALS, rows),
        }


def summary_of(
    forms: dict[str, dict[str, str]],
    rivals: dict[str, str],
    rows: dict[str, dict[str, dict[str, float]]],
) -> dict[str, Any]:
    """Compare with the best single rule without order or queue, and with tuned order."""

    def score(policy: str) -> float:
        return math.exp(float(np.mean([math.log(r[policy]["cost_s"]) for r in rows.values()])))

    best = {
        kind: min((form[kind] for form in forms.values()), key=score)
        for kind in ("plain", "order", "queue", "both")
    }

    def against(policy: str, other: str) -> dict[str, float]:
        def mean(name: str) -> float:
            logs = [math.log(max(r[policy][name], 1e-9) / r[other][name]) for r in rows.values()]
            return math.exp(sum(logs) / len(logs))

        missed = [sum(r[p]["missed"] for r in rows.values()) for p in (policy, other)]
        return {
            "cost": mean("cost_s"),
            "missed": missed[0] / missed[1],
            "ttft_p99": mean("ttft_p99_s"),
            "longest_ttft": max(
                r[policy]["longest_ttft_s"] / r[other]["longest_ttft_s"] for r in rows.values()
            ),
            "throughput_least": min(
                r[policy]["requests_per_s"] / r[other]["requests_per_s"] for r in rows.values()
            ),
        }

    hindsight = {
        kind: math.exp(
            float(
                np.mean(
                    [
                        math.log(min(r[form[kind]]["cost_s"] for form in forms.values()))
                        for r in rows.values()
                    ]
                )
            )
        )
        / score(best["plain"])
        for kind in best
    }
    return {
        "best": best,
        "against_best_plain": {
            policy: against(policy, best["plain"])
            for policy in [*(p for f in forms.values() for p in f.values()), *rivals.values()]
        },
        "order_gain": {rule: against(form["order"], form["plain"]) for rule, form in forms.items()},
        "queue_gain": {rule: against(form["queue"], form["plain"]) for rule, form in forms.items()},
        "holding_over_order": {
            rule: against(form["both"], form["order"]) for rule, form in forms.items()
        },
        "queue_over_order": {
            rule: against(form["queue"], form["order"]) for rule, form in forms.items()
        },
        "hindsight_cost_against_best_plain": hindsight,
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of docs/order.md."""
    summary, rows = found["summary"], found["scenarios"]
    lines = [
        "| placed by | order | queue | cost: order / alone | queue / alone | both / order |",
        "|---|---|---|---|---|---|",
    ]
    for rule, form in found["forms"].items():
        gains = (
            summary[k][rule]["cost"] for k in ("order_gain", "queue_gain", "holding_over_order")
        )
        order, queue = form["order"].partition("+order:")[2], form["queue"].partition("+queue:")[2]
        shown = " | ".join(f"{gain:.3f}" for gain in gains)
        lines.append(f"| `{rule}` | `{order}` | `{queue}` | {shown} |")
    best = summary["best"]
    lines += [
        "",
        "| against `" + best["plain"] + "` alone | cost | missed targets | P99 TTFT | "
        "longest TTFT, worst | throughput, least |",
        "|---|---|---|---|---|---|",
    ]
    shown_policies = {best[k]: best[k] for k in ("order", "queue", "both")}
    shown_policies |= {policy: f"{policy} ({name})" for name, policy in found["rivals"].items()}
    for policy, label in shown_policies.items():
        r = summary["against_best_plain"][policy]
        figures = (r[k] for k in ("cost", "missed", "ttft_p99", "longest_ttft", "throughput_least"))
        lines.append(f"| `{label}` | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    lines += [
        "",
        "| scenario | policy | cost, s | missed | P99 TTFT, s | longest, s | requests/s | hits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for scenario, by_policy in rows.items():
        for kind in best:
            policy = best[kind]
            r = by_policy[policy]
            lines.append(
                f"| {scenario} | `{policy}` | {r['cost_s']:.3f} | {r['missed']:.1%} | "
                f"{r['ttft_p99_s']:.2f} | {r['longest_ttft_s']:.1f} | {r['requests_per_s']:.2f} | "
                f"{r['hit_rate']:.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Make the table and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/order"), help="keep runs there")
    parser.add_argument("--requests", type=int, default=4000, help="of each run")
    parser.add_argument("--seeds", type=int, default=4, help="evaluation seeds")
    parser.add_argument("--tuning", type=int, default=2, help="tuning seeds")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    parser.add_argument("-o", "--out", type=Path, help="write it to a file too")
    options = parser.parse_args()
    for found in tables(options.folder, options.requests, options.seeds, options.tuning):
        if options.out:
            with atomic_path(options.out) as path:
                path.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        print(markdown(found))
        return
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
