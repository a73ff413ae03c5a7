"""What order and a queue at the router are worth: ``python benchmarks/order_table.py``.

Every rule places alone and with its tuned order at the servers (``+order:tuned``, found by
``tailrace tune`` on tuning seeds of the suite `standard`); some also with an order that was tuned
without raising P99 (``--kept FILE``, by ``tailrace tune --keep-tail``), with a tuned queue at the
router (``+queue:tuned``), and with both. Beside them the queues of routers in use. The table is
made on evaluation seeds: the suite `standard` and coding agents, and the goals of docs/order.md.
Runs are kept in ``--folder``, so that an interrupted table goes on where it stopped.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.evaluate.judge.baselines import fingerprint
from tailrace.evaluate.judge.suite import load_suite
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import run
from tailrace.evaluate.measure.tail import extremes
from tailrace.files import atomic_path
from tailrace.policy import shipped
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, seeds

SUBJECT = "tailrace"
#: Coding agents on eight replicas, prompts an eighth as long: most of the load is uncached prefill.
CODING = Scenario(
    name="coding-agents",
    cluster=Cluster(replicas=(Replica(count=8),)),
    workload=Workload(name="coding-agents", prompt_scale=0.125, rate=12.0),
)
#: Queues of routers in use, each with the rule it comes with.
RIVALS = {
    "Dynamo, fcfs": "dynamo+queue:max_prefill_s=0.5",
    "Dynamo, wspt": "dynamo+queue:max_prefill_s=0.5,order=wspt",
    "llm-d flow control, fcfs": "llm_d+queue:max_saturation=1",
    "llm-d flow control, edf": "llm_d+queue:max_saturation=1,order=edf",
    "SkyLB selective pushing": "load_aware+queue:max_queued=1",
    "max_in_flight, fcfs": "load_aware+queue:max_in_flight=32",
}
#: Forms of a rule: alone, tuned order, order tuned without raising P99, tuned queue, both.
FORMS = ("plain", "order", "kept", "queue", "both")
#: Order and queue count where the best rule alone misses more of its targets than this.
MISSES = 0.02
FIGURES = ("cost_s", "missed", "ttft_p99_s", "longest_ttft_s", "requests_per_s", "hit_rate")
WARMUP = 0.1

#: Scenario -> policy -> figure.
Rows = Mapping[str, Mapping[str, Mapping[str, float]]]
#: Rule -> form -> policy.
Forms = Mapping[str, Mapping[str, str]]


class Runs:
    """Figures of runs, kept in a file."""

    def __init__(self, folder: Path, requests: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"runs-{requests}.jsonl"
        self._requests = requests
        self._known: dict[str, list[float]] = {}
        self._digests: dict[str, str] = {}
        if self._path.is_file():
            self._known = dict(json.loads(line) for line in self._path.read_text().splitlines())

    def figures(self, scenario: Scenario, policy: str, seed: int) -> list[float]:
        """Return the FIGURES of a policy on one seed of a scenario."""
        if policy not in self._digests:
            self._digests[policy] = fingerprint(policy, scenario)
        key = f"{scenario.name} {policy} {self._digests[policy]} {seed}"
        if key not in self._known:
            sized = scenario.with_workload(requests=self._requests)
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


def forms_of(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return every rule whose order was tuned in its forms; ``kept``: records of ``tune``."""
    tuned = {rule: shipped.spec_of(rule, c) for rule, c in shipped.tuned_constants().items()}
    forms = {}
    for name, order in tuned.items():
        rule, ordered, _ = name.partition("+order")
        if not ordered:
            continue
        forms[rule] = {"plain": rule, "order": order}
        if name in kept:
            forms[rule]["kept"] = kept[name]["spec"]
        queue = tuned.get(f"{rule}+queue")
        if queue is not None:
            forms[rule] |= {"queue": queue, "both": order + queue.removeprefix(rule)}
    return forms


