"""Content of a report, section by section; templates/ holds its appearance."""

from collections.abc import Sequence

from tailrace import scenario as scenarios
from tailrace.evaluate.judge.bootstrap import BOOTSTRAP_SAMPLES, CONFIDENCE, Interval
from tailrace.evaluate.judge.replays import LOAD_REQUESTS, Replays, shown
from tailrace.evaluate.judge.results_folder import Results
from tailrace.evaluate.judge.statistics import VersusBestOfEach, versus_each
from tailrace.evaluate.judge.weightings import WEIGHTINGS, leader, placings
from tailrace.report import charts, tables, timelines
from tailrace.report.blocks import (
    Block,
    Commands,
    Folded,
    Gallery,
    ReportContent,
    Section,
    Tabular,
    Tile,
    Words,
)
from tailrace.report.difference import differently
from tailrace.report.tables import TIMES, Table, bounds_text, ratio_text
from tailrace.terminal.tables import counted
from tailrace.view.objective import E2E_WEIGHT, LATE_WEIGHT, LOST_COST_S, TTFT_WEIGHT

#: With fewer seeds, bootstrap intervals have clearly less than their nominal coverage.
FEW_SEEDS = 10


def content(results: Results, replays: Replays | None, method: Section) -> ReportContent:
    """Assemble a report; plots that need replays are omitted without them."""
    each = versus_each(results.grid, results.subject, results.best_of_each)
    lined = charts.has_front(results)
    sections = [
        Section("headline", "Comparison with the best rules", (Tabular(tables.headline(results)),)),
        _scenarios(results, each),
        Section(
            "policies",
            "All policies",
            (
                Words(
                    f"Each dot is a policy, relative to {results.data.best_single}: geometric "
                    "means over scenarios. Further left and down is better"
                    + ("; no policy beats those on the dotted line in both." if lined else ".")
                ),
                Gallery(tuple(charts.pareto(results)), _overall_legend(results)),
                Tabular(tables.ranking(results), "Ranking of all policies"),
            ),
        ),
        Section(
            "weightings",
            "Under other weightings",
            (
                Words(
                    "The latency cost weighs TTFT, end-to-end latency and lateness in one way. "
                    "The same runs, ranked by one of them alone and by goodput: "
                    + _weighted(results)
                ),
                Tabular(tables.weightings(results), "Ranking under other weightings"),
            ),
        ),
    ]
    if replays is not None:
        sections += _played(results, replays)
    sections += _sizes(results)
    if replays is not None:
        sections += differently(results, replays)
    sections += [
        Section(
            "fairness",
            "Fairness and worst cases",
            (
                Words(
                    "Means and percentiles can hide a request that starves or a replica that does "
                    "most of the work."
                ),
                Tabular(tables.fairness(results)),
            ),
        ),
        _single_scenarios(results),
        method,
    ]
    return ReportContent(
        subject=results.subject,
        title=f"{results.subject} on the suite {results.data.suite}"
        if results.data.suite != "custom"
        else f"{results.subject} on {counted(len(results.grid.scenarios), 'scenario')}",
        facts=_facts(results),
        tiles=_tiles(results, each),
        sentences=_sentences(results, each),
        sections=tuple(sections),
        warnings=_warnings(results, replays),
    )


# ---- the top ------------------------------------------------------------------------------------


def _facts(results: Results) -> tuple[str, ...]:
    data = results.data
    counts = sorted(set(data.requests.values()))
    requests = " to ".join(_thousands(n) for n in dict.fromkeys((counts[0], counts[-1])))
    return (
        counted(len(results.grid.scenarios), "scenario"),
        counted(len(results.grid.policies), "policy", "policies"),
        f"{counted(len(data.seeds), f'{data.purpose} seed')}",
        f"{requests} requests per run",
    )


def _thousands(count: int) -> str:
    """A count with narrow spaces between thousands."""
    return f"{count:,}".replace(",", "\u202f")


