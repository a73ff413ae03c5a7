"""The one exception a user is meant to see, and the one warning."""

import difflib
from collections.abc import Iterable


class TailraceError(Exception):
    """A mistake in what the user gave us, said in one sentence that names what to do.

    The command line prints it without a stack trace and exits with code 2.
    """


class LatencyLimitWarning(UserWarning):
    """Requests of an environment took longer than the limit it was given."""


class RenamedSettingWarning(UserWarning):
    """A setting was given by a name that it no longer has.

    The command line prints it as one plain line.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> TailraceError:
    """Build the error for a name that does not exist, with the nearest names that do."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return TailraceError(f"unknown {kind} '{name}'; {hint}")
