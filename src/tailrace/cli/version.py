"""``tailrace version``: what exactly is running here."""

import platform
from importlib.metadata import version

import click

from tailrace import __version__
from tailrace.cli import console, options

_LIBRARIES = ("numba", "numpy", "scipy", "pyarrow", "pydantic")


@click.command("version")
@options.json
def command() -> None:
    """Print the versions of Tailrace, Python and the libraries."""
    versions = {"tailrace": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in _LIBRARIES}
    lines = "\n".join(f"{name} {text}" for name, text in versions.items())
    console.show(versions, lambda _: click.echo(lines))
