"""Evaluations as tables for people."""

from collections.abc import Callable, Sequence
from math import isfinite

from rich.console import Console
from rich.text import Text

from tailrace.evaluate.judge.baselines import REFERENCE
from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.compare import averaged
from tailrace.evaluate.judge.results import merged_extremes
from tailrace.evaluate.judge.statistics import VersusBestOfEach
from tailrace.evaluate.judge.suite import Evaluation, Standing
from tailrace.evaluate.judge.weightings import (
    GOODPUT,
    SLO_MISSES,
    WEIGHTINGS,
    Weighting,
    placings,
)
from tailrace.evaluate.measure import classes
from tailrace.evaluate.measure.contender import Role
from tailrace.terminal.tables import UNKNOWN, Column, number, percent, print_columns

#: Policies of a ranking that are shown besides those under test.
SHOWN = 12


def print_evaluation(console: Console, found: Evaluation) -> None:
    """Print the headline, the subject scenario by scenario, and the ranking of all."""
    if found.versus_each is not None and found.subject is not None:
        _print_headline(console, found.subject, found.versus_each)
        console.print()
        _print_scenarios(console, found, found.versus_each)
        console.print()
        _print_classes(console, found, found.versus_each)
    print_ranking(console, found)


def _print_headline(console: Console, subject: Standing, each: VersusBestOfEach) -> None:
    versus, worst = subject.versus, each.worst
    console.print(Text(f"{subject.contender.label} against {versus.baseline}, the best single rule",
                       style="bold"))  # fmt: skip
    for label, ratio in (
        ("P99 TTFT", versus.p99_ttft),
        ("mean end to end", versus.mean_e2e),
        ("throughput", versus.throughput),
        ("latency cost", versus.cost),
    ):
        console.print(Text(f"  {label:16} {_ratio(ratio)}x  {_bounds(ratio)}"))
    console.print(Text("and against the best rule of each scenario", style="bold"))
    console.print(
        Text(
            f"  lower cost in {percent(each.share_better)} of the scenarios "
            f"({percent(each.share_surely_better)} statistically significant), "
            f"at worst {_ratio(worst.cost)}x ({worst.scenario})"
        )
    )


def _print_scenarios(console: Console, found: Evaluation, each: VersusBestOfEach) -> None:
    rows = each.verdicts
    subject = found.grid.policies.index(str(found.plan.subject))
    cells = [row[subject] for row in found.grid.cells]
    mine = [averaged([c.summary for c in group]) for group in cells]
    worst = [merged_extremes(group) for group in cells]
    columns = [
        Column(("", "scenario"), [v.scenario for v in rows], left=True),
        Column(("", "best rule"), [v.baseline for v in rows], left=True),
        Column(("cost", "ratio"), [_ratio(v.cost) for v in rows]),
        Column(("95 %", "interval"), [_bounds(v.cost) for v in rows], 3),
        Column(("", "p (Holm)"), [f"{v.p_holm:.3f}" for v in rows], 5),
        Column(("P99 TTFT", "ratio"), [_ratio(v.p99_ttft) for v in rows]),
        Column(("mean E2E", "ratio"), [_ratio(v.mean_e2e) for v in rows]),
        Column(("P99 TTFT", "s"), [number(s.ttft_s.p99) for s in mine], 1, label="P99 TTFT"),
        Column(("within", "SLO"), [f"{100 * s.slo_attainment:.1f}%" for s in mine], 2),
        Column(("oldest", "s"), [number(w.longest_ttft_s) for w in worst], 4, label="oldest"),
        Column(("over", "limit"), [str(w.over_limit) for w in worst], 4, label="over limit"),
        Column(("queue", "alarms"), [str(w.alarms) for w in worst], 4, label="alarms"),
    ]
    print_columns(console, columns)


def _print_classes(console: Console, found: Evaluation, each: VersusBestOfEach) -> None:
    """Print what each class of requests got, from the subject and from the scenario's best rule."""
    grid = found.grid
    subject = grid.policies.index(str(found.plan.subject))
    rows = []
    for row, verdict in zip(grid.cells, each.verdicts, strict=True):
        mine, best = (
            classes.merged([cell.classes for cell in row[policy]])
            for policy in (subject, grid.policies.index(verdict.baseline))
        )
        rows += [(verdict, name, mine[name], best[name]) for name in mine]
    if not rows:
        return

    def both(key: str, text: Callable[[float], str] = number) -> list[str]:
        return [f"{text(getattr(a, key))} ({text(getattr(b, key))})" for _, _, a, b in rows]

    columns = [
        Column(("", "scenario"), [v.scenario for v, *_ in rows], left=True),
        Column(("", "class"), [name for _, name, *_ in rows], left=True),
        Column(("within", "SLO"), both("slo_attainment", lambda x: f"{100 * x:.1f}%")),
        Column(("", "req/s"), both("requests_per_s")),
        Column(("mean TTFT", "s"), both("ttft_mean_s"), 3),
        Column(("worst 1 %", "TTFT, s"), both("worst_ttft_s")),
        Column(("longest", "TTFT, s"), both("longest_ttft_s")),
    ]
    console.print(Text("By class; in brackets: the best rule of the scenario", style="bold"))
    print_columns(console, columns)
    console.print()


