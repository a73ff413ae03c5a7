"""Where commands write: results to standard output, everything else to standard error."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from rich.console import Console

#: Width of tables that go to a file or a pipe.
PIPE_WIDTH = 120
#: Anything that takes longer shows its progress.
PATIENCE_S = 1.0


def stdout() -> "Console":
    """Return the console of results."""
    from rich.console import Console

    width = None
    if not sys.stdout.isatty():
        width = int(os.environ.get("COLUMNS", "0") or 0) or PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False)


@contextmanager
def own_output() -> Iterator[None]:
    """Send what a user's policy prints to standard error: the other belongs to results."""
    with redirect_stdout(sys.stderr):
        yield


def need(*modules: str, extra: str, what: str) -> None:
    """Raise unless these modules are installed; a package extra brings them."""
    for module in modules:
        if find_spec(module) is None:
            raise TailraceError(f"{what} needs {module}: pip install 'tailrace[{extra}]'")


def print_json(value: Any) -> None:
    """Write a result as JSON to standard output."""
    from tailrace.files import dumps

    click.echo(dumps(value))


@contextmanager
def progress(
    label: str, total: int | None = None, *, enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error once the work has taken a second; yields ``update(done)``.

    Nothing is shown if standard error is not a terminal.
    """
    if not (enabled and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    task = bar.add_task(label, total=total)
    timer = threading.Timer(PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
