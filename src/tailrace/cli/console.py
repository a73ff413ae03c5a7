"""Where commands write: results to standard output, everything else to standard error."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, TypeVar

import click

from tailrace.errors import TailraceError
from tailrace.files import dumps

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

#: Width of tables that go to a file or a pipe.
PIPE_WIDTH = 120
#: Anything that takes longer shows its progress.
PATIENCE_S = 1.0
#: Where there is no terminal, a line says so often how far compiling is, in s.
LINE_S = 10.0


def stdout() -> "Console":
    """Return the console of results."""
    from rich.console import Console

    width = None
    if not sys.stdout.isatty():
        width = int(os.environ.get("COLUMNS", "0") or 0) or PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False)


def need(*modules: str, extra: str, what: str) -> None:
    """Raise unless these modules are installed; a package extra brings them."""
    for module in modules:
        if find_spec(module) is None:
            raise TailraceError(f"{what} needs {module}: pip install 'tailrace[{extra}]'")


def remember(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    """Callback of ``--json`` and ``--quiet``: what follows in this module asks for them."""
    ctx.meta[f"{__name__}.{param.name}"] = given


def _given(name: str) -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(f"{__name__}.{name}"))


def is_quiet() -> bool:
    """Whether the command is to say nothing but its result."""
    return _given("quiet") or _given("json")


def show(
    result: T, table: "Callable[[Console], None]", as_json: Callable[[T], str] = dumps
) -> None:
    """Print a result: as JSON if ``--json`` was given, else for people, by ``table``."""
    if _given("json"):
        click.echo(as_json(result))
    else:
        table(stdout())


@contextmanager
def own_output() -> Iterator[None]:
    """Send what a user's policy prints to standard error: the other belongs to results."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error once the work has taken a second; yields ``update(done)``.

    ``update()`` is one more done. Nothing is shown if the command is quiet or standard error is not
    a terminal. What a user's policy prints meanwhile goes to standard error.
    """
    if is_quiet() or not sys.stderr.isatty():
        with own_output():
            yield lambda _=None: None
        return
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    task = bar.add_task(label, total=total)
    CompileProgress.bar = lambda text: bar.update(task, description=text or label)

    def update(done: int | None = None) -> None:
        bar.update(task, completed=done, advance=1 if done is None else None)

    timer = threading.Timer(PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        with own_output():
            yield update
    finally:
        CompileProgress.bar = None
        timer.cancel()
        timer.join()
        bar.stop()


class CompileProgress:
    """Shows on standard error what is compiled at first use (see ``tailrace.compile_events``)."""

    #: Sets the label of the bar that is on the screen; an empty one restores its own.
    bar: ClassVar[Callable[[str], None] | None] = None

    def __init__(self) -> None:
        self._functions = self._depth = 0
        self._started = self._shown_at = 0.0

    def __call__(self, name: str | None) -> None:
        """Take note of a function that is compiled now; None: the latest one is compiled."""
        now = time.monotonic()
        if name is not None:
            if self._functions == 0:
                self._started = now
                self._shown_at = now + PATIENCE_S - LINE_S
            self._functions += 1
            self._depth += 1
        else:
            self._depth -= 1
        if is_quiet() or now - self._started < PATIENCE_S:
            return
        from tailrace.terminal.tables import counted

        functions = counted(self._functions, "function")
        text = f"compiling, once: {functions}, {now - self._started:.0f} s"
        if CompileProgress.bar is not None:
            CompileProgress.bar(text if self._depth else "")
        elif sys.stderr.isatty():
            click.echo(f"\r\033[K{text if self._depth else ''}", nl=False, err=True)
        elif now - self._shown_at >= LINE_S:
            self._shown_at = now
            click.echo(text + _where_kept(), err=True)


def _where_kept() -> str:
    """Say where compiled code is kept, or why it is compiled again at the next start."""
    from tailrace import compiled

    if compiled.CACHE is None:
        return f" (not kept: {compiled.NO_CACHE_REASON})"
    if not os.access(compiled.CACHE, os.W_OK):
        return f" (not kept: {compiled.CACHE} is read-only)"
    return f" (kept in {compiled.CACHE})"