def _tiles(results: Results, each: VersusBestOfEach) -> tuple[Tile, ...]:
    single = results.data.best_single
    tiles = []
    if single != results.subject:
        for key, label in tables.HEADLINE:
            others = [single] * len(results.grid.scenarios)
            ratio = results.grid.ratios(key, results.subject, others).geometric_mean()
            tiles.append(
                _tile(f"{label}, against {single}", ratio, more_is_better=key == "throughput")
            )
    better = sum(v.cost.ratio < 1 for v in each.verdicts)
    sure = round(each.share_surely_better * len(each.verdicts))
    tiles.append(
        Tile(
            "scenarios with a lower cost than their best rule",
            f"{better} of {len(each.verdicts)}",
            f"{sure} statistically significant (Holm, 5%)",
            "better" if 2 * better > len(each.verdicts) else "even",
            "",
        )
    )
    return tuple(tiles)


def _tile(label: str, interval: Interval, *, more_is_better: bool) -> Tile:
    bounds = bounds_text(interval.low, interval.high)
    verdict = judged(interval, more_is_better=more_is_better)
    change = abs(interval.ratio - 1)
    way = "higher" if interval.ratio > 1 else "lower"
    words = f"{100 * change:.1f}% {way}" if verdict != "even" else "no significant difference"
    return Tile(label, f"{ratio_text(interval.ratio)}{TIMES}", bounds, verdict, words)


def judged(interval: Interval, *, more_is_better: bool = False) -> str:
    """Return better or worse if the whole interval is on one side of 1, else even."""
    if interval.low is None or interval.high is None or interval.low <= 1 <= interval.high:
        return "even"
    return "better" if (interval.low > 1) == more_is_better else "worse"


def _sentences(results: Results, each: VersusBestOfEach) -> tuple[str, ...]:
    data, worst = results.data, each.worst
    better = sum(v.cost.ratio < 1 for v in each.verdicts)
    single = (
        f"The figures above are ratios to {data.best_single}, the rule with the lowest "
        f"geometric-mean cost on other seeds, with 95% intervals."
        if data.best_single != results.subject
        else f"{results.subject} is itself the best single rule."
    )
    return (
        single,
        (
            f"Against the best rule of each scenario its cost is lower in {better} of "
            f"{len(each.verdicts)}; its worst is {ratio_text(worst.cost.ratio)}{TIMES} of "
            f"{worst.baseline} in {worst.scenario}."
        ),
    )


def _warnings(results: Results, replays: Replays | None) -> tuple[str, ...]:
    found = list(results.data.notes)
    if results.data.purpose != "evaluation":
        found.append(
            f"Measured on {results.data.purpose} seeds: for exploration, not for conclusions."
        )
    if len(results.data.seeds) == 1:
        found.append("With one seed there are no confidence intervals.")
    elif len(results.data.seeds) < FEW_SEEDS:
        found.append(
            f"{len(results.data.seeds)} seeds are few: bootstrap intervals are too narrow; "
            f"use {FEW_SEEDS} or more."
        )
    fixed = [name for name in results.grid.scenarios if _is_the_same_on_all_seeds(results, name)]
    if fixed:
        found.append(
            f"Every seed has the same requests, so intervals do not cover other traffic: "
            f"{', '.join(fixed)}. Recorded arrivals repeat; use an arrival process "
            '(arrivals = "gamma" or "resampled") for new ones.'
        )
    if replays is not None and replays.unlike:
        some = ", ".join(replays.unlike[:3]) + (", …" if len(replays.unlike) > 3 else "")
        found.append(
            f"{len(replays.unlike)} of {len(replays.runs)} runs played again for the plots did not "
            f"give the cost of the results file ({some}): policy, scenario or simulator have "
            "changed since. Tables are of the results, plots of now."
        )
    if replays is not None and replays.left_out:
        found.append(
            f"Not played again, as the settings are not in the results: "
            f"{', '.join(replays.left_out)}."
        )
    return tuple(found)


def _is_the_same_on_all_seeds(results: Results, scenario: str) -> bool:
    """Whether a policy has the same costs on all seeds: not by chance, with so many digits."""
    costs = [
        {cell.summary.cost_s for cell in results.cells(scenario, policy)}
        for policy in results.grid.policies
    ]
    return len(results.data.seeds) > 1 and any(len(of) == 1 for of in costs)


# ---- sections -----------------------------------------------------------------------------------


