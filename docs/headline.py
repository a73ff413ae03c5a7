"""Writes the tables of results in README.md and model-card.md anew: python docs/headline.py.

They come from results/standard.json and results/holdout.json, which ``make evaluate`` makes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SUITES = ("standard", "holdout")
TARGETS = (DOCS.parent / "README.md", DOCS / "model-card.md")
#: Who uses an opponent; these are shown in the headline, besides the best ones.
USED_BY = {
    "round_robin": "everyone",
    "least_outstanding": "everyone",
    "cache_aware": "SGLang",
    "dynamo": "NVIDIA Dynamo",
    "llm_d": "llm-d",
    "lmetric": "LMetric",
    "llm_d_sticky": "llm-d's guides",
    "load_aware": "vLLM production-stack",
}
SHOWN = tuple(USED_BY)
FIGURES = {
    "cost": "composite cost",
    "p99_ttft": "P99 TTFT",
    "mean_e2e": "mean end to end",
    "throughput": "throughput",
}

Results = Mapping[str, Any]


def begin(name: str) -> str:
    """Return the line that begins a table."""
    return f"<!-- {name}: python docs/headline.py -->\n"


END = "<!-- end -->\n"


def headline(results: Results) -> str:
    """Return the table of a suite: the policy's ratios to its opponents."""
    by_name = {row["policy"]: row["vs_best_single"] for row in results["policies"]}
    subject, best = results["subject"], results["best_single"]
    lines = [
        f"| `{subject}` as a ratio to | {' | '.join(FIGURES.values())} |",
        f"|---|{'---|' * len(FIGURES)}",
    ]
    remarks = {best: ", the best single opponent", results["best_hand_made"]: ", the best rule"}
    ahead = [row["policy"] for row in results["policies"] if row["role"] == "look-ahead"]
    for name in dict.fromkeys((*SHOWN, results["best_hand_made"], best, *ahead)):
        if name not in by_name:
            continue
        against: dict[str, Any] = {
            key: by_name[subject][key] / by_name[name][key] for key in FIGURES
        }
        against["intervals"] = {"cost": (0.0, 0.0)}
        if name == best:
            against = by_name[subject]
        elif name == results["best_hand_made"]:
            against = results["vs_best_hand_made"]
        used = f" ({USED_BY[name]})" if name in USED_BY else ""
        lines.append(f"| `{name}`{used}{remarks.get(name, '')} | {_ratios(against)} |")
    return "\n".join(lines) + "\n"


def _ratios(against: Mapping[str, Any]) -> str:
    low, high = against["intervals"]["cost"]
    shown = {key: f"{against[key]:.3f}" for key in FIGURES}
    if low != high:
        shown["cost"] += f" ({low:.3f}-{high:.3f})"
    return " | ".join(shown.values())


def scenarios(results: Results) -> str:
    """Return the table of a suite against the best rule of each scenario."""
    lines = [
        f"| scenario | best rule there | {' | '.join(FIGURES.values())} |",
        f"|---|---|{'---|' * len(FIGURES)}",
    ]
    for name, against in results["vs_best_per_scenario"]["scenarios"].items():
        lines.append(f"| `{name}` | `{against['policy']}` | {_ratios(against)} |")
    return "\n".join(lines) + "\n"


def summary(results: Results) -> str:
    """Return what a suite shows in two sentences."""
    each = results["vs_best_per_scenario"]
    count = len(each["scenarios"])
    better, surely = round(each["share_better"] * count), round(each["share_surely_better"] * count)
    worst = each["worst_ratio"]
    far = f"{worst - 1:.1%} dearer" if worst > 1 else f"{1 - worst:.1%} cheaper"
    if abs(worst - 1) < 5e-4:
        far = "level"
    return (
        f"Against the best rule *of each scenario* it is cheaper in {better} of {count} "
        f"({surely} beyond doubt); "
        f"where it does worst, `{each['worst_scenario']}`, it is {far}. "
        f"{len(results['seeds'])} evaluation seeds from {results['seeds'][0]} on, "
        f"{min(results['requests'].values())} requests or more per cell, "
        f"{len(results['policies'])} policies.\n"
    )


def hindsight(results: Results) -> str:
    """Return how much better than the best single rule any policy was, chosen by hindsight."""
    by_scenario: dict[str, dict[str, Any]] = {}
    for cell in results["cells"]:
        by_scenario.setdefault(cell["scenario"], {})[cell["policy"]] = cell
    best = results["best_single"]

    def ratio(figure: str) -> float:
        logs = [
            math.log(min(cell[figure] for cell in cells.values()) / cells[best][figure])
            for cells in by_scenario.values()
        ]
        return math.exp(sum(logs) / len(logs))

    return (
        f"What is there to win: whoever picked the best of all {len(results['policies'])} "
        "policies, look-aheads included, for each scenario and each figure by hindsight would come "
        f"to a cost of {ratio('cost_s'):.3f}, a P99 TTFT of {ratio('ttft_s_p99'):.3f} and a mean "
        f"end to end of {ratio('e2e_s_mean'):.3f}.\n"
    )


def tables() -> dict[str, str]:
    """Return every table by its name."""
    made = {}
    for suite in SUITES:
        path = DOCS / "results" / f"{suite}.json"
        results = json.loads(path.read_text(encoding="utf-8"))
        text = f"{headline(results)}\n{summary(results)}\n{hindsight(results)}"
        made[f"headline {suite}"] = f"\n{text}\n"
        made[f"scenarios {suite}"] = f"\n{scenarios(results)}\n"
    return made


def with_tables(text: str) -> str:
    """Return a text with the tables it has brought up to date."""
    for name, table in tables().items():
        if begin(name) in text:
            before, rest = text.split(begin(name))
            _, after = rest.split(END, 1)
            text = f"{before}{begin(name)}{table}{END}{after}"
    return text


if __name__ == "__main__":
    for target in TARGETS:
        target.write_text(with_tables(target.read_text(encoding="utf-8")), encoding="utf-8")
