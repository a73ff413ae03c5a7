"""Tailrace commands as child processes: run to the end, or stopped when a block ends."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.errors import TailraceError
from tailrace.files import write_text

Json = dict[str, Any]

#: Seconds that a process has to end after it was asked to.
STOP_S = 20.0
_BEGUN = time.monotonic()


def tell(text: str) -> None:
    """Write a line about what is going on to standard error, with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:4.0f} s] {text}", file=sys.stderr, flush=True)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start a tailrace command apart from our terminal, so that only we stop it."""
    command = [sys.executable, "-m", "tailrace.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def stop(process: subprocess.Popen[str], number_of_signal: int) -> None:
    """Ask a process we started to end, and kill it if it does not."""
    if process.poll() is None:
        process.send_signal(number_of_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    # Its workers, if any are left, are in its group, whose number is its own until we wait.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run(*arguments: str) -> str:
    """Run a tailrace command to its end and return what it printed."""
    tell(f"$ tailrace {shlex.join(arguments)}")
    process = spawn(*arguments)
    try:
        printed, _ = process.communicate()
    finally:
        stop(process, signal.SIGINT)
    if process.returncode:
        raise TailraceError(f"tailrace {arguments[0]} failed ({process.returncode})")
    return printed


def run_json(keep: Path, *arguments: str) -> Json:
    """Run a command with --json, keep what it printed in a file, and return it."""
    printed = run(*arguments, "--json")
    write_text(keep, printed)
    found: Json = json.loads(printed)
    return found


@contextmanager
def started(*arguments: str, say: Callable[[str], None] = tell) -> Iterator[subprocess.Popen[str]]:
    """Run a tailrace command during this block; it is stopped in the end whatever happens."""
    say(f"$ tailrace {shlex.join(arguments)}")
    process = spawn(*arguments)
    try:
        yield process
    finally:
        stop(process, signal.SIGTERM)


def awaited(process: subprocess.Popen[str], pattern: str) -> str:
    """Return what a pattern finds in the next lines that a process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(pattern, line)
        if found:
            return found[1]
    command = shlex.join(list(process.args)[3:4])  # type: ignore[arg-type]
    raise TailraceError(f"tailrace {command} ended with {process.wait()} before it was ready")
