"""Figures for files, and what they share. Needs matplotlib: pip install 'tailrace[plots]'."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tailrace.errors import TailraceError
from tailrace.evaluate.judge.compare import Comparison, Entry
from tailrace.files import atomic_path
from tailrace.terminal.tables import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
BEST, REFERENCE, OTHERS = "#0d9488", "#334155", "#818cf8"


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, its size in inches; raises if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TailraceError("plots need matplotlib: pip install 'tailrace[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path, dpi: int = 150) -> None:
    """Write a figure to ``path``; its suffix, one of PLOT_SUFFIXES, says the format."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=dpi)


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw every policy's P99 time to first token and mean end-to-end time, the cheapest on top."""
    entries = [e for e in comparison.entries if e.mean.e2e_s.mean is not None][::-1]
    figure = new_figure(10, 1.6 + 0.27 * len(entries))
    left, right = figure.subplots(1, 2, sharey=True)
    best_rule = next(
        (e.policy for e in reversed(entries) if not e.policy.startswith("lookahead")), None
    )
    colours = [_colour(e, best_rule, comparison.reference) for e in entries]
    first_token = [e.mean.ttft_s.p99 for e in entries]
    end_to_end = [e.mean.e2e_s.mean for e in entries]
    _dots(left, entries, first_token, colours, "time to first token, P99 (s)")
    _dots(right, entries, end_to_end, colours, "end to end, mean (s)")
    rate = "" if comparison.rate_rps is None else f" at {comparison.rate_rps:.1f} requests/s"
    figure.suptitle(
        f"{comparison.scenario.name}: {comparison.scenario.workload.name}{rate} on "
        f"{counted(comparison.scenario.cluster.size, 'replica')}, "
        f"{counted(len(comparison.seeds), 'seed')}",
        fontsize=11,
    )
    save_figure(figure, path)


def _colour(entry: Entry, best_rule: str | None, reference: str) -> str:
    if entry.policy == best_rule:
        return BEST
    return REFERENCE if entry.policy == reference else OTHERS


def _dots(
    axes: "Axes",
    entries: Sequence[Entry],
    values: Sequence[float | None],
    colours: Sequence[str],
    title: str,
) -> None:
    """One row per policy; a logarithmic axis if the values differ by more than ten times."""
    known = np.array([np.nan if v is None else v for v in values])
    rows = np.arange(len(entries))
    low, high = float(np.nanmin(known)), float(np.nanmax(known))
    if high > 10 * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.6, high * 2.2)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, high * 1.15)
    axes.hlines(rows, axes.get_xlim()[0], known, color="#e2e8f0", linewidth=2, zorder=1)
    axes.scatter(known, rows, c=list(colours), s=46, zorder=2)
    axes.set_ylim(-0.8, len(entries) - 0.2)
    axes.set_yticks(rows, [e.policy for e in entries], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row, value in zip(rows, known, strict=True):
        if np.isfinite(value):
            axes.annotate(
                f"{value:.3g}",
                (float(value), row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
