"""``tailrace scenarios``: the shipped experiments."""

import click

from tailrace import scenario as scenarios
from tailrace.cli import console, names
from tailrace.cli.options import json_option
from tailrace.config import Scenario


@click.command("scenarios")
@click.argument("name", required=False, shell_complete=names.scenarios)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the shipped scenarios, or print the file of one of them (NAME)."""
    if name is not None:
        scenario = scenarios.load(name)
        if as_json:
            console.print_json(scenario)
        else:
            click.echo(scenarios.find(name).read_text(encoding="utf-8"), nl=False)
        return
    found = [scenarios.load(n) for n in scenarios.names()]
    if as_json:
        console.print_json(found)
        return
    from tailrace.terminal.listings import print_listing

    rows = [(s.name, str(s.cluster.size), s.workload.name, _pace(s), s.description) for s in found]
    headings = ("scenario", "replicas", "workload", "load", "shows")
    print_listing(console.stdout(), headings, rows)


def _pace(scenario: Scenario) -> str:
    if scenario.workload.rate is not None:
        return f"{scenario.workload.rate:g}/s"
    return "own" if scenario.workload.load is None else f"{scenario.workload.load:g}"
