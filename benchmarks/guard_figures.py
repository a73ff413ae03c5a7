"""Figures for the router's guard: which rule it falls back to, and when it should.

    python benchmarks/guard_figures.py rules --traces FOLDER --work WORK [--json FILE]
    python benchmarks/guard_figures.py range --traces FOLDER --work WORK [--json FILE]

``rules`` runs the built-in rules on the suite `standard` (tuning seeds) and on the training half of
recorded traffic, and compares each with the best rule of every cell. ``range`` lets a trained
policy decide only while all of its inputs are within LIMIT standard deviations of the mean in
training, and the fallback rule otherwise: how often that happens on traffic the policy was trained
for (false alarms), and what it saves or costs on other traffic and when the router takes a server
to be much faster or slower than it is. WORK keeps what was imported and
measured, so that the same command goes on where it was interrupted.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tailrace as tr
from tailrace.config import Scenario
from tailrace.evaluate.judge.baselines import contender, fingerprint, members
from tailrace.evaluate.judge.suite import TUNE_FROM, load_scenarios, load_suite
from tailrace.evaluate.measure.cells import CellBatch, Measure, Traffic, gather, source_digest
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import play, policy_for, traffic
from tailrace.files import write_text
from tailrace.parallel import WorkerPool
from tailrace.policy.base import BuiltinPolicy, Policy
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.architecture import FEATURE_NAMES, STD_FLOOR
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.router.decide.chooser import ChooserSettings
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, seeds
from tailrace.view.records import View

#: Limits tried, in standard deviations; the last one never intervenes.
LIMITS = (8.0, 12.0, 16.0, float("inf"))
WARMUP = {"standard": 0.1, "misjudged": 0.1, "holdout": 0.1, "recorded": 0.2}
#: Scenarios in which the router overestimates the speed of one server by this factor.
MISJUDGED, FACTORS = ("hot-sessions", "mixed-speed"), (0.01, 0.1, 10.0, 100.0)
#: Tuning seeds of their own, so that nothing else was chosen on them.
FIRST_SEED = TUNE_FROM + 5000


def worlds(args: argparse.Namespace, suites: tuple[str, ...]) -> dict[str, list[Scenario]]:
    """Return the scenarios of suites, and of recorded traffic if a folder is given."""
    found = {name: load_scenarios(load_suite(name).scenarios, args.requests) for name in suites}
    if args.traces is not None:
        work = args.work / "traces"
        found["recorded"] = tr.recorded(args.traces, work, half="train", requests=args.requests)
    return found


# ---- rules --------------------------------------------------------------------------------------


def _show(group: str, total: int, done: int, _: int) -> None:
    print(f"\r{group}: {done} of {total}", end="", flush=True)


def compare_rules(args: argparse.Namespace) -> dict[str, Any]:
    """Return each rule's cost relative to the best rule of each cell, by group of cells."""
    names = args.rules or members("rules")
    groups = worlds(args, ("standard",))
    numbers = seeds(Purpose.TUNING, args.seeds, FIRST_SEED)
    costs: dict[str, dict[str, NDArray[np.float64]]] = {}
    for group, found in groups.items():
        rules = tuple(contender(name, found[0]) for name in names)
        batch = CellBatch(
            tuple(Traffic(s, resolve_rate(s), seed) for s in found for seed in numbers), rules
        )
        shown = partial(_show, group, batch.size)
        cells = gather(
            [batch], Measure(WARMUP[group]), args.work / "cells", jobs=args.jobs, progress=shown
        )
        print()
        costs[group] = {
            s.name: np.array(
                [
                    np.mean(
                        [c.summary.cost_s for c in cells if (c.scenario, c.policy) == (s.name, n)]
                    )
                    for n in names
                ]
            )
            for s in found
        }
    ratios = {g: np.array([row / row.min() for row in of.values()]) for g, of in costs.items()}
    cell_names = [name for of in costs.values() for name in of]
    every = np.concatenate(list(ratios.values()))
    rows = []
    for k, name in enumerate(names):
        by_group = {g: float(np.exp(np.log(r[:, k]).mean())) for g, r in ratios.items()}
        rows.append(
            {
                "rule": name,
                **by_group,
                # Groups weigh the same, however many cells they have.
                "all": float(np.exp(np.mean([np.log(v) for v in by_group.values()]))),
                "worst": float(every[:, k].max()),
                "worst_cell": cell_names[int(every[:, k].argmax())],
                "within_10_percent": float((every[:, k] < 1.1).mean()),
            }
        )
    rows.sort(key=lambda row: row["all"])
    return {
        "requests": args.requests,
        "seeds": list(numbers),
        "cells": {group: len(of) for group, of in costs.items()},
        "rules": rows,
    }


