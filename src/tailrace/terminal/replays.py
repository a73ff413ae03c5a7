"""Recorded traffic simulated again, as tables and pictures for people."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from tailrace.evaluate.measure.metrics import Summary
from tailrace.replay.fidelity import Fidelity
from tailrace.replay.what_if import ReplayOutcome
from tailrace.terminal.plots import new_figure, save_figure
from tailrace.terminal.tables import UNKNOWN, Column, number, print_columns

RECORDED = "recorded"


def print_replay(
    console: Console,
    found: Fidelity | None,
    outcomes: Sequence[ReplayOutcome],
    recorded: tuple[str, int, Summary] | None,
) -> None:
    """Print how far to trust the simulation, if that is known, and what it says."""
    if found is not None:
        print_fidelity(console, found)
    print_outcomes(console, outcomes, recorded)


def print_fidelity(console: Console, found: Fidelity) -> None:
    """Print how far the simulation is from what was recorded."""
    console.print(Text("Simulated on the recorded replicas, against recorded", style="bold"))
    rows = found.latencies
    columns = [Column(("", "latency"), [a.name for a in rows], left=True)]
    for top, key in (("mean", "mean"), ("P50", "p50"), ("P99", "p99")):
        columns += [
            Column((top, "rec. s"), [number(getattr(a, f"recorded_{key}_s")) for a in rows]),
            Column(("", "sim. s"), [number(getattr(a, f"simulated_{key}_s")) for a in rows]),
            Column(("", "error"), [_signed(getattr(a, f"{key}_error")) for a in rows]),
        ]
    columns += [
        Column(("per request", "P50 error"), [f"{a.typical_error:.1%}" for a in rows]),
        Column(("", "P99 error"), [f"{a.worst_error:.1%}" for a in rows]),
        Column(("rank", "corr."), [_known(a.correlation) for a in rows]),
    ]
    print_columns(console, columns)
    real = UNKNOWN if found.recorded_hit_rate is None else f"{found.recorded_hit_rate:.1%}"
    console.print(
        Text(f"Prefix hits: {real} of prompt tokens recorded, {found.simulated_hit_rate:.1%} "
             "simulated. Figures below are as good as these.", style="dim")
    )  # fmt: skip
    console.print()


def print_outcomes(
    console: Console, outcomes: Sequence[ReplayOutcome], recorded: tuple[str, int, Summary] | None
) -> None:
    """Print each policy with each number of replicas, and what was recorded first."""
    rows: list[tuple[str, int, Summary]] = [(o.policy, o.replicas, o.summary) for o in outcomes]
    if recorded is not None:
        rows.insert(0, recorded)
    summaries = [summary for *_, summary in rows]
    columns = [
        Column(("", "policy"), [name for name, *_ in rows], left=True),
        Column(("", "replicas"), [str(size) for _, size, _ in rows]),
        Column(("cost", "s"), [number(s.cost_s) for s in summaries]),
    ]
    for title, key, keep in (("TTFT", "ttft_s", 1), ("E2E", "e2e_s", 2)):
        for field, about in (("mean", "mean s"), ("p50", "P50 s"), ("p99", "P99 s")):
            cells = [number(getattr(getattr(s, key), field)) for s in summaries]
            top = title if field == "mean" else ""
            label = f"{title} {about}"
            columns.append(Column((top, about), cells, keep * (field == "p50"), label=label))
    columns += [
        Column(("within", "SLO"), [f"{s.slo_attainment:.1%}" for s in summaries]),
        Column(("", "hit"), [f"{s.prefix_hit_rate:.0%}" for s in summaries], 3, label="hits"),
    ]
    print_columns(console, columns, bold=[0] if recorded is not None else [])


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _known(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def plot_replay(outcomes: Sequence[ReplayOutcome], found: Fidelity | None, path: Path) -> None:
    """Draw mean cost by number of replicas, and simulated against recorded latencies."""
    kinds = list(found.recorded_s) if found is not None else []
    figure = new_figure(4.2 * (1 + len(kinds)), 3.8)
    axes = figure.subplots(1, 1 + len(kinds), squeeze=False)[0]
    for policy in dict.fromkeys(o.policy for o in outcomes):
        some = sorted((o.replicas, o.summary.cost_s) for o in outcomes if o.policy == policy)
        axes[0].plot(*zip(*some, strict=True), "o-", markersize=4, label=policy)
    axes[0].set(xlabel="replicas", ylabel="mean cost (s)", yscale="log")
    axes[0].legend(fontsize=7)
    for axis, name in zip(axes[1:], kinds, strict=True):
        assert found is not None
        real, simulated = found.recorded_s[name], found.simulated_s[name]
        shown = np.unique(np.linspace(0, len(real) - 1, 2000).astype(int))
        axis.scatter(real[shown], simulated[shown], s=4, alpha=0.4, color="#0d9488")
        ends = [float(real.min()), float(real.max())]
        axis.plot(ends, ends, color="#334155", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel=f"{name} recorded (s)",
                 ylabel=f"{name} simulated (s)")  # fmt: skip
    save_figure(figure, path)
