"""Files that are either complete or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import TailraceError


def check_target(path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse, before any work is done, a file that could not be written in the end."""
    if path.suffix.lower() not in suffixes:
        raise TailraceError(
            f"cannot tell the format of {path}; its name must end in {_any(suffixes)}"
        )
    if path.is_dir():
        raise TailraceError(f"cannot write {path}: it is a folder")
    folder = path.parent
    if not folder.is_dir():
        raise TailraceError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise TailraceError(f"cannot write {path}: no permission in folder {folder}")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; moved there at the end, removed on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise TailraceError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _any(suffixes: tuple[str, ...]) -> str:
    return " or ".join(suffixes)
