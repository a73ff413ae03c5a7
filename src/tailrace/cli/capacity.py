"""``tailrace capacity``: the highest load a cluster holds within an SLO."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace import scenario as scenarios
from tailrace.cli import console, names
from tailrace.cli.options import (
    SEED,
    F,
    SectionedCommand,
    SectionOption,
    json_option,
    quiet_option,
    scenario_options,
    take_scenario,
)
from tailrace.config import Scenario
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.evaluate.search.capacity import ServiceObjective

_SLO = "Objectives (all must hold; default: --attainment 0.99)"
_SECONDS: dict[str, Any] = {
    "type": float,
    "metavar": "SECONDS",
    "cls": SectionOption,
    "section": _SLO,
}


_OBJECTIVE_OPTIONS = (
    click.option(
        "--attainment", type=float, metavar="SHARE", cls=SectionOption, section=_SLO,
        help="Least share of requests that meet both of their targets.",
    ),
    click.option("--ttft-p99-s", help="Most for the P99 of the time to first token.", **_SECONDS),
    click.option("--tpot-p99-s", help="Most for the P99 of the time per output token.", **_SECONDS),
    click.option("--e2e-p99-s", help="Most for the P99 of the end-to-end time.", **_SECONDS),
    click.option(
        "--scheduling-delay-p99-s", help="Most for the P99 of the scheduling delay.", **_SECONDS
    ),
)  # fmt: skip


def objective_options(function: F) -> F:
    """Add one option per kind of objective."""
    for decorator in reversed(_OBJECTIVE_OPTIONS):
        function = decorator(function)
    return function


def take_objectives(params: dict[str, Any]) -> "tuple[ServiceObjective, ...]":
    """Take what :func:`objective_options` added out of a command's parameters."""
    from tailrace.evaluate.search.capacity import OBJECTIVES, ServiceObjective

    given = {kind: params.pop(kind) for kind in OBJECTIVES}
    limits = [(kind, limit) for kind, limit in given.items() if limit is not None]
    return tuple(ServiceObjective(kind, limit) for kind, limit in limits or [("attainment", 0.99)])


@click.command("capacity", cls=SectionedCommand)
@scenario_options
@click.option(
    "-p", "--policy", default="load_aware", show_default=True, cls=SectionOption,
    shell_complete=names.policies, help="Router (see `tailrace policies`).",
)  # fmt: skip
@click.option(
    "--seed", type=SEED, default=0, show_default=True, cls=SectionOption,
    help="Seed of traffic and ties in the search.",
)  # fmt: skip
@click.option(
    "--saturation", is_flag=True, cls=SectionOption,
    help="Measure the saturation throughput instead, to which `load` refers.",
)  # fmt: skip
@click.option(
    "--write", is_flag=True, cls=SectionOption,
    help="With --saturation: store it in the file of --config.",
)  # fmt: skip
@click.option(
    "--write-shipped", is_flag=True, hidden=True, cls=SectionOption,
    help="For maintainers: store it in the file of the shipped --scenario.",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(1e-4, 0.5), default=0.01, show_default=True,
    cls=SectionOption, help="Relative precision of the search.",
)  # fmt: skip
@objective_options
@json_option
@quiet_option
def command(
    policy: str,
    seed: int,
    saturation: bool,
    write: bool,
    write_shipped: bool,
    tolerance: float,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Find the highest load a cluster holds within an SLO."""
    for option in ("rate", "load"):
        if settings[f"workload__{option}"] is not None:
            raise TailraceError(f"capacity looks for the {option} itself; leave --{option} out")
    config, shipped = settings["config"], settings["scenario"]
    objectives = take_objectives(settings)
    scenario = take_scenario(settings)
    if (write or write_shipped) and not saturation:
        raise TailraceError("--write stores the saturation throughput; give --saturation with it")
    show = not (as_json or quiet)
    if saturation:
        target = None
        if write_shipped:
            target = _own_file(shipped and scenarios.find(shipped), scenario, "--scenario")
        elif write:
            target = _own_file(config, scenario, "--config")
            if target.resolve().parent == scenarios.SHIPPED.resolve():
                raise TailraceError(f"{target} is a shipped scenario; write to a copy of it")
        _saturation(scenario, target, as_json=as_json, show=show)
        return
    from tailrace.evaluate.search.capacity import max_load
    from tailrace.terminal.tables import print_max_load

    with console.own_output(), console.progress("searching", enabled=show) as update:
        steps = iter(range(1, 1_000_000))
        found = max_load(
            scenario,
            policy,
            objectives,
            seed=seed,
            tolerance=tolerance,
            progress=lambda _: update(next(steps)),
        )
    if as_json:
        console.print_json(found)
    else:
        print_max_load(console.stdout(), found)


def _own_file(path: Path | None, scenario: Scenario, option: str) -> Path:
    """Return the file to store the capacity in; it must describe this very cluster and traffic."""
    if path is None:
        raise TailraceError(f"--write needs the {option} whose file to write to")
    if not scenarios.same_capacity(scenarios.load(path), scenario):
        raise TailraceError(
            f"{path} describes another cluster or traffic than the options; "
            "write its capacity without them"
        )
    return path


def _saturation(scenario: Scenario, path: Path | None, *, as_json: bool, show: bool) -> None:
    from tailrace.saturation import saturation_rps

    with console.progress("measuring", enabled=show):
        measured = saturation_rps(scenario)
    if path is not None:
        scenarios.write_capacity(path, measured)
    if as_json:
        console.print_json({"saturation_rps": measured, "written_to": path})
        return
    size = scenario.cluster.size
    click.echo(
        f"{measured:.4g} requests/s ({measured / size:.3g} per replica) with "
        f"{scenario.workload.name} on {size} replica{'s' * (size > 1)}"
    )
    if path is not None:
        click.echo(f"written to {path}")
