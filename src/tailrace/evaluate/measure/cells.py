"""Cells of an evaluation: one policy on the traffic of one scenario and seed, each in its own file.

A cell's folder is named after its policy and two digests: of what was asked (scenario, traffic,
rate, policy), and of everything else its metrics depend on (defaults, source code). An interrupted
evaluation resumes from its cells, and other settings never reuse them; cells of baselines measured
with earlier sources are reused only if that is asked for.
"""

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.classes import ClassFigures, by_class
from tailrace.evaluate.measure.contender import Contender, Role
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import run
from tailrace.evaluate.measure.tail import Extremes, extremes
from tailrace.files import dumps, plain, write_text
from tailrace.parallel import WorkerPool
from tailrace.sim.result import SimResult
from tailrace.workload.library import classes_of

#: Policies per task: they share the generated traffic, and progress stays visible.
POLICIES_PER_TASK = 8
_PACKAGE = Path(__file__).parents[2]
#: Sources on which metrics depend.
_SOURCES = (
    *("view/**/*.py", "sim/**/*.py", "policy/**/*.py", "workload/**/*.py"),
    *("evaluate/measure/metrics.py", "evaluate/measure/tail.py", "evaluate/measure/classes.py"),
)


@dataclass(frozen=True)
class Measure:
    """How a run is turned into metrics."""

    warmup_fraction: float = 0.1  #: share of the first requests left out
    ttft_limit_s: float = 30.0  #: hard limit: longer waits for a first token are counted


@dataclass(frozen=True)
class Cell:
    """The metrics of one policy on one seed of a scenario."""

    scenario: str
    policy: str
    seed: int
    summary: Summary
    extremes: Extremes
    classes: dict[str, ClassFigures] = field(
        default_factory=dict
    )  #: by name; empty: there are none


_CELL = TypeAdapter(Cell)


@dataclass(frozen=True)
class Traffic:
    """Arrivals shared by all policies: a scenario, its rate (None: as recorded) and a seed."""

    scenario: Scenario
    rate_rps: float | None
    seed: int


#: Runs traffic under a policy, given by its spec, on some engine.
Player = Callable[[Traffic, str], SimResult]


@dataclass(frozen=True)
class CellTask:
    """Some policies on the same traffic."""

    traffic: Traffic
    contenders: tuple[Contender, ...]
    measure: Measure
    folder: Path
    player: Player


