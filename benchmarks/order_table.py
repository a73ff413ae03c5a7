"""What order and a queue at the router are worth: ``python benchmarks/order_table.py``.

Every rule places alone and with its tuned order at the servers (``+order:tuned``, found by
``tailrace tune`` on tuning seeds of the suite `standard`); `tailrace` also with the order of its
own that its file has; some with a tuned queue at the router (``+queue:tuned``), and with both.
Beside them, with ``--rivals``, the queues of routers in use. The table is made on evaluation seeds
of a suite (with `standard`, coding agents too), and checks the goals of docs/order.md. Runs are
kept in ``--folder``, so that an interrupted table goes on where it stopped.

``--orders w=40,most=30 w=107,most=300 ...`` instead compares orders of `tailrace` on tuning seeds.

Throughput is requests/s that ended while others still arrived: to the end of the last request, one
long session would decide it. Intervals are 95 % bootstrap intervals over seeds.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.evaluate.judge.baselines import fingerprint
from tailrace.evaluate.judge.recorded import scenarios_of
from tailrace.evaluate.judge.suite import Suite, load_suite
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import run
from tailrace.evaluate.measure.tail import extremes, times_of
from tailrace.files import atomic_path
from tailrace.policy import registry, shipped
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, generator, seeds
from tailrace.workload.recorded.conversations import Half

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
#: Forms of a rule: alone, tuned order, the order in the policy's file, tuned queue, both.
FORMS = ("plain", "order", "own", "queue", "both")
#: Order and queue count where the best rule alone misses more of its targets than this.
MISSES = 0.02
FIGURES = (
    "cost_s", "missed", "ttft_p99_s", "worst_ttft_s", "longest_ttft_s", "requests_per_s", "hit_rate"
)  # fmt: skip
#: First tuning seed on which orders are compared.
ORDERS_FROM = 60
#: Share of the requests that counts as the worst served, and draws of seeds for an interval.
WORST, DRAWS = 0.01, 400

#: Scenario -> policy -> figure.
Rows = Mapping[str, Mapping[str, Mapping[str, float]]]
#: Rule -> form -> policy.
Forms = Mapping[str, Mapping[str, str]]


class Runs:
    """Figures of runs, kept in a file."""

    def __init__(self, folder: Path, requests: int, warmup: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._warmup = warmup
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
            summary, tail = summarise(result, self._warmup), extremes(result, self._warmup, 30.0)
            arrived, answered, _, _ = times_of(result, self._warmup)
            waits = np.sort((answered - arrived)[int(self._warmup * len(arrived)) :])
            self._known[key] = [
                summary.cost_s,
                1 - summary.slo_attainment,
                summary.ttft_s.p99 or math.nan,
                float(waits[-max(1, round(WORST * waits.size)) :].mean()),
                tail.longest_ttft_s,
                tail.steady_rps,
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

    def rows(
        self, worlds: Sequence[Scenario], policies: Sequence[str], of: Sequence[int]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return the means of all policies on all scenarios."""
        return {w.name: {p: self.means(w, p, of) for p in policies} for w in worlds}

    def means(self, scenario: Scenario, policy: str, of: Sequence[int]) -> dict[str, float]:
        """Return the mean FIGURES over seeds; of the longest time to first token, the longest."""
        found = np.array([self.figures(scenario, policy, seed) for seed in of])
        row = dict(zip(FIGURES, found.mean(axis=0).tolist(), strict=True))
        row["longest_ttft_s"] = float(found[:, FIGURES.index("longest_ttft_s")].max())
        return row


