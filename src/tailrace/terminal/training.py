"""A training run on the screen: live while it goes, and its outcome."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tailrace.learn.trainer import Outcome

#: Figures shown, in order: name, heading, format.
METRICS = (
    ("steps_per_s", "samples/s", ",.0f"),
    ("loss", "loss", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("kl", "KL", ".4f"),
    ("score_vs_best_rule", "vs best rule", ".4f"),
    ("ttft_p99_s", "P99 TTFT s", ".3f"),
)
#: What is said of a step if these are not zero.
MARKS = (
    ("red_flag", "red flag: behind the best rule"),
    ("rolled_back", "back to the best policy"),
    ("pulse", "pulse"),
)
LINES = 8


class LiveWatcher:
    """Shows the latest steps, and a bar with the time left; lines of text without a terminal."""

    def __init__(self, show: bool) -> None:
        """Print nothing unless ``show``."""
        self._show = show
        self._terminal = show and sys.stderr.isatty()
        self._console = Console(file=sys.stderr)
        self._started = time.monotonic()
        self._first_step: tuple[float, int] | None = None
        self._rows: list[tuple[int, Mapping[str, Any]]] = []
        self._bar = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._steps = self._bar.add_task("run", total=None, left="")
        self._tasks = self._bar.add_task("", total=None, left="", visible=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._terminal:
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last picture on the screen."""
        self.stop()

    def stop(self) -> None:
        """Show nothing more."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Something else begins."""
        self._bar.reset(self._tasks, description=name, total=None, visible=True)
        self._refresh()

    def note(self, text: str) -> None:
        """Print a sentence above the picture, or as a line."""
        if self._show:
            self._console.print(Text(f"note: {text}"))

    def tasks(self, done: int, total: int) -> None:
        """So many tasks of the step are done."""
        self._bar.update(self._tasks, completed=done, total=total)
        self._refresh()

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """A step is over."""
        now = time.monotonic()
        self._rows = [*self._rows, (step, metrics)][-LINES:]
        left = ""
        if self._first_step is None:
            self._first_step = (now, step)
        else:
            began, first = self._first_step
            left = f"{_minutes((now - began) / (step - first) * (steps - step))} left"
        self._bar.update(self._steps, completed=step, total=steps, left=left)
        self._refresh()
        if self._show and not self._terminal:
            shown = ", ".join(
                f"{heading} {metrics[name]:{form}}"
                for name, heading, form in METRICS
                if name in metrics
            )
            begun = _minutes(now - self._started)
            print(
                f"{begun} step {step}/{steps} {metrics['phase']}: {shown}{marks(metrics)}",
                file=sys.stderr,
                flush=True,
            )

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._picture())

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right")
        table.add_column("phase")
        for _, heading, _ in METRICS:
            table.add_column(heading, justify="right")
        table.add_column("")
        for step, metrics in self._rows:
            cells = [f"{metrics[n]:{form}}" if n in metrics else "" for n, _, form in METRICS]
            star = " *" if metrics.get("best") else ""
            table.add_row(str(step), str(metrics["phase"]) + star, *cells, marks(metrics)[2:])
        return Group(table, self._bar)


def marks(metrics: Mapping[str, Any]) -> str:
    """Return what is unusual about a step, each part after a comma."""
    found = [text for name, text in MARKS if metrics.get(name)]
    if alarms := metrics.get("alarms"):
        found.append(f"alarms: {alarms:.0f}")
    return "".join(f", {text}" for text in found)


def print_outcome(console: Console, folder: Path, outcome: Outcome) -> None:
    """Print how a run ended, and what to do with it."""
    rule, rule_score = outcome.best_rule
    gain = 1 - outcome.best_score / rule_score
    console.print(
        f"best policy: [bold]{escape(str(outcome.best))}[/]  cost {outcome.best_score:.4f} of "
        f"{outcome.reference}, {abs(gain):.1%} {'below' if gain >= 0 else 'above'} the best rule, "
        f"{rule} ({rule_score:.4f}), on validation traffic"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("health", "", "found"):
        table.add_column(heading)
    for check in outcome.health:
        table.add_row(check.name, "ok" if check.ok else "[bold red]LOOK[/]", check.found)
    console.print(table)
    curves = f"curves: tensorboard --logdir {folder / 'tensorboard'}, or {folder / 'log.csv'}"
    console.print(escape(curves))


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
