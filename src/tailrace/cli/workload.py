"""``tailrace workload``: the built-in traffic, and files of requests."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names
from tailrace.cli.options import SEED, json_option, take_workload, workload_options

if TYPE_CHECKING:
    from tailrace.workload.compose import WorkloadSpec

_FILE = click.Path(path_type=Path)
_NAME = click.argument("name", shell_complete=names.workloads)
_SEED = click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the traffic.")


@click.group("workload")
def command() -> None:
    """List, describe, measure, write and import traffic."""


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the built-in workloads."""
    from tailrace.terminal.listings import print_listing
    from tailrace.workload import library

    specs = [library.describe(name) for name in library.names()]
    if as_json:
        console.print_json([_about(spec) for spec in specs])
        return
    rows = [(s.name, f"{s.default_rate_rps:g}", s.description) for s in specs]
    print_listing(console.stdout(), ("workload", "own rate /s", "what it is"), rows)


@command.command("describe")
@_NAME
@json_option
def describe_command(name: str, as_json: bool) -> None:
    """Say what a built-in workload (NAME) is and where its figures come from."""
    from tailrace.terminal.listings import print_record
    from tailrace.workload import library

    about = _about(library.describe(name))
    if as_json:
        console.print_json(about)
        return
    fields = {"what it is": about["description"], "source": about["source"]}
    fields["own rate"] = f"{about['default_rate_rps']:g} requests/s"
    for part in about["parts"]:
        label = (
            f"{100 * part['share']:.0f} % {part['name']}" if len(about["parts"]) > 1 else "made of"
        )
        fields[label] = f"{part['content']} {part['arrivals']}"
    print_record(console.stdout(), name, fields)
    click.echo(f"\nFigures of a sample: tailrace workload stats {name}")


@command.command("stats")
@_NAME
@workload_options
@_SEED
@json_option
def stats_command(name: str, seed: int, as_json: bool, **settings: Any) -> None:
    """Print statistics of a built-in workload or of a file of requests (NAME)."""
    workload = take_workload(name, settings)
    from tailrace.terminal.workloads import print_statistics
    from tailrace.workload.library import from_settings
    from tailrace.workload.stats import statistics

    found = statistics(from_settings(workload, workload.rate, seed))
    if as_json:
        console.print_json(found)
    else:
        print_statistics(console.stdout(), name, found)


@command.command("write")
@_NAME
@click.option("-o", "--out", type=_FILE, required=True, metavar="FILE", help="A .csv or .parquet.")
@workload_options
@_SEED
@json_option
def write_command(name: str, out: Path, seed: int, as_json: bool, **settings: Any) -> None:
    """Write the requests of a workload (NAME) to a file."""
    workload = take_workload(name, settings)
    from tailrace.workload import traces
    from tailrace.workload.library import from_settings

    _check_target(out)
    table = from_settings(workload, workload.rate, seed)
    traces.write(table, out)
    _report({"requests": len(table), "written_to": out}, as_json)


@command.command("import")
@click.argument("file", type=_FILE)
@click.option(
    "--format", "format_name", default="auto", show_default=True,
    help="azure, mooncake, vidur, burstgpt, csv or parquet; auto looks at the file.",
)  # fmt: skip
@click.option("--sort", is_flag=True, help="Put an unsorted file in order of arrival.")
@click.option("-o", "--out", type=_FILE, required=True, metavar="FILE", help="A .csv or .parquet.")
@json_option
def import_command(file: Path, format_name: str, sort: bool, out: Path, as_json: bool) -> None:
    """Turn a public trace, or a decision log of the live router, (FILE) into a file of requests."""
    from tailrace.workload import traces

    _check_target(out)
    trace = traces.read(file, format_name, sort=sort)
    traces.write(trace.table, out, has_arrivals=trace.has_arrivals)
    about = {
        "requests": len(trace.table),
        "written_to": out,
        "format": trace.format,
        "skipped": trace.skipped,
        "was_sorted": trace.was_sorted,
        "has_arrivals": trace.has_arrivals,
    }
    _report(about, as_json)


def _check_target(out: Path) -> None:
    from tailrace.files import check_target

    check_target(out, (".csv", ".parquet"))


def _report(about: dict[str, Any], as_json: bool) -> None:
    """Say what was written and what was changed on the way."""
    if as_json:
        console.print_json(about)
        return
    line = f"{about['requests']} requests written to {about['written_to']}"
    if "format" in about:
        line += f" (read as {about['format']})"
    click.echo(line)
    if about.get("skipped"):
        click.echo(f"{about['skipped']} failed requests left out")
    if about.get("was_sorted"):
        click.echo("rows put in order of arrival")
    if not about.get("has_arrivals", True):
        click.echo("the file has no arrival times: choose a process with --arrivals to use it")


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
