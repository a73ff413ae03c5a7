"""One trial of a sweep: an ordinary training run that tells its score after every evaluation.

Its folder is that of any run, so a trial that was interrupted goes on exactly where it stopped, and
what it told before is told again.
"""

import csv
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tailrace.errors import TailraceError
from tailrace.integrations.rollout_sources import ROLLOUT_SOURCES
from tailrace.learn.run_folder import RunFolder
from tailrace.learn.settings import TrainSettings
from tailrace.learn.trainer import Silent, Trainer

#: Told the step (counted from 1), the score of its evaluation and the best one so far.
Report = Callable[[int, float, float], None]
_FAILURE = "failure.txt"


class Reporter(Silent):
    """Passes on what evaluations say."""

    def __init__(self, report: Report, told: list[tuple[int, float]]) -> None:
        """``told``: step and score of each evaluation so far; they are told again."""
        self._report = report
        self._best = float("inf")
        for step, score in told:
            self._tell(step, score)

    def _tell(self, step: int, score: float) -> None:
        self._best = min(self._best, score)
        self._report(step, score, self._best)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """A step is over, and perhaps evaluated."""
        del steps
        if "score" in metrics:
            self._tell(step, float(metrics["score"]))


def run_trial(folder: Path, settings: TrainSettings, report: Report) -> bool:
    """Begin a run, or go on with it; False: it failed, and :func:`failure` says why."""
    run = RunFolder(folder)
    if not run.has_steps:
        shutil.rmtree(folder, ignore_errors=True)  # it ended before its first step
    reporter = Reporter(report, scores(folder))
    if is_done(folder):
        return True
    note = folder / _FAILURE
    note.unlink(missing_ok=True)
    try:
        begin_with = None if run.has_steps else settings
        Trainer(folder, begin_with, 1, reporter, ROLLOUT_SOURCES).run()
    except TailraceError as error:
        note.write_text(str(error), encoding="utf-8")
        return False
    return True


def failure(folder: Path) -> str:
    """Return the sentence a run failed with, empty if it did not."""
    try:
        return (folder / _FAILURE).read_text(encoding="utf-8")
    except OSError:
        return ""


def is_done(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return (folder / "health.json").is_file()


def scores(folder: Path) -> list[tuple[int, float]]:
    """Step, counted from 1, and score of every evaluation that a run has in its log."""
    try:
        with (folder / "log.csv").open(newline="", encoding="utf-8") as file:
            rows = [(row["step"], row["score"]) for row in csv.DictReader(file)]
        return [(int(step) + 1, float(score)) for step, score in rows if score]
    except (OSError, KeyError, ValueError, TypeError, csv.Error):
        return []
