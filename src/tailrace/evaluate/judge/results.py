"""Result files of an evaluation: all cells as Parquet, their comparison as JSON.

:class:`ResultsFile` is the schema of ``results.json`` for writing and reading. All keys are
written; unknown keys are ignored when reading.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet
from pydantic import BaseModel, ConfigDict, ValidationError

from tailrace import __version__
from tailrace import scenario as scenarios
from tailrace.errors import TailraceError
from tailrace.evaluate.judge.baselines import REFERENCE
from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.compare import averaged
from tailrace.evaluate.judge.statistics import Verdict, VersusBestOfEach, VersusBestSingle
from tailrace.evaluate.judge.suite import Evaluation, Standing
from tailrace.evaluate.judge.weightings import Placing, placings
from tailrace.evaluate.measure import classes
from tailrace.evaluate.measure.cells import Cell, source_digest
from tailrace.evaluate.measure.classes import ClassFigures
from tailrace.evaluate.measure.contender import Role
from tailrace.evaluate.measure.metrics import Latency, Summary
from tailrace.evaluate.measure.tail import Extremes
from tailrace.files import atomic_path, dumps, plain, write_text
from tailrace.seeds import purpose_of

PARQUET, JSON = "results.parquet", "results.json"
#: Significant digits in the JSON file; more would not be reproducible across machines.
DIGITS, CELL_DIGITS = 6, 4
#: Lists of the JSON file that are written one row per line, after all else.
_LISTS = ("policies", "cells")
_RATIOS = ("cost", "p99_ttft", "mean_e2e", "throughput")


# ---- the schema of results.json -----------------------------------------------------------------


class _Part(BaseModel):
    """Part of the file. Undefined numbers are null."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Versus(_Part):
    """Ratios of a policy's metrics to another policy's; below 1 is better, except throughput."""

    policy: str
    """The other policy."""
    cost: float | None
    p99_ttft: float | None
    mean_e2e: float | None
    throughput: float | None
    intervals: dict[str, tuple[float | None, float | None] | None]
    """95 % interval of each ratio; null with a single seed."""


class VersusInScenario(Versus):
    """The same in one scenario, against its best rule."""

    p_value: float | None
    """Of the difference in cost, paired by seeds."""
    p_holm: float | None
    """The same, adjusted for the number of scenarios."""


class VersusPerScenario(_Part):
    """The policy under test against the best rule of each scenario."""

    share_better: float | None
    """Share of scenarios in which its cost is lower."""
    share_surely_better: float | None
    """The same where it is statistically significant (Holm, 5 %)."""
    worst_ratio: float | None
    """Cost ratio in the scenario in which it does worst."""
    worst_scenario: str
    scenarios: dict[str, VersusInScenario]


class PlacedPolicy(_Part):
    """One policy under another weighting than the latency cost."""

    score: float | None
    """See weightings.py; goodput: higher is better, all else: lower."""
    rank: int
    """From 1, among all policies."""


class RankedPolicy(_Part):
    """One policy over all scenarios."""

    policy: str
    spec: str
    role: Role
    score: float | None
    """Geometric mean over scenarios of its cost / the reference's."""
    vs_best_single: Versus
    other_weightings: dict[str, PlacedPolicy] = {}
    """TTFT only, end to end only, SLO misses, goodput -> score and rank."""


class ClassMeans(_Part):
    """One class of requests over all seeds; see ClassFigures."""

    requests: int
    slo_attainment: float | None
    requests_per_s: float | None
    ttft_mean_s: float | None
    worst_ttft_s: float | None
    longest_ttft_s: float | None


