"""``tailrace workload``: the built-in traffic, and files of requests."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, SEED, FileType, option

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.workload.compose import WorkloadSpec

_NAME = click.argument("name", shell_complete=names.workloads)
_OUT = option(
    "-o",
    "--out",
    "--output",
    "out",
    type=FileType(".csv", ".parquet"),
    required=True,
    help="A .csv or .parquet.",
)
_SEED = option("--seed", type=SEED, default=0, help="Seed of the traffic.")


@click.group("workload")
def command() -> None:
    """List, describe, measure, write and import traffic."""


@command.command("list")
@options.json
def list_command() -> None:
    """List the built-in workloads."""
    from tailrace.terminal.listings import print_listing
    from tailrace.workload import library

    specs = [library.describe(name) for name in library.names()]
    rows = [(s.name, f"{s.default_rate_rps:g}", s.description) for s in specs]
    headings = ("workload", "own rate /s", "what it is")
    console.show(
        [_about(spec) for spec in specs], lambda screen: print_listing(screen, headings, rows)
    )


@command.command("describe")
@_NAME
@options.json
def describe_command(name: str) -> None:
    """Describe a built-in workload (NAME) and its sources."""
    from tailrace.terminal.listings import print_record
    from tailrace.workload import library

    about = _about(library.describe(name))
    fields = {"what it is": about["description"], "source": about["source"]}
    fields["own rate"] = f"{about['default_rate_rps']:g} requests/s"
    for part in about["parts"]:
        label = (
            f"{100 * part['share']:.0f} % {part['name']}" if len(about["parts"]) > 1 else "made of"
        )
        fields[label] = f"{part['content']} {part['arrivals']}"

    def describe(screen: "Console") -> None:
        print_record(screen, name, fields)
        screen.print(f"\nFigures of a sample: tailrace workload stats {name}")

    console.show(about, describe)


@command.command("stats")
@_NAME
@options.workload_options
@_SEED
@options.json
def stats_command(name: str, seed: int, **settings: Any) -> None:
    """Print statistics of a workload or a file of requests (NAME)."""
    workload = options.take_workload(name, settings)
    from tailrace.terminal.workloads import print_statistics
    from tailrace.workload.library import from_settings
    from tailrace.workload.stats import statistics

    found = statistics(from_settings(workload, workload.rate, seed))
    console.show(found, lambda screen: print_statistics(screen, name, found))


@command.command("write")
@_NAME
@_OUT
@options.workload_options
@_SEED
@options.json
def write_command(name: str, out: Path, seed: int, **settings: Any) -> None:
    """Write the requests of a workload (NAME) to a file."""
    workload = options.take_workload(name, settings)
    from tailrace.workload import traces
    from tailrace.workload.library import from_settings

    table = from_settings(workload, workload.rate, seed)
    traces.write(table, out)
    _report({"requests": len(table), "written_to": out})


@command.command("import")
@click.argument("file", type=FILE)
@click.option(
    "--format", "format_name", default="auto", show_default=True,
    help="azure, vidur, burstgpt, csv, mooncake, sessions, weka (Claude Code), lcp, access_log, "
    "parquet or decisions (a log of `tailrace serve`); auto looks at the file.",
)  # fmt: skip
@click.option(
    "--block-size", type=click.IntRange(1, 2**24), metavar="N",
    help="Tokens per block id of mooncake and sessions, if the file does not say it.",
)  # fmt: skip
@click.option(
    "--session-gap", type=click.FloatRange(0), metavar="SECONDS",
    help="Time between the starts of sessions whose trace does not say when they began.",
)  # fmt: skip
@click.option("--sort", is_flag=True, help="Put an unsorted file in order of arrival.")
@_OUT
@options.json
def import_command(
    file: Path,
    format_name: str,
    block_size: int | None,
    session_gap: float | None,
    sort: bool,
    out: Path,
) -> None:
    """Convert a trace or decision log (FILE) to a file of requests.

    FILE may be a folder of decision logs or of Claude Code sessions.
    """
    from tailrace.workload import traces

    trace = traces.read(
        file, format_name, sort=sort, block_tokens=block_size, session_gap_s=session_gap
    )
    traces.write(trace.table, out, has_arrivals=trace.has_arrivals, has_slos=trace.has_slos)
    about = {
        "requests": len(trace.table),
        "written_to": out,
        "format": trace.format,
        "skipped": trace.skipped,
        "was_sorted": trace.was_sorted,
        "has_arrivals": trace.has_arrivals,
    }
    _report(about)


def _report(about: dict[str, Any]) -> None:
    """Say what was written and what was changed on the way."""
    line = f"{about['requests']} requests written to {about['written_to']}"
    if "format" in about:
        line += f" (read as {about['format']})"
    lines = [line]
    if about.get("skipped"):
        lines.append(f"{about['skipped']} failed requests left out")
    if about.get("was_sorted"):
        lines.append("rows put in order of arrival")
    if not about.get("has_arrivals", True):
        lines.append("the file has no arrival times: choose a process with --arrivals to use it")
    console.show(about, lambda _: click.echo("\n".join(lines)))


def _about(spec: "WorkloadSpec") -> dict[str, Any]:
    """Describe a workload in plain values."""
    total = sum(part.weight for part in spec.parts)
    return {
        "name": spec.name,
        "description": spec.description,
        "source": spec.source,
        "default_rate_rps": spec.default_rate_rps,
        "parts": [
            {
                "name": part.name,
                "share": part.weight / total,
                "arrivals": _first_line(part.arrivals),
                "content": _first_line(part.content),
            }
            for part in spec.parts
        ],
    }


def _first_line(model: object) -> str:
    return (inspect.getdoc(type(model)) or type(model).__name__).splitlines()[0]
