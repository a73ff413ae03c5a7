"""Recorded traffic in a folder: which traces there are, whatever their formats.

Every file that a reader recognises is a trace; the Claude Code sessions of one folder are one trace
together, and so are decision logs. Beside ``name.ext``, or beside a folder ``name``, a file
``name.toml`` may hold what cannot be detected (:class:`TraceOptions`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tailrace.config import Positive, Settings, load_toml, parse
from tailrace.errors import TailraceError
from tailrace.workload import decision_log, traces
from tailrace.workload.traces import Trace

#: Folders within folders that are looked into.
_DEEPEST = 4
_OPTIONS = ".toml"
#: Endings that are not part of a trace's name.
_ENDINGS = (".gz", ".csv", ".jsonl", ".json", ".parquet")


class TraceOptions(Settings):
    """What cannot be read off a trace."""

    name: str | None = None
    """Name of the trace in results; default: that of its file."""
    format: str = traces.AUTO
    """Format of the file, as `tailrace workload import --format` takes it."""
    block_size: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Tokens per block id, where the file does not say it."""
    ttft_slo_s: Positive = 1.0
    """Target for the time to first token, unless the file has its own."""
    tpot_slo_s: Positive = 0.05
    """Target for the time per output token, unless the file has its own."""
    skip: bool = False
    """Leave the trace out."""


@dataclass(frozen=True)
class FoundTrace:
    """A trace in a folder."""

    name: str
    path: Path
    options: TraceOptions
    files: tuple[Path, ...] = ()  #: of a folder of sessions, those to be read

    def read(self) -> Trace:
        """Read it; rows are put in order of arrival."""
        block = self.options.block_size
        format_ = self.options.format
        return traces.read(
            self.path,
            "weka" if self.files and format_ == traces.AUTO else format_,
            sort=True,
            block_tokens=block,
            only=self.files,
        )


@dataclass(frozen=True)
class Skipped:
    """A file that is no trace, and why."""

    path: Path
    why: str


def find(folder: Path) -> tuple[list[FoundTrace], list[Skipped]]:
    """Return the traces in a folder (or the one that a file is), by name, and what is left out."""
    if not folder.exists():
        raise TailraceError(f"there is no folder {folder}; name one with recorded traffic")
    found: list[FoundTrace] = []
    skipped: list[Skipped] = []
    if folder.is_file():
        _take([folder], folder.parent, found, skipped)
    else:
        for inner in _folders(folder, 0):
            files = sorted(p for p in inner.iterdir() if p.is_file())
            _take(files, inner, found, skipped)
    return _named(found), skipped


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth < _DEEPEST:
        for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
            if not inner.name.startswith("."):
                yield from _folders(inner, depth + 1)


def _take(files: list[Path], folder: Path, found: list[FoundTrace], skipped: list[Skipped]) -> None:
    """Sort the files of one folder into traces and others."""
    sessions: list[Path] = []
    logs: list[Path] = []
    for path in files:
        if path.suffix == _OPTIONS or path.name.startswith("."):
            continue
        options = _options(path)
        if options.skip:
            skipped.append(Skipped(path, "its options say so"))
            continue
        try:
            kind = _kind(path) if options.format == traces.AUTO else options.format
        except (TailraceError, OSError, UnicodeDecodeError) as error:
            skipped.append(Skipped(path, f"not recognised: {str(error).removeprefix(f'{path} ')}"))
            continue
        if kind == "weka":
            sessions.append(path)
        elif kind == "decisions":
            logs.append(path)
        else:
            found.append(FoundTrace(options.name or stem(path), path, options))
    options = _options(folder)
    if options.skip and (sessions or logs):
        skipped.append(Skipped(folder, "its options say so"))
        return
    if sessions:
        found.append(FoundTrace(options.name or folder.name, folder, options, tuple(sessions)))
    if logs:
        # Logs of one router are parts of one recording, which share sessions.
        whole = decision_log.files(folder) == logs
        parts = [folder] if whole else logs
        found += [FoundTrace(options.name or stem(path), path, options) for path in parts]


def _kind(path: Path) -> str:
    """Return the format of a file; raises if it is no trace."""
    if path.stat().st_size == 0:
        raise TailraceError("it is empty")
    if not path.name.endswith(_ENDINGS):
        raise TailraceError(f"its name ends in none of {', '.join(_ENDINGS)}")
    return traces.detect(path)


def _options(path: Path) -> TraceOptions:
    """Return what the file of options beside a trace says."""
    for name in dict.fromkeys((f"{path.name}{_OPTIONS}", f"{stem(path)}{_OPTIONS}")):
        beside = path.parent / name
        if beside.is_file():
            try:
                return parse(TraceOptions, load_toml(beside))
            except TailraceError as error:
                raise TailraceError(f"{beside}: {error}") from None
    return TraceOptions()


def stem(path: Path) -> str:
    """Return a file's name without the endings of traces."""
    name = path.name
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _named(found: list[FoundTrace]) -> list[FoundTrace]:
    """Give traces of the same name the name of their folder before it."""
    names = [trace.name for trace in found]
    unique: list[FoundTrace] = []
    for trace in found:
        name = trace.name
        if names.count(name) > 1:
            name = f"{trace.path.parent.name}-{name}"
        taken = {other.name for other in unique}
        number = 2
        while name in taken:
            name, number = f"{trace.name}-{number}", number + 1
        unique.append(FoundTrace(name, trace.path, trace.options, trace.files))
    return sorted(unique, key=lambda trace: trace.name)
