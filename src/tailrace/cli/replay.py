"""``tailrace replay``: recorded traffic under other policies and sizes, and how far to trust it."""

from pathlib import Path
from typing import Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, PLOT, SEED, option, section_options
from tailrace.config import RouterSettings
from tailrace.errors import TailraceError

USUAL = ("tailrace", "load_aware", "least_outstanding", "round_robin")


@options.command("replay")
@click.argument("traffic", type=FILE, metavar="LOG_OR_TABLE")
@option(
    "--cluster", "--config", "config", type=FILE, required=True,
    help="The replicas ([[cluster.replicas]]), as `calibrate` writes them.",
)  # fmt: skip
@option(
    "-p", "--policy", "policies", multiple=True, default=USUAL, shell_complete=names.policies,
    help="Policy to try; may be repeated (see `tailrace policies`).",
)  # fmt: skip
@option(
    "--replicas", metavar="N,...",
    help="Numbers of replicas to try: the first of the cluster, or all and the same again. "
    "[default: those of the cluster]",
)  # fmt: skip
@option(
    "--overhead-ms", metavar="MS,...",
    help="What a request takes beside its iterations, as `calibrate` reports it: one figure, or "
    "one for each replica. [default: 0]",
)  # fmt: skip
@section_options("Router", "router", RouterSettings)
@option("--seed", type=SEED, default=0, help="Seed of ties.")
@options.jobs
@options.warmup
@option(
    "--plot", type=PLOT, section=OUTPUT,
    help="Draw cost by size, and simulated against recorded; FILE ends in .png, .svg or .pdf.",
)  # fmt: skip
@options.json
@options.quiet
def command(
    traffic: Path,
    policies: tuple[str, ...],
    replicas: str | None,
    overhead_ms: str | None,
    seed: int,
    jobs: int | None,
    warmup: float,
    plot: Path | None,
    **settings: Any,
) -> None:
    """Simulate recorded traffic under other policies and sizes.

    Of a decision log the recorded latencies are compared with simulated ones first, so that you
    know how far to trust the rest.

    For example: tailrace replay decisions/ --cluster cluster.toml --replicas 3,4,5
    """
    from tailrace.evaluate.measure.metrics import summarise
    from tailrace.replay import recorded as logs
    from tailrace.replay.fidelity import fidelity
    from tailrace.replay.what_if import what_if
    from tailrace.terminal.replays import RECORDED, plot_replay, print_replay
    from tailrace.workload import traces

    scenario = options.take_scenario(settings)
    cluster = scenario.cluster
    sizes = _sizes(replicas, cluster.size)
    overhead = _overhead(overhead_ms, cluster.size)
    found = before = None
    if logs.is_recorded(traffic):
        log = logs.read(traffic)
        table = log.table
        found = fidelity(log, cluster, scenario.engine, overhead_ms=overhead)
        name = f"{RECORDED}: {', '.join(log.policies)}"
        before = (name, log.replicas, summarise(log.result(), warmup))
    else:
        trace = traces.read(traffic)
        table = trace.table
        traces.check_arrivals(trace, traffic)
    with console.progress("simulating", len(sizes) * len(set(policies))) as update:
        outcomes = what_if(
            table, cluster, policies, sizes, router=scenario.router, engine=scenario.engine,
            seed=seed, warmup_fraction=warmup, overhead_ms=overhead, jobs=jobs, progress=update,
        )  # fmt: skip
    if plot is not None:
        plot_replay(outcomes, found, plot)
    trust = found and {
        "latencies": found.latencies,
        "recorded_hit_rate": found.recorded_hit_rate,
        "simulated_hit_rate": found.simulated_hit_rate,
    }
    was = before and {"policy": before[0], "summary": before[2]}
    about = {"requests": len(table), "fidelity": trust, "recorded": was, "outcomes": outcomes}
    console.show(about, lambda screen: print_replay(screen, found, outcomes, before))


def _sizes(text: str | None, default: int) -> list[int]:
    """Read numbers with commas between them."""
    if text is None:
        return [default]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TailraceError(
            f"--replicas takes whole numbers with commas between them, got '{text}'"
        ) from None


def _overhead(text: str | None, size: int) -> list[float]:
    """Read the overhead of requests in ms, one figure or one for each of ``size`` replicas."""
    try:
        found = [0.0] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, size) or not all(0 <= ms < 1e6 for ms in found):
        raise TailraceError(
            f"--overhead-ms takes one time in ms, or {size} with commas between them, got '{text}'"
        )
    return found
