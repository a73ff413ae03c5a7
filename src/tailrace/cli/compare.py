"""``tailrace compare``: many policies on identical arrivals."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import OUTPUT, PLOT, SEED, F, option
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.config import Scenario, VidurSettings

ALL = "all"
SIM, VIDUR = "sim", "vidur"


def vidur_engine(function: F) -> F:
    """Let ``--engine``, which is made from the settings, name the real Vidur as well."""
    params: list[click.Parameter] = function.__click_params__  # type: ignore[attr-defined]
    option = next(p for p in params if p.name == "engine__engine")
    assert isinstance(option, click.Option)
    assert isinstance(option.type, click.Choice)
    option.type = click.Choice([*option.type.choices, SIM, VIDUR])
    option.help = (
        f"{option.help} sim is the same as auto; vidur is the real package "
        "(needs tailrace[vidur]; slow, so at most 500 requests unless --requests is given)."
    )
    return function


@options.command("compare")
@vidur_engine
@options.scenario_options
@option(
    "-p", "--policy", "policies", multiple=True, shell_complete=names.policies,
    help="Policy to compare: a name, a file, or `all` (tailrace and every rule); may be repeated. "
    "[default: all]",
)  # fmt: skip
@option(
    "--reference", default="least_outstanding", shell_complete=names.policies,
    help="Policy the others are set against.",
)  # fmt: skip
@option(
    "--seeds", "seed_count", type=click.IntRange(1, 10_000), default=5, metavar="N",
    help="How many seeds, that is, different traffic.",
)  # fmt: skip
@option(
    "--seed", "first_seed", type=SEED,
    help="The first of the seeds. [default: the first tuning seed; evaluation has its own]",
)  # fmt: skip
@options.vidur
@options.jobs
@option("--wide", is_flag=True, section=OUTPUT, help="Show all columns.")
@option(
    "--plot", type=PLOT, section=OUTPUT,
    help="Draw the comparison; FILE ends in .png, .svg or .pdf. Needs tailrace[plots].",
)  # fmt: skip
@options.warmup
@options.json
@options.quiet
def command(
    policies: tuple[str, ...],
    reference: str,
    seed_count: int,
    first_seed: int | None,
    vidur_args: str | None,
    vidur_imports: tuple[str, ...],
    jobs: int | None,
    wide: bool,
    plot: Path | None,
    warmup: float,
    **settings: Any,
) -> None:
    """Run many policies on the same requests, and rank them by cost."""
    own = options.take_vidur(vidur_args, vidur_imports)
    engine = settings["engine__engine"] or (VIDUR if own.arguments else None)
    if own.arguments and engine != VIDUR:
        raise TailraceError(f"--vidur-args are played by --engine vidur, not by {engine}")
    if engine in (SIM, VIDUR):
        settings["engine__engine"] = None
    few = engine == VIDUR and settings["workload__requests"] is None
    scenario = options.take_scenario(settings)
    from tailrace.evaluate.judge.compare import compare
    from tailrace.evaluate.measure.runner import default_policies, policy_for
    from tailrace.saturation import with_capacity
    from tailrace.seeds import Purpose, seeds
    from tailrace.terminal.plots import plot_comparison
    from tailrace.terminal.tables import print_comparison

    notes: list[str] = []
    if engine == VIDUR:
        from tailrace.integrations.vidur import compare as in_vidur

        scenario, notes = _for_vidur(scenario, own, few)
        policy_for = in_vidur.vidur_policy
    chosen: list[str] = []
    left_out: list[str] = []
    for name in policies or (ALL,):
        if name == ALL:
            if engine == VIDUR:
                builtin, left_out = in_vidur.default_policies()
            else:
                builtin, left_out = default_policies(scenario)
            chosen += builtin
        else:
            chosen.append(name)
    with console.own_output():
        for name in (*chosen, reference):
            policy_for(scenario, name)
    if first_seed is None:
        numbers = seeds(Purpose.TUNING, seed_count)
    else:
        numbers = list(range(first_seed, first_seed + seed_count))
    if left_out:
        where = "in vidur" if engine == VIDUR else "on the reference engine"
        notes.append(f"left out {where}: {', '.join(left_out)}")
    for note in notes:
        click.echo(note, err=True)
    with console.progress("measuring capacity"):
        scenario = with_capacity(scenario)
    with console.progress("simulating", len({*chosen, reference}) * seed_count) as update:
        play = partial(in_vidur.compare, own=own) if engine == VIDUR else compare
        comparison = play(
            scenario, chosen, numbers, jobs, update, reference=reference, warmup_fraction=warmup
        )
    if plot is not None:
        plot_comparison(comparison, plot)
    console.show(comparison, lambda screen: print_comparison(screen, comparison, wide=wide))


def _for_vidur(
    scenario: "Scenario", own: "VidurSettings", few: bool
) -> "tuple[Scenario, list[str]]":
    """Return the scenario as Vidur can play it, and what was changed; ``few``: requests."""
    from tailrace.integrations.vidur import require
    from tailrace.integrations.vidur.compare import DEFAULT_REQUESTS
    from tailrace.integrations.vidur.setup import setup_of

    require()
    setup, notes = setup_of(scenario, own if own.arguments else None)
    scenario = setup.scenario
    if few and scenario.workload.requests > DEFAULT_REQUESTS:
        scenario = scenario.with_workload(requests=DEFAULT_REQUESTS)
        notes = [*notes, f"vidur is slow: {DEFAULT_REQUESTS} requests; --requests gives more"]
    return scenario, notes
