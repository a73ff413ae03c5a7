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

from tailrace import __version__, compile_events
from tailrace.cli.console import CompileProgress
from tailrace.errors import RenamedSettingWarning, TailraceError, unknown_name

#: Commands by their heading on the help page; each is a module with a ``command``.
GROUPS = {
    "Serve": ("serve", "pick", "picktest", "emulate", "warmup"),
    "Measure": ("assess", "bench", "calibrate", "fit", "replay"),
    "Simulate": (
        *("simulate", "compare", "capacity", "plan", "workload"),
        *("evaluate", "report", "inspect", "headroom"),
    ),
    "Train": ("train", "sweep", "tune"),
    "Reference": ("policies", "devices", "features", "scenarios", "completion", "version"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)

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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands group by group."""
        longest = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            rows = []
            for name in names:
                command = self.get_command(ctx, name)
                assert command is not None
                limit = formatter.width - 6 - longest
                rows.append((name.ljust(longest), command.get_short_help_str(limit)))
            with formatter.section(title):
                formatter.write_dl(rows)

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
        compile_events.watcher = CompileProgress()
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
            compile_events.watcher = None
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
    """Route, simulate, compare and train: request routing for clusters of LLM servers."""


def main() -> None:
    """Entry point of the ``tailrace`` command."""
    cli(prog_name="tailrace")
