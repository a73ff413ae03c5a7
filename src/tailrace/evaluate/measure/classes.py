"""What each class of requests got: targets met, throughput, the worst served, the longest wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tailrace.evaluate.measure.metrics import slo_met
from tailrace.evaluate.measure.tail import times_of
from tailrace.sim.result import FINISHED, SimResult
from tailrace.workload.classes import RequestClass

#: Share of a class's requests that counts as the worst served.
WORST = 0.01


@dataclass(frozen=True)
class ClassFigures:
    """One class of requests in one run, after warm-up. A request without an answer waits on."""

    requests: int
    slo_attainment: float  #: share that met both targets
    requests_per_s: float  #: that ended while others still arrived
    ttft_mean_s: float
    worst_ttft_s: float  #: mean time to first token of the worst-served one per cent
    longest_ttft_s: float


def by_class(
    result: SimResult, classes: Sequence[RequestClass], warmup_fraction: float
) -> dict[str, ClassFigures]:
    """Return the figures of each class by its name; a class without requests has none."""
    rows = result.table.rows
    counted = np.arange(len(rows)) >= int(warmup_fraction * len(rows))
    arrived, answered, ended, (start, stop) = times_of(result, warmup_fraction)
    done = (result.requests["status"] == FINISHED) & (ended > start) & (ended <= stop)
    met, ttft = slo_met(result), answered - arrived
    found = {}
    for one in classes:
        member = one.members(rows)
        mine = member & counted
        count = int(mine.sum())
        if not count:
            continue
        waits = np.sort(ttft[mine])
        found[one.name] = ClassFigures(
            requests=count,
            slo_attainment=float(met[mine].mean()),
            requests_per_s=float((done & member).sum() / (stop - start)) if stop > start else 0.0,
            ttft_mean_s=float(waits.mean()),
            worst_ttft_s=float(waits[-max(1, round(WORST * count)) :].mean()),
            longest_ttft_s=float(waits[-1]),
        )
    return found


def merged(cells: Sequence[Mapping[str, ClassFigures]]) -> dict[str, ClassFigures]:
    """Merge the figures of several seeds: requests in all, the longest wait, means of all else."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    found = {}
    for name in names:
        seeds = [cell[name] for cell in cells if name in cell]
        values: dict[str, Any] = {
            field.name: sum(getattr(one, field.name) for one in seeds) / len(seeds)
            for field in fields(ClassFigures)
        }
        values["requests"] = sum(one.requests for one in seeds)
        values["longest_ttft_s"] = max(one.longest_ttft_s for one in seeds)
        found[name] = ClassFigures(**values)
    return found
