"""Shell completion of names; the modules that know them are imported only then."""

import click
from click.shell_completion import CompletionItem


def _matching(known: list[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(n, help=about) for n, about in known if n.startswith(incomplete)]


def scenarios(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a shipped scenario."""
    from tailrace import scenario

    known = [(name, scenario.load(name).description) for name in scenario.names()]
    return _matching(known, incomplete)


def workloads(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a built-in workload."""
    from tailrace.workload import library

    return _matching([(n, library.describe(n).description) for n in library.names()], incomplete)


def devices(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a device preset."""
    from tailrace.view import devices as presets

    return _matching([(n, presets.get(n).description) for n in presets.names()], incomplete)


def policies(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a policy."""
    from tailrace.policy import registry

    sources = {rule.name: rule.source for rule in registry.rules()}
    return _matching([(name, sources.get(name, "")) for name in registry.names()], incomplete)
