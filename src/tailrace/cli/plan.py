"""``tailrace plan``: the fewest replicas, or the cheapest mix, that keeps an SLO."""

from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names
from tailrace.cli.capacity import objective_options, take_objectives
from tailrace.cli.options import (
    SectionedCommand,
    SectionOption,
    jobs_option,
    json_option,
    quiet_option,
    scenario_options,
    take_scenario,
)
from tailrace.config import Replica, Scenario
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.evaluate.search.sizing import Kind

USUAL = ("tailrace", "load_aware", "llm_d_sticky", "lmetric", "least_outstanding", "round_robin")


@click.command("plan", cls=SectionedCommand)
@scenario_options
@click.option(
    "-p", "--policy", "policies", multiple=True, default=USUAL, show_default=True,
    cls=SectionOption, shell_complete=names.policies,
    help="Router to plan for; may be repeated. The saving is that of the first.",
)  # fmt: skip
@click.option(
    "--kind", "kinds", multiple=True, metavar="DEVICE[*SPEED][=PRICE]", cls=SectionOption,
    help="A kind of replica that can be had (see `tailrace devices`) and what one costs; may be "
    "repeated, then the cheapest mix is looked for. [default: the cluster's first replica]",
)  # fmt: skip
@click.option(
    "--most", type=click.IntRange(1, 1024), default=64, show_default=True, cls=SectionOption,
    metavar="N", help="Most replicas to try.",
)  # fmt: skip
@click.option(
    "--seeds", "seed_count", type=click.IntRange(1, 1000), default=3, show_default=True,
    cls=SectionOption, metavar="N", help="Tuning seeds; the objectives must hold on each.",
)  # fmt: skip
@objective_options
@jobs_option
@json_option
@quiet_option
def command(
    policies: tuple[str, ...],
    kinds: tuple[str, ...],
    most: int,
    seed_count: int,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Find the fewest replicas, or the cheapest mix of kinds, that keeps an SLO at a rate.

    For example: tailrace plan --workload sessions-hot --rate 60 --ttft-p99-s 1
    """
    from tailrace.evaluate.search.sizing import Wanted, plan, targets_s
    from tailrace.seeds import Purpose, seeds
    from tailrace.terminal.plans import print_plan

    objectives = take_objectives(settings)
    scenario = take_scenario(settings)
    if scenario.workload.rate is None:
        raise TailraceError("a plan is for a rate: give --rate in requests/s (a load has no size)")
    offered = [_kind(text, scenario) for text in kinds] or [_own_kind(scenario)]
    wanted = Wanted(
        scenario,
        objectives,
        tuple(seeds(Purpose.TUNING, seed_count)),
        most,
        targets_s(scenario, objectives),
    )
    show = not (as_json or quiet)
    policies = tuple(dict.fromkeys(policies))
    with (
        console.own_output(),
        console.progress("searching", len(policies), enabled=show) as update,
    ):
        needs = plan(wanted, offered, policies, jobs=jobs, progress=update)
    if as_json:
        kind_names = [kind.name for kind in offered]
        console.print_json({"kinds": kind_names, "objectives": objectives, "needs": needs})
    else:
        print_plan(console.stdout(), needs, offered, wanted)


def _own_kind(scenario: Scenario) -> "Kind":
    from tailrace.evaluate.search.sizing import Kind

    first = scenario.cluster.replicas[0]
    return Kind(first.device, first.model_copy(update={"count": 1}))


def _kind(text: str, scenario: Scenario) -> "Kind":
    """Read DEVICE[*SPEED][=PRICE]; all else is as in the cluster's first replica."""
    from tailrace.evaluate.search.sizing import Kind
    from tailrace.view import devices

    name, _, price = text.partition("=")
    device, _, speed = name.partition("*")
    devices.get(device)
    like = scenario.cluster.replicas[0].model_dump() | {
        "device": device, "cost": None, "num_blocks": None, "count": 1,
    }  # fmt: skip
    try:
        factor, cost = float(speed or 1), float(price or 1)
        if not 0 < cost < float("inf"):
            raise ValueError
    except ValueError:
        raise TailraceError(
            f"cannot read --kind {text}: write DEVICE, DEVICE=PRICE or DEVICE*SPEED=PRICE, "
            "for instance a100-llama3-8b=2.5"
        ) from None
    from tailrace.config import parse

    return Kind(name, parse(Replica, like | {"speed": factor}), cost)
