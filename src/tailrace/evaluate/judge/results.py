"""What an evaluation leaves behind: all cells as Parquet, and what they say as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from tailrace import __version__
from tailrace.evaluate.judge.baselines import REFERENCE
from tailrace.evaluate.judge.compare import Interval, averaged
from tailrace.evaluate.judge.statistics import VersusBestOfEach, VersusBestSingle
from tailrace.evaluate.judge.suite import Evaluation, Standing
from tailrace.evaluate.measure.cells import Cell, source_digest
from tailrace.evaluate.measure.metrics import Latency
from tailrace.evaluate.measure.tail import Extremes
from tailrace.files import atomic_path, dumps, plain
from tailrace.seeds import purpose_of

PARQUET, JSON = "results.parquet", "results.json"
#: Figures of results files; more digits would not repeat on another machine.
DIGITS, CELL_DIGITS = 6, 4
_LISTS = ("policies", "cells")
#: Figures of a summary that the JSON file gives for every cell; the Parquet file has them all.
_CELL_FIGURES = (
    *("requests", "finished", "failed", "pending", "rerouted", "cost_s"),
    *(f"{name}_{at}" for name in ("ttft_s", "e2e_s") for at in ("mean", "p50", "p90", "p99")),
    *("tpot_s_mean", "tpot_s_p99", "slo_attainment", "goodput_rps", "prefix_hit_rate"),
    *("mean_batch_size", "preemptions", "imbalance"),
)
_HEADLINE = ("cost", "p99_ttft", "mean_e2e", "throughput")


def write(found: Evaluation, folder: Path) -> None:
    """Write both files into ``folder``."""
    with atomic_path(folder / PARQUET) as temporary:
        pyarrow.parquet.write_table(table(found), temporary, compression="zstd")
    with atomic_path(folder / JSON) as temporary:
        temporary.write_text(as_text(as_data(found)) + "\n", encoding="utf-8")


def as_text(data: dict[str, Any]) -> str:
    """Return the results as JSON, one line per policy and cell: small, and differences show."""
    head = dumps({key: value for key, value in data.items() if key not in _LISTS})
    lists = ""
    for name in _LISTS:
        rows = ",\n    ".join(json.dumps(row, allow_nan=False) for row in data[name])
        lists += f',\n  "{name}": [\n    {rows}\n  ]'
    return f"{head.removesuffix('}').rstrip()}{lists}\n}}"


def table(found: Evaluation) -> pa.Table:
    """Return one row per cell, those of the selection included: scenario, policy, seed, figures."""
    roles = {c.label: c for c in found.plan.contenders}
    measured = [cell for row in found.grid.cells for cells in row for cell in cells]
    rows = []
    for cell in (*measured, *found.selection):
        about = roles[cell.policy]
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
            }
        )
    return pa.Table.from_pylist(rows)


def flat(figures: Any) -> dict[str, Any]:
    """Return the fields of a summary as columns; a latency becomes four."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        if isinstance(value, Latency):
            columns |= {f"{field.name}_{k}": v for k, v in dataclasses.asdict(value).items()}
        else:
            columns[field.name] = list(value) if isinstance(value, tuple) else value
    return columns


