"""``tailrace bench``: open-loop load on any OpenAI endpoint."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names
from tailrace.cli.options import (
    OUTPUT,
    SEED,
    SectionedCommand,
    SectionOption,
    json_option,
    quiet_option,
    section_options,
    take_scenario,
    warmup_option,
)
from tailrace.config import Scenario, Workload
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.bench.load import Api

#: Environment variable of the key that is sent as bearer token.
API_KEY = "OPENAI_API_KEY"


def _traffic_options(function: Any) -> Any:
    return section_options(function, "Traffic", "workload", Workload, but=("requests",))


@click.command("bench", cls=SectionedCommand)
@click.option(
    "--url", required=True, cls=SectionOption,
    help="Address of the server or router, e.g. http://127.0.0.1:8080.",
)  # fmt: skip
@click.option(
    "--scenario", metavar="NAME", cls=SectionOption, shell_complete=names.scenarios,
    help="Traffic of a shipped scenario, at its load of its capacity (see `tailrace scenarios`).",
)  # fmt: skip
@click.option(
    "--requests", "workload__requests", type=click.IntRange(1, 10_000_000), default=200,
    show_default=True, cls=SectionOption, section="Traffic", help="How many requests.",
)  # fmt: skip
@_traffic_options
@click.option(
    "--seed", type=SEED, default=0, show_default=True, cls=SectionOption,
    help="Seed of the traffic.",
)  # fmt: skip
@click.option(
    "--api", type=click.Choice(["completions", "chat"]), default="completions", show_default=True,
    cls=SectionOption, help="Endpoint the requests go to.",
)  # fmt: skip
@click.option("--model", cls=SectionOption, help="Model to ask for; default: the first it has.")
@click.option(
    "--chars-per-token", type=click.FloatRange(0.5, 64), cls=SectionOption,
    help="Length of prompts; default: the server's /tokenize, else 4.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0.001), default=600.0, show_default=True,
    metavar="S", cls=SectionOption, help="Longest time for one request.",
)  # fmt: skip
@click.option(
    "--stretch", type=click.FloatRange(1e-4, 1e4), default=1.0, show_default=True,
    cls=SectionOption,
    help="Multiply arrival and think times, as servers with --time-scale need it.",
)  # fmt: skip
@click.option(
    "--salt", type=SEED, default=0, show_default=True, cls=SectionOption,
    help="Other texts of the same form, for servers that have these in their caches.",
)  # fmt: skip
@click.option(
    "-H", "--header", "header_lines", multiple=True, metavar="NAME:VALUE", cls=SectionOption,
    help=f"Header to send; may be repeated. {API_KEY} is sent as bearer token if it is set.",
)  # fmt: skip
@warmup_option
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE", cls=SectionOption,
    section=OUTPUT, help="Write one row per request; FILE ends in .parquet.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    url: str,
    seed: int,
    api: "Api",
    model: str | None,
    chars_per_token: float | None,
    timeout_s: float,
    stretch: float,
    salt: int,
    header_lines: tuple[str, ...],
    warmup: float,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Send traffic to an OpenAI endpoint at its own pace, and measure the answers."""
    console.need("httptools", "orjson", extra="serve", what="tailrace bench")
    has_scenario = settings["scenario"] is not None
    given_load = settings["workload__load"] is not None
    scenario = take_scenario(settings | {"config": None, "assignments": ()})
    if given_load and not has_scenario:
        raise TailraceError(
            "--load is a share of a scenario's capacity: give --scenario, or --rate"
        )
    from tailrace.bench.load import run_load
    from tailrace.bench.result import check_target_of, write
    from tailrace.workload.library import from_settings

    if out is not None:
        check_target_of(out)
    headers = headers_of(header_lines)
    rate = _rate(scenario, has_scenario)
    table = from_settings(scenario.workload, rate, seed)
    raise_file_limit()
    with console.progress("sending", len(table), enabled=not (as_json or quiet)) as update:
        result = run_load(
            url,
            table,
            api=api,
            model=model,
            chars_per_token=chars_per_token,
            headers=headers,
            timeout_s=timeout_s,
            stretch=stretch,
            salt=salt,
            progress=update,
        )
    if out is not None:
        write(result, out)
    metrics = result.summary(warmup)
    if as_json:
        console.print_json(
            {"url": url, "workload": scenario.workload, "rate_rps": rate, "seed": seed,
             "prompt_lengths_by": result.calibration, "summary": metrics}
        )  # fmt: skip
        return
    from tailrace.terminal.loads import print_load

    print_load(console.stdout(), scenario.workload.name, rate, result, warmup)


def _rate(scenario: Scenario, has_scenario: bool) -> float | None:
    """Requests/s: what was asked for, or the traffic's own where no scenario gives a capacity."""
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
    """Allow as many open connections as the system lets us."""
    """Every stream is a connection: allow as many as the system does."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
