"""``tailrace inspect``: look into a trained policy."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, SEED, option

if TYPE_CHECKING:
    from rich.console import Console


@options.command("inspect")
@click.argument("policy")
@option(
    "--scenario", "scenario_names", multiple=True, metavar="NAME", shell_complete=names.scenarios,
    help="Shipped scenario to play, or a scenario's .toml file; may be repeated. "
    "[default: demo, or none with --state]",
)  # fmt: skip
@option(
    "--requests", type=click.IntRange(10, 1_000_000), default=3000, metavar="N",
    help="Requests per scenario.",
)  # fmt: skip
@option("--seed", type=SEED, help="Seed of the traffic. [default: the first tuning seed]")
@option(
    "--states", type=click.IntRange(2, 100_000), default=1000, metavar="N",
    help="Decisions to look at per scenario.",
)  # fmt: skip
@option(
    "--state", "state_files", multiple=True, type=FILE,
    help="A state in TOML (see examples/states): what it does there and why; may be repeated.",
)  # fmt: skip
@option(
    "--all", "all_features", is_flag=True, section=OUTPUT,
    help="Show all features, not just the most important, and the settings of its training.",
)  # fmt: skip
@option(
    "--plot", type=FILE, section=OUTPUT, metavar="FILE|FOLDER",
    help="Draw all into one FILE (.png, .svg or .pdf) or each picture into FOLDER. Needs "
    "tailrace[plots].",
)  # fmt: skip
@options.json
@options.quiet
def command(
    policy: str,
    scenario_names: tuple[str, ...],
    requests: int,
    seed: int | None,
    states: int,
    state_files: tuple[Path, ...],
    all_features: bool,
    plot: Path | None,
) -> None:
    """Show what a trained policy looks at and how it decides.

    POLICY is a .tailrace file, or `tailrace`, the policy that ships with the package.

    What its file says, which features it reacts to, where its attention goes, how it spreads
    requests, how often it agrees with each rule, and what it does in given states.
    """
    from tailrace import scenario as scenarios
    from tailrace.evaluate.explain.explain_state import explain_state
    from tailrace.evaluate.explain.inspect import description, inspect, learned, parameters
    from tailrace.evaluate.explain.state_file import read
    from tailrace.seeds import Purpose, seeds
    from tailrace.terminal.inspection_plots import check_plot, plot_inspection
    from tailrace.terminal.inspections import print_about, print_explanation, print_inspection

    chosen = learned(policy)
    if not scenario_names and not state_files:
        scenario_names = ("demo",)
    worlds = [
        scenarios.load(name).with_workload(requests=requests)
        for name in dict.fromkeys(scenario_names)
    ]
    given = [(path.stem, read(path)) for path in state_files]
    if plot is not None:
        check_plot(plot)
    found = None
    if worlds:
        traffic_seed = seeds(Purpose.TUNING, 1)[0] if seed is None else seed
        with console.progress("looking", len(worlds) + 1) as update:
            found = inspect(chosen, worlds, traffic_seed, states=states, progress=update)
    explanations = [explain_state(chosen, state, name) for name, state in given]
    if plot is not None:
        plot_inspection(found, explanations, plot)

    def tables(screen: "Console") -> None:
        if found is not None:
            print_inspection(screen, found, all_features=all_features)
        elif all_features:
            print_about(screen, chosen.name, parameters(chosen), description(chosen))
        for number, one in enumerate(explanations):
            if number or found is not None or all_features:
                screen.print()
            print_explanation(screen, one)

    console.show({"inspection": found, "states": explanations}, tables)