def as_data(found: Evaluation) -> dict[str, Any]:
    """Return what the JSON file holds; plain, without NaN."""
    plan, subject = found.plan, found.subject
    data: dict[str, Any] = {
        "suite": plan.suite,
        "subject": plan.subject,
        "seeds": list(plan.seeds),
        "purpose": str(purpose_of(plan.seeds[0]) or "own"),
        "selection_seeds": list(plan.selection_seeds),
        "requests": {s.name: s.workload.requests for s in plan.scenarios},
        "warmup_fraction": plan.measure.warmup_fraction,
        "ttft_limit_s": plan.measure.ttft_limit_s,
        "tailrace": __version__,
        "sources": source_digest(),
        "reference": REFERENCE,
        "best_single": found.best_single,
        "best_hand_made": found.best_hand_made,
        "best_of_each": dict(zip(found.grid.scenarios, found.best_of_each, strict=True)),
        "vs_best_single": _or_none(subject.versus if subject else None),
        "vs_best_hand_made": _or_none(found.versus_hand_made),
        "vs_best_per_scenario": None if found.versus_each is None else _each(found.versus_each),
        "policies": [_standing(s) for s in found.standings],
    }
    cells: list[dict[str, Any]] = _rounded(plain(_cells(found)), CELL_DIGITS)
    # Not rounded: whoever plays a scenario again gets the very same requests.
    settings = {
        s.name: s.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
        for s in plan.scenarios
    }
    return {**_rounded(plain(data), DIGITS), "scenarios": plain(settings), "cells": cells}


def _single(versus: VersusBestSingle) -> dict[str, Any]:
    return {
        "policy": versus.opponent,
        **{name: getattr(versus, name).ratio for name in _HEADLINE},
        "intervals": {name: _bounds(getattr(versus, name)) for name in _HEADLINE},
    }


def _or_none(versus: VersusBestSingle | None) -> dict[str, Any] | None:
    return None if versus is None else _single(versus)


def _each(versus: VersusBestOfEach) -> dict[str, Any]:
    worst = versus.worst
    return {
        "share_better": versus.share_better,
        "share_surely_better": versus.share_surely_better,
        "worst_ratio": worst.cost.ratio,
        "worst_scenario": worst.scenario,
        "scenarios": {
            v.scenario: {
                "policy": v.opponent,
                **{name: getattr(v, name).ratio for name in _HEADLINE},
                "intervals": {name: _bounds(getattr(v, name)) for name in _HEADLINE},
                "p_value": v.p_value,
                "p_holm": v.p_holm,
            }
            for v in versus.verdicts
        },
    }


def _standing(standing: Standing) -> dict[str, Any]:
    contender = standing.contender
    return {
        "policy": contender.label,
        "spec": contender.spec,
        "role": str(contender.role),
        "score": standing.score,
        "vs_best_single": _single(standing.versus),
    }


def _cells(found: Evaluation) -> list[dict[str, Any]]:
    """Every policy on every scenario, means over seeds; counts are totals."""
    grid = found.grid
    return [
        {
            "scenario": scenario,
            "policy": policy,
            **_shown(flat(averaged([cell.summary for cell in cells]))),
            **merged_extremes(cells),
        }
        for scenario, row in zip(grid.scenarios, grid.cells, strict=True)
        for policy, cells in zip(grid.policies, row, strict=True)
    ]


def _shown(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: columns[name] for name in _CELL_FIGURES}


def merged_extremes(cells: Sequence[Cell]) -> dict[str, Any]:
    """Merge the extremes of several seeds: the worst is the worst, rates are means."""
    all_ = [cell.extremes for cell in cells]
    sessions = [e.worst_session_ttft_s for e in all_ if e.worst_session_ttft_s is not None]

    def mean(name: str) -> float:
        return sum(float(getattr(e, name)) for e in all_) / len(all_)

    merged = Extremes(
        longest_ttft_s=max(e.longest_ttft_s for e in all_),
        longest_e2e_s=max(e.longest_e2e_s for e in all_),
        worst_session_ttft_s=max(sessions, default=None),
        over_limit=sum(e.over_limit for e in all_),
        least_share=min(e.least_share for e in all_),
        most_share=max(e.most_share for e in all_),
        steady_rps=mean("steady_rps"),
        last_queue=mean("last_queue"),
        queue_grows=any(e.queue_grows for e in all_),
    )
    return {**flat(merged), "alarms": sum(e.queue_grows for e in all_)}


def _bounds(interval: Interval) -> list[float] | None:
    if interval.low is None or interval.high is None:
        return None
    return [interval.low, interval.high]


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return value
