"""``tailrace policies``: which routers there are, where they come from and what they do."""

import click

from tailrace.cli import console, names, options


@click.command("policies")
@click.argument("name", required=False, shell_complete=names.policies)
@options.json
def command(name: str | None) -> None:
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
        fields = {
            "from": rule.source,
            "rule": rule.rule_text,
            "parameters": ", ".join(f"{k}={v:g}" for k, v in rule.params.items()) or "none",
            "ties": "lowest number" if rule.lowest_id_wins else "at random",
            "reads": "own ledger"
            + ", metrics snapshots" * rule.uses_metrics
            + ", prefix index" * rule.uses_prefix,
        }
        console.show(rule, lambda screen: print_record(screen, rule.name, fields))
        return
    rows = [(rule.name, rule.source, rule.rule_text) for rule in rules.values()]
    rows += [(n, "installed package", "") for n in installed]
    found = [*rules.values(), *({"name": n} for n in installed)]
    console.show(found, lambda screen: print_listing(screen, ("policy", "from", "rule"), rows))
