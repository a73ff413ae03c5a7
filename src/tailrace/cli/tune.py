"""``tailrace tune``: constants for the rules, and the two simple learned baselines."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names
from tailrace.cli.options import (
    SectionedCommand,
    SectionOption,
    jobs_option,
    json_option,
    quiet_option,
    workers_option,
)
from tailrace.errors import TailraceError, unknown_name

if TYPE_CHECKING:
    from tailrace.evaluate.measure.cells import Traffic
    from tailrace.evaluate.search.tune import Tuned


@click.command("tune", cls=SectionedCommand)
@click.argument("targets", nargs=-1, metavar="[NAME]...")
@click.option(
    "--suite", default="standard", show_default=True, metavar="NAME", cls=SectionOption,
    help="Scenarios to tune on.",
)  # fmt: skip
@click.option(
    "--scenario", "scenario_names", metavar="NAME", multiple=True, cls=SectionOption,
    shell_complete=names.scenarios, help="Scenario instead of a suite; may be repeated.",
)  # fmt: skip
@click.option(
    "--seeds", "seed_count", type=click.IntRange(1, 1000), default=2, show_default=True,
    cls=SectionOption, metavar="N", help="How many seeds; tuning seeds (predict_greedy: training).",
)  # fmt: skip
@click.option(
    "--requests", type=click.IntRange(10, 1_000_000), default=10_000, show_default=True,
    cls=SectionOption, metavar="N", help="Requests of each run.",
)  # fmt: skip
@click.option(
    "--budget", type=click.IntRange(2, 100_000), default=64, show_default=True, cls=SectionOption,
    metavar="N", help="Candidates tried for a rule with several constants.",
)  # fmt: skip
@click.option(
    "--generations", type=click.IntRange(1, 100_000), default=100, show_default=True,
    cls=SectionOption, metavar="N", help="Generations of candidates for linear_es.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, cls=SectionOption,
    metavar="N", help="Rounds of learning for predict_greedy.",
)  # fmt: skip
@jobs_option
@workers_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), cls=SectionOption, section="Output",
    metavar="FILE",
    help="Write there: constants to a .json (rules in it that are not tuned now stay), linear_es "
    "or predict_greedy to a .tailrace.",
)  # fmt: skip
@click.option(
    "--write-shipped", is_flag=True, hidden=True, cls=SectionOption,
    help="For maintainers: write to the package's own files.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    targets: tuple[str, ...], output: Path | None, write_shipped: bool, as_json: bool, quiet: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Tune baselines on tuning seeds, so that they are at their best when beaten.

    NAME is a rule with constants, linear_es (a linear score over the observation, by CMA-ES) or
    predict_greedy (a supervised predictor of cost; needs tailrace[train]). Default: all rules with
    constants.
    """
    from tailrace.evaluate.search.tune import KNOBS
    from tailrace.policy import shipped

    for name in targets:
        if name not in (*KNOBS, *shipped.LEARNING):
            raise unknown_name("name to tune", name, [*KNOBS, *shipped.LEARNING])
    learning = [name for name in targets if name in shipped.LEARNING]
    if learning and len(targets) > 1:
        raise TailraceError(f"{learning[0]} is tuned by itself; leave the other names out")
    if write_shipped:
        output = shipped.TUNED_FILE
        if learning:
            output = shipped.FOLDER / f"{learning[0]}.tailrace"
    from tailrace.files import check_target

    if output is not None:
        check_target(output, (".tailrace",) if learning else (".json",))
    if learning:
        _tune_learning(learning[0], output, as_json=as_json, show=not (as_json or quiet), **given)
    else:
        _tune_rules(targets or tuple(KNOBS), output, as_json=as_json, quiet=quiet, **given)
        documented = shipped.FOLDER.parents[2] / "docs" / "results" / shipped.TUNED_FILE.name
        if write_shipped and documented.parent.is_dir():
            documented.write_bytes(shipped.TUNED_FILE.read_bytes())


def _traffics(
    suite: str, scenario_names: Sequence[str], requests: int, seeds: Sequence[int]
) -> "list[Traffic]":
    from tailrace.evaluate.judge.suite import load_scenarios, load_suite
    from tailrace.evaluate.measure.cells import Traffic
    from tailrace.saturation import resolve_rate

    found = load_scenarios(scenario_names or load_suite(suite).scenarios, requests)
    return [Traffic(s, resolve_rate(s), seed) for s in found for seed in seeds]


def _tune_rules(
    targets: Sequence[str], output: Path | None, *, as_json: bool, quiet: bool, suite: str,
    scenario_names: Sequence[str], seed_count: int, requests: int, budget: int, jobs: int | None,
    **_: Any,
) -> None:  # fmt: skip
    from tailrace.evaluate.judge.suite import TUNE_FROM
    from tailrace.evaluate.search.tune import TuningObjective, tune_rule
    from tailrace.evaluate.search.tuned import merge, record_of
    from tailrace.parallel import WorkerPool
    from tailrace.seeds import Purpose, seeds

    numbers = seeds(Purpose.TUNING, seed_count, TUNE_FROM)
    traffics = _traffics(suite, scenario_names, requests, numbers)
    conditions = {
        "suite": "custom" if scenario_names else suite,
        "scenarios": list(dict.fromkeys(t.scenario.name for t in traffics)),
        "seeds": numbers,
        "requests": requests,
    }
    found: dict[str, Tuned] = {}
    show = not (as_json or quiet)
    with WorkerPool(jobs) as pool, console.progress("tuning", len(targets), enabled=show) as update:
        objective = TuningObjective(traffics, pool)
        for name in targets:
            found[name] = tune_rule(name, objective, budget)
            update(len(found))
            if output is not None:
                merge(output, {name: record_of(name, found[name], conditions)})
    records = {name: record_of(name, tuned, conditions) for name, tuned in found.items()}
    if as_json:
        console.print_json({"rules": records})
        return
    from tailrace.terminal.listings import print_listing

    rows = [
        (name, f"{t.default_score:.3f}", f"{t.score:.3f}", records[name]["spec"])
        for name, t in found.items()
    ]
    print_listing(console.stdout(), ("rule", "score", "tuned", "policy"), rows)


def _tune_learning(
    name: str, output: Path | None, *, as_json: bool, show: bool, suite: str,
    scenario_names: Sequence[str], seed_count: int, requests: int, generations: int, rounds: int,
    jobs: int | None, **_: Any,
) -> None:  # fmt: skip
    from tailrace.evaluate.judge.suite import TUNE_FROM
    from tailrace.evaluate.search.tuned import save_linear, save_predictor
    from tailrace.parallel import WorkerPool
    from tailrace.policy.shipped import LINEAR
    from tailrace.seeds import Purpose, seeds

    if output is None:
        raise TailraceError(f"say with -o FILE.tailrace where to put {name}")
    purpose = Purpose.TUNING if name == LINEAR else Purpose.TRAINING
    traffics = _traffics(suite, scenario_names, requests, seeds(purpose, seed_count, TUNE_FROM))
    total = generations if name == LINEAR else rounds
    with (
        WorkerPool(jobs) as pool,
        console.progress(f"tuning {name}", total, enabled=show) as update,
    ):
        if name == LINEAR:
            metrics = save_linear(output, traffics, pool, generations, update)
        else:
            metrics = save_predictor(output, traffics, pool, rounds, update)
    if as_json:
        console.print_json({"name": name, "file": output, **metrics})
    else:
        facts = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        click.echo(f"{name} written to {output}: {facts}")
