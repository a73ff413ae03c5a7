"""``tailrace simulate``: one policy on one workload and cluster."""

from pathlib import Path
from typing import Any

from tailrace.cli import console, names, options
from tailrace.cli.options import OUTPUT, SEED, FileType, option
from tailrace.config import Scenario


@options.command("simulate")
@options.scenario_options
@option(
    "-p", "--policy", default="least_outstanding", shell_complete=names.policies,
    help="Policy: a name (see `tailrace policies`), e.g. tailrace, or a .tailrace or .py file.",
)  # fmt: skip
@option("--seed", type=SEED, default=0, help="Seed of traffic and ties.")
@options.warmup
@option(
    "-o", "--out", "--output", "out", type=FileType(".csv", ".parquet"), section=OUTPUT,
    help="Write one row per request; FILE ends in .csv or .parquet.",
)  # fmt: skip
@option(
    "--trace", type=FileType(".json"), section=OUTPUT,
    help="Write the batches as a Chrome trace for ui.perfetto.dev; FILE ends in .json.",
)  # fmt: skip
@options.json
@options.quiet
def command(
    policy: str,
    seed: int,
    warmup: float,
    out: Path | None,
    trace: Path | None,
    **settings: Any,
) -> None:
    """Run one policy on one workload, and print a summary."""
    scenario = options.take_scenario(settings)
    from tailrace.evaluate.measure.metrics import summarise
    from tailrace.evaluate.measure.runner import policy_for, run
    from tailrace.saturation import resolve_rate
    from tailrace.sim.warmup import helper
    from tailrace.terminal.tables import print_summary

    with console.own_output():
        policy_for(scenario, policy)
    with helper():
        with console.progress("measuring capacity"):
            rate = resolve_rate(scenario)
        with console.progress("simulating", scenario.workload.requests) as update:
            result = run(
                scenario, policy, rate, seed, record_batches=trace is not None, progress=update
            )
    summary = summarise(result, warmup)
    if out is not None:
        from tailrace.evaluate.measure.request_results import write_requests

        write_requests(result, out)
    if trace is not None:
        from tailrace.evaluate.measure.chrome_trace import write_trace

        write_trace(result, trace, scenario.events)
    about = {"policy": policy, "seed": seed, "rate_rps": rate}
    title = _heading(scenario, policy, rate)
    console.show(
        {**about, "summary": summary, "scenario": scenario},
        lambda screen: print_summary(screen, summary, title),
    )


def _heading(scenario: Scenario, policy: str, rate: float | None) -> str:
    """Say in a line what was run."""
    pace = "its own pace" if rate is None else f"{rate:.3g} requests/s"
    size = scenario.cluster.size
    return f"{policy}: {scenario.workload.name} at {pace} on {size} replica{'s' * (size > 1)}"