def tables(
    folder: Path, requests: int, count: int, kept: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure everything; a table after each evaluation seed, over those so far."""
    runs = Runs(folder, requests)
    worlds = [*(scenarios.load(name) for name in load_suite("standard").scenarios), CODING]
    forms = forms_of(kept)
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
            "forms": forms,
            "rivals": RIVALS,
            "scenarios": rows,
            "summary": summary_of(forms, rows),
        }


def best_of(rows: Rows, policies: Sequence[str]) -> str:
    """Return the policy of least cost, as the geometric mean over scenarios."""
    return min(policies, key=lambda p: sum(math.log(r[p]["cost_s"]) for r in rows.values()))


def against(rows: Rows, policy: str, other: str) -> dict[str, float]:
    """Return ratios of a policy's figures to another's: means over scenarios, and the worst."""
    pairs = [(r[policy], r[other]) for r in rows.values()]

    def ratios(name: str) -> list[float]:
        return [max(mine[name], 1e-9) / max(theirs[name], 1e-9) for mine, theirs in pairs]

    def mean(name: str) -> float:
        return math.exp(sum(math.log(x) for x in ratios(name)) / len(pairs))

    missed = [sum(r["missed"] for r in side) for side in zip(*pairs, strict=True)]
    return {
        "cost": mean("cost_s"),
        "cost_worst": max(ratios("cost_s")),
        "cost_lower_share": sum(x < 1 for x in ratios("cost_s")) / len(pairs),
        "missed": missed[0] / max(missed[1], 1e-9),
        "ttft_p99": mean("ttft_p99_s"),
        "longest_ttft_worst": max(ratios("longest_ttft_s")),
        "throughput_least": min(ratios("requests_per_s")),
    }


def hindsight(rows: Rows, policies: Sequence[str], other: str) -> float:
    """Return the cost of the best policy of each scenario, relative to that of one policy."""
    logs = [
        math.log(min(r[p]["cost_s"] for p in policies) / r[other]["cost_s"]) for r in rows.values()
    ]
    return math.exp(sum(logs) / len(logs))


def summary_of(forms: Forms, rows: Rows) -> dict[str, Any]:
    """Compare with the best single rule alone and with tuned order; check the goals."""
    by_form = {kind: [f[kind] for f in forms.values() if kind in f] for kind in FORMS}
    # The best baselines are rules other than the subject.
    others = {
        kind: [f[kind] for rule, f in forms.items() if kind in f and rule != SUBJECT]
        for kind in FORMS
    }
    best = {kind: best_of(rows, policies) for kind, policies in others.items() if policies}
    plain = best["plain"]
    hard = {name: r for name, r in rows.items() if r[plain]["missed"] > MISSES}
    easy = {name: r for name, r in rows.items() if name not in hard}
    ordered = [p for kind in ("plain", "order", "kept") for p in by_form[kind]]
    everything = [p for policies in by_form.values() for p in policies]

    def gains(kind: str, over: str) -> dict[str, dict[str, float]]:
        return {
            rule: against(rows, form[kind], form[over])
            for rule, form in forms.items()
            if kind in form and over in form
        }

    subject = forms[SUBJECT]
    return {
        "best_rule": best,
        "missing_targets": list(hard),
        "subject": {
            kind: {
                "missing_targets": against(hard, policy, plain),
                "elsewhere": against(easy, policy, plain),
                "with_tuned_order": against(rows, policy, best["order"]),
            }
            for kind, policy in subject.items()
        },
        "goals": {kind: goals(hard, easy, rows, p, best) for kind, p in subject.items()},
        "order_gain": gains("order", "plain"),
        "kept_gain": gains("kept", "plain"),
        "queue_gain": gains("queue", "plain"),
        "holding_over_order": gains("both", "order"),
        "rivals": {p: against(rows, p, plain) for p in RIVALS.values()},
        "hindsight": {
            "missing_targets": {
                "placing": hindsight(hard, by_form["plain"], plain),
                "placing and order": hindsight(hard, ordered, plain),
                "with queues": hindsight(hard, everything, plain),
            },
            "all": {
                "placing": hindsight(rows, by_form["plain"], plain),
                "placing and order": hindsight(rows, ordered, plain),
                "with queues": hindsight(rows, everything, plain),
            },
        },
    }


def goals(
    hard: Rows, easy: Rows, rows: Rows, policy: str, best: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return what was aimed at, what came out, and whether it holds."""
    plain, order = best["plain"], best["order"]
    at_most: Callable[[float, float], bool] = lambda x, limit: x <= limit  # noqa: E731
    at_least: Callable[[float, float], bool] = lambda x, limit: x >= limit  # noqa: E731
    tight, light, both = (
        against(hard, policy, plain),
        against(easy, policy, plain),
        against(rows, policy, order),
    )
    whole = against(rows, policy, plain)
    wanted = (
        ("cost where targets are missed", tight["cost"], at_most, 0.85),
        ("missed targets there", tight["missed"], at_most, 0.8),
        ("P99 TTFT there", tight["ttft_p99"], at_most, 1.0),
        ("cost elsewhere, worst scenario", light["cost_worst"], at_most, 1.01),
        ("throughput, worst scenario", whole["throughput_least"], at_least, 0.995),
        ("longest TTFT, worst scenario", whole["longest_ttft_worst"], at_most, 2.0),
        ("cost against tuned order", both["cost"], at_most, 0.98),
        ("share of scenarios with lower cost", both["cost_lower_share"], at_least, 0.75),
        ("cost against tuned order, worst scenario", both["cost_worst"], at_most, 1.02),
    )
    return [
        {"goal": name, "limit": limit, "at_least": holds is at_least, "found": found,
         "holds": holds(found, limit)}
        for name, found, holds, limit in wanted
    ]  # fmt: skip


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of docs/order.md."""
    summary, rows, forms = found["summary"], found["scenarios"], found["forms"]
    best = summary["best_rule"]
    lines = [
        f"{len(found['evaluation_seeds'])} evaluation seeds, {found['requests']} requests per run.",
        f"The best rule alone is `{best['plain']}`, the best with tuned order `{best['order']}`.",
        "",
        "| placed by | order | cost | P99 TTFT | keeping P99 | cost | P99 TTFT | queue | both |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def figure(part: str, rule: str, name: str) -> str:
        known = summary[part].get(rule)
        return "" if known is None else f"{known[name]:.3f}"

    for rule, form in forms.items():
        weights = [form.get(kind, "").partition("+order:")[2] for kind in ("order", "kept")]
        texts = [f"`{w}`" if w else "" for w in weights]
        lines.append(
            f"| `{rule}` | {texts[0]} | {figure('order_gain', rule, 'cost')} | "
            f"{figure('order_gain', rule, 'ttft_p99')} | {texts[1]} | "
            f"{figure('kept_gain', rule, 'cost')} | {figure('kept_gain', rule, 'ttft_p99')} | "
            f"{figure('queue_gain', rule, 'cost')} | "
            f"{figure('holding_over_order', rule, 'cost')} |"
        )
    lines += [
        "",
        "| queue of | rule and limits | cost | missed targets | P99 TTFT | throughput, least |",
        "|---|---|---|---|---|---|",
    ]
    for name, policy in found["rivals"].items():
        r = summary["rivals"][policy]
        lines.append(
            f"| {name} | `{policy}` | {r['cost']:.3f} | {r['missed']:.3f} | {r['ttft_p99']:.3f} | "
            f"{r['throughput_least']:.3f} |"
        )
    kinds = [kind for kind in ("plain", "order", "kept") if kind in forms[SUBJECT]]
    titles = {"plain": "placing alone", "order": "tuned order", "kept": "order that keeps P99"}
    lines += ["", "| goal | limit | " + " | ".join(titles[k] for k in kinds) + " |"]
    lines.append("|---" * (2 + len(kinds)) + "|")
    for k, goal in enumerate(summary["goals"]["plain"]):
        sign = "at least" if goal["at_least"] else "at most"
        cells = []
        for kind in kinds:
            mine = summary["goals"][kind][k]
            text = f"{mine['found']:.3f}"
            cells.append(f"**{text}**" if mine["holds"] else text)
        lines.append(f"| {goal['goal']} | {sign} {goal['limit']:g} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| best in hindsight, per scenario | where targets are missed | all scenarios |",
        "|---|---|---|",
    ]
    tight, whole = (summary["hindsight"][part] for part in ("missing_targets", "all"))
    lines += [f"| {name} | {tight[name]:.3f} | {whole[name]:.3f} |" for name in tight]
    for kind in kinds:
        costs = (
            against(
                {n: rows[n] for n in names}, forms[SUBJECT][kind], summary["best_rule"]["plain"]
            )
            for names in (summary["missing_targets"], rows)
        )
        figures = " | ".join(f"{one['cost']:.3f}" for one in costs)
        lines.append(f"| `{SUBJECT}`, {titles[kind]}: no hindsight | {figures} |")
    lines += [
        "",
        "| scenario | policy | cost, s | missed | P99 TTFT, s | longest, s | requests/s | hits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shown = [best["plain"], best["order"], *(forms[SUBJECT][kind] for kind in kinds)]
    for scenario, by_policy in rows.items():
        for policy in dict.fromkeys(shown):
            r = by_policy[policy]
            mark = "*" if scenario in summary["missing_targets"] else ""
            lines.append(
                f"| {scenario}{mark} | `{policy}` | {r['cost_s']:.3f} | {r['missed']:.1%} | "
                f"{r['ttft_p99_s']:.2f} | {r['longest_ttft_s']:.1f} | {r['requests_per_s']:.2f} | "
                f"{r['hit_rate']:.1%} |"
            )
    return "\n".join(lines)


def put_in(page: Path, text: str) -> None:
    """Put tables into a page, between ``<!-- order -->`` and ``<!-- end -->``."""
    before, begin, rest = page.read_text().partition("<!-- order -->\n")
    if not begin:
        raise SystemExit(f"{page} has no line <!-- order -->")
    end = "<!-- end -->"
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def main() -> None:
    """Make the table and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/order"), help="keep runs there")
    parser.add_argument("--kept", type=Path, help="orders by `tailrace tune --keep-tail -o FILE`")
    parser.add_argument("--requests", type=int, default=4000, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="evaluation seeds")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    parser.add_argument("-o", "--out", type=Path, help="write it to a file too")
    parser.add_argument("--read", type=Path, help="take the figures of such a file")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = parser.parse_args()
    if options.read:
        text = markdown(json.loads(options.read.read_text()))
        if options.page:
            put_in(options.page, text)
        else:
            print(text)
        return
    kept = json.loads(options.kept.read_text())["rules"] if options.kept else {}
    for found in tables(options.folder, options.requests, options.seeds, kept):
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