class CellMeans(_Part):
    """One policy in one scenario over all seeds.

    Counts are totals, extremes the worst of all seeds, all else means; see Summary and Extremes.
    """

    scenario: str
    policy: str
    requests: int
    finished: int
    failed: int
    pending: int
    rerouted: int
    cost_s: float | None
    ttft_s_mean: float | None
    ttft_s_p50: float | None
    ttft_s_p90: float | None
    ttft_s_p99: float | None
    e2e_s_mean: float | None
    e2e_s_p50: float | None
    e2e_s_p90: float | None
    e2e_s_p99: float | None
    tpot_s_mean: float | None
    tpot_s_p99: float | None
    slo_attainment: float | None
    goodput_rps: float | None
    prefix_hit_rate: float | None
    mean_batch_size: float | None
    preemptions: int
    imbalance: float | None
    longest_ttft_s: float | None
    longest_e2e_s: float | None
    worst_session_ttft_s: float | None
    over_limit: int
    least_share: float | None
    most_share: float | None
    steady_rps: float | None
    last_queue: float | None
    queue_grows: bool
    alarms: int
    """Seeds on which the queue grew without bound."""
    classes: dict[str, ClassMeans] = {}
    """What each class of requests got, if the workload has classes."""


class ResultsFile(_Part):
    """All of results.json."""

    suite: str
    """Its name, or "custom"."""
    subject: str | None
    """The policy under test; null if there was none."""
    seeds: tuple[int, ...]
    purpose: str
    """What the seeds are for: evaluation, tuning, or "own"."""
    selection_seeds: tuple[int, ...]
    """Seeds on which the best rules were chosen."""
    requests: dict[str, int]
    """Requests per run of each scenario."""
    warmup_fraction: float
    ttft_limit_s: float
    tailrace: str
    """Version that made it."""
    sources: str
    """Digest of the sources on which metrics depend."""
    reference: str
    best_single: str
    best_hand_made: str
    best_of_each: dict[str, str]
    """Scenario -> its best rule."""
    vs_best_single: Versus | None = None
    vs_best_hand_made: Versus | None = None
    vs_best_per_scenario: VersusPerScenario | None = None
    scenarios: dict[str, dict[str, Any]] = {}
    """Settings of each scenario that are not the default. Not rounded: a scenario played again has
    the very same requests. Without them only shipped scenarios can be played again."""
    notes: tuple[str, ...] = ()
    """What was left out of recorded traffic, in sentences."""
    policies: tuple[RankedPolicy, ...]
    """Lowest score first."""
    cells: tuple[CellMeans, ...] = ()


# ---- writing ------------------------------------------------------------------------------------


def write(found: Evaluation, folder: Path) -> None:
    """Write both files into ``folder``, and the scenarios that do not ship with Tailrace."""
    with atomic_path(folder / PARQUET) as temporary:
        pyarrow.parquet.write_table(table(found), temporary, compression="zstd")
    results = results_of(found)
    for name, settings in results.scenarios.items():
        if name not in scenarios.names():
            path = scenario_file(folder, name)
            path.parent.mkdir(exist_ok=True)
            write_text(path, dumps({"name": name, **settings}) + "\n")
    write_text(folder / JSON, as_text(results) + "\n")


def scenario_file(folder: Path, name: str) -> Path:
    """Where the settings of a scenario of one's own are kept."""
    return folder / "scenarios" / f"{quote(name, safe=' ')}.json"


def as_text(results: ResultsFile) -> str:
    """Return the JSON text with one line per policy and cell, which keeps it small and diffable."""
    data = plain(results.model_dump(mode="json"))
    # What files of earlier versions lack stays away: they are written as they were read.
    if not results.notes:
        del data["notes"]
    for policy in data["policies"]:
        if not policy["other_weightings"]:
            del policy["other_weightings"]
    for cell in data["cells"]:
        if not cell["classes"]:
            del cell["classes"]
    rounded = {
        name: value
        if name == "scenarios"
        else _rounded(value, CELL_DIGITS if name == "cells" else DIGITS)
        for name, value in data.items()
    }
    head = dumps({name: value for name, value in rounded.items() if name not in _LISTS})
    lists = ""
    for name in _LISTS:
        rows = ",\n    ".join(json.dumps(row, allow_nan=False) for row in rounded[name])
        lists += f',\n  "{name}": [\n    {rows}\n  ]'
    return f"{head.removesuffix('}').rstrip()}{lists}\n}}"


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return value


