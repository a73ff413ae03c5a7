"""Sweeps over the settings of training with Ray Tune.

A sweep is a folder:

sweep.json      what was asked for, and the settings of every trial
trials/N        the training run of trial N; trial 0 has the settings as they are
ray/            what Ray Tune writes; nothing is ever read from it
results.json    how the trials ended
best.toml       the best settings, for `tailrace train --config`

Trials play the same worlds (training seeds) and are judged on the same validation traffic (training
seeds too, which no update sees). Evaluation seeds are never touched.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from tailrace.config import Settings, parse
from tailrace.errors import TailraceError
from tailrace.files import atomic_path
from tailrace.integrations.ray import space
from tailrace.integrations.ray.trial import failure, is_done, run_trial, scores
from tailrace.learn import settings as s

#: How often a trial goes on whose process died.
RETRIES = 3
#: asha: of the trials that have come to the same step, only the best third goes on.
Scheduler = Literal["asha", "all"]
_REDUCTION = 3


class Sweep(Settings):
    """What was asked for; the content of sweep.json."""

    preset: str = ""
    """Preset that all trials start from, empty: none."""
    over: dict[str, Any]
    """Settings of training put over it, the same for all trials."""
    trials: tuple[dict[str, Any], ...]
    """What each trial changes, by path."""
    scheduler: Scheduler = "asha"
    """asha: give up trials that are behind others; all: let every one end."""

    @classmethod
    def of(
        cls,
        preset: str,
        over: dict[str, Any],
        varied: Mapping[str, space.Varied],
        samples: int,
        seed: int,
        scheduler: Scheduler,
    ) -> Self:
        """Draw the trials; the first one changes nothing, so that one sees what is gained."""
        trials = ({}, *space.draw(varied, samples, seed))
        return cls(preset=preset, over=over, trials=trials, scheduler=scheduler)

    def changes(self, number: int) -> dict[str, Any]:
        """Return all that a trial puts over the preset."""
        data = deepcopy(self.over)
        for key, value in self.trials[number].items():
            s.assign(data, key, value)
        return data

    def settings(self, number: int) -> s.TrainSettings:
        """Return the settings of a trial."""
        return s.build(s.read(self.preset) if self.preset else {}, self.changes(number))


@dataclass(frozen=True)
class Result:
    """How a trial ended."""

    trial: int
    values: dict[str, Any]  #: what it changes, by path
    status: str  #: done, stopped (others were better), failed or open
    steps: int  #: at which it was last evaluated
    best_score: float | None  #: cost against that of the first rule, on validation traffic
    policy: Path | None  #: its best checkpoint
    error: str = ""


def begin(folder: Path, sweep: Sweep) -> None:
    """Write a new sweep to its folder; raises if the settings of any trial have a mistake."""
    for number, values in enumerate(sweep.trials):
        try:
            sweep.settings(number)
        except TailraceError as error:
            raise TailraceError(f"trial {number} ({_words(values)}): {error}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TailraceError(
            f"{folder} exists and is not empty; go on with a sweep by --resume, or choose another "
            "folder with -o"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TailraceError(f"cannot make {folder}: {error.strerror or error}") from None
    _write(folder / "sweep.json", json.dumps(sweep.model_dump(mode="json"), indent=1) + "\n")


def load(folder: Path) -> Sweep:
    """Return the sweep of a folder."""
    path = folder / "sweep.json"
    if not path.is_file():
        raise TailraceError(f"{folder} is no sweep: it has no sweep.json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TailraceError(f"cannot read {path}: {error}") from None
    return parse(Sweep, data)


def run(
    folder: Path,
    sweep: Sweep,
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Do the trials of a sweep that are not done, on the Ray cluster this process has joined.

    ``jobs``: most trials at once; each takes one CPU. ``progress`` is told how many have ended.
    Returns all results, the best first.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    from ray import tune

    class Told(tune.Callback):  # type: ignore[misc]
        """Counts trials that have ended."""

        ended = 0

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            del iteration, trials, trial, info
            self.ended += 1
            if progress is not None:
                progress(self.ended)

    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses logs that we keep ourselves
    folder = folder.resolve()
    numbers = range(len(sweep.trials))
    steps = [sweep.settings(number).steps for number in numbers]
    tuner = tune.Tuner(
        tune.with_resources(_trainable, {"cpu": 1}),
        param_space={
            "folder": str(folder),
            "sweep": sweep.model_dump(mode="json"),
            "trial": tune.grid_search(list(numbers)),
        },
        tune_config=tune.TuneConfig(
            metric="score",  # not the best so far, which is often that of cloning for all alike
            mode="min",
            scheduler=_scheduler(sweep, max(steps)),
            max_concurrent_trials=jobs,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder / "ray"),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            callbacks=[Told()],
        ),
    )
    died = {
        int(found.config["trial"]): f"its process failed {RETRIES + 1} times: {found.error}"
        for found in tuner.fit()
        if found.config and found.error is not None
    }
    results = sorted(
        (result(folder, sweep, number, died.get(number, "")) for number in numbers),
        key=lambda r: (r.best_score is None, r.best_score, r.trial),
    )
    write(folder, sweep, results)
    return results


def _trainable(config: dict[str, Any]) -> None:
    """Run a trial in a process of Tune."""
    from ray import tune

    sweep, number = parse(Sweep, config["sweep"]), int(config["trial"])

    def report(step: int, score: float, best_score: float) -> None:
        tune.report({"step": step, "score": score, "best_score": best_score})

    run_folder = trial_folder(Path(config["folder"]), number)
    if not run_trial(run_folder, sweep.settings(number), report):
        report(0, math.inf, math.inf)


def _scheduler(sweep: Sweep, steps: int) -> Any:
    """What gives trials up: not before cloning is over and an update was seen."""
    if sweep.scheduler == "all":
        return None
    from ray.tune.schedulers import ASHAScheduler

    rounds = sweep.settings(0).demonstrations.rounds
    return ASHAScheduler(
        time_attr="step",
        max_t=steps + 1,
        grace_period=min(steps, max(rounds + 1, steps // _REDUCTION)),
        reduction_factor=_REDUCTION,
    )


def _name(trial: Any) -> str:
    return f"trial-{trial.config['trial']}"


def trial_folder(folder: Path, number: int) -> Path:
    """Return the folder of a trial's training run."""
    return folder / "trials" / f"{number:03d}"


