"""``tailrace simulate``: one policy on one workload and cluster."""

from pathlib import Path
from typing import Any

import click

from tailrace.cli import console, names
from tailrace.cli.options import (
    OUTPUT,
    SEED,
    SectionedCommand,
    SectionOption,
    json_option,
    quiet_option,
    scenario_options,
    take_scenario,
    warmup_option,
)
from tailrace.config import Scenario

_FILE = click.Path(path_type=Path)


@click.command("simulate", cls=SectionedCommand)
@scenario_options
@click.option(
    "-p", "--policy", default="least_outstanding", show_default=True, cls=SectionOption,
    shell_complete=names.policies,
    help="Router: a built-in rule, FILE.py or module:attribute (see `tailrace policies`).",
)  # fmt: skip
@click.option(
    "--seed", type=SEED, default=0, show_default=True, cls=SectionOption,
    help="Seed of traffic and ties.",
)  # fmt: skip
@warmup_option
@click.option(
    "-o", "--out", type=_FILE, metavar="FILE", cls=SectionOption, section=OUTPUT,
    help="Write one row per request; FILE ends in .csv or .parquet.",
)  # fmt: skip
@click.option(
    "--trace", type=_FILE, metavar="FILE", cls=SectionOption, section=OUTPUT,
    help="Write the batches as a Chrome trace for ui.perfetto.dev; FILE ends in .json.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    policy: str,
    seed: int,
    warmup: float,
    out: Path | None,
    trace: Path | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Run one policy on one workload and cluster, and print a summary."""
    scenario = take_scenario(settings)
    from tailrace.evaluate.measure.metrics import summarise
    from tailrace.evaluate.measure.request_results import check_requests_target, write_requests
    from tailrace.evaluate.measure.runner import policy_for, run
    from tailrace.saturation import resolve_rate
    from tailrace.sim.chrome_trace import check_trace_target, write_trace
    from tailrace.terminal.tables import print_summary

    with console.own_output():
        policy_for(scenario, policy)
    if out is not None:
        check_requests_target(out)
    if trace is not None:
        check_trace_target(trace)
    show = not (as_json or quiet)
    with console.progress("measuring capacity", enabled=show):
        rate = resolve_rate(scenario)
    total = scenario.workload.requests
    with console.own_output(), console.progress("simulating", total, enabled=show) as update:
        result = run(
            scenario, policy, rate, seed, record_batches=trace is not None, progress=update
        )
    summary = summarise(result, warmup)
    if out is not None:
        write_requests(result, out)
    if trace is not None:
        write_trace(result, trace, scenario.events)
    if as_json:
        console.print_json(
            {"policy": policy, "seed": seed, "rate_rps": rate, "summary": summary,
             "scenario": scenario}
        )  # fmt: skip
        return
    screen = console.stdout()
    screen.print(heading(scenario, policy, rate), style="bold")
    screen.print()
    print_summary(screen, summary)


def heading(scenario: Scenario, policy: str, rate: float | None) -> str:
    """Say in a line what was run."""
    pace = "its own pace" if rate is None else f"{rate:.3g} requests/s"
    size = scenario.cluster.size
    return f"{policy}: {scenario.workload.name} at {pace} on {size} replica{'s' * (size > 1)}"
