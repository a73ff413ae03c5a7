"""``tailrace sweep``: training with other settings, many times, on Ray."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, options
from tailrace.cli.options import FILE, OUTPUT, assignment, option
from tailrace.config import current_key
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.integrations.ray.sweep import Result, Sweep


@options.command("sweep")
@option(
    "--preset", metavar="NAME",
    help="Settings to start from, as for `tailrace train`. [default: quick]",
)  # fmt: skip
@option(
    "--config", type=FILE,
    help="Settings from a TOML file, put over the preset's, or alone without --preset.",
)  # fmt: skip
@option(
    "--scenario", "scenarios", metavar="NAME", multiple=True,
    help="Scenario to train on, by name or file, instead of the preset's; may be repeated.",
)  # fmt: skip
@option(
    "--updates", type=click.IntRange(0), metavar="N",
    help="Updates after cloning, instead of the preset's.",
)  # fmt: skip
@option(
    "--set", "assignments", metavar="KEY=VALUES", multiple=True,
    help="Setting to vary: log(1e-4,1e-2), uniform(0.1,0.5), int(4,16) or choice(6,12,20); or a "
    "plain value for all trials. May be repeated.",
)  # fmt: skip
@option(
    "--samples", type=click.IntRange(1, 10_000), default=8, metavar="N",
    help="Trials with values drawn at random, besides one with the settings as are.",
)  # fmt: skip
@option(
    "--seed", type=click.IntRange(0, 2**31), default=0, metavar="N",
    help="Seed of the drawing. The runs themselves all have the preset's.",
)  # fmt: skip
@option(
    "--scheduler", type=click.Choice(["asha", "all"]), default="asha",
    help="asha: give up trials that are behind others; all: let every one end.",
)  # fmt: skip
@option(
    "--resume", type=FILE, metavar="SWEEP",
    help="Go on with the sweep in this folder; unfinished trials go on where they stopped.",
)  # fmt: skip
@option(
    "-j", "--jobs", type=click.IntRange(1, 1024), metavar="N",
    help="Trials that run side by side, one CPU each. [default: one per CPU of the cluster]",
)  # fmt: skip
@option(
    "--workers", default="ray", metavar="WHERE",
    help="ray (Ray, started on this machine) or ray:ADDRESS (a Ray cluster).",
)  # fmt: skip
@option(
    "-o", "--out", "--output", "output", type=FILE, metavar="FOLDER", section=OUTPUT,
    help="Folder of the sweep. [default: runs/sweep-PRESET-SEED]",
)  # fmt: skip
@options.json
@options.quiet
def command(
    resume: Path | None, jobs: int | None, workers: str, output: Path | None, **given: Any
) -> None:
    """Train with random settings and rank them by their score.

    Ray Tune runs the trials. Each is an ordinary training run with a folder of its own. They are
    trained and judged on training seeds only, never on evaluation seeds.
    """
    from tailrace.integrations.ray.pool import SCHEME, connect, parse_workers

    if resume is not None and options.given_besides("resume", "jobs", "workers"):
        raise TailraceError(
            "--resume goes on with a sweep as it was begun; it takes no other settings but "
            "--jobs and --workers"
        )
    if workers.partition(":")[0] != SCHEME:
        raise TailraceError(f"a sweep runs on Ray: --workers ray or ray:ADDRESS, not '{workers}'")
    address = parse_workers(workers, "a sweep")
    console.need("torch", "tensorboard", "gymnasium", extra="train", what="training")
    from tailrace.integrations.ray import sweep as sweeps

    if resume is not None:
        folder, sweep = resume, sweeps.load(resume)
    else:
        sweep = _sweep_of(**given)
        name = sweep.preset or sweep.over.get("name", "custom")
        folder = output or Path("runs") / f"sweep-{name}-{given['seed']}"
        sweeps.begin(folder, sweep)
    import ray

    started = connect(address, jobs)
    try:
        with console.progress("trials", len(sweep.trials)) as update:
            results = sweeps.run(folder, sweep, jobs=jobs, progress=update)
    finally:
        if started:
            ray.shutdown()
    console.show(results, lambda screen: _print(screen, folder, results))


def _sweep_of(
    preset: str | None,
    config: Path | None,
    scenarios: tuple[str, ...],
    updates: int | None,
    assignments: tuple[str, ...],
    samples: int,
    seed: int,
    scheduler: Any,
) -> "Sweep":
    """Make a sweep of the options."""
    from tailrace.integrations.ray import space
    from tailrace.integrations.ray.sweep import Sweep
    from tailrace.learn import settings as s

    over: dict[str, Any] = s.read(config) if config is not None else {}
    if preset is None and config is None:
        preset = "quick"
    if preset is not None:
        s.read(preset)
        over.pop("name", None)
    if scenarios:
        over |= {"scenarios": list(scenarios), "randomise": None}
    if updates is not None:
        over["updates"] = updates
    varied: dict[str, space.Varied] = {}
    for text in assignments:
        found = space.read(text)
        if found is None:
            s.assign(over, *assignment(text))
        else:
            varied[current_key(s.TrainSettings, found[0])] = found[1]
    if not varied:
        raise TailraceError("say what to vary, e.g. --set 'branching.learning_rate=log(1e-4,1e-2)'")
    return Sweep.of(preset or "", over, varied, samples, seed, scheduler)


def _print(screen: "Console", folder: Path, results: "list[Result]") -> None:
    from tailrace.terminal.listings import print_listing

    rows = []
    for result in results:
        score = "" if result.best_score is None else f"{result.best_score:.4f}"
        values = ", ".join(f"{key}={value}" for key, value in result.values.items())
        what = result.error or values or "as it is"
        rows.append((str(result.trial), score, str(result.steps), result.status, what))
    print_listing(screen, ("trial", "score", "steps", "status", "settings"), rows)
    if results[0].best_score is not None:
        click.echo(f"best settings: {folder / 'best.toml'}; policy: {results[0].policy}", err=True)