def print_rules(found: dict[str, Any]) -> None:
    """Print the table of rules."""
    groups = list(found["cells"])
    print("| rule | " + " | ".join([*groups, "all", "worst", "within 10 %"]) + " |")
    print("|---|" + "---:|" * (len(groups) + 3))
    for row in found["rules"]:
        figures = [f"{row[g]:.3f}" for g in [*groups, "all"]]
        figures += [f"{row['worst']:.2f} ({row['worst_cell']})", f"{row['within_10_percent']:.0%}"]
        print(f"| `{row['rule']}` | " + " | ".join(figures) + " |")


# ---- range --------------------------------------------------------------------------------------


class RangeGuarded(Policy):
    """A trained policy that leaves decisions beyond a limit to a rule, as the live router does."""

    def __init__(self, policy: LearnedPolicy, rule: BuiltinPolicy, limit: float) -> None:
        self.name = policy.name
        self._policy, self._rule, self._limit = policy, rule, limit
        tensors = policy.tensors
        norms = ("replica_norm", "request_norm")
        mean, var = (
            [tensors[f"{norm}.{what}"].astype(np.float64) for norm in norms]
            for what in ("mean", "var")
        )
        self._mean = mean
        self._deviation = [np.maximum(np.sqrt(v), STD_FLOOR) for v in var]
        ignored = [FEATURE_NAMES.index(name) for name in policy.config.ignore]
        self._counts = np.ones(sum(map(len, mean)), bool)
        self._counts[ignored] = False
        self.farthest: list[float] = []  #: per decision, in standard deviations
        self.features: list[int] = []  #: the feature that is farthest out

    def reset(self, n_replicas: int, seed: int) -> None:
        """Start a run."""
        self._policy.reset(n_replicas, seed)
        self._rule.reset(n_replicas, seed)

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return the scores of the policy or rule that decides."""
        scores = self._policy.scores(view)
        f = self._policy.params.view(np.float32)
        n, features = len(view.replicas), len(self._mean[0])
        x, g = int(self._policy.params[a.X]), int(self._policy.params[a.G])
        replicas = f[x : x + n * features].reshape(n, features)[view.replicas["available"] != 0]
        shared = f[g : g + len(self._mean[1])]
        out = np.concatenate(
            [
                np.abs((replicas - self._mean[0]) / self._deviation[0]).max(axis=0, initial=0.0),
                np.abs((shared - self._mean[1]) / self._deviation[1]),
            ]
        )
        out = np.where(self._counts, out, 0.0)
        self.farthest.append(float(out.max()))
        self.features.append(int(out.argmax()))
        return scores if self.farthest[-1] <= self._limit else self._rule.scores(view)


@dataclass(frozen=True)
class RangeTask:
    """One scenario and seed under all limits."""

    group: str
    scenario: Scenario
    seed: int
    policy: str
    rule: str
    folder: Path

    @property
    def file(self) -> Path:
        """Where its figures are kept: by all that they depend on."""
        about = (
            self.scenario.model_dump_json(), self.seed, self.policy, self.rule, LIMITS,
            fingerprint(self.policy, self.scenario), source_digest(),
        )  # fmt: skip
        return self.folder / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"


def measure(task: RangeTask) -> dict[str, Any]:
    """Return cost and share of alarms at every limit; measured once and kept."""
    if task.file.is_file():
        kept: dict[str, Any] = json.loads(task.file.read_text(encoding="utf-8"))
        return kept
    found = _measured(task)
    task.folder.mkdir(parents=True, exist_ok=True)
    write_text(task.file, json.dumps(found))
    return found


def _measured(task: RangeTask) -> dict[str, Any]:
    rate = resolve_rate(task.scenario)
    table = traffic(task.scenario, rate, task.seed)
    warmup = WARMUP[task.group]
    policy = policy_for(task.scenario, task.policy)
    rule = policy_for(task.scenario, task.rule)
    assert isinstance(policy, LearnedPolicy)
    assert isinstance(rule, BuiltinPolicy)
    found: dict[str, Any] = {"group": task.group, "scenario": task.scenario.name}
    found["rule"] = summarise(play(task.scenario, table, rule, task.seed), warmup).cost_s
    free = RangeGuarded(policy, rule, float("inf"))
    alone = summarise(play(task.scenario, table, free, task.seed), warmup).cost_s
    far = np.array(free.farthest)
    worst = free.features[int(far.argmax())]
    found |= {"farthest": float(far.max()), "feature": FEATURE_NAMES[worst], "limits": []}
    for limit in LIMITS:
        cost, alarms = alone, float((far > limit).mean())
        if alarms:  # otherwise the limit changes nothing
            guarded = RangeGuarded(policy, rule, limit)
            cost = summarise(play(task.scenario, table, guarded, task.seed), warmup).cost_s
            alarms = float((np.array(guarded.farthest) > limit).mean())
        found["limits"].append({"limit": limit, "cost": cost, "alarms": alarms})
    return found


def misjudged(requests: int) -> Iterator[Scenario]:
    """Yield scenarios whose first server the router takes to be faster or slower than it is."""
    for scenario in load_scenarios(MISJUDGED, requests):
        first, *rest = scenario.cluster.replicas
        others = (first.model_copy(update={"count": first.count - 1}),) * (first.count > 1)
        for factor in FACTORS:
            wrong = first.model_copy(update={"count": 1, "assumed_speed": factor})
            cluster = scenario.cluster.model_copy(update={"replicas": (wrong, *others, *rest)})
            name = f"{scenario.name}, believed {factor:g} times as fast"
            yield scenario.model_copy(update={"name": name, "cluster": cluster})


def compare_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Return alarms and costs of every limit on traffic within and beyond the training range."""
    groups = {"misjudged": list(misjudged(args.requests))}
    groups |= worlds(args, ("standard", "holdout"))
    groups["recorded"] = [s for s in groups.get("recorded", ()) if _is_chosen(args, s.name)]
    numbers = seeds(Purpose.TUNING, args.seeds, FIRST_SEED)
    tasks = [
        RangeTask(group, s, seed, args.policy, args.rule, args.work / "range")
        for group, found in groups.items()
        for s in found
        for seed in numbers
    ]
    runs = []
    with WorkerPool(args.jobs) as pool:
        for done, (_, run) in enumerate(pool.run(measure, tasks), start=1):
            runs.append(run)
            print(f"\r{done} of {len(tasks)}", end="", flush=True)
    print()
    runs.sort(key=lambda run: (run["group"], run["scenario"]))
    rows = []
    for k, limit in enumerate(LIMITS):
        row: dict[str, Any] = {"limit": None if np.isinf(limit) else limit}
        for group in groups:
            mine = [run for run in runs if run["group"] == group]
            at = [run["limits"][k] for run in mine]
            free = [run["limits"][-1] for run in mine]
            logs = [np.log(x["cost"] / y["cost"]) for x, y in zip(at, free, strict=True)]
            row[group] = {
                "alarms": float(np.mean([x["alarms"] for x in at])),
                "cells_with_alarms": sum(x["alarms"] > 0 for x in at),
                "cost": float(np.exp(np.mean(logs))),
                "best_save": float(np.exp(min(logs))),
                "worst_harm": float(np.exp(max(logs))),
            }
        rows.append(row)
    return {
        "policy": args.policy,
        "rule": args.rule,
        "requests": args.requests,
        "seeds": list(numbers),
        "cells": {group: len(found) for group, found in groups.items()},
        "limits": rows,
        "runs": [
            {**run, "limits": [x | {"limit": None if np.isinf(x["limit"]) else x["limit"]}
                               for x in run["limits"]]}
            for run in runs
        ],
    }  # fmt: skip


