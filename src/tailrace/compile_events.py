"""What is being compiled, for whoever shows it.

A module of its own because the command line must not import the compiler.
"""

from collections.abc import Callable

#: Called with the name of a function before it is compiled, and with None when it is compiled.
#: Functions that it calls may be compiled in between.
watcher: Callable[[str | None], None] | None = None


def tell(name: str | None) -> None:
    """Call the watcher, if there is one."""
    if watcher is not None:
        watcher(name)
