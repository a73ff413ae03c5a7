"""``tailrace policies``: which routers there are, where they come from and what they do."""

import click

from tailrace.cli import console, names
from tailrace.cli.options import json_option


@click.command("policies")
@click.argument("name", required=False, shell_complete=names.policies)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the policies, or show all about one of them (NAME).

    A policy of your own is a file: `--policy my_rule.py`, with a function scores(view).
    """
    from tailrace.errors import unknown_name
    from tailrace.policy import registry
    from tailrace.terminal.listings import print_listing, print_record

    rules = {rule.name: rule for rule in registry.rules()}
    installed = [n for n in registry.names() if n not in rules]
    if name is not None:
        if name not in rules:
            raise unknown_name("policy", name, rules)
        rule = rules[name]
        if as_json:
            console.print_json(rule)
            return
        print_record(
            console.stdout(),
            rule.name,
            {
                "from": rule.source,
                "rule": rule.rule_text,
                "parameters": ", ".join(f"{k}={v:g}" for k, v in rule.params.items()) or "none",
                "ties": "lowest number" if rule.lowest_id_wins else "at random",
                "reads": ", ".join(_reads(rule.uses_metrics, rule.uses_prefix)),
            },
        )
        return
    if as_json:
        console.print_json([*rules.values(), *({"name": n} for n in installed)])
        return
    rows = [(rule.name, rule.source, rule.rule_text) for rule in rules.values()]
    rows += [(n, "installed package", "") for n in installed]
    print_listing(console.stdout(), ("policy", "from", "rule"), rows)


def _reads(uses_metrics: bool, uses_prefix: bool) -> list[str]:
    reads = ["own ledger"]
    if uses_metrics:
        reads.append("metrics snapshots")
    if uses_prefix:
        reads.append("prefix index")
    return reads
