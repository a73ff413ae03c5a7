"""``tailrace policies``: which routers there are, where they come from and what they do."""

from typing import Any

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
    from tailrace.policy import registry, shipped
    from tailrace.terminal.listings import print_listing, print_record

    rules = {rule.name: rule for rule in registry.rules()}
    if name in shipped.TRAINED:
        _show_trained(name)
        return
    if name is not None:
        if name not in rules:
            raise unknown_name("policy", name, [*shipped.TRAINED, *rules])
        rule = rules[name]
        fields = {
            "from": rule.source,
            "version": rule.version or "none in particular",
            "rule": rule.rule_text,
            "parameters": ", ".join(f"{k}={v:g}" for k, v in rule.params.items()) or "none",
            "ties": "lowest number" if rule.lowest_id_wins else "at random",
            "reads": "own ledger"
            + ", metrics snapshots" * rule.uses_metrics
            + ", prefix index" * rule.uses_prefix,
        }
        if rule.index_learns:
            fields["its index learns"] = rule.index_learns
        console.show(rule, lambda screen: print_record(screen, rule.name, fields))
        return
    found: list[Any] = []
    rows = []
    for one in registry.names():
        if one in rules:
            found.append(rules[one])
            rows.append((one, rules[one].source, rules[one].rule_text))
        else:
            source = "own, trained" if one in shipped.TRAINED else "installed package"
            found.append({"name": one, "source": source, "rule_text": shipped.TRAINED.get(one, "")})
            rows.append((one, source, shipped.TRAINED.get(one, "")))
    console.show(found, lambda screen: print_listing(screen, ("policy", "from", "rule"), rows))


def _show_trained(name: str) -> None:
    from tailrace.evaluate.explain.inspect import description, learned, parameters
    from tailrace.policy import shipped
    from tailrace.terminal.listings import print_record

    policy = learned(name)
    about = description(policy)
    fields = {"what it is": shipped.TRAINED[name], "from": "own, trained"}
    fields["parameters"] = f"{parameters(policy)} weights"
    fields["reads"] = "own ledger, metrics snapshots, prefix index"
    fields["more"] = f"tailrace inspect {name} --scenario demo"
    record = {"name": name, **fields, "about": about}
    console.show(record, lambda screen: print_record(screen, name, fields))