def _scenarios(results: Results, each: VersusBestOfEach) -> Section:
    verdicts = each.verdicts
    seeds = len(results.data.seeds)
    least = min(1.0, 2.0 ** (1 - seeds) * len(verdicts))
    few = f" With {counted(seeds, 'seed')} p cannot be below {least:.2g}." * (least > 0.05)
    lead = (
        f"The best rule of each scenario was chosen among the rules that took part, on "
        f"{counted(len(results.data.selection_seeds), 'tuning seed')}, then both met the same "
        f"requests. Hollow dots: the interval includes 1. With "
        f"{counted(len(verdicts), 'comparison')}, p is adjusted (Holm) but intervals are not: "
        f"about {(1 - CONFIDENCE) * len(verdicts):.1f} of {len(verdicts)} intervals miss the true "
        f"value by chance.{few}"
    )
    table = tables.scenarios(each)
    return Section("scenarios", "Scenario by scenario", (Words(lead), Tabular(table)))


def _weighted(results: Results) -> str:
    """Where the subject stands under each weighting, and who leads."""
    placed = placings(results.grid, results.data.reference)
    parts = []
    for weighting in WEIGHTINGS:
        best = leader(placed, weighting)
        rank = placed[results.subject][weighting.key].rank
        leads = "" if rank == 1 else f" ({best} leads)"
        parts.append(f"{rank} by {weighting.title}{leads}")
    return f"Of {len(placed)} policies, {results.subject} is number " + ", ".join(parts) + "."


def _single_scenarios(results: Results) -> Section:
    blocks: list[Block] = []
    shipped = scenarios.names()
    for name in results.grid.scenarios:
        about = str(results.data.scenarios.get(name, {}).get("description", ""))
        if name in shipped:
            about = scenarios.load(name).description
        blocks.append(Tabular(tables.one_scenario(results, name), name, about))
    return Section("details", "Every policy in every scenario", tuple(blocks))


def _legend(results: Results, *parts: str) -> tuple[tuple[str, str], ...]:
    names = {
        "subject": results.subject,
        "single": f"{results.data.best_single} (best single rule)",
        "each": "best rule of the scenario",
        "reference": results.data.reference,
        "oracle": "look-ahead",
        "other": "other policies",
    }
    if results.data.best_single == results.subject:
        names.pop("single")
    if results.data.reference in (results.subject, results.data.best_single):
        names.pop("reference")
    used = {part for s in results.grid.scenarios for part in shown(results, s).values()}
    if "each" not in used:
        names.pop("each")
    return tuple((part, names[part]) for part in parts if part in names)


def _overall_legend(results: Results) -> tuple[tuple[str, str], ...]:
    parts = ["subject", "single", "other"]
    if results.look_aheads:
        parts.insert(2, "oracle")
    return _legend(results, *parts)


def _played(results: Results, replays: Replays) -> list[Section]:
    if not replays.runs:
        return []
    legend = _legend(results, "subject", "single", "each", "reference")
    seed = results.data.seeds[0]
    ttft, e2e = (charts.distributions(results, replays, name) for name in ("ttft_s", "e2e_s"))
    found = [
        Section(
            "latencies",
            "Latency distributions",
            (
                Words(
                    f"Cumulative distributions over the requests of seed {seed}, after warm-up. "
                    "The axis is stretched towards the tail: P99 is the wait of one request in a "
                    "hundred. Further left is better."
                ),
                Gallery(tuple(ttft), legend),
                Folded("The same for end-to-end times", Gallery(tuple(e2e), legend)),
            ),
        )
    ]
    curves = charts.over_load(results, replays)
    if curves:
        words = (
            "The same traffic at other rates, up to "
            f"{_thousands(LOAD_REQUESTS)} requests at each load; means of "
            f"{counted(len(replays.load_seeds), 'seed')} ({spans(replays.load_seeds)}). "
            "Capacity is the throughput at saturation, measured with load_aware."
        )
        bare = _legend(results, "subject", "single", "reference")
        blocks = (Words(words), Gallery(tuple(curves), bare))
        found.append(Section("load", "Latency over load", blocks))
    return [*found, *_over_time(results, replays, legend)]


