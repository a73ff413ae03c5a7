"""``tailrace evaluate``: policies x scenarios x seeds, with honest statistics."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, option
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.evaluate.judge.suite import EvaluationPlan

DEFAULT_SUITE = "standard"
DEFAULT_SEEDS, DEFAULT_RANKING_SEEDS = 20, 5


@options.command("evaluate")
@click.argument("run", required=False, type=FILE)
@option(
    "--all-checkpoints", is_flag=True,
    help="Rank every checkpoint of the training run RUN on the run's scenarios.",
)  # fmt: skip
@option(
    "--suite", metavar="NAME", shell_complete=names.suites,
    help=f"Scenarios to run: standard or holdout. [default: {DEFAULT_SUITE}]",
)  # fmt: skip
@option(
    "--scenario", "scenario_names", metavar="NAME", multiple=True, shell_complete=names.scenarios,
    help="Scenario (name or .toml file) instead of a suite; may be repeated.",
)  # fmt: skip
@option(
    "-p", "--policy", "policies", multiple=True, shell_complete=names.policies,
    help="Policy under test; may be repeated, the first makes the headline. [default: tailrace]",
)  # fmt: skip
@option(
    "--against", multiple=True, metavar="NAME",
    help="Baselines: all, rules, tuned, learned, look-ahead, none, or a policy; may be repeated. "
    "[default: all; with --all-checkpoints all but look-ahead; with --scenario the best known]",
)  # fmt: skip
@option(
    "--seeds", "seed_count", type=click.IntRange(1, 10_000), metavar="N",
    help=f"How many seeds. [default: {DEFAULT_SEEDS}; with --all-checkpoints "
    f"{DEFAULT_RANKING_SEEDS}]",
)  # fmt: skip
@option(
    "--first-seed", type=click.IntRange(0, 100_000_000), default=0, metavar="N",
    help="Begin with the N-th of the seeds: once results were looked at, judge what was changed "
    "since then on others.",
)  # fmt: skip
@option(
    "--selection-seeds", type=click.IntRange(1, 10_000), default=5, metavar="N",
    help="How many tuning seeds choose the best rules.",
)  # fmt: skip
@option(
    "--purpose", type=click.Choice(["evaluation", "tuning"]),
    help="Which seeds to measure on. [default: evaluation; with --all-checkpoints tuning]",
)  # fmt: skip
@option(
    "--requests", type=click.IntRange(1, 50_000_000), metavar="N",
    help="Requests of every cell. [default: the scenario's, 10 000 or more]",
)  # fmt: skip
@option(
    "--warmup", type=click.FloatRange(0, 1, max_open=True), default=0.1, metavar="SHARE",
    help="Share of the first requests left out.",
)  # fmt: skip
@option(
    "--ttft-limit-s", type=click.FloatRange(0, 1e9, min_open=True), default=30.0, metavar="SECONDS",
    help="Hard limit: longer waits for a first token are counted.",
)  # fmt: skip
@options.jobs
@options.workers
@option(
    "-o", "--out", "--output", "output", type=FILE, section=OUTPUT, metavar="FOLDER",
    help="Keep cells, results.parquet and results.json there; the same command goes on where it "
    "was interrupted.",
)  # fmt: skip
@option(
    "--write-shipped", is_flag=True, hidden=True,
    help="For maintainers: record the best rules of the suite in the package.",
)  # fmt: skip
@options.json
@options.quiet
def command(output: Path | None, jobs: int | None, write_shipped: bool, **given: Any) -> None:
    """Measure policies on a suite of scenarios against the best rules there are.

    All policies meet the very same requests. The best single rule and the best rule of each
    scenario are chosen on tuning seeds, and beaten or not on evaluation seeds.

    RUN, with --all-checkpoints, is the folder of a training run.
    """
    from tailrace.evaluate.judge import baselines, results
    from tailrace.evaluate.judge.suite import evaluate
    from tailrace.terminal.evaluations import print_evaluation

    with console.progress("measuring capacity"):
        plan = plan_of(**given)
    with _folder(output) as folder, _interruptible(plan, output) as note:
        total = sum(batch.size for batch in plan.batches)
        with console.progress("simulating", total) as update:

            def progress(done: int, kept: int) -> None:
                note(done, kept)
                update(done)

            found = evaluate(plan, folder / "cells", jobs=jobs, progress=progress)
        if output is not None:
            results.write(found, output)
    if write_shipped:
        of_each = dict(zip(found.grid.scenarios, found.best_of_each, strict=True))
        baselines.record_best(plan.suite, found.best_single, of_each)
    console.show(
        results.results_of(found), lambda screen: print_evaluation(screen, found), results.as_text
    )
    if output is not None and not console.is_quiet():
        click.echo(f"written to {output / results.PARQUET} and {output / results.JSON}", err=True)


def plan_of(
    run: Path | None,
    all_checkpoints: bool,
    suite: str | None,
    scenario_names: tuple[str, ...],
    policies: tuple[str, ...],
    against: tuple[str, ...],
    seed_count: int | None,
    first_seed: int,
    selection_seeds: int,
    purpose: str | None,
    requests: int | None,
    warmup: float,
    ttft_limit_s: float,
) -> "EvaluationPlan":
    """Make a plan of the options; raises before any work is done if they cannot be met."""
    from tailrace.evaluate.judge import baselines, checkpoints
    from tailrace.evaluate.judge import suite as suites
    from tailrace.evaluate.measure.cells import Measure

    if suite is not None and scenario_names:
        raise TailraceError("--suite and --scenario both say what to run; give one of the two")
    if all_checkpoints != (run is not None):
        raise TailraceError(
            "to rank the checkpoints of a training run, give its folder and --all-checkpoints"
        )
    chosen, label = list(scenario_names), "custom"
    if run is not None and suite is None and not chosen:
        chosen, label = checkpoints.run_scenarios(run), f"run {run.name}"
    if not chosen:
        label = suite or DEFAULT_SUITE
        chosen = list(suites.load_suite(label).scenarios)
    found = suites.load_scenarios(chosen, requests)
    tested = baselines.subjects(policies, found[0]) if run is None or policies else []
    if run is not None:
        tested = [*checkpoints.run_checkpoints(run, found[0]), *tested]
    against = against or _usual_baselines(run, scenario_names)
    everybody = baselines.gathered(tested, baselines.baselines_of(against, found[0]))
    everybody, left_out = suites.without_what_cannot_run(everybody, found)
    if left_out:
        click.echo(f"left out on the reference engine: {', '.join(left_out)}", err=True)
    if not tested:
        click.echo(
            "no policy is under test: this installation comes without the trained policy "
            "'tailrace'; name one with -p",
            err=True,
        )
    kind = purpose or ("tuning" if run is not None else "evaluation")
    count = seed_count or (DEFAULT_SEEDS if run is None else DEFAULT_RANKING_SEEDS)
    take = suites.evaluation_seeds if kind == "evaluation" else suites.ranking_seeds
    return suites.EvaluationPlan(
        label,
        tuple(found),
        tuple(everybody),
        tested[0].label if tested and run is None else None,
        take(count, first_seed),
        suites.selection_seeds(selection_seeds),
        Measure(warmup, ttft_limit_s),
    )


def _usual_baselines(run: Path | None, scenario_names: tuple[str, ...]) -> tuple[str, ...]:
    """Baselines if none are named: all, but the best known ones will do for single scenarios."""
    from tailrace.evaluate.judge.baselines import recorded_best

    if run is not None:
        return ("rules", "tuned", "learned")
    return tuple((scenario_names and recorded_best(scenario_names)) or ("all",))


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """The folder of the cells: the user's own, or one that is gone afterwards."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="tailrace-") as name:
            yield Path(name)
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TailraceError(f"cannot write to folder {output}: {error.strerror or error}") from None
    yield output


@contextmanager
def _interruptible(
    plan: "EvaluationPlan", output: Path | None
) -> Iterator[Callable[[int, int], None]]:
    """Say on Ctrl-C what is kept, and on the way what was there already."""
    state = {"done": 0, "shown": 0}

    def note(done: int, kept: int) -> None:
        if kept and not state["shown"]:
            state["shown"] = 1
            click.echo(f"{kept} cells are in {output} already", err=True)
        state["done"] = done

    try:
        yield note
    except (KeyboardInterrupt, click.Abort):
        if output is not None:
            total = sum(batch.size for batch in plan.batches)
            click.echo(
                f"at least {state['done']} of {total} cells are kept in {output}; "
                "the same command goes on from there",
                err=True,
            )
        raise
