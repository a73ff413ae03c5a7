"""The results folder of ``tailrace evaluate``, read back and checked."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.errors import TailraceError, unknown_name
from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.results import (
    JSON,
    PARQUET,
    RankedPolicy,
    ResultsFile,
    cell_of,
    damaged,
    read,
)
from tailrace.evaluate.judge.statistics import Grid, versus_single
from tailrace.evaluate.measure.cells import Cell
from tailrace.evaluate.measure.contender import Role
from tailrace.saturation import with_capacity

#: Ratios of the two files that differ by more than this are of different evaluations; the JSON
#: file has six digits.
SAME = 1e-4


@dataclass(frozen=True)
class Results:
    """An evaluation read from its results folder."""

    folder: Path
    data: ResultsFile
    grid: Grid
    subject: str  #: the policy the report is about

    @property
    def best_of_each(self) -> tuple[str, ...]:
        """The best rule of each scenario [S]."""
        return tuple(self.data.best_of_each[name] for name in self.grid.scenarios)

    @cached_property
    def standing(self) -> dict[str, RankedPolicy]:
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
            workload = found.workload.name
            if scenarios.is_request_file(workload) and not Path(workload).is_file():
                return None
        elif name in scenarios.names():
            found = scenarios.load(name)
        else:
            return None
        return with_capacity(found.with_workload(requests=self.data.requests[name]))


def load(folder: Path, policy: str | None = None) -> Results:
    """Read a results folder; ``policy`` replaces the policy under test as the report's subject.

    Raises if it is none, if a file is damaged, or if its files are of different evaluations.
    """
    if not folder.is_dir():
        raise TailraceError(
            f"there is no results folder {folder}; make one with `tailrace evaluate -o {folder}`"
        )
    data = read(_existing(folder / JSON))
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


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise TailraceError(
            f"{path.parent} is no results folder, or its evaluation did not come to an end: there "
            f"is no {path.name}; run `tailrace evaluate` with -o {path.parent}"
        )
    return path


def _grid(path: Path, data: ResultsFile) -> Grid:
    """All cells on the seeds of the evaluation; those of the selection are left out."""
    try:
        rows = pyarrow.parquet.read_table(_existing(path)).to_pylist()
        cells = [cell_of(row) for row in rows if row["seed"] in data.seeds]
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, " ".join(str(error).split())) from None
    except (KeyError, TypeError) as error:
        raise damaged(path, f"there is no figure {error}") from None
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


def _check_same(results: Results) -> None:
    """Raise unless both files agree on the subject: one may be of an older evaluation."""
    claimed = results.standing[results.subject].vs_best_single
    if claimed.policy not in results.grid.policies:
        raise damaged(results.folder / JSON, f"no policy is called '{claimed.policy}'")
    found = versus_single(results.grid, results.subject, claimed.policy).cost.ratio
    if claimed.cost is not None and not abs(found - claimed.cost) <= SAME * claimed.cost:
        raise TailraceError(
            f"{JSON} and {PARQUET} in {results.folder} are of different evaluations: the cost "
            f"against {claimed.policy} is {claimed.cost:g} in one and {found:g} in the other; run "
            "the same `tailrace evaluate` command again"
        )