def results_of(found: Evaluation) -> ResultsFile:
    """Return the contents of the JSON file."""
    plan, subject = found.plan, found.subject
    hand_made, each = found.versus_hand_made, found.versus_each
    placed = placings(found.grid, REFERENCE)
    return ResultsFile(
        suite=plan.suite,
        subject=plan.subject,
        seeds=plan.seeds,
        purpose=str(purpose_of(plan.seeds[0]) or "own"),
        selection_seeds=plan.selection_seeds,
        requests={s.name: s.workload.requests for s in plan.scenarios},
        warmup_fraction=plan.measure.warmup_fraction,
        ttft_limit_s=plan.measure.ttft_limit_s,
        tailrace=__version__,
        sources=source_digest(),
        reference=REFERENCE,
        best_single=found.best_single,
        best_hand_made=found.best_hand_made,
        best_of_each=dict(zip(found.grid.scenarios, found.best_of_each, strict=True)),
        vs_best_single=None if subject is None else Versus(**_ratios(subject.versus)),
        vs_best_hand_made=None if hand_made is None else Versus(**_ratios(hand_made)),
        vs_best_per_scenario=None if each is None else _per_scenario(each),
        scenarios={
            s.name: s.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
            for s in plan.scenarios
        },
        notes=plan.notes,
        policies=tuple(_ranked(s, placed[s.contender.label]) for s in found.standings),
        cells=tuple(_cell_means(found)),
    )


def _ratios(versus: VersusBestSingle | Verdict) -> dict[str, Any]:
    return {
        "policy": versus.baseline,
        **{name: getattr(versus, name).ratio for name in _RATIOS},
        "intervals": {name: _bounds(getattr(versus, name)) for name in _RATIOS},
    }


def _bounds(interval: Interval) -> tuple[float, float] | None:
    if interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high


def _per_scenario(versus: VersusBestOfEach) -> VersusPerScenario:
    return VersusPerScenario(
        share_better=versus.share_better,
        share_surely_better=versus.share_surely_better,
        worst_ratio=versus.worst.cost.ratio,
        worst_scenario=versus.worst.scenario,
        scenarios={
            v.scenario: VersusInScenario(**_ratios(v), p_value=v.p_value, p_holm=v.p_holm)
            for v in versus.verdicts
        },
    )


def _ranked(standing: Standing, placed: dict[str, Placing]) -> RankedPolicy:
    contender = standing.contender
    return RankedPolicy(
        policy=contender.label,
        spec=contender.spec,
        role=contender.role,
        score=standing.score,
        vs_best_single=Versus(**_ratios(standing.versus)),
        other_weightings={
            key: PlacedPolicy(score=one.score, rank=one.rank) for key, one in placed.items()
        },
    )


