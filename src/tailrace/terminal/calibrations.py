"""What a calibration found, as tables and pictures for people."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from tailrace.calibrate.iteration_fit import FIELDS
from tailrace.calibrate.result import CAPACITY, Calibrated, Calibration
from tailrace.terminal.listings import print_listing
from tailrace.terminal.plots import new_figure, save_figure
from tailrace.terminal.tables import UNKNOWN

_COLOURS = ("#0d9488", "#334155", "#818cf8", "#d97706", "#be185d")


def print_calibration(
    console: Console, calibration: Calibration, written: Path | None = None
) -> None:
    """Print cost model, capacity, errors and warnings of every replica, and where it is written."""
    for found in calibration.replicas:
        size = found.replica.count
        console.print(Text(found.name + (f" ({size} equal replicas)" if size > 1 else ""), "bold"))
        print_listing(console, ("cost model", "ms", "standard error"), _coefficients(found))
        console.print()
        rows = [(name, str(getattr(found.replica, name)), found.sources[name]) for name in CAPACITY]
        print_listing(console, ("capacity", "value", "source"), rows)
        console.print()
        headings = ("measured times", "count", "mean error", "largest", "bias", "spread")
        print_listing(console, headings, _regimes(found))
        for warning in found.warnings:
            console.print(Text(f"warning: {warning}", style="bold"))
        console.print()
    if written is not None:
        console.print(Text(f"written to {written}"), soft_wrap=True)


def _coefficients(found: Calibrated) -> list[tuple[str, str, str]]:
    model = found.replica.cost
    assert model is not None
    known = [(name, getattr(model, name), name) for name in FIELDS]
    known[2:2] = [(f"from {k:g} tokens on, more", slope, f"knot {k:g}") for k, slope in model.knots]
    known.append(("overhead of a request (taken off)", found.overhead_ms, "overhead_ms"))
    return [
        (label, f"{value:.4g}", _percent(found.uncertainty.get(key))) for label, value, key in known
    ]


def _regimes(found: Calibrated) -> list[tuple[str, ...]]:
    return [
        (r.name, str(r.count), _percent(r.mean_error), _percent(r.max_error),
         UNKNOWN if r.bias is None else f"{100 * r.bias:+.1f} %", _percent(r.spread))
        for r in found.regimes
    ]  # fmt: skip


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draw predicted against measured times and their errors, one row of pictures per replica."""
    count = len(calibration.replicas)
    figure = new_figure(10, 3.6 * count)
    grid = figure.subplots(count, 2, squeeze=False)
    for (left, right), found in zip(grid, calibration.replicas, strict=True):
        measured, predicted = (
            np.array([getattr(p, name) for p in found.points])
            for name in ("measured_ms", "predicted_ms")
        )
        kinds = np.array([p.regime for p in found.points])
        ends = [0.8 * measured.min(), 1.2 * measured.max()]
        left.plot(ends, ends, color="#e2e8f0", zorder=0)
        right.axhline(0.0, color="#e2e8f0", zorder=0)
        for colour, kind in zip(_COLOURS * 2, dict.fromkeys(kinds.tolist()), strict=False):
            some = kinds == kind
            style = {"s": 16, "color": colour, "label": kind}
            left.scatter(measured[some], predicted[some], **style)
            right.scatter(measured[some], 100 * (predicted[some] / measured[some] - 1), **style)
        left.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="fitted (ms)")
        right.set(xscale="log", xlabel="measured (ms)", ylabel="error (%)")
        left.set_title(found.name, fontsize=10)
        right.legend(fontsize=7)
    save_figure(figure, path)
