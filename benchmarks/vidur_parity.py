"""Does Tailrace give Vidur's answers? Replays recorded Vidur runs and compares every request.

    python benchmarks/vidur_parity.py FOLDER [--json] [--jobs N]

A run is a pair RUN.json (settings and check-sums) and RUN.csv (one row per request with its replica
and times). Each is replayed twice: with the recorded replicas (are the times the same?) and with
Vidur's router rebuilt (are the replicas the same?). Exit code 0: all runs agree, 1: some do not, 2:
the folder cannot be used.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tailrace.config import Engine
from tailrace.errors import TailraceError
from tailrace.sim.build import why_not_compiled
from tailrace.sim.reference import ReferenceEngine
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import Simulation
from vidur_routers import make_router
from vidur_runs import TIMES, VidurRun, read_run, run_names

TOLERANCE_S = 1e-6
DIFFERENCES = ("max_diff_s", "compiled_max_diff_s", "fast_max_diff_s")

Report = dict[str, Any]


def max_diff_s(a: NDArray[np.void], b: NDArray[np.void]) -> float:
    """Largest difference of any time of any request; inf if one of them never got so far."""
    largest = 0.0
    for field in TIMES:
        if (np.isnan(a[field]) != np.isnan(b[field])).any():
            return math.inf
        difference = np.abs(a[field] - b[field])
        largest = max(largest, float(np.nanmax(difference, initial=0.0)))
    return largest


def same_checksums(run: VidurRun, result: SimResult) -> bool:
    """Whether iterations and the sums of T, K and W agree."""
    totals = result.replicas
    found = {
        "iterations": int(totals["iterations"].sum()),
        "sum_T": int(totals["tokens"].sum()),
        "sum_K": int(totals["context"].sum()),
        "sum_W": float(totals["prefill_work"].sum()),
    }
    return all(run.checksums[name] == value for name, value in found.items())


def same_iterations(run: VidurRun, result: SimResult) -> bool:
    """Whether every logged iteration took place, to the last bit of its start."""
    assert result.batches is not None
    fields = ("replica", "stage", "start_s", "tokens", "context", "prefill_work")
    ours = set(zip(*(result.batches[field].tolist() for field in fields), strict=True))
    return run.iterations <= ours


def reference_report(run: VidurRun) -> Report:
    """Compare a run with the reference engine."""
    engine = ReferenceEngine(run.cluster, run.table, engine=Engine(vidur_compat=True))
    recorded = run.requests["replica"]
    log = bool(run.iterations)
    router = make_router(run.branch, run.router, run.router_settings)
    result = engine.run(dispatcher=router, record_batches=log)
    same_replicas = bool((result.requests["replica"] == recorded).all())
    if not same_replicas:  # otherwise a replay would be the very same run
        result = engine.run(replicas=recorded, record_batches=log)
    report: Report = {
        "engine": "reference",
        "max_diff_s": max_diff_s(result.requests, run.requests),
        "assignment_equal": same_replicas,
        "restarts_equal": bool((result.requests["restarts"] == run.requests["restarts"]).all()),
        "cached_tokens_equal": bool(
            (result.requests["cached_tokens"] == run.requests["cached_tokens"]).all()
        ),
        "checksums_equal": same_checksums(run, result),
    }
    if log:
        report["iterations_equal"] = same_iterations(run, result)
    return report


def compiled_report(run: VidurRun) -> Report:
    """Compare a run with the compiled engine, iteration by iteration and with fast-forward."""
    if why_not_compiled(run.cluster) is not None:
        return {}
    report: Report = {"engine": "reference+compiled"}
    try:
        exact, fast = compiled_result(run, exact=True), compiled_result(run, exact=False)
    except TailraceError as error:  # the run is fine, the reference engine has played it
        return report | {"compiled_max_diff_s": math.inf, "compiled_error": str(error)}
    return report | {
        "compiled_max_diff_s": max_diff_s(exact.requests, run.requests),
        "compiled_checksums_equal": same_checksums(run, exact),
        "fast_max_diff_s": max_diff_s(fast.requests, exact.requests),
    }


def compiled_result(run: VidurRun, exact: bool) -> SimResult:
    """Replay a run on the compiled engine."""
    engine = Engine(engine="compiled", exact=exact, vidur_compat=True)
    simulation = Simulation(run.cluster, run.table, engine=engine)
    simulation.replay(run.requests["replica"].astype(np.int64))
    return simulation.result()


def check_run(folder: Path, name: str) -> Report:
    """Replay one run and say how well it agrees."""
    run = read_run(folder, name)
    started = time.perf_counter()
    report = reference_report(run)
    report |= compiled_report(run)
    report["requests"] = len(run.table)
    report["seconds"] = round(time.perf_counter() - started, 3)
    report["ok"] = agrees(report)
    return report


def agrees(report: Report) -> bool:
    """Whether all that is promised holds. Fast-forward may fall on the other side of a tie."""
    times = [report["max_diff_s"], report.get("compiled_max_diff_s", 0.0)]
    verdicts = [value for key, value in report.items() if key.endswith("_equal")]
    return all(seconds <= TOLERANCE_S for seconds in times) and all(verdicts)


def check_folder(folder: Path, jobs: int) -> Iterator[tuple[str, Report]]:
    """Check all runs, on several processes if asked to; yields them in order of name."""
    names = run_names(folder)
    if jobs == 1 or len(names) == 1:
        for name in names:
            yield name, check_run(folder, name)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        reports = pool.map(check_run, [folder] * len(names), names)
        yield from zip(names, reports, strict=True)


def summary(reports: dict[str, Report]) -> Report:
    """The whole folder in a few figures."""
    failed = [name for name, report in reports.items() if not report["ok"]]
    return {
        "runs": len(reports),
        "passed": len(reports) - len(failed),
        "failed": failed,
        "bit_equal": sum(report["max_diff_s"] == 0.0 for report in reports.values()),
        "assignment_equal": sum(report["assignment_equal"] for report in reports.values()),
        **{key: _largest(reports, key) for key in DIFFERENCES},
    }


def _largest(reports: dict[str, Report], key: str) -> float | None:
    return max((report[key] for report in reports.values() if key in report), default=None)


def print_tables(reports: dict[str, Report], console: Console) -> None:
    """Print a line per run and the summary."""
    table = Table(box=None)
    for heading in ("run", "engine", "max diff s", "compiled", "fast", "router", "rest", ""):
        table.add_column(heading, no_wrap=True)
    for name, report in reports.items():
        differ = [key for key, value in report.items() if key.endswith("_equal") and not value]
        rest = [key.removesuffix("_equal") for key in differ if key != "assignment_equal"]
        table.add_row(
            name,
            report["engine"],
            *(_seconds(report.get(key)) for key in DIFFERENCES),
            "equal" if report["assignment_equal"] else "DIFFERS",
            f"DIFFERS: {', '.join(rest)}" if rest else "equal",
            "ok" if report["ok"] else "FAILED",
        )
    console.print(table)
    for key, value in summary(reports).items():
        console.print(f"{key}: {', '.join(value) or '-' if isinstance(value, list) else value}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def to_json(reports: dict[str, Report]) -> str:
    """Both parts as JSON, with null for a time that only one side has."""

    def finite(report: Report) -> Report:
        return {k: None if v in (math.inf, None) else v for k, v in report.items()}

    runs = {name: finite(report) for name, report in reports.items()}
    return json.dumps({"runs": runs, "summary": finite(summary(reports))}, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of recorded runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--jobs", type=int, default=cpu_count() or 1, help="processes to use")
    options = parser.parse_args(argv)
    # In a file or a pipe there is no terminal to fit into.
    console = Console(width=None if sys.stdout.isatty() else 160)
    reports: dict[str, Report] = {}
    try:
        total = len(run_names(options.folder))
        with Progress(console=console, transient=True, disable=options.json) as progress:
            task = progress.add_task("replaying", total=total)
            for name, report in check_folder(options.folder, max(1, options.jobs)):
                reports[name] = report
                progress.update(task, advance=1, description=name)
    except TailraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(to_json(reports))
    else:
        print_tables(reports, console)
    return 0 if all(report["ok"] for report in reports.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
