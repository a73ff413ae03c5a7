"""``tailrace scenarios``: the shipped experiments."""

import click

from tailrace import scenario as scenarios
from tailrace.cli import console, names, options
from tailrace.config import Scenario


@click.command("scenarios")
@click.argument("name", required=False, shell_complete=names.scenarios)
@options.json
def command(name: str | None) -> None:
    """List the shipped scenarios, or print one of them (NAME)."""
    if name is not None:
        text = scenarios.find(name).read_text(encoding="utf-8")
        console.show(scenarios.load(name), lambda _: click.echo(text, nl=False))
        return
    from tailrace.terminal.listings import print_listing

    found = [scenarios.load(n) for n in scenarios.names()]
    rows = [(s.name, str(s.cluster.size), s.workload.name, _pace(s), s.description) for s in found]
    headings = ("scenario", "replicas", "workload", "load", "shows")
    console.show(found, lambda screen: print_listing(screen, headings, rows))


def _pace(scenario: Scenario) -> str:
    if scenario.workload.rate is not None:
        return f"{scenario.workload.rate:g}/s"
    return "own" if scenario.workload.load is None else f"{scenario.workload.load:g}"