def _is_chosen(args: argparse.Namespace, name: str) -> bool:
    return not args.cells or any(text in name for text in args.cells)


def print_limits(found: dict[str, Any]) -> None:
    """Print the table of limits."""
    groups = list(found["cells"])
    print("| limit | " + " | ".join(f"{g}: alarms | cost (best, worst)" for g in groups) + " |")
    print("|---:|" + "---:|" * (2 * len(groups)))
    for row in found["limits"]:
        parts = [
            f"{row[g]['alarms']:.2%} | {row[g]['cost']:.3f} "
            f"({row[g]['best_save']:.2f}, {row[g]['worst_harm']:.2f})"
            for g in groups
        ]
        print(f"| {row['limit'] or 'none'} | " + " | ".join(parts) + " |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("rules", "range"))
    parser.add_argument("--traces", type=Path, help="folder of recorded traffic")
    parser.add_argument("--work", type=Path, default=Path("build/guard"))
    parser.add_argument("--requests", type=int, default=2000, help="of every run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rules", nargs="*", help="rules to compare; default: all")
    parser.add_argument("--cells", nargs="*", help="recorded cells to take, by parts of names")
    parser.add_argument("--policy", default="tailrace")
    parser.add_argument("--rule", default=ChooserSettings().fallback)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    args = parser.parse_args()
    found = compare_rules(args) if args.what == "rules" else compare_limits(args)
    (print_rules if args.what == "rules" else print_limits)(found)
    if args.json is not None:
        known = json.loads(args.json.read_text("utf-8")) if args.json.is_file() else {}
        write_text(args.json, json.dumps(known | {args.what: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