def simulator(traffic: Traffic, spec: str) -> SimResult:
    """Run traffic in the simulator."""
    return run(traffic.scenario, spec, traffic.rate_rps, traffic.seed)


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Return a digest of the sources on which metrics depend."""
    digest = hashlib.sha256()
    for path in sorted(p for pattern in _SOURCES for p in _PACKAGE.glob(pattern)):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cell_path(task: CellTask, contender: Contender) -> Path:
    """Return the file of a cell."""
    scenario = task.traffic.scenario
    about = {
        "scenario": _settings(scenario, exclude_defaults=True),
        "traffic": _file_digest(scenario.workload.name),
        "rate_rps": task.traffic.rate_rps,
        "measure": plain(task.measure),
        "policy": contender.fingerprint,
        "player": getattr(task.player, "__qualname__", type(task.player).__qualname__),
    }
    version = {"scenario": _settings(scenario), "sources": source_digest()}
    policy = re.sub(r"[^\w.=-]+", "_", contender.label)[:60]
    folder = task.folder / re.sub(r"[^\w.-]+", "_", scenario.name)
    return folder / f"{policy}.{_key(about)}.{_key(version)}" / f"{task.traffic.seed}.json"


def _settings(scenario: Scenario, *, exclude_defaults: bool = False) -> dict[str, Any]:
    settings: dict[str, Any] = scenario.model_dump(
        mode="json", exclude={"name", "description"}, exclude_defaults=exclude_defaults
    )
    # A file of recorded traffic is known by its digest, wherever it lies.
    if _file_digest(scenario.workload.name) is not None:
        del settings["workload"]["name"]
    return settings


def _key(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


def earlier(path: Path) -> Path | None:
    """Return the newest stored cell that answers the same question as ``path``; None: none."""
    same = path.parent.name.rpartition(".")[0]
    found = [p for p in path.parent.parent.glob(f"{glob.escape(same)}.*/{path.name}") if p != path]
    return max(found, key=lambda p: p.stat().st_mtime_ns, default=None)


@lru_cache(maxsize=64)
def _file_digest(workload: str) -> str | None:
    """Digest of a file of requests; None for a built-in workload."""
    path = Path(workload)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def work(task: CellTask) -> list[Cell]:
    """Run a task; each cell is stored as soon as it is finished."""
    done = []
    for contender in task.contenders:
        cell = measured(task, contender)
        path = cell_path(task, contender)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, dumps(cell))
        done.append(cell)
    return done


def measured(task: CellTask, contender: Contender) -> Cell:
    """Run a cell and return its metrics."""
    traffic, measure = task.traffic, task.measure
    try:
        result = task.player(traffic, contender.spec)
    except TailraceError as error:
        raise TailraceError(
            f"{contender.label} on {traffic.scenario.name}, seed {traffic.seed}: {error}"
        ) from None
    return Cell(
        traffic.scenario.name,
        contender.label,
        traffic.seed,
        summarise(result, measure.warmup_fraction),
        extremes(result, measure.warmup_fraction, measure.ttft_limit_s),
        by_class(result, classes_of(traffic.scenario.workload.name), measure.warmup_fraction),
    )


def read_cell(path: Path, contender: Contender, traffic: Traffic) -> Cell | None:
    """Read a stored cell under its current names; None if it is missing or damaged."""
    try:
        cell = _CELL.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return replace(cell, scenario=traffic.scenario.name, policy=contender.label, seed=traffic.seed)


@dataclass(frozen=True)
class CellBatch:
    """Cells to obtain: every policy on every traffic."""

    traffics: tuple[Traffic, ...]
    contenders: tuple[Contender, ...]

    @property
    def size(self) -> int:
        """Number of cells."""
        return len(self.traffics) * len(self.contenders)


def gather(
    batches: Sequence[CellBatch],
    measure: Measure,
    folder: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
    player: Player = simulator,
    keep_baselines: bool = False,
) -> list[Cell]:
    """Return all cells of the batches, reading those stored in ``folder`` and measuring the rest.

    ``keep_baselines`` reads cells of baselines although sources or default settings have changed
    since. ``progress`` gets the number of finished cells, and how many of them were stored before.
    """
    cells: list[Cell] = []
    tasks: list[CellTask] = []
    for batch in batches:
        for traffic in batch.traffics:
            whole = CellTask(traffic, batch.contenders, measure, folder, player)
            missing = []
            for contender in batch.contenders:
                path = cell_path(whole, contender)
                cell = read_cell(path, contender, traffic)
                if cell is None and keep_baselines and contender.role is not Role.SUBJECT:
                    old = earlier(path)
                    cell = None if old is None else read_cell(old, contender, traffic)
                if cell is None:
                    missing.append(contender)
                else:
                    cells.append(cell)
            tasks += [replace(whole, contenders=part) for part in _parts(missing)]
    kept = len(cells)
    progress(kept, kept)
    tasks.sort(key=_urgency)
    with WorkerPool(jobs) as pool:
        for _, found in pool.run(work, tasks):
            cells += found
            progress(len(cells), kept)
    return cells


def _parts(missing: Sequence[Contender]) -> Iterator[tuple[Contender, ...]]:
    """Split policies into tasks; a look-ahead takes as long as all other policies together."""
    groups = (
        [c for c in missing if c.role is Role.SUBJECT],
        [c for c in missing if c.role not in (Role.SUBJECT, Role.ORACLE)],
    )
    for group in groups:
        for start in range(0, len(group), POLICIES_PER_TASK):
            yield tuple(group[start : start + POLICIES_PER_TASK])
    for contender in missing:
        if contender.role is Role.ORACLE:
            yield (contender,)


def _urgency(task: CellTask) -> tuple[bool, bool, int]:
    """Sort key: policies under test first, so errors show early; long tasks before short ones."""
    roles = {c.role for c in task.contenders}
    scenario = task.traffic.scenario
    return (
        Role.SUBJECT not in roles,
        Role.ORACLE not in roles,
        -scenario.workload.requests * scenario.cluster.size,
    )
