"""``tailrace capacity``: the highest load a cluster holds within an SLO."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace import scenario as scenarios
from tailrace.cli import console, names, options
from tailrace.cli.options import SEED, option
from tailrace.config import Scenario
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.evaluate.search.capacity import ServiceObjective

_SLO = "Objectives (all must hold; default: --attainment 0.99)"
_SECONDS: dict[str, Any] = {"type": float, "metavar": "SECONDS", "section": _SLO}
#: One option per kind of objective.
objective_options = options.all_of(
    option(
        "--attainment", type=float, metavar="SHARE", section=_SLO,
        help="Least share of requests that meet both of their targets.",
    ),
    option("--ttft-p99-s", help="Maximum P99 time to first token.", **_SECONDS),
    option("--tpot-p99-s", help="Maximum P99 time per output token.", **_SECONDS),
    option("--e2e-p99-s", help="Maximum P99 end-to-end time.", **_SECONDS),
    option("--scheduling-delay-p99-s", help="Maximum P99 scheduling delay.",
           **_SECONDS),
)  # fmt: skip


def take_objectives(params: dict[str, Any]) -> "tuple[ServiceObjective, ...]":
    """Take what :func:`objective_options` added out of a command's parameters."""
    from tailrace.evaluate.search.capacity import OBJECTIVES, ServiceObjective

    given = {kind: params.pop(kind) for kind in OBJECTIVES}
    limits = [(kind, limit) for kind, limit in given.items() if limit is not None]
    return tuple(ServiceObjective(kind, limit) for kind, limit in limits or [("attainment", 0.99)])


@options.command("capacity")
@options.scenario_options
@option(
    "-p", "--policy", default="load_aware", shell_complete=names.policies,
    help="Policy (see `tailrace policies`).",
)  # fmt: skip
@option("--seed", type=SEED, default=0, help="Seed of traffic and ties in the search.")
@option(
    "--saturation", is_flag=True,
    help="Measure the saturation throughput instead, to which `load` refers.",
)  # fmt: skip
@option("--write", is_flag=True, help="With --saturation: store it in the file of --config.")
@option(
    "--write-shipped", is_flag=True, hidden=True,
    help="For maintainers: store it in the file of the shipped --scenario.",
)  # fmt: skip
@option(
    "--tolerance", type=click.FloatRange(1e-4, 0.5), default=0.01,
    help="Relative precision of the search.",
)  # fmt: skip
@objective_options
@options.json
@options.quiet
def command(
    policy: str,
    seed: int,
    saturation: bool,
    write: bool,
    write_shipped: bool,
    tolerance: float,
    **settings: Any,
) -> None:
    """Find the highest load a cluster holds within an SLO."""
    for pace in ("rate", "load"):
        if settings[f"workload__{pace}"] is not None:
            raise TailraceError(f"capacity looks for the {pace} itself; leave --{pace} out")
    config, shipped = settings["config"], settings["scenario"]
    objectives = take_objectives(settings)
    scenario = options.take_scenario(settings)
    if (write or write_shipped) and not saturation:
        raise TailraceError("--write stores the saturation throughput; give --saturation with it")
    if saturation:
        target = None
        if write_shipped:
            target = _own_file(shipped and scenarios.find(shipped), scenario, "--scenario")
        elif write:
            target = _own_file(config, scenario, "--config")
            if target.resolve().parent == scenarios.SHIPPED.resolve():
                raise TailraceError(f"{target} is a shipped scenario; write to a copy of it")
        _saturation(scenario, target)
        return
    from tailrace.evaluate.search.capacity import max_load
    from tailrace.terminal.tables import print_max_load

    with console.progress("searching") as update:
        found = max_load(
            scenario,
            policy,
            objectives,
            seed=seed,
            tolerance=tolerance,
            progress=lambda _: update(),
        )
    console.show(found, lambda screen: print_max_load(screen, found))


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


def _saturation(scenario: Scenario, path: Path | None) -> None:
    from tailrace.saturation import saturation_rps

    with console.progress("measuring"):
        measured = saturation_rps(scenario)
    if path is not None:
        scenarios.write_capacity(path, measured)
    size = scenario.cluster.size
    text = (
        f"{measured:.4g} requests/s ({measured / size:.3g} per replica) with "
        f"{scenario.workload.name} on {size} replica{'s' * (size > 1)}"
    ) + (f"\nwritten to {path}" if path is not None else "")
    found = {"saturation_rps": measured, "written_to": path}
    console.show(found, lambda _: click.echo(text))
