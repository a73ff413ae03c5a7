"""``tailrace plan``: the fewest replicas, or the cheapest mix, that keeps an SLO."""

from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.capacity import objective_options, take_objectives
from tailrace.cli.options import option
from tailrace.config import Replica, parse
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.evaluate.search.sizing import Kind

USUAL = ("tailrace", "load_aware", "llm_d_sticky", "lmetric", "least_outstanding", "round_robin")


@options.command("plan")
@options.scenario_options
@option(
    "-p", "--policy", "policies", multiple=True, default=USUAL, shell_complete=names.policies,
    help="Policy to plan for; may be repeated. The saving is that of the first.",
)  # fmt: skip
@option(
    "--kind", "kinds", multiple=True, metavar="DEVICE[*SPEED][=PRICE]",
    help="A kind of replica that can be had (see `tailrace devices`) and what one costs; may be "
    "repeated, then the cheapest mix is looked for. [default: the cluster's first replica]",
)  # fmt: skip
@option(
    "--most", type=click.IntRange(1, 1024), default=64, metavar="N", help="Most replicas to try."
)
@option(
    "--seeds", "seed_count", type=click.IntRange(1, 1000), default=3, metavar="N",
    help="Tuning seeds; the objectives must hold on each.",
)  # fmt: skip
@option(
    "--order", "with_order", is_flag=True,
    help="Also each router with its tuned order (POLICY+order:tuned), where it has one; needs "
    "servers that serve by priority.",
)  # fmt: skip
@objective_options
@options.jobs
@options.json
@options.quiet
def command(
    policies: tuple[str, ...],
    kinds: tuple[str, ...],
    most: int,
    seed_count: int,
    with_order: bool,
    jobs: int | None,
    **settings: Any,
) -> None:
    """Find the smallest or cheapest cluster for an SLO at a rate.

    For example: tailrace plan --workload sessions-hot --rate 60 --ttft-p99-s 1 --order
    """
    from tailrace.evaluate.search.sizing import Kind, Wanted, plan, targets_s
    from tailrace.seeds import Purpose, seeds
    from tailrace.terminal.plans import print_plan

    objectives = take_objectives(settings)
    scenario = options.take_scenario(settings)
    if scenario.workload.rate is None:
        raise TailraceError(
            "plan needs --rate (requests/s); --load is relative and cannot size a cluster"
        )
    first = scenario.cluster.replicas[0].model_copy(update={"count": 1})
    offered = [_kind(text, first) for text in kinds] or [Kind(first.device, first)]
    wanted = Wanted(
        scenario,
        objectives,
        tuple(seeds(Purpose.TUNING, seed_count)),
        most,
        targets_s(scenario, objectives),
    )
    policies = tuple(dict.fromkeys(policies))
    if with_order:
        policies = _with_orders(policies)
    with console.progress("searching", len(policies)) as update:
        needs = plan(wanted, offered, policies, jobs=jobs, progress=update)
    found = {"kinds": [kind.name for kind in offered], "objectives": objectives, "needs": needs}
    console.show(found, lambda screen: print_plan(screen, needs, offered, wanted))


def _with_orders(policies: tuple[str, ...]) -> tuple[str, ...]:
    """Return policies, each followed by itself with a tuned order if it has one."""
    from tailrace.policy.registry import ORDER_SUFFIX
    from tailrace.policy.shipped import TUNED_SUFFIX, tuned_constants

    tuned = tuned_constants()
    found = [
        each
        for policy in policies
        for each in (policy, policy + ORDER_SUFFIX)
        if each == policy or each in tuned
    ]
    if len(found) == len(policies):
        known = ", ".join(n.removesuffix(ORDER_SUFFIX) for n in tuned if n.endswith(ORDER_SUFFIX))
        raise TailraceError(f"--order: none of these policies has a tuned order, only: {known}")
    return tuple(each if each in policies else each + TUNED_SUFFIX for each in found)


def _kind(text: str, first: Replica) -> "Kind":
    """Read DEVICE[*SPEED][=PRICE]; all else is as in the cluster's first replica."""
    from tailrace.evaluate.search.sizing import Kind
    from tailrace.view import devices

    name, _, price = text.partition("=")
    device, _, speed = name.partition("*")
    devices.get(device)
    like = first.model_dump() | {"device": device, "cost": None, "num_blocks": None}
    try:
        factor, cost = float(speed or 1), float(price or 1)
        if not 0 < cost < float("inf"):
            raise ValueError
    except ValueError:
        raise TailraceError(
            f"cannot read --kind {text}: write DEVICE, DEVICE=PRICE or DEVICE*SPEED=PRICE, "
            "for instance a100-llama3-8b=2.5"
        ) from None
    return Kind(name, parse(Replica, like | {"speed": factor}), cost)
