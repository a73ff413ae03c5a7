"""``tailrace inspect``: look into a trained policy."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tailrace.cli import console, names
from tailrace.cli.options import (
    OUTPUT,
    SEED,
    SectionedCommand,
    SectionOption,
    json_option,
    quiet_option,
)

if TYPE_CHECKING:
    from tailrace.config import Scenario


@click.command("inspect", cls=SectionedCommand)
@click.argument("policy")
@click.option(
    "--scenario", "scenario_names", multiple=True, metavar="NAME", cls=SectionOption,
    shell_complete=names.scenarios,
    help="Shipped scenario to play, or a scenario's .toml file; may be repeated. "
    "[default: demo, or none with --state]",
)  # fmt: skip
@click.option(
    "--requests", type=click.IntRange(10, 1_000_000), default=3000, show_default=True,
    cls=SectionOption, metavar="N", help="Requests per scenario.",
)  # fmt: skip
@click.option(
    "--seed", type=SEED, cls=SectionOption,
    help="Seed of the traffic. [default: the first tuning seed]",
)  # fmt: skip
@click.option(
    "--states", type=click.IntRange(2, 100_000), default=1000, show_default=True,
    cls=SectionOption, metavar="N", help="Decisions to look at per scenario.",
)  # fmt: skip
@click.option(
    "--state", "state_files", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    cls=SectionOption,
    help="A state in TOML (see examples/states): what it does there and why; may be repeated.",
)  # fmt: skip
@click.option(
    "--all", "all_features", is_flag=True, cls=SectionOption, section=OUTPUT,
    help="Show all features, not just the most important.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(path_type=Path), cls=SectionOption, section=OUTPUT,
    metavar="FILE|FOLDER",
    help="Draw all into one FILE (.png, .svg or .pdf) or each picture into FOLDER. Needs "
    "tailrace[plots].",
)  # fmt: skip
@json_option
@quiet_option
def command(
    policy: str,
    scenario_names: tuple[str, ...],
    requests: int,
    seed: int | None,
    states: int,
    state_files: tuple[Path, ...],
    all_features: bool,
    plot: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Look into a trained POLICY: a .tailrace file, or `tailrace`, the one that ships.

    What its file says, which features it reacts to, where its attention goes, how it spreads
    requests, how often it agrees with each rule, and what it does in given states.
    """
    from tailrace.evaluate.explain.explain_state import explain_state
    from tailrace.evaluate.explain.inspect import description, inspect, learned, parameters
    from tailrace.evaluate.explain.state_file import read
    from tailrace.seeds import Purpose, seeds
    from tailrace.terminal.inspection_plots import check_plot, plot_inspection
    from tailrace.terminal.inspections import print_about, print_explanation, print_inspection

    chosen = learned(policy)
    if not scenario_names and not state_files:
        scenario_names = ("demo",)
    worlds = [_scenario(name, requests) for name in dict.fromkeys(scenario_names)]
    given = [(path.stem, read(path)) for path in state_files]
    if plot is not None:
        check_plot(plot)
    found = None
    done = 0
    with console.progress(
        "looking", len(worlds) + 1, enabled=bool(worlds) and not (as_json or quiet)
    ) as update:

        def advance() -> None:
            nonlocal done
            done += 1
            update(done)

        if worlds:
            traffic_seed = seeds(Purpose.TUNING, 1)[0] if seed is None else seed
            found = inspect(chosen, worlds, traffic_seed, states=states, progress=advance)
    explanations = [explain_state(chosen, state, name) for name, state in given]
    if plot is not None:
        plot_inspection(found, explanations, plot)
    if as_json:
        console.print_json({"inspection": found, "states": explanations})
        return
    output = console.stdout()
    if found is None:
        print_about(output, chosen.name, parameters(chosen), description(chosen))
    else:
        print_inspection(output, found, all_features=all_features)
    for one in explanations:
        output.print()
        print_explanation(output, one)


def _scenario(name: str, requests: int) -> "Scenario":
    from tailrace import scenario as scenarios

    found = scenarios.load(name)
    workload = found.workload.model_copy(update={"requests": requests})
    return found.model_copy(update={"workload": workload})
