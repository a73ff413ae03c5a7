"""What a report is made of: the results folder of ``tailrace evaluate``, read back and checked."""

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pydantic import BaseModel, ConfigDict, ValidationError

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.errors import TailraceError, unknown_name
from tailrace.evaluate.judge.compare import Interval
from tailrace.evaluate.judge.results import JSON, PARQUET
from tailrace.evaluate.judge.statistics import Grid, versus_single
from tailrace.evaluate.measure.cells import Cell
from tailrace.evaluate.measure.contender import Role
from tailrace.evaluate.measure.metrics import Latency, Summary
from tailrace.evaluate.measure.tail import Extremes
from tailrace.saturation import with_capacity

#: Ratios of the two files that differ by more than this are of different evaluations; the JSON
#: file has six digits.
SAME = 1e-4


class _Part(BaseModel):
    """Part of results.json; what a report does not need is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Versus(_Part):
    """Ratios to another policy, geometric means over scenarios."""

    policy: str
    cost: float | None
    p99_ttft: float | None
    mean_e2e: float | None
    throughput: float | None
    intervals: dict[str, tuple[float, float] | None]


class Standing(_Part):
    """One policy over all scenarios."""

    policy: str
    spec: str
    role: Role
    score: float | None
    vs_best_single: Versus


class Summed(_Part):
    """What results.json says."""

    suite: str
    subject: str | None
    seeds: tuple[int, ...]
    purpose: str
    selection_seeds: tuple[int, ...]
    requests: dict[str, int]
    warmup_fraction: float
    ttft_limit_s: float
    tailrace: str
    sources: str
    reference: str
    best_single: str
    best_hand_made: str
    best_of_each: dict[str, str]
    policies: tuple[Standing, ...]
    scenarios: dict[str, dict[str, Any]] = {}
    """Settings of the scenarios; without them only shipped ones can be played again."""


@dataclass(frozen=True)
class Results:
    """An evaluation as its folder tells it."""

    folder: Path
    data: Summed
    grid: Grid
    subject: str  #: the policy the report is about

    @property
    def opponents(self) -> tuple[str, ...]:
        """The best rule of each scenario [S]."""
        return tuple(self.data.best_of_each[name] for name in self.grid.scenarios)

    @cached_property
    def standing(self) -> dict[str, Standing]:
        """Every policy by its name, lowest score first."""
        return {s.policy: s for s in self.data.policies}

    @cached_property
    def cost_ratios(self) -> dict[str, list[Interval]]:
        """Cost of every policy against that of the best single rule, per scenario [S]."""
        others = [self.data.best_single] * len(self.grid.scenarios)
        return {p: self.grid.ratios("cost", p, others).each() for p in self.grid.policies}

    @property
    def look_aheads(self) -> tuple[str, ...]:
        """Names of the policies that simulate the future."""
        return tuple(name for name, s in self.standing.items() if s.role is Role.ORACLE)

    def cells(self, scenario: str, policy: str) -> tuple[Cell, ...]:
        """Return the cells of a policy in a scenario, one per seed."""
        grid = self.grid
        return grid.cells[grid.scenarios.index(scenario)][grid.policies.index(policy)]

    def scenario(self, name: str) -> Scenario | None:
        """Return a scenario as it was played; None if its settings are not known here."""
        if name in self.data.scenarios:
            found = scenarios.build({"name": name, **self.data.scenarios[name]})
        elif name in scenarios.names():
            found = scenarios.load(name)
        else:
            return None
        requests = {"requests": self.data.requests[name]}
        found = found.model_copy(update={"workload": found.workload.model_copy(update=requests)})
        return with_capacity(found)


def load(folder: Path, policy: str | None = None) -> Results:
    """Read a results folder; ``policy`` is what the report is about instead of the one under test.

    Raises if it is none, if a file is damaged, or if its files are of different evaluations.
    """
    if not folder.is_dir():
        raise TailraceError(
            f"there is no results folder {folder}; make one with `tailrace evaluate -o {folder}`"
        )
    data = _summed(folder / JSON)
    grid = _grid(folder / PARQUET, data)
    subject = policy or data.subject
    if subject is None:
        raise TailraceError(
            f"no policy was under test in {folder}; say with --policy which one to report on, "
            f"e.g. --policy {data.policies[0].policy}"
        )
    if subject not in grid.policies:
        raise unknown_name("policy in these results", subject, grid.policies)
    results = Results(folder, data, grid, subject)
    _check_same(results)
    return results


def _damaged(path: Path, what: str) -> TailraceError:
    return TailraceError(
        f"{path} is damaged ({what}); the `tailrace evaluate` command that made it writes it anew "
        "from its cells"
    )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise TailraceError(
            f"{path.parent} is no results folder, or its evaluation did not come to an end: there "
            f"is no {path.name}; run `tailrace evaluate` with -o {path.parent}"
        )
    return path


def _summed(path: Path) -> Summed:
    try:
        data = json.loads(_existing(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    try:
        summed = Summed.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
    if not (summed.seeds and summed.policies and summed.best_of_each):
        raise _damaged(path, "it holds no results")
    return summed


def _grid(path: Path, data: Summed) -> Grid:
    """All cells on the seeds of the evaluation; those of the selection are left out."""
    try:
        rows = pyarrow.parquet.read_table(_existing(path)).to_pylist()
        cells = [_cell(row) for row in rows if row["seed"] in data.seeds]
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None
    except (KeyError, TypeError) as error:
        raise _damaged(path, f"there is no figure {error}") from None
    try:
        return Grid.of(
            cells, list(data.best_of_each), [s.policy for s in data.policies], data.seeds
        )
    except KeyError as error:
        scenario, policy, seed = error.args[0]
        raise TailraceError(
            f"{path} does not belong to the {JSON} beside it: it has no cell of {policy} on "
            f"{scenario}, seed {seed}; run the same `tailrace evaluate` command again"
        ) from None


def _cell(row: dict[str, Any]) -> Cell:
    def of(kind: type[Summary] | type[Extremes]) -> Any:
        values: dict[str, Any] = {}
        for field in fields(kind):
            if field.type is Latency:
                parts = {f.name: row[f"{field.name}_{f.name}"] for f in fields(Latency)}
                values[field.name] = Latency(**parts)
            else:
                value = row[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value
        return kind(**values)

    return Cell(row["scenario"], row["policy"], row["seed"], of(Summary), of(Extremes))


def _check_same(results: Results) -> None:
    """Raise unless both files tell the same of the subject: one may be of an older evaluation."""
    claimed = results.standing[results.subject].vs_best_single
    if claimed.policy not in results.grid.policies:
        raise _damaged(results.folder / JSON, f"no policy is called '{claimed.policy}'")
    found = versus_single(results.grid, results.subject, claimed.policy).cost.ratio
    if claimed.cost is not None and not abs(found - claimed.cost) <= SAME * claimed.cost:
        raise TailraceError(
            f"{JSON} and {PARQUET} in {results.folder} are of different evaluations: the cost "
            f"against {claimed.policy} is {claimed.cost:g} in one and {found:g} in the other; run "
            "the same `tailrace evaluate` command again"
        )
