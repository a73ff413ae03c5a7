"""The command line: ``tailrace COMMAND``.

Commands are imported when they are used, and import the simulator only when they run, so that help
and completion answer at once.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import click

from tailrace import __version__
from tailrace.errors import RenamedSettingWarning, TailraceError, unknown_name

#: Commands in the order of the help page; each module holds a ``command``.
COMMANDS = (
    "simulate",
    "compare",
    "capacity",
    "plan",
    "train",
    "sweep",
    "evaluate",
    "report",
    "tune",
    "inspect",
    "headroom",
    "workload",
    "policies",
    "devices",
    "features",
    "fit",
    "scenarios",
    "serve",
    "calibrate",
    "replay",
    "emulate",
    "bench",
    "completion",
    "version",
)

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class TailraceGroup(click.Group):
    """Finds commands by module, and turns the user's mistakes into one sentence and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"tailrace.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments, or name the nearest."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise unknown_name("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run and exit: 0 done, 2 bad input, 130 interrupted; any other failure keeps its trace."""
        extra.pop("standalone_mode", None)
        show = warnings.showwarning
        warnings.showwarning = partial(_show_warning, show)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
        except TailraceError as error:
            _fail(str(error))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(EXIT_BAD_INPUT)
        except click.ClickException as error:
            _fail(error.format_message())
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader (head, less) has gone; give Python no chance to complain about it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        finally:
            warnings.showwarning = show
        sys.exit(code if isinstance(code, int) else 0)


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any
) -> None:
    """Print a warning that is meant for users in one line, any other one as Python does."""
    if issubclass(category, RenamedSettingWarning):
        click.echo(f"warning: {message}", err=True)
    else:
        show(message, category, *where)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_BAD_INPUT)


@click.group(
    cls=TailraceGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="tailrace", message="%(prog)s %(version)s")
def cli() -> None:
    """Simulate, compare and size routers for clusters of LLM servers."""


def main() -> None:
    """Entry point of the ``tailrace`` command."""
    cli(prog_name="tailrace")