def result(folder: Path, sweep: Sweep, number: int, died: str = "") -> Result:
    """Return how a trial stands, by its folder; ``died``: what Tune says of its process."""
    run_folder = trial_folder(folder, number)
    found = scores(run_folder)
    error = failure(run_folder) or died
    policy = run_folder / "best.tailrace"
    status = "done" if is_done(run_folder) else "failed" if error else "stopped"
    return Result(
        number,
        dict(sweep.trials[number]),
        status if found or error else "open",
        found[-1][0] if found else 0,
        min((score for _, score in found), default=None),
        policy if policy.is_file() else None,
        error,
    )


def write(folder: Path, sweep: Sweep, results: Sequence[Result]) -> None:
    """Write results.json and, if there is a best trial, best.toml."""
    rows = [asdict(r) | {"policy": r.policy and str(r.policy)} for r in results]
    _write(folder / "results.json", json.dumps(rows, indent=1) + "\n")
    if results and results[0].best_score is not None:
        best = results[0]
        over = f" over the preset {sweep.preset}" if sweep.preset else ""
        head = f"# Trial {best.trial} of {folder.name}: score {best.best_score:.4f}{over}.\n"
        changes = sweep.changes(best.trial)
        if changes.get("randomise", 0) is None:
            head += "# Name the scenarios by --scenario again: no file can say randomise is off.\n"
        _write(folder / "best.toml", head + space.toml(changes))


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "as it is"


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
