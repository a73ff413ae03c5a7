"""``tailrace version``: what exactly is running here."""

import platform
from importlib.metadata import version

import click

from tailrace import __version__
from tailrace.cli import console
from tailrace.cli.options import json_option

_LIBRARIES = ("numba", "numpy", "scipy", "pyarrow", "pydantic")


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Print the versions of Tailrace, Python and the libraries that shape results."""
    versions = {"tailrace": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in _LIBRARIES}
    if as_json:
        console.print_json(versions)
        return
    for name, text in versions.items():
        click.echo(f"{name} {text}")
