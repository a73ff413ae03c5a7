"""``tailrace completion``: shell completion scripts."""

import click
from click.shell_completion import get_completion_class

_HOW = {
    "bash": 'add to ~/.bashrc:  eval "$(tailrace completion bash)"',
    "zsh": 'add to ~/.zshrc:  eval "$(tailrace completion zsh)"',
    "fish": "run once:  tailrace completion fish > ~/.config/fish/completions/tailrace.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(tuple(_HOW)))
def command(shell: str) -> None:
    """Print a completion script; its first line says how to use it."""
    from tailrace.cli import cli

    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(cli, {}, "tailrace", "_TAILRACE_COMPLETE").source()
    click.echo(f"# To install, {_HOW[shell]}\n{script}")
