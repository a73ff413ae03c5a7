"""The page of an assessment: the same building blocks as a report of an evaluation."""

from collections.abc import Callable

import numpy as np

from tailrace.assess.assessment import Assessment, Estimate
from tailrace.replay.fidelity import Fidelity
from tailrace.report.blocks import (
    Block,
    Commands,
    Gallery,
    ReportContent,
    Section,
    Tabular,
    Tile,
    Words,
)
from tailrace.report.charts import Figure
from tailrace.report.render import render_page
from tailrace.report.svg import Panel, around, whisker
from tailrace.report.tables import UNKNOWN, Row, Table, TableCell, scale_axis
from tailrace.terminal.assessments import interval, paragraph, rows_of, servers, share, signed
from tailrace.terminal.tables import number

#: Requests in a plot of simulated against recorded.
MOST_DOTS = 400


def render_assessment(found: Assessment, switch: str, again: str) -> str:
    """Return the page; ``switch`` puts the best policy in charge, ``again`` makes the page anew."""
    commands: list[Block] = []
    if found.gains:
        commands += [
            Words(f"Puts {found.best.policy} in charge of your servers:"), Commands((switch,))
        ]  # fmt: skip
    else:
        commands += [Words(f"Nothing to switch: no policy is clearly better than {found.present}.")]
    commands += [Words("Makes this page again:"), Commands((again,))]
    sections = [
        Section(
            "headline",
            "What each policy would give",
            (
                Words(
                    f"The same {found.requests} requests under every policy, the lowest latency "
                    "cost first. Missed SLO: first token or tokens too slow for the request's "
                    "target. Replicas to spare: how many could be switched off, the slowest first, "
                    "with mean TTFT, mean end-to-end time and missed SLOs no worse than now. "
                    "Small figures are 95 % intervals over blocks of requests."
                ),
                Tabular(_table(found)),
            ),
        ),
        Section("switch", "How to switch", tuple(commands)),
    ]
    if found.fidelity is not None:
        sections.insert(1, _trust(found.fidelity, found))
    return render_page(
        ReportContent(
            subject=found.best.policy,
            title=f"{found.present} or {found.best.policy}?"
            if found.best.policy != found.present
            else f"Keep {found.present}",
            facts=(
                f"{found.requests} requests",
                f"{found.duration_s / 60:.1f} minutes",
                servers(found),
                f"now: {found.present}",
            ),
            tiles=tiles_of(found),
            sentences=(paragraph(found),),
            sections=tuple(sections),
            warnings=found.notes,
            kicker="Tailrace assessment",
            made_by="tailrace assess",
        )
    )


def tiles_of(found: Assessment) -> tuple[Tile, ...]:
    """Return the best policy's figures against those of the present rule."""
    best, now = found.best, found.now
    assert now is not None
    tiles = []
    for label, change, before, after in (
        ("first token, mean", best.ttft_change, now.ttft_s, best.ttft_s),
        ("end to end, mean", best.e2e_change, now.e2e_s, best.e2e_s),
    ):
        if change is not None:
            tiles.append(
                Tile(
                    label, signed(change.value),
                    f"{best.policy} {number(after.value)} s, {found.present} "
                    f"{number(before.value)} s; 95 %: {interval(change, signed)}",
                    _verdict(change.low, change.high), "",
                )
            )  # fmt: skip
    missed = best.missed.value - now.missed.value
    error = 0.0 if found.errors is None else abs(found.errors.rule_missed or 0.0)
    tiles.append(
        Tile(
            "missed SLOs", share(best.missed.value),
            f"{found.present} {share(now.missed.value)}; 95 %: {interval(best.missed, share)}",
            _verdict(missed - error, missed + error), "",
        )
    )  # fmt: skip
    if best.spare is not None:
        tiles.append(
            Tile(
                "replicas to spare", f"{best.spare.value:.0f} of {found.replicas}",
                f"with {best.policy}, no worse than now; 95 %: "
                f"{interval(best.spare, '{:.0f}'.format)}",
                "better" if best.spare.low > 0 else "even", "",
            )
        )  # fmt: skip
    return tuple(tiles)