def print_ranking(console: Console, found: Evaluation) -> None:
    """Print policies by score: all that are under test, and the best of the others."""
    shown: list[Standing] = []
    others = 0
    for standing in found.standings:
        if standing.contender.role is not Role.SUBJECT:
            others += 1
        label = standing.contender.label
        if standing.contender.role is Role.SUBJECT or others <= SHOWN or label == found.best_single:
            shown.append(standing)
    ratios = [s.versus for s in shown]
    columns = [
        Column(("", "policy"), [s.contender.label for s in shown], left=True),
        Column(("", "is"), [str(s.contender.role) for s in shown], 3, left=True),
        Column(("", "score"), [f"{s.score:.3f}" for s in shown]),
        Column(("cost vs.", "best rule"), [_ratio(r.cost) for r in ratios]),
        Column(("95 %", "interval"), [_bounds(r.cost) for r in ratios], 2),
        Column(("P99 TTFT", "vs. best"), [_ratio(r.p99_ttft) for r in ratios]),
        Column(("mean E2E", "vs. best"), [_ratio(r.mean_e2e) for r in ratios]),
        Column(("req/s", "vs. best"), [_ratio(r.throughput) for r in ratios], 1),
    ]
    bold = [i for i, s in enumerate(shown) if s.contender.label == found.best_single]
    print_columns(console, columns, bold)
    console.print(Text(_note(found, len(found.standings) - len(shown)), style="dim"))
    console.print()
    _print_weightings(console, found, [s.contender.label for s in shown], bold)


def _print_weightings(
    console: Console, found: Evaluation, shown: Sequence[str], bold: Sequence[int]
) -> None:
    """Print how the same policies rank under other weightings."""
    placed = placings(found.grid, REFERENCE)
    order = [s.contender.label for s in found.standings]
    columns = [
        Column(("", "policy"), list(shown), left=True),
        Column(("cost", "rank"), [str(order.index(name) + 1) for name in shown]),
    ]
    for weighting in WEIGHTINGS:
        places = [placed[name][weighting.key] for name in shown]
        texts = [_score(weighting, place.score) for place in places]
        columns.append(Column((weighting.title, "score"), texts, label=weighting.title))
        columns.append(Column(("", "rank"), [str(p.rank) for p in places]))
    console.print(Text("Under other weightings", style="bold"))
    print_columns(console, columns, bold)
    console.print(
        Text(
            "TTFT and end to end only: geometric mean over scenarios of the mean / that of "
            f"{REFERENCE}. SLO misses: share of requests that missed a target. Goodput: requests/s "
            "within both targets, as a share of the best policy's; more is better.",
            style="dim",
        )
    )


def _score(weighting: Weighting, score: float) -> str:
    if not isfinite(score):
        return UNKNOWN
    return f"{100 * score:.1f}%" if weighting in (SLO_MISSES, GOODPUT) else _three(score)


def _note(found: Evaluation, left_out: int) -> str:
    plan = found.plan
    more = f" {left_out} more rules are in the results." if left_out else ""
    return (
        f"{len(plan.scenarios)} scenario{_s(plan.scenarios)}, {len(plan.seeds)} "
        f"seed{_s(plan.seeds)}. Score = geometric mean over scenarios of cost / that of "
        f"least_outstanding. Best rule ({found.best_single}, bold) and best rules of scenarios "
        f"were chosen on {len(plan.selection_seeds)} other seed{_s(plan.selection_seeds)}; "
        f"look-aheads do not count.{more}"
    )


def _s(things: Sequence[object]) -> str:
    return "s" * (len(things) != 1)


def _ratio(interval: Interval) -> str:
    return _three(interval.ratio) if isfinite(interval.ratio) else UNKNOWN


def _bounds(interval: Interval) -> str:
    if interval.low is None or interval.high is None or not isfinite(interval.ratio):
        return UNKNOWN
    return f"{_three(interval.low)}-{_three(interval.high)}"


def _three(ratio: float) -> str:
    """Three decimals: the policies worth comparing differ by per mille."""
    return f"{ratio:.3f}" if ratio < 9.9995 else number(ratio)
