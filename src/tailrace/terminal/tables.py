"""Tables for people. What does not fit the terminal is left out, least important first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.compare import Comparison, Entry
from tailrace.evaluate.measure.metrics import Latency, Summary
from tailrace.evaluate.search.capacity import MaxLoad
from tailrace.view.objective import E2E_WEIGHT, LATE_WEIGHT, LOST_COST_S, TTFT_WEIGHT

UNKNOWN = "-"
STATISTICS = (("mean", "mean"), ("p50", "P50"), ("p90", "P90"), ("p99", "P99"))


@dataclass(frozen=True)
class Column:
    """One column: heading lines, cells, and how dearly we want to keep it (0: always)."""

    heading: tuple[str, str]
    cells: Sequence[str]
    keep: int = 0
    left: bool = False
    label: str = ""

    @property
    def width(self) -> int:
        """Characters it needs."""
        return max(map(len, (*self.heading, *self.cells)))


def number(value: float | None) -> str:
    """Return a figure with three significant digits, at most three decimals and no exponent."""
    if value is None:
        return UNKNOWN
    for limit, decimals in ((0.9995, 3), (9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.0f}%"


def fitted(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Split columns into those that fit into ``width`` characters and those left out."""
    kept = list(columns)
    dropped: list[Column] = []
    while sum(c.width + 1 for c in kept) - 1 > width:
        candidates = [c for c in kept if c.keep > 0]
        if not candidates:
            break
        worst = max(c.keep for c in candidates)
        dropped += [c for c in kept if c.keep == worst]
        kept = [c for c in kept if c.keep != worst]
    return kept, dropped


