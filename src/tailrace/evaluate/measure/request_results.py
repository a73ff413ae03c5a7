"""Per-request results as CSV or Parquet."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from tailrace.evaluate.measure.metrics import composite_cost_s, request_times, slo_met
from tailrace.files import atomic_path, check_target
from tailrace.sim.result import SimResult

SUFFIXES = (".csv", ".parquet")
#: In the order of their numbers.
STATUS_NAMES = ("pending", "finished", "failed")


def request_columns(result: SimResult) -> pa.Table:
    """Return one row per request, in table order; a time that does not exist is null."""
    rows, done = result.table.rows, result.requests
    times = request_times(result)
    columns: dict[str, Any] = {"request": np.arange(len(rows))}
    for name in ("prompt_tokens", "output_tokens", "session", "turn", "priority"):
        columns[name] = rows[name]
    columns["status"] = pa.array(STATUS_NAMES).take(pa.array(done["status"]))
    for name in ("replica", "arrived_s", "scheduled_s", "first_token_s", "finished_s"):
        columns[name] = done[name]
    columns |= {"ttft_s": times.ttft_s, "tpot_s": times.tpot_s, "e2e_s": times.e2e_s}
    columns |= {"cost_s": composite_cost_s(result), "slo_met": slo_met(result)}
    for name in ("restarts", "reroutes", "cached_tokens", "expected_cached"):
        columns[name] = done[name]
    return pa.table({name: _without_nan(column) for name, column in columns.items()})


def _without_nan(column: Any) -> Any:
    """Return a column as Arrow array, null where it is NaN."""
    if isinstance(column, pa.Array):
        return column
    return pa.array(np.ascontiguousarray(column), from_pandas=True)


def write_requests(result: SimResult, path: Path) -> None:
    """Write the per-request results to ``path``; its ending says the format."""
    check_target(path, SUFFIXES)
    columns = request_columns(result)
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".csv":
            options = pyarrow.csv.WriteOptions(quoting_style="needed")
            pyarrow.csv.write_csv(columns, temporary, options)
        else:
            pyarrow.parquet.write_table(columns, temporary, compression="zstd")
