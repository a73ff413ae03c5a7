"""``tailrace report``: the results of an evaluation as one file to read."""

import shlex
from pathlib import Path

import click

from tailrace.cli import console, options
from tailrace.cli.options import FILE, OUTPUT, FileType, option


@options.command("report")
@click.argument("results", type=FILE)
@option(
    "-p", "--policy", metavar="NAME",
    help="Policy of the results to report on. [default: the one under test]",
)  # fmt: skip
@option(
    "--quick", is_flag=True,
    help="Leave out what needs runs to be played again: distributions, plots over load and time, "
    "and decisions.",
)  # fmt: skip
@options.jobs
@option(
    "-o", "--out", "--output", "output", type=FileType(".html", ".htm"), section=OUTPUT,
    metavar="FILE.html",
    help="HTML file, complete in itself. [default: RESULTS/report.html]",
)  # fmt: skip
@option(
    "--markdown", type=FileType(".md"), section=OUTPUT, metavar="FILE.md",
    help="The tables as Markdown too; alone unless -o is given.",
)  # fmt: skip
@options.quiet
def command(
    results: Path,
    policy: str | None,
    quick: bool,
    jobs: int | None,
    output: Path | None,
    markdown: Path | None,
) -> None:
    """Write the results of `tailrace evaluate` as an HTML page.

    Tables are of the results. For plots of single requests a few runs are played again, on the
    same seeds, and checked against the results.
    """
    console.need("jinja2", extra="report", what="a report")
    from tailrace.evaluate.judge.replays import play, tasks_of
    from tailrace.evaluate.judge.results_folder import load
    from tailrace.files import check_target, write_text
    from tailrace.report.render import render

    if output is None and markdown is None:
        output = results / "report.html"
        if not results.is_dir():
            load(results)  # says what is wrong with it
        check_target(output, (output.suffix,))
    found = load(results, policy)
    replays = None
    # Markdown has no plots, but tells what the policy does differently.
    if not quick:
        tasks = tasks_of(found)
        with console.progress("simulating", len(tasks)) as update:
            replays = play(found, tasks, jobs, update)
    line = _command_line(results, policy, quick, output, markdown)
    for path in (output, markdown):
        if path is None:
            continue
        write_text(path, render(found, replays, line, markdown=path is markdown))
        if not console.is_quiet():
            click.echo(f"written to {path}", err=True)
    if replays is not None and replays.unlike:
        click.echo(
            f"{len(replays.unlike)} of {len(replays.runs)} runs played again differ from the "
            "results; the report says which",
            err=True,
        )


def _command_line(
    results: Path, policy: str | None, quick: bool, output: Path | None, markdown: Path | None
) -> str:
    """Return the command that was given, for the report to tell."""
    words = ["tailrace", "report", str(results)]
    for flag, value in (("-p", policy), ("-o", output), ("--markdown", markdown)):
        if value is not None:
            words += [flag, str(value)]
    return shlex.join([*words, "--quick"] if quick else words)