def print_columns(console: Console, columns: Sequence[Column], bold: Sequence[int] = ()) -> None:
    """Print columns side by side; rows in ``bold`` stand out."""
    kept, dropped = fitted(columns, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in kept:
        heading = "\n".join(column.heading)
        justify = "left" if column.left else "right"
        table.add_column(Text(heading), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row, cells in enumerate(zip(*(c.cells for c in kept), strict=True)):
        table.add_row(*map(Text, cells), style="bold" if row in bold else None)
    console.print(table)
    if dropped:
        labels = ", ".join(c.label or c.heading[-1] for c in dropped)
        console.print(Text(f"Left out for lack of width: {labels}.", style="dim"))


def print_comparison(console: Console, comparison: Comparison, *, wide: bool = False) -> None:
    """Print what was compared and by which figure, then the ranked table; ``wide``: all columns."""
    entries = comparison.entries
    means = [e.mean for e in entries]
    console.print(Text(_comparison_note(comparison), style="dim"))
    columns = [
        Column(("", "policy"), [e.policy for e in entries], left=True),
        Column(("cost", "s"), [_two_decimals(m.cost_s) for m in means]),
        Column(("rela-", "tive"), [_ratio(e.versus_reference) for e in entries]),
        Column(("95 %", "interval"), [_interval(e.versus_reference) for e in entries], 2),
    ]
    latencies = [
        *_latency_columns("TTFT", "s", [m.ttft_s for m in means], 1.0),
        *_latency_columns("TPOT", "ms", [m.tpot_s for m in means], 1e3),
        *_latency_columns("E2E", "s", [m.e2e_s for m in means], 1.0),
    ]
    if not wide:
        shown = {"TTFT mean", "TTFT P99", "E2E mean"}
        latencies = [
            Column((c.label.split()[0], f"{c.heading[1]} s"), c.cells, label=c.label)
            for c in latencies
            if c.label in shown
        ]
    columns += [*latencies, Column(("req", "/s"), [number(m.requests_per_s) for m in means])]
    if wide:
        hits = [percent(m.prefix_hit_rate) for m in means]
        columns += [
            Column(("busiest", "/mean"), [number(m.imbalance) for m in means], 1, label="busiest"),
            Column(("", "hit"), hits, 3, label="prefix hits"),
        ]
    if any(m.failed or m.pending for m in means):
        columns.append(Column(("", "unserved"), [str(m.failed + m.pending) for m in means]))
    reference = [i for i, e in enumerate(entries) if e.policy == comparison.reference]
    print_columns(console, columns, bold=reference)


def _latency_columns(name: str, unit: str, values: Sequence[Latency], scale: float) -> list[Column]:
    """Four columns under one heading: mean, P50, P90, P99."""
    tops = (name, "", "", unit)
    patience = ("TTFT", "E2E", "TPOT").index(name)
    keeps = {"mean": 0, "p50": 7 + patience, "p90": 4 + patience, "p99": 0}
    return [
        Column(
            (top, title),
            [number(_scaled(getattr(v, field), scale)) for v in values],
            keeps[field],
            label=f"{name} {title}",
        )
        for top, (field, title) in zip(tops, STATISTICS, strict=True)
    ]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _ratio(interval: Interval | None) -> str:
    return UNKNOWN if interval is None else _two_decimals(interval.ratio)


def _interval(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return UNKNOWN
    return f"{_two_decimals(interval.low)}-{_two_decimals(interval.high)}"


def _two_decimals(ratio: float) -> str:
    """Two decimals as long as that takes four characters, so that columns stay narrow."""
    return f"{ratio:.2f}" if ratio < 9.995 else number(ratio)


def counted(number_: int, one: str, many: str = "") -> str:
    """Return a number of things, as in "1 seed" and "5 seeds"."""
    return f"{number_} {one if number_ == 1 else many or f'{one}s'}"


def _comparison_note(comparison: Comparison) -> str:
    entry: Entry = comparison.entries[0]
    seeds = len(comparison.seeds)
    pace = (
        "own pace" if comparison.rate_rps is None else f"{number(comparison.rate_rps)} requests/s"
    )
    return (
        f"{entry.mean.requests // seeds} requests at {pace}, {counted(seeds, 'seed')}, "
        f"{counted(comparison.scenario.cluster.size, 'replica')}. Ranked by latency cost, lowest "
        f"first: the mean over requests of {_cost_formula()}. Relative: to {comparison.reference}."
    )


def _cost_formula() -> str:
    ttft = "TTFT" if TTFT_WEIGHT == 1 else f"{TTFT_WEIGHT:g}*TTFT"
    return (
        f"{E2E_WEIGHT:g}*E2E + {ttft} + {LATE_WEIGHT:g}*max(0, TTFT - SLO), "
        f"and {LOST_COST_S:g} s if unserved"
    )


def print_max_load(console: Console, found: MaxLoad) -> None:
    """Print the steps of a search for the highest load, and what it found."""
    probes = sorted(found.probes, key=lambda p: p.rate_rps)
    runs = [p.summary for p in probes]
    columns = [
        Column(("offered", "req/s"), [number(p.rate_rps) for p in probes]),
        Column(("", "load"), [f"{p.load:.3f}" for p in probes]),
        Column(("within", "SLO"), [f"{100 * s.slo_attainment:.1f}%" for s in runs]),
        Column(("TTFT", "P99 s"), [number(s.ttft_s.p99) for s in runs]),
        Column(("TPOT", "P99 ms"), [number(_scaled(s.tpot_s.p99, 1e3)) for s in runs]),
        Column(("E2E", "P99 s"), [number(s.e2e_s.p99) for s in runs]),
        Column(("delay", "P99 s"), [number(s.scheduling_delay_s.p99) for s in runs]),
        Column(("goodput", "req/s"), [number(s.goodput_rps) for s in runs]),
        Column(("", "holds"), ["yes" if p.met else "no" for p in probes]),
    ]
    print_columns(console, columns)
    aim = " and ".join(map(str, found.objectives))
    if found.rate_rps is None or found.load is None:
        verdict = f"Not even {number(probes[0].rate_rps)} requests/s is within {aim}."
    else:
        more = "" if found.bounded else " or more"
        verdict = (
            f"{found.policy} holds {number(found.rate_rps)} requests/s{more} within {aim}: "
            f"{found.load:.2f} of the saturation throughput of {number(found.saturation_rps)}."
        )
    console.print(Text(verdict))


def print_summary(console: Console, summary: Summary, heading: str = "") -> None:
    """Print the figures of one run."""
    if heading:
        console.print(heading, style="bold")
        console.print()
    latencies = {
        "time to first token": summary.ttft_s,
        "time per output token": summary.tpot_s,
        "end to end": summary.e2e_s,
        "scheduling delay": summary.scheduling_delay_s,
    }
    print_metrics(console, latencies, _facts(summary))


def print_metrics(
    console: Console, latencies: Mapping[str, Latency], facts: Sequence[tuple[str, str]]
) -> None:
    """Print latencies by name, those per token in ms, and some facts below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("latency")
    for title in ("", *(title for _, title in STATISTICS)):
        table.add_column(title, justify="right")
    for label, latency in latencies.items():
        unit, scale = ("ms", 1e3) if "per output token" in label else ("s", 1.0)
        cells = [number(_scaled(getattr(latency, field), scale)) for field, _ in STATISTICS]
        table.add_row(label, unit, *cells)
    console.print(table)
    console.print()
    rows = Table(box=None, pad_edge=False, show_header=False)
    for label, value in facts:
        rows.add_row(label, Text(value))
    console.print(rows)


def _facts(s: Summary) -> list[tuple[str, str]]:
    tokens = number(s.output_tokens_per_s)
    facts = [
        ("requests", f"{s.finished} of {s.requests} finished in {s.duration_s:.1f} s"),
        ("throughput", f"{number(s.requests_per_s)} requests/s, {tokens} output tokens/s"),
        ("within SLO", f"{100 * s.slo_attainment:.1f} %, {number(s.goodput_rps)} requests/s"),
        ("latency cost", f"{number(s.cost_s)} s (mean of {_cost_formula()})"),
        ("prefix hits", f"{100 * s.prefix_hit_rate:.1f} % of prompt tokens"),
        ("mean batch size", number(s.mean_batch_size)),
        ("preemptions", str(s.preemptions)),
        ("imbalance", f"{s.imbalance:.3f} (largest / mean busy time)"),
        ("shares", _shares(s.replica_share)),
    ]
    if s.failed or s.pending or s.rerouted:
        facts.append(("failures", f"{s.failed} failed, {s.rerouted} rerouted, {s.pending} pending"))
    return facts


def _shares(shares: Sequence[float]) -> str:
    if len(shares) <= 8:
        return " ".join(percent(share) for share in shares)
    return f"{percent(min(shares))} to {percent(max(shares))} of requests per replica"
