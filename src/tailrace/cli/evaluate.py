"""``tailrace evaluate``: policies x scenarios x seeds, with honest statistics."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, option
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.evaluate.judge.suite import EvaluationPlan

DEFAULT_SUITE = "standard"
DEFAULT_RANKING_SEEDS = 5
KEPT_NOTE = "Baselines may have been measured with earlier sources (--keep-baselines)."


@options.command("evaluate")
@click.argument("run", required=False, type=FILE)
@option(
    "--all-checkpoints", is_flag=True,
    help="Rank every checkpoint of the training run RUN on the run's scenarios.",
)  # fmt: skip
@option(
    "--suite", metavar="NAME", shell_complete=names.suites,
    help=f"Scenarios to run: standard, holdout, classes (interactive, batch, tenants, deadlines), "
    f"or real (recorded traffic, needs --traces). "
    f"[default: {DEFAULT_SUITE}]",
)  # fmt: skip
@option(
    "--traces", type=FILE, metavar="FOLDER",
    help="Recorded traffic for --suite real: a folder of files that `tailrace workload import` "
    "reads, or one of them.",
)  # fmt: skip
@option(
    "--half", type=click.Choice(["train", "judge"]), default="judge",
    help="With --traces: which half of the recorded conversations, by a hash of their ids.",
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
    help="Baselines: all, rules, tuned, learned, look-ahead, ordered (with a tuned order or queue, "
    "no part of all), none, or a policy; may be repeated. "
    "[default: all; with --all-checkpoints or --traces all but look-ahead; with --scenario the "
    "best known]",
)  # fmt: skip
@option(
    "--seeds", "seed_count", type=click.IntRange(1, 10_000), metavar="N",
    help=f"How many seeds. [default: 20, for real 12; with --all-checkpoints "
    f"{DEFAULT_RANKING_SEEDS}]",
)  # fmt: skip
@option(
    "--first-seed", type=click.IntRange(0, 100_000_000), default=0, metavar="N",
    help="Begin with the N-th of the seeds: once results were looked at, judge what was changed "
    "since then on others.",
)  # fmt: skip
@option(
    "--selection-seeds", type=click.IntRange(1, 10_000), metavar="N",
    help="How many tuning seeds choose the best rules. [default: 5, for real 3]",
)  # fmt: skip
@option(
    "--purpose", type=click.Choice(["evaluation", "tuning"]),
    help="Which seeds to measure on. [default: evaluation; with --all-checkpoints tuning]",
)  # fmt: skip
@option(
    "--requests", type=click.IntRange(1, 50_000_000), metavar="N",
    help="Requests of every cell. [default: the scenario's, 10 000 or more; for real 3 000]",
)  # fmt: skip
@option(
    "--warmup", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE",
    help="Share of the first requests left out. [default: 0.1, for real 0.2]",
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
    "--keep-baselines", is_flag=True, section=OUTPUT,
    help="Reuse the baselines' cells in FOLDER although the simulator's or the rules' sources have "
    "changed since. For trying out policies; results.json says so.",
)  # fmt: skip
@option(
    "--write-shipped", is_flag=True, hidden=True,
    help="For maintainers: record the best rules of the suite in the package.",
)  # fmt: skip
@options.json
@options.quiet
def command(output: Path | None, jobs: int | None, write_shipped: bool, **given: Any) -> None:
    """Compare policies with all baselines on held-out traffic.

    All policies meet the very same requests. The best single rule and the best rule of each
    scenario are chosen on tuning seeds, and beaten or not on evaluation seeds.

    RUN, with --all-checkpoints, is the folder of a training run.
    """
    from tailrace.evaluate.judge import baselines, results
    from tailrace.evaluate.judge.suite import evaluate
    from tailrace.terminal.evaluations import print_evaluation

    with ExitStack() as stack:
        # Made late: a mistake in the options must leave nothing behind.
        make = cache(lambda: stack.enter_context(_folder(output)))
        with console.progress("measuring capacity") as update:
            plan = plan_of(**given, folder=make, jobs=jobs, progress=lambda _: update())
        folder = make()
        for note in plan.notes:
            click.echo(note, err=True)
        with _interruptible(plan, output) as note_cells:
            total = sum(batch.size for batch in plan.batches)
            with console.progress("simulating", total) as update:

                def progress(done: int, kept: int) -> None:
                    note_cells(done, kept)
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
    selection_seeds: int | None,
    purpose: str | None,
    requests: int | None,
    warmup: float | None,
    ttft_limit_s: float,
    traces: Path | None = None,
    half: str = "judge",
    keep_baselines: bool = False,
    folder: Callable[[], Path] = Path,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> "EvaluationPlan":
    """Make a plan of the options; raises before any work is done if they cannot be met.

    Recorded traffic is imported into a folder by ``jobs`` processes; ``progress`` gets what is
    being read.
    """
    from tailrace.evaluate.judge import baselines, checkpoints
    from tailrace.evaluate.judge import suite as suites
    from tailrace.evaluate.judge.recorded import Recorded, scenarios_of
    from tailrace.evaluate.measure.cells import Measure
    from tailrace.workload.recorded.conversations import Half

    if suite is not None and scenario_names:
        raise TailraceError("--suite and --scenario both say what to run; give one of the two")
    if all_checkpoints != (run is not None):
        raise TailraceError(
            "to rank the checkpoints of a training run, give its folder and --all-checkpoints"
        )
    chosen, label = list(scenario_names), "custom"
    if run is not None and suite is None and not chosen:
        chosen, label = checkpoints.run_scenarios(run), f"run {run.name}"
    usual = suites.Suite(name=label)
    if not chosen:
        label = suite or DEFAULT_SUITE
        usual = suites.load_suite(label)
    if (traces is not None) != usual.is_recorded:
        raise TailraceError("--suite real and --traces FOLDER belong together; give both")
    requests = requests or usual.requests
    if traces is not None:
        recorded = scenarios_of(
            traces, usual.clusters, Half(half), folder() / "traces",
            requests=requests or 3000, keep_capacities=keep_baselines,
            jobs=jobs, progress=progress,
        )  # fmt: skip
    else:
        names = chosen or suites.shipped_scenarios(usual)
        recorded = Recorded(tuple(suites.load_scenarios(names, requests)), (), ())
    found = recorded.scenarios
    tested = baselines.subjects(policies, found[0]) if run is None or policies else []
    if run is not None:
        tested = [*checkpoints.run_checkpoints(run, found[0]), *tested]
    against = against or _usual_baselines(run is not None or usual.is_recorded, scenario_names)
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
    kind = purpose or ("tuning" if run is not None or half == "train" else "evaluation")
    count = seed_count or (usual.seeds if run is None else DEFAULT_RANKING_SEEDS)
    take = suites.evaluation_seeds if kind == "evaluation" else suites.ranking_seeds
    return suites.EvaluationPlan(
        label,
        found,
        tuple(everybody),
        tested[0].label if tested and run is None else None,
        take(count, first_seed),
        suites.selection_seeds(selection_seeds or usual.selection_seeds),
        Measure(usual.warmup if warmup is None else warmup, ttft_limit_s),
        # Nothing may be chosen on the conversations that judge; training's own are free to use.
        recorded.others if half == "judge" else (),
        recorded.notes + (KEPT_NOTE,) * keep_baselines,
        keep_baselines,
    )


def _usual_baselines(long_runs: bool, scenario_names: tuple[str, ...]) -> tuple[str, ...]:
    """Baselines if none are named: all, but the best known ones will do for single scenarios."""
    from tailrace.evaluate.judge.baselines import recorded_best

    if long_runs:
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