def _verdict(low: float, high: float) -> str:
    return "better" if high < 0 else "worse" if low > 0 else "even"


def _table(found: Assessment) -> Table:
    rows = rows_of(found, None)
    changes = [p.cost_change for _, p in rows if p.cost_change is not None]
    ends = [1 + v for c in changes for v in (c.low, c.high)]
    scale = around([*ends, 1.0], log=True)
    made = []
    for name, p in rows:
        change = p.cost_change
        picture = None
        if change is not None:
            tip = f"{p.policy}: cost {signed(change.value)}"
            picture = whisker(
                scale, 1 + change.value, 1 + change.low, 1 + change.high,
                "subject" if p.policy == found.best.policy else "other", tip,
            )  # fmt: skip
        made.append(
            Row(
                (
                    TableCell(name),
                    _cell(p.ttft_s, number),
                    _cell(p.ttft_p99_s, number),
                    _cell(p.e2e_s, number),
                    _cell(p.missed, share),
                    _cell(p.spare, "{:.0f}".format),
                    _cell(change, signed),
                    TableCell("", picture=picture),
                ),
                strong=p.policy in (found.best.policy, "recorded"),
            )
        )
    heads = (
        "policy", "TTFT mean, s", "TTFT P99, s", "end to end mean, s", "missed SLO",
        "replicas to spare", "latency cost", "",
    )  # fmt: skip
    return Table(
        "Each policy on the recorded requests", heads, tuple(made), axis=scale_axis(scale),
        pictures=7,
    )  # fmt: skip


def _cell(value: Estimate | None, text: Callable[[float], str]) -> TableCell:
    if value is None:
        return TableCell(UNKNOWN)
    return TableCell(text(value.value), interval(value, text))


def _trust(trust: Fidelity, found: Assessment) -> Section:
    """How far the replay is from what was recorded."""
    errors = found.errors
    words = "Every dot is a request, on the replica and at the moment at which it was sent. "
    if errors is not None and errors.held_out:
        words += f"The servers were fitted to other requests than these {errors.requests}. "
    if errors is not None and errors.rule_ttft is not None and errors.rule_e2e is not None:
        words += (
            f"With {found.present} deciding anew the replay's mean first token is "
            f"{signed(errors.rule_ttft)} and its mean end-to-end time {signed(errors.rule_e2e)} "
            "off what was recorded: where servers are nearly full, small shifts in time change "
            "which requests wait."
        )
    figures = []
    for name, real in trust.recorded_s.items():
        simulated = trust.simulated_s[name]
        shown = np.unique(np.linspace(0, len(real) - 1, MOST_DOTS).astype(int))
        scale = around([*real[shown].tolist(), *simulated[shown].tolist()], log=True)
        panel = Panel(scale, scale, f"{name} of {len(real)} requests, simulated over recorded")
        panel.axes(f"{name} recorded, s", f"{name} simulated, s")
        panel.line([(scale.low, scale.low), (scale.high, scale.high)], "single", "equal")
        for x, y in zip(real[shown].tolist(), simulated[shown].tolist(), strict=True):
            panel.dot(x, y, "other", f"recorded {number(x)} s, simulated {number(y)} s", 2)
        figures.append(Figure(name, panel.svg()))
    rows = tuple(
        Row(
            tuple(
                TableCell(text)
                for text in (
                    a.name, str(a.requests), number(a.recorded_mean_s), number(a.simulated_mean_s),
                    signed(a.mean_error), number(a.recorded_p99_s), number(a.simulated_p99_s),
                    signed(a.p99_error),
                )
            )
        )
        for a in trust.latencies
    )  # fmt: skip
    heads = (
        "latency", "requests", "mean recorded, s", "simulated, s", "error", "P99 recorded, s",
        "simulated, s", "error",
    )  # fmt: skip
    table = Table("Simulated on the recorded replicas, against recorded", heads, rows)
    blocks = (Words(words), Gallery(tuple(figures)), Tabular(table))
    return Section("trust", "How far to trust it", blocks)
