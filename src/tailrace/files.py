"""Atomic writes, and JSON that any parser reads: what is not a finite number becomes null."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tailrace.errors import TailraceError


def check_target(path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse, before any work is done, a file that could not be written in the end."""
    if path.suffix.lower() not in suffixes:
        raise TailraceError(
            f"cannot tell the format of {path}; its name must end in {' or '.join(suffixes)}"
        )
    if path.is_dir():
        raise TailraceError(f"cannot write {path}: it is a folder")
    folder = path.parent
    if not folder.is_dir():
        raise TailraceError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise TailraceError(f"cannot write {path}: no permission in folder {folder}")


def make_folder(path: Path) -> None:
    """Make a folder to write to, and those above it, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TailraceError(f"cannot make folder {path}: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise TailraceError(f"cannot write to folder {path}: no permission")


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


def write_text(path: Path, text: str) -> None:
    """Write a text to ``path``, all of it or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def plain(value: Any) -> Any:
    """Turn results and settings into dicts, lists, strings and finite numbers."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="python"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # of NumPy, which the command line does not load for its help
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    return value


def dumps(value: Any) -> str:
    """Return a value as indented JSON; keys keep their order: equal results, equal bytes."""
    return json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