def _over_time(
    results: Results, replays: Replays, legend: tuple[tuple[str, str], ...]
) -> list[Section]:
    blocks: list[Block] = []
    burst = timelines.burst_stretch(results, replays)
    failure = timelines.failure_stretch(results, replays)
    for stretch, words in (
        (burst, "Around the highest burst of arrivals of all scenarios"),
        (failure, "Around the failure of replicas"),
    ):
        if stretch is not None:
            blocks.append(Words(f"{words}: {stretch.scenario}, seed {results.data.seeds[0]}."))
            figures = timelines.queues(results, replays, stretch)
            blocks.append(Gallery(tuple(figures), legend))
    for scenario in timelines.share_scenarios(results, replays):
        settings = results.scenario(scenario)
        if settings is None:
            continue
        kinds = settings.cluster.expanded()
        replicas = tuple(
            (f"replica-{i}", f"replica {i}, speed {r.speed:g}") for i, r in enumerate(kinds)
        )
        blocks.append(Words(f"Share of requests per replica, in {scenario}:"))
        blocks.append(Gallery(tuple(timelines.shares(results, replays, scenario)), replicas))
    return (
        [Section("time", "Over time: bursts, failures, shares of replicas", tuple(blocks))]
        if blocks
        else []
    )


def _sizes(results: Results) -> list[Section]:
    of = charts.sizes(results)
    if not of or results.data.best_single == results.subject:
        return []
    blocks = (
        Gallery(tuple(charts.over_size(results)), _legend(results, "subject", "single", "oracle")),
        Tabular(tables.sizes(results, of)),
    )
    title = f"Over cluster size: {of[0][0]} to {of[-1][0]} replicas"
    return [Section("sizes", title, blocks)]


# ---- method -------------------------------------------------------------------------------------


def method(
    results: Results,
    replays: Replays | None,
    commands: Sequence[str],
    made: Sequence[tuple[str, str]],
) -> Section:
    """Describe the method; ``made``: versions and machine, as (what, text)."""
    data = results.data
    cost = (
        f"Latency cost of a request: {E2E_WEIGHT:g} {TIMES} end to end + {TTFT_WEIGHT:g} {TIMES} "
        f"TTFT + {LATE_WEIGHT:g} {TIMES} max(0, TTFT - its target), in seconds, and "
        f"{LOST_COST_S:g} more if it is lost. TTFT is the time to first token."
    )
    pairs = (
        "All policies of a scenario and a seed meet the same requests. Ratios are of means over "
        f"seeds (of the P99 of each seed, for P99). Intervals are 95% bootstrap intervals over "
        f"seeds ({BOOTSTRAP_SAMPLES} draws), drawn for all policies together and for each scenario "
        "apart; scenarios are not drawn. p-values are of a two-sided sign-flip test on paired "
        "logarithms of costs, adjusted by Holm's method for the number of scenarios."
    )
    chosen = (
        f"Measured on {data.purpose} seeds {spans(data.seeds)}. The best single rule and the best "
        f"rule of each scenario were chosen on the tuning seeds {spans(data.selection_seeds)}. "
        f"Training, tuning and evaluation seeds are disjoint. The first "
        f"{100 * data.warmup_fraction:g}% of the requests are left out; every run goes on until "
        "its last request has ended. Look-aheads simulate the future: they are shown as bounds and "
        "never selected as rules."
    )
    again = "Plots that need single requests were left out (--quick)."
    if replays is not None:
        right = len(replays.runs) - len(replays.unlike)
        again = (
            f"Distributions, plots over time and decisions are of seed {data.seeds[0]}, played "
            f"again for this report: {right} of {len(replays.runs)} runs gave the very cost that "
            "the results file has."
        )
    rows = tuple(tables.Row(tables.plain(*row)) for row in made)
    table = Table("Versions and machine", ("what", "which"), rows, frozenset({0, 1}))
    blocks: list[Block] = [Words(text) for text in (cost, chosen, pairs, again)]
    blocks += [Words("To reproduce this report:"), Commands(tuple(commands)), Tabular(table)]
    return Section("method", "How it was measured", tuple(blocks))


def spans(values: Sequence[int]) -> str:
    """Return numbers as a list in words; consecutive ones become 'a to b'."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
