"""``tailrace report``: the results of an evaluation as one file to read."""

import shlex
from pathlib import Path

import click

from tailrace.cli import console
from tailrace.cli.options import OUTPUT, SectionedCommand, SectionOption, jobs_option, quiet_option


@click.command("report", cls=SectionedCommand)
@click.argument("results", type=click.Path(path_type=Path))
@click.option(
    "-p", "--policy", cls=SectionOption, metavar="NAME",
    help="Policy of the results to report on. [default: the one under test]",
)  # fmt: skip
@click.option(
    "--quick", is_flag=True, cls=SectionOption,
    help="Leave out what needs runs to be played again: distributions, plots over load and time, "
    "and decisions.",
)  # fmt: skip
@jobs_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), cls=SectionOption, section=OUTPUT,
    metavar="FILE.html", help="HTML file, complete in itself. [default: RESULTS/report.html]",
)  # fmt: skip
@click.option(
    "--markdown", type=click.Path(path_type=Path), cls=SectionOption, section=OUTPUT,
    metavar="FILE.md", help="The tables as Markdown too; alone unless -o is given.",
)  # fmt: skip
@quiet_option
def command(
    results: Path,
    policy: str | None,
    quick: bool,
    jobs: int | None,
    output: Path | None,
    markdown: Path | None,
    quiet: bool,
) -> None:
    """Make one readable file of RESULTS, the folder of `tailrace evaluate -o`.

    Tables are of the results. For plots of single requests a few runs are played again, on the
    same seeds, and checked against the results.
    """
    console.need("jinja2", extra="report", what="a report")
    from tailrace.evaluate.judge.replays import play, tasks_of
    from tailrace.evaluate.judge.results_folder import load
    from tailrace.files import atomic_path, check_target
    from tailrace.report.render import render

    if output is None and markdown is None:
        output = results / "report.html"
        if not results.is_dir():
            load(results)  # says what is wrong with it
    for path, suffixes in ((output, (".html", ".htm")), (markdown, (".md",))):
        if path is not None:
            check_target(path, suffixes)
    found = load(results, policy)
    replays = None
    # Markdown has no plots, but tells what the policy does differently.
    if not quick:
        tasks = tasks_of(found)
        with (
            console.own_output(),
            console.progress("simulating", len(tasks), enabled=not quiet) as update,
        ):
            replays = play(found, tasks, jobs, update)
    line = _command_line(results, policy, quick, output, markdown)
    for path in (output, markdown):
        if path is None:
            continue
        text = render(found, replays, line, markdown=path is markdown)
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        if not quiet:
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
    for option, value in (("-p", policy), ("-o", output), ("--markdown", markdown)):
        if value is not None:
            words += [option, str(value)]
    return shlex.join([*words, "--quick"] if quick else words)
