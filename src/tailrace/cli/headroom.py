"""``tailrace headroom``: what a reward leaves to be won above the best rule."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, PLOT, SEED, SectionedCommand, SectionOption, option
from tailrace.config import load_toml, parse
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.env.reward import RewardSettings

#: Name of a reward's table in a file of more settings.
SECTION = "reward"


#: Types of options whose setting is no number.
_TYPES: dict[Any, Any] = {str: click.STRING, bool: click.BOOL}


@cache
def _reward_options() -> tuple[click.Option, ...]:
    """One option per setting of a reward, described by the setting itself."""
    from tailrace.env.reward import RewardSettings

    found = []
    for field, info in RewardSettings.model_fields.items():
        text = " ".join((info.description or "").split())
        default = "none" if info.default is None else info.default
        found.append(
            SectionOption(
                [f"--reward-{field.replace('_', '-')}", f"{SECTION}__{field}"],
                type=_TYPES.get(info.annotation, click.FLOAT),
                help=f"{text} [default: {default}]".replace(" [default: none]", ""),
                section="Reward",
            )
        )
    return tuple(found)


class RewardCommand(SectionedCommand):
    """A command with an option per setting of a reward, imported when its options are needed."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own options and those of the reward."""
        return [*super().get_params(ctx), *_reward_options()]


@click.command("headroom", cls=RewardCommand)
@click.argument("policies", nargs=-1, metavar="[POLICY]...")
@option(
    "--scenario", "scenario_names", multiple=True, default=("demo",), metavar="NAME",
    shell_complete=names.scenarios,
    help="Shipped scenario, or a scenario's .toml file; may be repeated.",
)  # fmt: skip
@option(
    "--requests", type=click.IntRange(2, 1_000_000), default=1000, metavar="N",
    help="Requests per seed.",
)  # fmt: skip
@option(
    "--seeds", "seed_count", type=click.IntRange(1, 1000), default=3, metavar="N",
    help="How many seeds, that is, different traffic.",
)  # fmt: skip
@option(
    "--seed", "first_seed", type=SEED,
    help="The first of the seeds. [default: the first training seed; others are refused]",
)  # fmt: skip
@option(
    "--reward", "reward_file", type=FILE, section="Reward",
    help="Settings of the reward from a TOML file, at its top or in its table [reward].",
)  # fmt: skip
@option(
    "--plot", type=PLOT, section=OUTPUT,
    help="Draw reward and cost; FILE ends in .png, .svg or .pdf. Needs tailrace[plots].",
)  # fmt: skip
@options.json
@options.quiet
def command(
    policies: tuple[str, ...],
    scenario_names: tuple[str, ...],
    requests: int,
    seed_count: int,
    first_seed: int | None,
    reward_file: Path | None,
    plot: Path | None,
    **settings: Any,
) -> None:
    """Show how much better than the rules a policy could be.

    Plays all rules, both look-aheads and POLICY files under a reward, and judges the reward.

    It answers three questions: Is the best rule already the most that this reward can give? Do all
    policies get the same reward? Does it rank policies as the latency cost does?
    """
    reward = _take_reward(reward_file, settings)
    from tailrace import scenario as scenarios
    from tailrace.evaluate.search.headroom import headroom, players
    from tailrace.seeds import Purpose, require
    from tailrace.seeds import seeds as registered
    from tailrace.terminal.headrooms import plot_headroom, print_headrooms

    found_scenarios = [scenarios.load(name) for name in dict.fromkeys(scenario_names)]
    if first_seed is None:
        seeds = registered(Purpose.TRAINING, seed_count)
    else:
        seeds = [require(s, Purpose.TRAINING) for s in range(first_seed, first_seed + seed_count)]
    playing = players(policies)
    with console.progress("playing", len(playing) * len(found_scenarios)) as update:
        found = [
            headroom(scenario, reward, playing, seeds, decisions=requests, progress=update)
            for scenario in found_scenarios
        ]
    if plot is not None:
        plot_headroom(found, plot)
    console.show(found, lambda screen: print_headrooms(screen, found))


def _take_reward(file: Path | None, params: dict[str, Any]) -> "RewardSettings":
    """Take the reward's options out of a command's parameters and put them over the file's."""
    from tailrace.env.reward import RewardSettings

    data: dict[str, Any] = {} if file is None else load_toml(file)
    if SECTION in data:
        data = data[SECTION]
        if not isinstance(data, dict):
            raise TailraceError(f"{SECTION} in {file} must be a table of settings, got {data!r}")
    given = {name.removeprefix(f"{SECTION}__"): value for name, value in params.items()}
    return parse(RewardSettings, data | {k: v for k, v in given.items() if v is not None})
