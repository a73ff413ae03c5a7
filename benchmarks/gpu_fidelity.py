"""How well a fitted simulator predicts real GPUs: ``python benchmarks/gpu_fidelity.py FOLDER``.

FOLDER holds recordings of real servers, one folder each: ``requests.jsonl`` with the times of every
request, ``meta.json`` with the engine's settings, and perhaps ``summary.txt`` with the errors of
LLMServingSim 2 on the same run. For each, ``tailrace calibrate`` learns the server from the times
of the first half of the requests. Then the whole run is simulated with what it found and judged on
the second half, whose times it has not seen. The other way round, and from the middle half to the
first and last quarter, are printed as cross-checks.
Exits with 1 if a mean or P90 is off by more than the limit. The report holds errors, no data.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.calibrate.logs import calibrate_log
from tailrace.calibrate.run_fit import simulated
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.files import write_text
from tailrace.replay import recorded
from tailrace.replay.recorded import RecordedTraffic

LATENCIES = ("TTFT", "TPOT", "E2E")
STATISTICS = ("mean", "p50", "p90", "p99")
#: Largest error of a mean, also for a mixture of experts, and of a 90th percentile.
MEAN_LIMIT, EXPERTS_LIMIT, P90_LIMIT = 0.03, 0.05, 0.05
_EXPERTS = re.compile(r"-a\d+(\.\d+)?b\b|moe|mixtral|gpt-oss|deepseek-(v|r)", re.IGNORECASE)
_PEER_NAMES = {"TTFT": "TTFT", "TPOT": "TPOT", "Latency": "E2E"}
_PEER_ROW = re.compile(r"^(\w+)\s+(Mean|Median|P90|P99)\s+([\d.]+)\s+([\d.]+)", re.MULTILINE)


def latencies(
    table_rows: NDArray[np.void], first_s: NDArray[np.float64], last_s: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Return the latencies [R] in s; of answers of one token there is no TPOT (NaN)."""
    gaps = table_rows["output_tokens"] - 1.0
    tpot = np.where(gaps > 0, (last_s - first_s) / np.maximum(gaps, 1.0), np.nan)
    return {"TTFT": first_s, "TPOT": tpot, "E2E": last_s}


def statistics(values: NDArray[np.float64]) -> dict[str, float]:
    """Return mean and percentiles."""
    known = values[np.isfinite(values)]
    points = np.percentile(known, [50, 90, 99])
    return dict(zip(STATISTICS, map(float, (known.mean(), *points)), strict=True))


def judge(recording: RecordedTraffic, used: NDArray[np.bool_]) -> dict[str, Any]:
    """Fit on some requests, simulate all and compare the others."""
    start = time.process_time()
    (found,) = calibrate_log(recording, Replica(), only=used).replicas
    seconds = time.process_time() - start
    model = found.replica.cost
    assert model is not None
    rows, before = recording.table.rows, recording.outcomes
    was = latencies(rows, before["first_s"] - before["sent_s"], before["last_s"] - before["sent_s"])
    now = latencies(rows, *simulated(recording.table, found.replica, found.overhead_ms))
    errors = {}
    for name in LATENCIES:
        real, ours = was[name][~used], now[name][~used]
        there, here = statistics(real), statistics(ours)
        errors[name] = {key: here[key] / there[key] - 1.0 for key in STATISTICS}
        errors[name]["request"] = float(np.nanmedian(np.abs(ours / real - 1.0)))
    capacity = {k: getattr(found.replica, k) for k in ("batch_cap", "chunk_size", "num_blocks")}
    return {
        "judged_on": int((~used).sum()),
        "errors": errors,
        "cost": model.model_dump(),
        "overhead_ms": found.overhead_ms,
        "capacity": capacity,
        "sources": found.sources,
        "cpu_s": seconds,
    }


def peer_errors(file: Path) -> dict[str, dict[str, float]]:
    """Return another simulator's errors on the whole run, from its summary; empty: none."""
    if not file.is_file():
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, statistic, real, theirs in _PEER_ROW.findall(file.read_text(encoding="utf-8")):
        if name in _PEER_NAMES and float(real) > 0:
            key = "p50" if statistic == "Median" else statistic.lower()
            found.setdefault(_PEER_NAMES[name], {})[key] = float(theirs) / float(real) - 1.0
    return found


def is_mixture(folder: Path) -> bool:
    """Whether the model is a mixture of experts, by its name or the engine's settings."""
    text = (folder / "meta.json").read_text(encoding="utf-8") if _has_meta(folder) else ""
    return bool(_EXPERTS.search(f"{folder.name} {text}")) or (
        re.search(r'"enable_expert_parallel":\s*true', text) is not None
    )


def _has_meta(folder: Path) -> bool:
    return (folder / "meta.json").is_file()


def measure(folder: Path) -> dict[str, Any]:
    """Judge one recording both ways."""
    recording = recorded.read(folder)
    if recording.replicas != 1:
        raise TailraceError(
            f"{folder} has {recording.replicas} servers; give recordings of one server each"
        )
    place = np.arange(len(recording.table)) / len(recording.table)
    half = place < 0.5
    forward = judge(recording, half)
    limit = EXPERTS_LIMIT if is_mixture(folder) else MEAN_LIMIT
    errors = forward["errors"]
    within = all(
        abs(errors[name]["mean"]) <= limit and abs(errors[name]["p90"]) <= P90_LIMIT
        for name in LATENCIES
    )
    return {
        "recording": folder.name,
        "requests": len(recording.table),
        "is_mixture_of_experts": is_mixture(folder),
        "mean_limit": limit,
        "within_limits": within,
        "first_half_predicts_second": forward,
        "second_half_predicts_first": judge(recording, ~half),
        "middle_half_predicts_rest": judge(recording, (place >= 0.25) & (place < 0.75)),
        "llmservingsim": peer_errors(folder / "summary.txt"),
    }


def show(result: dict[str, Any]) -> None:
    """Print one recording's errors in percent."""
    verdict = "within" if result["within_limits"] else "OUTSIDE"
    print(
        f"\n{result['recording']}: {result['requests']} requests, {verdict} the limits "
        f"(mean {result['mean_limit']:.0%}, P90 {P90_LIMIT:.0%})"
    )
    print(f"{'error, %':32}" + "".join(f"{name + ' ' + k:>11}" for name in LATENCIES
                                       for k in ("mean", "p90", "p99")))  # fmt: skip
    rows = [
        ("second half, from the first", result["first_half_predicts_second"]["errors"]),
        ("first half, from the second", result["second_half_predicts_first"]["errors"]),
        ("both ends, from the middle half", result["middle_half_predicts_rest"]["errors"]),
        ("LLMServingSim 2, whole run", result["llmservingsim"]),
    ]
    for label, errors in rows:
        cells = [errors.get(name, {}).get(key) for name in LATENCIES for key in
                 ("mean", "p90", "p99")]  # fmt: skip
        print(f"{label:32}" + "".join(f"{'-' if c is None else f'{100 * c:+.1f}':>11}"
                                      for c in cells))  # fmt: skip


def main() -> int:
    """Judge all recordings; 0 if all errors are within the limits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="recordings, one folder each, or one of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the errors to this file")
    given = parser.parse_args()
    try:
        inside = sorted(p.parent for p in given.folder.glob("*/requests.jsonl"))
        folders = inside or [given.folder]
        results = []
        for folder in folders:
            results.append(measure(folder))
            show(results[-1])
    except TailraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json is not None:
        write_text(given.json, json.dumps({"recordings": results}, indent=1) + "\n")
    return 0 if all(r["within_limits"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
