"""Writes the tables of results in README.md and model-card.md and the picture in README.md anew.

    python docs/headline.py

They come from results/standard.json and results/holdout.json, which ``make evaluate`` makes, and
results/real.json, which ``make real`` makes; the picture and the short table come from
results/routers.json, which ``make routers`` makes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SUITES = ("standard", "holdout", "real")
TARGETS = (DOCS.parent / "README.md", DOCS / "model-card.md")
#: A table that each target must have.
HEADS = ("short routers", "headline standard")
#: Who uses an opponent; these are shown in the headline, besides the best ones.
USED_BY = {
    "round_robin": "everyone",
    "least_outstanding": "everyone",
    "cache_aware": "SGLang",
    "sglang_cache_aware": "SGLang",
    "dynamo": "NVIDIA Dynamo",
    "llm_d": "llm-d",
    "lmetric": "LMetric",
    "llm_d_sticky": "llm-d's guides",
    "load_aware": "vLLM production-stack",
}
SHOWN = tuple(USED_BY)
#: Rows of the table in README, besides the best rule.
SHORT = ("least_outstanding", "sglang_cache_aware", "llm_d", "load_aware")
#: Bars of the picture, from the top.
BARS = {
    "round_robin": "round robin",
    "least_outstanding": "least outstanding",
    "sglang_cache_aware": "SGLang gateway",
    "llm_d": "llm-d",
    "load_aware": "production-stack",
}
PICTURE = DOCS / "images" / "routers.svg"
FIGURES = {
    "cost": "latency cost",
    "p99_ttft": "P99 TTFT",
    "mean_e2e": "mean end to end",
    "throughput": "throughput",
}

Results = Mapping[str, Any]


def begin(name: str) -> str:
    """Return the line that begins a table."""
    return f"<!-- {name}: python docs/headline.py -->\n"


END = "<!-- end -->\n"


def headline(results: Results, shown: Sequence[str] = SHOWN, others: bool = True) -> str:
    """Return the table of a suite: the policy's ratios to its opponents.

    ``others``: also the best single opponent and the look-aheads.
    """
    by_name = {row["policy"]: row["vs_best_single"] for row in results["policies"]}
    subject, best = results["subject"], results["best_single"]
    lines = [
        f"| `{subject}` as a ratio to | {' | '.join(FIGURES.values())} |",
        f"|---|{'---|' * len(FIGURES)}",
    ]
    rule = "the best rule" if others else "the best rule of this run"
    remarks = {best: ", the best single opponent", results["best_hand_made"]: f", {rule}"}
    ahead = [row["policy"] for row in results["policies"] if row["role"] == "look-ahead"]
    more = (best, *ahead) if others else ()
    for name in dict.fromkeys((*shown, results["best_hand_made"], *more)):
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
    far = f"{worst - 1:.1%} higher" if worst > 1 else f"{1 - worst:.1%} lower"
    if abs(worst - 1) < 5e-4:
        far = "equal"
    return (
        f"Against the best rule *of each scenario* its cost is lower in {better} of {count} "
        f"({surely} statistically significant); "
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

    ahead = any(row["role"] == "look-ahead" for row in results["policies"])
    return (
        f"Upper bound: choosing the best of all {len(results['policies'])} policies"
        f"{', look-aheads included,' if ahead else ''} for each scenario and each figure in "
        "hindsight would give "
        f"a cost of {ratio('cost_s'):.3f}, a P99 TTFT of {ratio('ttft_s_p99'):.3f} and a mean "
        f"end to end of {ratio('e2e_s_mean'):.3f}.\n"
    )


def where(results: Results) -> str:
    """Return where the policy helps most and least against the best rule of each scenario."""
    each = results["vs_best_per_scenario"]["scenarios"]
    order = sorted(each, key=lambda name: each[name]["cost"])

    def named(names: Sequence[str]) -> str:
        return ", ".join(f"`{name}` ({_change(each[name]['cost'])})" for name in names)

    opponents = sum(row["role"] in ("rule", "tuned", "learned") for row in results["policies"])
    slower = [name for name in each if each[name]["p99_ttft"] > 1.02]
    worst = max(each, key=lambda name: each[name]["p99_ttft"])
    return (
        f"Latency cost against the best of {opponents} rules in *each* scenario "
        "([more opponents](docs/model-card.md#figures)): it helps most in "
        f"{named(order[:3])}, least in {named(order[-3:])}. What it trades: mean latency comes "
        f"first; in {len(slower)} of {len(each)} scenarios its P99 TTFT is more than 2 % above "
        f"that opponent's (at most {each[worst]['p99_ttft'] - 1:.0%}, `{worst}`).\n"
    )


def _change(ratio: float) -> str:
    text = f"{ratio - 1:+.0%}"
    return "equal" if text in ("+0%", "-0%") else text


def picture(results: Results) -> str:
    """Return six bars as SVG: mean end-to-end time relative to round robin."""
    by_name = {row["policy"]: row["vs_best_single"]["mean_e2e"] for row in results["policies"]}
    names = {**BARS, results["subject"]: "Tailrace"}
    values = {name: by_name[name] / by_name["round_robin"] for name in names}
    left, width, step, top = 150, 430, 34, 46
    marks = []
    for k, (name, label) in enumerate(names.items()):
        y, kind = top + step * k, "own" if name == results["subject"] else "other"
        long = width * values[name]
        marks.append(
            f'<text class="name" x="{left - 10}" y="{y + 16}" text-anchor="end">{label}</text>'
            f'<rect class="{kind}" x="{left}" y="{y}" width="{long:.1f}" height="22" rx="3"/>'
            f'<text class="value" x="{left + long + 8:.1f}" y="{y + 16}">{values[name]:.2f}</text>'
        )
    bottom = top + step * len(names)
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x = left + width * tick
        marks.append(
            f'<path class="tick" d="M{x:.1f} {top - 6}V{bottom}"/>'
            f'<text class="axis" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    count = len(results["vs_best_per_scenario"]["scenarios"])
    style = (
        "text{font:13px Helvetica,Arial,sans-serif;fill:#1e293b}.head{font-weight:bold}"
        ".axis{font-size:12px;fill:#64748b}.own{fill:#0d9488}.other{fill:#94a3b8}"
        ".tick{stroke:#cbd5e1;stroke-width:1;opacity:.6}.paper{fill:#ffffff}"
        "@media(prefers-color-scheme:dark){text{fill:#e2e8f0}.axis{fill:#94a3b8}"
        ".paper{fill:#0d1117}.tick{stroke:#334155}.other{fill:#64748b}.own{fill:#2dd4bf}}"
    )
    title = f"Mean end-to-end time relative to round robin, {count} scenarios"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {bottom + 44}" role="img" '
        f'aria-label="{title}: '
        + ", ".join(f"{label} {values[name]:.2f}" for name, label in names.items())
        + f'"><style>{style}</style><rect class="paper" width="660" height="{bottom + 44}" rx="6"/>'
        f'<text class="head" x="16" y="26">{title} (lower is better)</text>'
        + "".join(reversed(marks))
        + f'<text class="axis" x="{left + width / 2}" y="{bottom + 34}" text-anchor="middle">'
        "mean end-to-end time, geometric mean over scenarios; round robin = 1</text></svg>\n"
    )


def routers() -> Results:
    """Return the results of today's rules of other routers on the suite standard."""
    found: Results = json.loads((DOCS / "results" / "routers.json").read_text(encoding="utf-8"))
    return found


def tables() -> dict[str, str]:
    """Return every table by its name."""
    made = {}
    for suite in SUITES:
        path = DOCS / "results" / f"{suite}.json"
        results = json.loads(path.read_text(encoding="utf-8"))
        text = f"{headline(results)}\n{summary(results)}\n{hindsight(results)}"
        made[f"headline {suite}"] = f"\n{text}\n"
        made[f"scenarios {suite}"] = f"\n{scenarios(results)}\n"
    made["short routers"] = f"\n{headline(routers(), SHORT, others=False)}\n"
    made["where routers"] = f"\n{where(routers())}\n"
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
    PICTURE.write_text(picture(routers()), encoding="utf-8")