def forms_of(rules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return every rule whose order was tuned in its forms; ``rules``: only those, if any."""
    tuned = {rule: shipped.spec_of(rule, c) for rule, c in shipped.tuned_constants().items()}
    forms = {}
    for name, order in tuned.items():
        rule, ordered, _ = name.partition("+order")
        if not ordered or (rules and rule not in rules):
            continue
        forms[rule] = {"plain": rule, "order": order}
        own = registry.get(rule).own_order
        if own is not None:
            forms[rule]["own"] = rule + own.suffix
        queue = tuned.get(f"{rule}+queue")
        if queue is not None:
            forms[rule] |= {"queue": queue, "both": order + queue.removeprefix(rule)}
    return forms


def worlds_of(suite: Suite, traces: Path | None, folder: Path) -> list[Scenario]:
    """Return the scenarios of a suite; with `standard`, coding agents too."""
    if suite.is_recorded:
        if traces is None:
            raise SystemExit(f"suite {suite.name} needs --traces")
        found = scenarios_of(
            traces, suite.clusters, Half.JUDGE, folder / "traces",
            requests=suite.requests or 3000, keep_capacities=True, jobs=1,
        )  # fmt: skip
        return list(found.scenarios)
    worlds = [scenarios.load(name) for name in suite.scenarios]
    return [*worlds, CODING] if suite.name == "standard" else worlds


def table(suite: Suite, worlds: Sequence[Scenario], options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, seed by seed: runs are kept, so fewer seeds can be asked for later."""
    runs = Runs(options.folder, options.requests, suite.warmup)
    forms = forms_of(options.rules)
    rivals = RIVALS if options.rivals else {}
    policies = [p for form in forms.values() for p in form.values()] + list(rivals.values())
    of = seeds(Purpose.EVALUATION, options.seeds)
    for seed in of:
        runs.make(worlds, policies, [seed])
    return {
        "suite": suite.name,
        "requests": options.requests,
        "evaluation_seeds": of,
        "forms": forms,
        "rivals": rivals,
        "scenarios": runs.rows(worlds, policies, of),
        "summary": summary_of(forms, rivals, lambda of: runs.rows(worlds, policies, of), of),
    }


def compared(
    worlds: Sequence[Scenario], warmup: float, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Compare orders of the subject, on tuning seeds, with the best rule alone and with order."""
    runs = Runs(options.folder, options.requests, warmup)
    alone = shipped.LINEAR
    order = forms_of([alone])[alone]["order"]
    policies = [
        alone,
        order,
        SUBJECT,
        *(f"{SUBJECT}+order:{weights}" for weights in options.orders),
    ]
    of = seeds(Purpose.TUNING, options.seeds, ORDERS_FROM)
    runs.make(worlds, policies, of)
    rows = runs.rows(worlds, policies, of)
    return {
        p: {"alone": against(rows, p, alone), "ordered": against(rows, p, order)} for p in policies
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
        "worst_ttft": mean("worst_ttft_s"),
        "throughput": mean("requests_per_s"),
        "throughput_least": min(ratios("requests_per_s")),
    }


def hindsight(rows: Rows, policies: Sequence[str], other: str) -> float:
    """Return the cost of the best policy of each scenario, relative to that of one policy."""
    logs = [
        math.log(min(r[p]["cost_s"] for p in policies) / r[other]["cost_s"]) for r in rows.values()
    ]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary_of(
    forms: Forms,
    rivals: Mapping[str, str],
    rows_of: Callable[[Sequence[int]], Rows],
    of: Sequence[int],
) -> dict[str, Any]:
    """Compare with the best single rule alone and with tuned order; check the goals.

    ``rows_of`` gives the means over some of the seeds ``of``.
    """
    rows = rows_of(of)
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
    rng = generator(0, "order table")
    draws = [rows_of(rng.choice(of, len(of)).tolist()) for _ in range(DRAWS)]
    choices = {
        "placing": by_form["plain"],
        "placing and order": [p for kind in ("plain", "order", "own") for p in by_form[kind]],
    }
    if by_form["queue"]:
        choices["with queues"] = [p for policies in by_form.values() for p in policies]

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
        "goals": {
            kind: with_intervals(
                goals(rows, list(hard), p, best),
                [goals(drawn, list(hard), p, best) for drawn in draws],
            )
            for kind, p in subject.items()
        },
        "order_gain": gains("order", "plain"),
        "own_gain": gains("own", "plain"),
        "queue_gain": gains("queue", "plain"),
        "holding_over_order": gains("both", "order"),
        "rivals": {p: against(rows, p, plain) for p in rivals.values()},
        "hindsight": {
            part: {name: hindsight(of_part, chosen, plain) for name, chosen in choices.items()}
            for part, of_part in (("missing_targets", hard), ("all", rows))
        },
    }


def goals(
    rows: Rows, missing: Sequence[str], policy: str, best: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return what was aimed at, what came out, and whether it holds.

    ``missing``: scenarios where targets are missed.
    """
    plain, order = best["plain"], best["order"]
    hard = {name: rows[name] for name in missing}
    easy = {name: r for name, r in rows.items() if name not in missing}
    whole, both = against(rows, policy, plain), against(rows, policy, order)
    wanted = []
    if hard:
        tight = against(hard, policy, plain)
        wanted += [
            ("cost where targets are missed", tight["cost"], "at most", 0.85),
            ("missed targets there", tight["missed"], "at most", 0.8),
            ("P99 TTFT there", tight["ttft_p99"], "at most", 1.0),
        ]
    if easy:
        worst = against(easy, policy, plain)["cost_worst"]
        wanted.append(("cost elsewhere, worst scenario", worst, "at most", 1.01))
    wanted += [
        ("throughput, mean of scenarios", whole["throughput"], "at least", 0.995),
        ("throughput, worst scenario", whole["throughput_least"], "at least", 0.995),
        ("longest TTFT, worst scenario", whole["longest_ttft_worst"], "at most", 2.0),
        ("the same against tuned order", both["longest_ttft_worst"], "at most", 2.0),
        ("worst-served 1 %, mean TTFT", whole["worst_ttft"], "at most", 1.0),
        ("cost against tuned order", both["cost"], "at most", 0.98),
        ("share of scenarios with lower cost", both["cost_lower_share"], "at least", 0.75),
        ("cost against tuned order, worst scenario", both["cost_worst"], "at most", 1.02),
    ]
    return [
        {"goal": name, "limit": limit, "at_least": sign == "at least", "found": found,
         "holds": found >= limit if sign == "at least" else found <= limit}
        for name, found, sign, limit in wanted
    ]  # fmt: skip


def with_intervals(
    found: list[dict[str, Any]], draws: Sequence[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return goals with the 95 % interval of each figure over draws of seeds."""
    values = np.array([[goal["found"] for goal in drawn] for drawn in draws])
    low, high = np.quantile(values, (0.025, 0.975), axis=0)
    return [goal | {"interval": [float(low[k]), float(high[k])]} for k, goal in enumerate(found)]


def markdown(found: dict[str, Any], scenarios_too: bool) -> str:
    """Return the tables of docs/order.md; ``scenarios_too``: one of each scenario as well."""
    summary, rows, forms = found["summary"], found["scenarios"], found["forms"]
    best = summary["best_rule"]
    hard, drawn = len(summary["missing_targets"]), len(found["evaluation_seeds"])
    lines = [
        f"Suite `{found['suite']}`: {len(rows)} scenarios, {hard} of which miss targets,",
        f"{drawn} evaluation seeds, {found['requests']} requests per run.",
        f"The best rule alone is `{best['plain']}`, the best with tuned order `{best['order']}`.",
        "",
        "| placed by | order | cost | P99 TTFT | worst 1 % | throughput |",
        "|---|---|---|---|---|---|",
    ]
    for rule, form in forms.items():
        for kind, note in (("order", ""), ("own", " (own)")):
            if kind in form:
                r = summary[f"{kind}_gain"][rule]
                lines.append(
                    f"| `{rule}` | `{form[kind].partition('+order:')[2]}`{note} | {r['cost']:.3f} "
                    f"| {r['ttft_p99']:.3f} | {r['worst_ttft']:.3f} | {r['throughput']:.3f} |"
                )
    if found["rivals"]:
        lines += [
            "",
            "| queue of | rule and limits | cost | missed targets | P99 TTFT | throughput |",
            "|---|---|---|---|---|---|",
        ]
    for name, policy in found["rivals"].items():
        r = summary["rivals"][policy]
        lines.append(
            f"| {name} | `{policy}` | {r['cost']:.3f} | {r['missed']:.3f} | {r['ttft_p99']:.3f} | "
            f"{r['throughput']:.3f} |"
        )
    kinds = [kind for kind in ("plain", "order", "own") if kind in forms[SUBJECT]]
    titles = {"plain": "placing alone", "order": "tuned order", "own": "its own order"}
    lines += ["", "| goal | limit | " + " | ".join(titles[k] for k in kinds) + " |"]
    lines.append("|---" * (2 + len(kinds)) + "|")
    for k, goal in enumerate(summary["goals"]["plain"]):
        sign = "at least" if goal["at_least"] else "at most"
        cells = []
        for kind in kinds:
            mine = summary["goals"][kind][k]
            text, (low, high) = f"{mine['found']:.3f}", mine["interval"]
            cells.append(f"{f'**{text}**' if mine['holds'] else text} ({low:.3f}-{high:.3f})")
        lines.append(f"| {goal['goal']} | {sign} {goal['limit']:g} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| best in hindsight, per scenario | where targets are missed | all scenarios |",
        "|---|---|---|",
    ]
    tight, whole = (summary["hindsight"][part] for part in ("missing_targets", "all"))
    lines += [f"| {name} | {tight[name]:.3f} | {whole[name]:.3f} |" for name in tight]
    for kind in kinds:
        costs = [
            hindsight({n: rows[n] for n in names}, [forms[SUBJECT][kind]], best["plain"])
            for names in (summary["missing_targets"], rows)
        ]
        lines.append(
            f"| `{SUBJECT}`, {titles[kind]}: no hindsight | {costs[0]:.3f} | {costs[1]:.3f} |"
        )
    if not scenarios_too:
        return "\n".join(lines)
    lines += [
        "",
        "| scenario | policy | cost | missed | P99 TTFT | worst 1 % | longest | per s | hits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    shown = [best["plain"], best["order"], *(forms[SUBJECT][kind] for kind in kinds)]
    for scenario, by_policy in rows.items():
        for policy in dict.fromkeys(shown):
            r = by_policy[policy]
            mark = "*" if scenario in summary["missing_targets"] else ""
            lines.append(
                f"| {scenario}{mark} | `{policy}` | {r['cost_s']:.3f} | {r['missed']:.1%} | "
                f"{r['ttft_p99_s']:.2f} | {r['worst_ttft_s']:.2f} | {r['longest_ttft_s']:.1f} | "
                f"{r['requests_per_s']:.2f} | {r['hit_rate']:.1%} |"
            )
    return "\n".join(lines)


def put_in(page: Path, suite: str, text: str) -> None:
    """Put tables into a page, between ``<!-- order SUITE -->`` and ``<!-- end -->``."""
    before, begin, rest = page.read_text().partition(f"<!-- order {suite} -->\n")
    if not begin:
        raise SystemExit(f"{page} has no line <!-- order {suite} -->")
    end = "<!-- end -->"
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def main() -> None:
    """Make the table and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="standard", help="a suite of `tailrace evaluate`")
    parser.add_argument("--traces", type=Path, help="recorded traffic of the suite `real`")
    parser.add_argument("--folder", type=Path, default=Path("runs/order"), help="keep runs there")
    parser.add_argument("--rules", nargs="*", default=(), help="only these, and the subject")
    parser.add_argument("--orders", nargs="+", default=(), help="compare these on tuning seeds")
    parser.add_argument("--only", nargs="+", default=(), help="scenarios of the suite")
    parser.add_argument("--rivals", action="store_true", help="also the queues of other routers")
    parser.add_argument("--requests", type=int, default=3000, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="evaluation seeds")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    parser.add_argument("--short", action="store_true", help="without a table of each scenario")
    parser.add_argument("-o", "--out", type=Path, help="write it to a file too")
    parser.add_argument("--read", type=Path, help="take the figures of such a file")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = parser.parse_args()
    if options.rules:
        options.rules = [*options.rules, SUBJECT]
    if options.read:
        found = json.loads(options.read.read_text())
        text = markdown(found, not options.short)
        if options.page:
            put_in(options.page, found["suite"], text)
        else:
            print(text)
        return
    suite = load_suite(options.suite)
    worlds = worlds_of(suite, options.traces, options.folder)
    if options.only:
        worlds = [world for world in worlds if world.name in options.only]
    if options.orders:
        json.dump(compared(worlds, suite.warmup, options), sys.stdout, indent=1)
        print()
        return
    found = table(suite, worlds, options)
    if options.out:
        with atomic_path(options.out) as path:
            path.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        print(markdown(found, not options.short))
        return
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
