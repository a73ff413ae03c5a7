"""The tables of a report: the same for HTML and Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from markupsafe import Markup

from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.compare import averaged
from tailrace.evaluate.judge.results import RankedPolicy, merged_extremes
from tailrace.evaluate.judge.results_folder import Results
from tailrace.evaluate.judge.statistics import VersusBestOfEach
from tailrace.evaluate.judge.weightings import (
    GOODPUT,
    SLO_MISSES,
    WEIGHTINGS,
    leader,
    placings,
)
from tailrace.evaluate.measure.cells import Cell
from tailrace.report.svg import Scale, around, tick_text, whisker
from tailrace.terminal.tables import number

#: Figures of the headline, in order: key, heading.
HEADLINE = (
    ("p99_ttft", "P99 TTFT"),
    ("mean_e2e", "mean end to end"),
    ("throughput", "throughput"),
    ("cost", "latency cost"),
)
UNKNOWN = DASH = "\u2013"
TIMES = "\u00d7"


@dataclass(frozen=True)
class TableCell:
    """One cell: text, a smaller note (an interval), a picture instead of both in HTML."""

    text: str
    note: str = ""
    picture: Markup | None = None


@dataclass(frozen=True)
class Row:
    """One row; the first cell is its heading."""

    cells: tuple[TableCell, ...]
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Columns with headings; ``left`` columns are words, the others figures."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    left: frozenset[int] = field(default=frozenset({0}))
    axis: Markup | None = None  #: ticks of the pictures, for the heading of their column
    pictures: int | None = None  #: column of the pictures; left out in Markdown


def plain(*texts: str) -> tuple[TableCell, ...]:
    """Return cells of plain text."""
    return tuple(TableCell(text) for text in texts)


def ratio_text(ratio: float | None) -> str:
    """Return a ratio with three decimals: the policies worth comparing differ by per mille."""
    if ratio is None or not isfinite(ratio):
        return UNKNOWN
    return f"{ratio:.3f}" if ratio < 9.9995 else number(ratio)


def bounds_text(low: float | None, high: float | None) -> str:
    """Return an interval; nothing if there is none."""
    if low is None or high is None or not isfinite(low + high):
        return ""
    return f"{ratio_text(low)}{DASH}{ratio_text(high)}"


def ratio_cell(interval: Interval) -> TableCell:
    """Return a ratio with its interval."""
    return TableCell(ratio_text(interval.ratio), bounds_text(interval.low, interval.high))


def share_text(share: float, decimals: int = 1) -> str:
    """Return a share as a percentage; 100% only if it is all."""
    text = f"{100 * share:.{decimals}f}"
    if share < 1 and float(text) == 100:
        text = f"{100 - 10**-decimals:.{decimals}f}"
    return f"{text}%"


# ---- all scenarios ------------------------------------------------------------------------------


def headline(results: Results) -> Table:
    """The policy under test against the best rules and look-aheads."""
    grid, data, subject = results.grid, results.data, results.subject
    every = len(grid.scenarios)
    baselines: list[tuple[str, str, Sequence[str]]] = [
        (f"best single rule: {data.best_single}", data.best_single, [data.best_single] * every)
    ]
    if data.best_hand_made != data.best_single:
        name = data.best_hand_made
        baselines.append((f"best hand-written rule: {name}", name, [name] * every))
    baselines.append(("best rule of each scenario", "", results.best_of_each))
    baselines += [(f"look-ahead: {name}", name, [name] * every) for name in results.look_aheads]
    rows = []
    for label, name, others in baselines:
        if name == subject:
            continue
        ratios = [grid.ratios(key, subject, others).geometric_mean() for key, _ in HEADLINE]
        rows.append(Row((TableCell(label), *map(ratio_cell, ratios))))
    heads = (f"{subject} against", *(title for _, title in HEADLINE))
    return Table(
        "Ratios of the policy under test to others: below 1 is better, except throughput. "
        "Geometric means over scenarios, with 95% intervals.",
        heads,
        tuple(rows),
    )


def ranking(results: Results) -> Table:
    """All policies by score."""
    rows = []
    for place, (name, standing) in enumerate(results.standing.items(), start=1):
        ratios = [_stated(standing, key) for key, _ in HEADLINE]
        cells = (
            TableCell(name),
            TableCell(str(standing.role)),
            TableCell(str(place)),
            TableCell(ratio_text(standing.score)),
            *map(ratio_cell, ratios),
        )
        rows.append(Row(cells, strong=name == results.subject))
    heads = ("policy", "is", "rank", "score", *(f"{title} ratio" for _, title in HEADLINE))
    return Table(
        f"All policies. Score: geometric mean over scenarios of cost / that of "
        f"{results.data.reference}. Ratios are to {results.data.best_single}, the best rule.",
        heads,
        tuple(rows),
        frozenset({0, 1}),
    )


def weightings(results: Results) -> Table:
    """All policies under other weightings than the latency cost, in the order of their score."""
    placed = placings(results.grid, results.data.reference)
    leaders = {leader(placed, w) for w in WEIGHTINGS}
    rows = []
    for rank, name in enumerate(results.standing, start=1):
        cells = [TableCell(name), TableCell(str(rank))]
        for weighting in WEIGHTINGS:
            place = placed[name][weighting.key]
            percent = weighting in (SLO_MISSES, GOODPUT)
            text = share_text(place.score) if percent else ratio_text(place.score)
            cells += [TableCell(text), TableCell(str(place.rank))]
        strong = name == results.subject or name in leaders
        rows.append(Row(tuple(cells), strong=strong))
    heads = [part for w in WEIGHTINGS for part in (w.title, "rank")]
    meanings = "; ".join(f"{w.title}: {w.meaning}" for w in WEIGHTINGS)
    return Table(
        f"Scores and ranks: {meanings}. Lower is better, except goodput. The reference is "
        f"{results.data.reference}.",
        ("policy", "rank by cost", *heads),
        tuple(rows),
    )


def _stated(standing: RankedPolicy, key: str) -> Interval:
    """A ratio as results.json states it."""
    ratio = getattr(standing.vs_best_single, key)
    low, high = standing.vs_best_single.intervals.get(key) or (None, None)
    return Interval(float("nan") if ratio is None else ratio, low, high)


def scenarios(each: VersusBestOfEach) -> Table:
    """The subject against the best rule of every scenario."""
    bounds = [v for verdict in each.verdicts for v in _three(verdict.cost)]
    scale = around([*bounds, 1.0], log=True)
    rows = []
    for verdict in each.verdicts:
        cost = verdict.cost
        tip = f"{verdict.scenario}: {ratio_text(cost.ratio)} {bounds_text(cost.low, cost.high)}"
        picture = None
        if isfinite(cost.ratio):
            picture = whisker(scale, cost.ratio, cost.low, cost.high, "subject", tip)
        cells = (
            TableCell(verdict.scenario),
            TableCell(verdict.baseline),
            ratio_cell(cost),
            TableCell("", picture=picture),
            TableCell(p_text(verdict.p_holm)),
            ratio_cell(verdict.p99_ttft),
            ratio_cell(verdict.mean_e2e),
            ratio_cell(verdict.throughput),
        )
        rows.append(Row(cells))
    return Table(
        "Ratios to the best rule of each scenario: below 1 is better, except throughput. 95% "
        "intervals, not adjusted; p is, for the number of scenarios.",
        ("scenario", "best rule", "cost ratio", "", "p (Holm)", "P99 TTFT ratio",
         "mean end to end ratio", "throughput ratio"),
        tuple(rows),
        frozenset({0, 1}),
        axis=scale_axis(scale),
        pictures=3,
    )  # fmt: skip


def p_text(p: float) -> str:
    """Return a p-value."""
    if not isfinite(p):
        return UNKNOWN
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _three(interval: Interval) -> tuple[float | None, ...]:
    return interval.ratio, interval.low, interval.high


def scale_axis(scale: Scale, width: int = 170) -> Markup:
    """Ticks above the whiskers."""
    marks = []
    for tick in scale.ticks(5):
        x = 6 + scale.share(tick) * (width - 12)
        marks.append(
            Markup('<text x="{:.1f}" y="12" text-anchor="middle">{}</text>').format(
                x, tick_text(tick)
            )
        )
    return Markup(
        '<svg class="whisker" viewBox="0 0 {w} 16" width="{w}" height="16" role="img" '
        'aria-label="scale of the cost ratio">{marks}</svg>'
    ).format(w=width, marks=Markup("").join(marks))


# ---- one scenario -------------------------------------------------------------------------------


def one_scenario(results: Results, scenario: str) -> Table:
    """Every policy in one scenario, lowest cost first."""
    grid, data = results.grid, results.data
    index = grid.scenarios.index(scenario)
    rows = []
    means = {name: averaged([c.summary for c in results.cells(scenario, name)])
             for name in grid.policies}  # fmt: skip
    for name in sorted(means, key=lambda n: means[n].cost_s):
        mean = means[name]
        versus = results.cost_ratios[name][index]
        cells = (
            TableCell(name),
            TableCell(number(mean.cost_s)),
            ratio_cell(versus),
            *plain(*(number(v) for v in (mean.ttft_s.mean, mean.ttft_s.p50, mean.ttft_s.p90))),
            *plain(number(mean.ttft_s.p99), number(mean.e2e_s.mean), number(mean.e2e_s.p99)),
            TableCell(number(None if mean.tpot_s.mean is None else 1e3 * mean.tpot_s.mean)),
            *plain(share_text(mean.slo_attainment), number(mean.goodput_rps)),
            *plain(share_text(mean.prefix_hit_rate, 0), number(mean.imbalance)),
            TableCell(str(mean.failed + mean.pending)),
        )
        rows.append(Row(cells, strong=name == results.subject))
    heads = (
        "policy", "cost, s", "cost ratio", "TTFT mean, s", "P50", "P90", "P99",
        "end to end mean, s", "P99", "per token, ms", "within SLO", "goodput, 1/s", "prefix hits",
        "imbalance", "unserved",
    )  # fmt: skip
    return Table(
        f"All policies in {scenario}, means over {len(grid.seeds)} seeds; cost ratio to "
        f"{data.best_single}.",
        heads,
        tuple(rows),
    )


def fairness(results: Results) -> Table:
    """Starvation and fairness of the policy under test and of the best single rule."""
    rows = [
        _fair(scenario, name, results.cells(scenario, name), results.subject)
        for scenario in results.grid.scenarios
        for name in dict.fromkeys((results.subject, results.data.best_single))
    ]
    return Table(
        "The worst over all seeds; shares are relative to an even one. Queue alarms: seeds in "
        "which the queue grew without bound.",
        ("scenario", "policy", "longest wait, s", "longest stay, s", "worst session, s",
         f"waited over {results.data.ttft_limit_s:g} s", "least share", "most share",
         "queue alarms"),
        tuple(rows),
        frozenset({0, 1}),
    )  # fmt: skip


def _fair(scenario: str, name: str, cells: Sequence[Cell], subject: str) -> Row:
    worst = merged_extremes(cells)
    session = worst.worst_session_ttft_s
    texts = (
        scenario,
        name,
        number(worst.longest_ttft_s),
        number(worst.longest_e2e_s),
        UNKNOWN if session is None else number(session),
        str(worst.over_limit),
        number(worst.least_share),
        number(worst.most_share),
        f"{worst.alarms} of {len(cells)}",
    )
    return Row(plain(*texts), strong=name == subject)


def sizes(results: Results, of: Sequence[tuple[int, str]]) -> Table:
    """The subject over cluster sizes."""
    rows = []
    grid, single = results.grid, results.data.best_single
    columns = [
        grid.ratios(metric, results.subject, others).each()
        for others in ([single] * len(grid.scenarios), list(results.best_of_each))
        for metric in ("cost", "p99_ttft")
    ]
    for count, scenario in of:
        index = grid.scenarios.index(scenario)
        ratios = [ratio_cell(column[index]) for column in columns]
        rows.append(Row((TableCell(str(count)), TableCell(scenario), *ratios)))
    return Table(
        f"{results.subject} over the number of replicas, with 95% intervals.",
        ("replicas", "scenario", f"cost ratio to {single}", f"P99 TTFT ratio to {single}",
         "cost ratio to the scenario's best rule", "P99 TTFT ratio to it"),
        tuple(rows),
        frozenset({1}),
    )  # fmt: skip


def share_bar(share: float, tip: str, width: int = 170) -> Markup:
    """Return a share as a bar, for a cell of a table."""
    return Markup(
        '<svg class="whisker" viewBox="0 0 {w} 22" width="{w}" height="22" role="img" '
        'aria-label="{tip}"><rect class="rest" width="{w}" height="8" y="7" rx="2"/>'
        '<rect class="part" width="{part:.1f}" height="8" y="7" rx="2"/></svg>'
    ).format(w=width, tip=tip, part=width * share)
