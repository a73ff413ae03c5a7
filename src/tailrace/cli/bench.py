"""``tailrace bench``: open-loop load on any OpenAI endpoint."""

import os
from pathlib import Path
from typing import Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import OUTPUT, SEED, FileType, option, section_options
from tailrace.config import Scenario, Workload
from tailrace.errors import TailraceError

#: Environment variable of the key that is sent as bearer token.
API_KEY = "OPENAI_API_KEY"


@options.command("bench")
@option("--url", required=True, help="Address of the server or router, e.g. http://127.0.0.1:8080.")
@option(
    "--scenario", metavar="NAME", shell_complete=names.scenarios,
    help="Traffic of a shipped scenario, at its load of its capacity (see `tailrace scenarios`).",
)  # fmt: skip
@option(
    "--requests", "workload__requests", type=click.IntRange(1, 10_000_000), default=200,
    section="Traffic",
    help="How many requests.",
)  # fmt: skip
@section_options("Traffic", "workload", Workload, but=("requests",))
@option("--seed", type=SEED, default=0, help="Seed of the traffic.")
@option(
    "--api", type=click.Choice(["completions", "chat"]), default="completions",
    help="Endpoint the requests go to.",
)  # fmt: skip
@option("--model", help="Model to ask for; default: the first it has.")
@option(
    "--chars-per-token", type=click.FloatRange(0.5, 64),
    help="Length of prompts; default: the server's /tokenize, else 4.",
)  # fmt: skip
@option(
    "--timeout", "timeout_s", type=click.FloatRange(0.001), default=600.0, metavar="S",
    help="Longest time for one request.",
)  # fmt: skip
@option(
    "--stretch", type=click.FloatRange(1e-4, 1e4), default=1.0,
    help="Multiply arrival and think times, as servers with --time-scale need it.",
)  # fmt: skip
@option(
    "--salt", type=SEED, default=0,
    help="Other texts of the same form, for servers that have these in their caches.",
)  # fmt: skip
@option(
    "-H", "--header", "header_lines", multiple=True, metavar="NAME:VALUE",
    help=f"Header to send; may be repeated. {API_KEY} is sent as bearer token if it is set.",
)  # fmt: skip
@options.warmup
@option(
    "-o", "--out", "--output", "out", type=FileType(".parquet"), section=OUTPUT,
    help="Write one row per request; FILE ends in .parquet.",
)  # fmt: skip
@options.json
@options.quiet
def command(
    url: str,
    seed: int,
    header_lines: tuple[str, ...],
    warmup: float,
    out: Path | None,
    **given: Any,
) -> None:
    """Send traffic to an OpenAI endpoint and measure the latencies.

    Requests are sent at their own times, whether or not earlier ones have been answered.
    """
    console.need("httptools", "orjson", extra="serve", what="tailrace bench")
    has_scenario = given["scenario"] is not None
    has_load = given["workload__load"] is not None
    scenario = options.take_scenario(given)
    if has_load and not has_scenario:
        raise TailraceError(
            "--load is a share of a scenario's capacity: give --scenario, or --rate"
        )
    from tailrace.bench.load import run_load
    from tailrace.bench.result import write
    from tailrace.terminal.loads import print_load
    from tailrace.workload.library import from_settings

    headers = headers_of(header_lines)
    rate = _rate(scenario, has_scenario)
    table = from_settings(scenario.workload, rate, seed)
    raise_file_limit()
    with console.progress("sending", len(table)) as update:
        # The other options, by the same names.
        result = run_load(url, table, headers=headers, progress=update, **given)
    if out is not None:
        write(result, out)
    found = {
        "url": url,
        "workload": scenario.workload,
        "rate_rps": rate,
        "seed": seed,
        "prompt_lengths_by": result.calibration,
        "summary": result.summary(warmup),
    }
    name = scenario.workload.name
    console.show(found, lambda screen: print_load(screen, name, rate, result, warmup))


def _rate(scenario: Scenario, has_scenario: bool) -> float | None:
    """Requests/s as given, or the traffic's own where no scenario gives a capacity."""
    if scenario.workload.rate is not None or not has_scenario:
        return scenario.workload.rate
    from tailrace.saturation import resolve_rate

    return resolve_rate(scenario)


def headers_of(lines: tuple[str, ...]) -> dict[str, str]:
    """Return the headers of "Name: value" lines, with the API key of the environment, if any."""
    headers: dict[str, str] = {}
    if os.environ.get(API_KEY):
        headers["authorization"] = f"Bearer {os.environ[API_KEY]}"
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise TailraceError("--header needs NAME:VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers


def raise_file_limit() -> None:
    """Allow as many open connections as the system does: every stream is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
