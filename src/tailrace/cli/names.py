"""Shell completion of names; the modules that know them are imported only then."""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completion(known: Callable[[], Iterable[tuple[str, str]]]) -> Completion:
    """Turn a function that returns names, and something about each, into a completion."""

    def complete(
        _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(n, help=about) for n, about in known() if n.startswith(incomplete)]

    return complete


@_completion
def scenarios() -> list[tuple[str, str]]:
    """Complete the name of a shipped scenario."""
    from tailrace import scenario

    return [(name, scenario.load(name).description) for name in scenario.names()]


@_completion
def suites() -> list[tuple[str, str]]:
    """Complete the name of a shipped suite."""
    from tailrace.evaluate.judge.suite import load_suite, suite_names

    return [(name, load_suite(name).description) for name in suite_names()]


@_completion
def workloads() -> list[tuple[str, str]]:
    """Complete the name of a built-in workload."""
    from tailrace.workload import library

    return [(name, library.describe(name).description) for name in library.names()]


@_completion
def devices() -> list[tuple[str, str]]:
    """Complete the name of a device preset."""
    from tailrace.view import devices as presets

    return [(name, presets.get(name).description) for name in presets.names()]


@_completion
def policies() -> list[tuple[str, str]]:
    """Complete the name of a policy."""
    from tailrace.policy import registry, shipped

    about = shipped.TRAINED | {rule.name: rule.source for rule in registry.rules()}
    return [(name, about.get(name, "")) for name in registry.names()]


@_completion
def features() -> list[tuple[str, str]]:
    """Complete the name of a feature."""
    from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES

    return [(feature.name, feature.help) for feature in (*REPLICA_FEATURES, *REQUEST_FEATURES)]
