"""Pictures of what was found in a trained policy. Needs matplotlib."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tailrace.errors import TailraceError
from tailrace.evaluate.explain.explain_state import StateExplanation
from tailrace.evaluate.explain.inspect import Behaviour, Habit, Inspection
from tailrace.files import check_target, make_folder
from tailrace.terminal.plots import PLOT_SUFFIXES, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], None]

TOP_FEATURES = 20
TOP_RULES = 12
MAIN, OTHER, MARK = "#0d9488", "#cbd5e1", "#334155"


def check_plot(path: Path) -> None:
    """Refuse, before any work is done, a file or folder that could not be written in the end."""
    if path.suffix:
        check_target(path, PLOT_SUFFIXES)
    elif path.exists() and not path.is_dir():
        raise TailraceError(f"cannot write pictures to {path}: it is a file and no folder")
    elif not path.parent.is_dir():
        raise TailraceError(f"cannot write {path}: there is no folder {path.parent}")


def plot_inspection(
    found: Inspection | None, explanations: Sequence[StateExplanation], path: Path
) -> list[Path]:
    """Draw all panels into one file, or each into its own in a folder; returns the files."""
    panels = _panels(found, explanations)
    if path.suffix:
        rows = -(-len(panels) // 2)
        columns = min(2, len(panels))
        figure = new_figure(7 * columns, 5 * rows)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (_, draw) in zip(grid, panels, strict=False):
            draw(axes)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        save_figure(figure, path, dpi=120)
        return [path]
    make_folder(path)
    written = []
    for name, draw in panels:
        figure = new_figure(7, 5)
        draw(figure.subplots())
        written.append(path / f"{name}.png")
        save_figure(figure, written[-1], dpi=120)
    return written


def _panels(
    found: Inspection | None, explanations: Sequence[StateExplanation]
) -> list[tuple[str, Draw]]:
    """Name and drawing of every panel."""
    panels: list[tuple[str, Draw]] = []
    if found is not None:
        panels += [
            ("importance", partial(_draw_importance, found)),
            ("ranges", partial(_draw_ranges, found)),
            ("attention", partial(_draw_attention, found)),
        ]
        for behaviour in found.behaviours:
            panels += [
                (f"shares-{behaviour.scenario}", partial(_draw_shares, behaviour)),
                (f"habits-{behaviour.scenario}", partial(_draw_habits, behaviour)),
            ]
    panels += [(f"state-{one.name}", partial(_draw_explanation, one)) for one in explanations]
    return panels


def _draw_importance(found: Inspection, axes: "Axes") -> None:
    features = found.audit.features[:TOP_FEATURES][::-1]
    _bars(axes, [f.name for f in features], [100 * f.changed for f in features])
    axes.set_title(f"{found.policy}: choices changed by exchanging a feature (%)", fontsize=10)


def _draw_ranges(found: Inspection, axes: "Axes") -> None:
    """Mean and deviation now, in deviations of training."""
    features = found.audit.features[:TOP_FEATURES][::-1]
    rows = np.arange(len(features))
    scale = np.array([max(f.trained_deviation, 0.1) for f in features])
    mean = np.array([f.mean - f.trained_mean for f in features]) / scale
    spread = np.array([f.deviation for f in features]) / scale
    axes.axvspan(-1, 1, color="#f1f5f9")
    axes.errorbar(mean, rows, xerr=spread, fmt="o", color=MAIN, markersize=4, linewidth=1)
    axes.axvline(0, color=MARK, linewidth=0.8)
    axes.set_yticks(rows, [f.name for f in features], fontsize=8)
    axes.set_title("features now, in deviations from their mean in training", fontsize=10)
    _plain(axes)


def _draw_attention(found: Inspection, axes: "Axes") -> None:
    heads = found.audit.attention
    places = np.arange(len(heads))
    for k, (values, colour, label) in enumerate(
        (
            ([h.to_self for h in heads], MAIN, "to itself"),
            ([h.to_chosen for h in heads], "#818cf8", "to the chosen"),
            ([h.even for h in heads], OTHER, "if all alike"),
        )
    ):
        axes.bar(places + 0.27 * (k - 1), values, 0.25, color=colour, label=label)
    axes.set_xticks(places, [f"head {h.head}" for h in heads])
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("mean attention weight", fontsize=10)
    _plain(axes)


def _draw_shares(found: Behaviour, axes: "Axes") -> None:
    labels = [f"{k}: {device}" for k, device in enumerate(found.replicas)][::-1]
    _bars(axes, labels, [100 * share for share in found.shares][::-1])
    axes.axvline(100 / len(found.shares), color=MARK, linestyle=":")
    axes.set_title(f"{found.scenario}: share of requests (%), dotted: even", fontsize=10)


def _draw_habits(found: Behaviour, axes: "Axes") -> None:
    rules = [h for h in found.rules if h.best is not None][:TOP_RULES]
    habits = [*(h for h in found.facts if h.best is not None), *rules][::-1]
    _bars(axes, [h.name for h in habits], [_per_cent(h) for h in habits])
    chance = [100 * (h.chance or 0.0) for h in habits]
    axes.scatter(chance, np.arange(len(habits)), color=MARK, marker="|", s=60, zorder=3)
    axes.set_title(
        f"{found.scenario}: takes the best by a fact or rule (%), mark: by chance", fontsize=10
    )


def _per_cent(habit: Habit) -> float:
    return 100 * (habit.best or 0.0)


def _draw_explanation(found: StateExplanation, axes: "Axes") -> None:
    labels = [str(o.replica) for o in found.options][::-1]
    values = [100 * o.probability for o in found.options][::-1]
    _bars(axes, [f"replica {label}" for label in labels], values)
    axes.set_title(f"{found.name}: probability of each replica (%)", fontsize=10)


def _bars(axes: "Axes", labels: Sequence[str], values: Sequence[float]) -> None:
    rows = np.arange(len(labels))
    axes.barh(rows, values, color=MAIN, height=0.7)
    axes.set_yticks(rows, labels, fontsize=8)
    _plain(axes)


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="both", length=0)