def _cell_means(found: Evaluation) -> list[CellMeans]:
    grid = found.grid
    return [
        CellMeans(
            scenario=scenario,
            policy=policy,
            **flat(averaged([cell.summary for cell in cells])),
            **flat(merged_extremes(cells)),
            classes={
                name: ClassMeans(**dataclasses.asdict(figures))
                for name, figures in classes.merged([cell.classes for cell in cells]).items()
            },
        )
        for scenario, row in zip(grid.scenarios, grid.cells, strict=True)
        for policy, cells in zip(grid.policies, row, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class MergedExtremes(Extremes):
    """Extremes over several seeds: the worst of each, and the mean of rates."""

    alarms: int  #: seeds on which the queue grew without bound


def merged_extremes(cells: Sequence[Cell]) -> MergedExtremes:
    """Merge the extremes of the cells of several seeds."""
    all_ = [cell.extremes for cell in cells]
    sessions = [e.worst_session_ttft_s for e in all_ if e.worst_session_ttft_s is not None]

    def mean(name: str) -> float:
        return sum(float(getattr(e, name)) for e in all_) / len(all_)

    return MergedExtremes(
        longest_ttft_s=max(e.longest_ttft_s for e in all_),
        longest_e2e_s=max(e.longest_e2e_s for e in all_),
        worst_session_ttft_s=max(sessions, default=None),
        over_limit=sum(e.over_limit for e in all_),
        least_share=min(e.least_share for e in all_),
        most_share=max(e.most_share for e in all_),
        steady_rps=mean("steady_rps"),
        last_queue=mean("last_queue"),
        queue_grows=any(e.queue_grows for e in all_),
        alarms=sum(e.queue_grows for e in all_),
    )


# ---- cells as a table ---------------------------------------------------------------------------


def table(found: Evaluation) -> pa.Table:
    """Return one row per cell, those of the selection included: scenario, policy, seed, metrics."""
    contenders = {c.label: c for c in found.plan.contenders}
    measured = [cell for row in found.grid.cells for cells in row for cell in cells]
    # Cells arrive in completion order; sort them so that the file does not depend on it.
    selection = sorted(found.selection, key=lambda cell: (cell.scenario, cell.policy, cell.seed))
    rows = []
    for cell in (*measured, *selection):
        about = contenders[cell.policy]
        rows.append(
            {
                "scenario": cell.scenario,
                "policy": cell.policy,
                "spec": about.spec,
                "role": str(about.role),
                "seed": cell.seed,
                "purpose": str(purpose_of(cell.seed) or "own"),
                **flat(cell.summary),
                **flat(cell.extremes),
                **_class_columns(cell),
            }
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: [row.get(name) for row in rows] for name in names})


#: Between the name of a class and that of its figure, in the names of columns.
_OF_CLASS = ": "


def _class_columns(cell: Cell) -> dict[str, Any]:
    return {
        f"{name}{_OF_CLASS}{key}": value
        for name, figures in cell.classes.items()
        for key, value in dataclasses.asdict(figures).items()
    }


def _classes_in(row: dict[str, Any]) -> dict[str, ClassFigures]:
    found: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        name, of_class, key = column.rpartition(_OF_CLASS)
        if of_class and value is not None:
            found.setdefault(name, {})[key] = value
    return {name: ClassFigures(**values) for name, values in found.items()}


def flat(metrics: Summary | Extremes) -> dict[str, Any]:
    """Return metrics as columns; a latency becomes four."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(metrics):
        value = getattr(metrics, field.name)
        if isinstance(value, Latency):
            columns |= {f"{field.name}_{k}": v for k, v in dataclasses.asdict(value).items()}
        else:
            columns[field.name] = list(value) if isinstance(value, tuple) else value
    return columns


def cell_of(row: dict[str, Any]) -> Cell:
    """Return the cell of a row of :func:`table`; raises KeyError if a metric is missing."""

    def of(kind: type[Summary] | type[Extremes]) -> Any:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            if field.type is Latency:
                names = [f.name for f in dataclasses.fields(Latency)]
                values[field.name] = Latency(**{n: row[f"{field.name}_{n}"] for n in names})
            else:
                value = row[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value
        return kind(**values)

    return Cell(
        row["scenario"], row["policy"], row["seed"], of(Summary), of(Extremes), _classes_in(row)
    )


# ---- reading ------------------------------------------------------------------------------------


def damaged(path: Path, what: str) -> TailraceError:
    """Return the error of a results file that cannot be used."""
    return TailraceError(
        f"{path} is damaged ({what}); the `tailrace evaluate` command that made it writes it anew "
        "from its cells"
    )


def read(path: Path) -> ResultsFile:
    """Read a results.json; raises if it is damaged or holds no results."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
    try:
        results = ResultsFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
    if not (results.seeds and results.policies and results.best_of_each):
        raise damaged(path, "it holds no results")
    return results
