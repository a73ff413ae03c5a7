"""Speed against NVIDIA's DynoSim on recorded traffic.

    python benchmarks/bench_peers.py --mooncake FILE --claude FOLDER [--json FILE]

DynoSim is the trace replay of ``ai-dynamo-runtime``; ``make peers`` installs it into an environment
of its own, ``--peer-python`` names another. Both simulate the same trace with the same number of
workers, KV blocks, batch limits and, as far as the forms allow, iteration times, in turns. Compared
are requests per CPU second of the process, without starting Python and without compiling: DynoSim
reads its trace file, Tailrace the Parquet file that it imported, and the import is timed beside it.
Each side runs as often as the other, by turns, and its best run counts; the median ratio of a turn
stands beside it. Outcomes are printed too; they differ as far as the schedulers and cost models do.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.config import Cluster, CostModel, Engine, Replica, RouterSettings
from tailrace.files import write_text
from tailrace.sim.simulator import simulate
from tailrace.workload import traces

PEER = "ai-dynamo-runtime"
DEFAULT_PYTHON = Path("build/peers/bin/python")
WORKERS = (8, 32)
#: Our rule for each of DynoSim's ways to route.
ROUTING = {"round_robin": "round_robin", "kv_router": "dynamo"}
#: DynoSim's options for each format. Sessions are played closed-loop, by a model of any name.
PEER_OPTIONS: dict[str, dict[str, Any]] = {
    "mooncake": {"trace_format": "mooncake", "trace_block_size": 512},
    "claude": {"trace_format": "weka", "execution_model": "model"},
}
GOALS = {"mooncake": 100.0, "claude": 30.0}
BLOCK, BLOCKS, SEQUENCES, BATCH_TOKENS = 64, 16_384, 256, 8192
#: DynoSim's polynomial: decodes take 5.74 ms and up to 54 ms per full KV memory, a prefill of x
#: tokens 0.0152 x + 4.2e-7 x^2 ms more.
COST = CostModel(
    base_ms=5.74,
    per_token_ms=0.01518,
    per_context_ms=54.0 / (BLOCK * BLOCKS),
    per_prefill_ms=8.4e-7,
)
SEED = 0

_PEER_RUN = """
import json, sys, time
from dynamo._core import run_mocker_trace_replay
asked = json.loads(sys.argv[1])
start = time.process_time()
result = run_mocker_trace_replay([asked["file"]], extra_engine_args={"engine": asked["engine"]},
    num_workers=asked["workers"], router_mode=asked["mode"], **asked["options"])
seconds = time.process_time() - start
print(json.dumps({"cpu_s": seconds, **result.summary}))
"""


def peer_run(python: Path, file: Path, trace: str, workers: int, mode: str) -> dict[str, Any]:
    """Replay a trace in DynoSim; return CPU time and outcomes."""
    asked = {
        "file": str(file),
        "engine": {
            "num_gpu_blocks": BLOCKS, "block_size": BLOCK, "max_num_seqs": SEQUENCES,
            "max_num_batched_tokens": BATCH_TOKENS,
        },
        "workers": workers,
        "mode": mode,
        "options": PEER_OPTIONS[trace],
    }  # fmt: skip
    done = subprocess.run(
        [python, "-c", _PEER_RUN, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"DynoSim failed: {done.stderr.strip()[-800:]}")
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"cpu_s"')))
    return {
        "requests": found["completed_requests"],
        "cpu_s": found["cpu_s"],
        "requests_per_cpu_s": found["completed_requests"] / found["cpu_s"],
        "mean_ttft_s": found["mean_ttft_ms"] / 1e3,
        "mean_e2e_s": found["mean_e2e_latency_ms"] / 1e3,
        "hit_rate": found["prefix_cache_reused_ratio"],
    }


def our_run(table_file: Path, workers: int, mode: str) -> dict[str, Any]:
    """Read an imported file and simulate it; return CPU time and outcomes."""
    replica = Replica(
        count=workers, cost=COST, block_size=BLOCK, num_blocks=BLOCKS, batch_cap=SEQUENCES,
        chunk_size=BATCH_TOKENS,
    )  # fmt: skip
    start = time.process_time()
    table = traces.read(table_file).table
    result = simulate(
        Cluster(replicas=(replica,)), table, ROUTING[mode], router=RouterSettings(),
        engine=Engine(), seed=SEED,
    )  # fmt: skip
    cpu_s = time.process_time() - start
    done = result.requests
    finished = np.isfinite(done["finished_s"])
    prompts = table.rows["prompt_tokens"][finished].astype(np.float64)
    return {
        "requests": int(finished.sum()),
        "cpu_s": cpu_s,
        "requests_per_cpu_s": int(finished.sum()) / cpu_s,
        "mean_ttft_s": float(np.mean((done["first_token_s"] - done["arrived_s"])[finished])),
        "mean_e2e_s": float(np.mean((done["finished_s"] - done["arrived_s"])[finished])),
        "hit_rate": float(done["cached_tokens"][finished].sum() / prompts.sum()),
    }


def uncompressed(source: Path, scratch: Path) -> Path:
    """Return a trace, a file or a folder, without compression, for DynoSim."""
    inside = sorted(source.iterdir()) if source.is_dir() else [source]
    if not any(file.suffix == ".gz" for file in inside):
        return source
    folder = scratch / "plain"
    folder.mkdir()
    for file in inside:
        plain = folder / (file.stem if file.suffix == ".gz" else file.name)
        reader = gzip.open if file.suffix == ".gz" else Path.open
        with reader(file, "rb") as packed, plain.open("wb") as out:
            shutil.copyfileobj(packed, out)
    return folder if source.is_dir() else plain


def _cpu_s(run: dict[str, Any]) -> float:
    return float(run["cpu_s"])


def measure(
    trace: str, source: Path, python: Path, rounds: int, workers_: Sequence[int]
) -> dict[str, Any]:
    """Measure one trace with some numbers of workers and all routings."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain, table_file = uncompressed(source, folder), folder / "imported.parquet"
        traces.write(traces.read(source).table, table_file)  # compiles what importing needs
        start = time.process_time()
        traces.write(traces.read(source).table, table_file)
        import_cpu_s = time.process_time() - start
        rows = []
        for workers in workers_:
            for mode in ROUTING:
                our_run(table_file, workers, mode)  # compiles
                mine, others = [], []
                for _ in range(rounds):
                    mine.append(our_run(table_file, workers, mode))
                    others.append(peer_run(python, plain, trace, workers, mode))
                ours, theirs = min(mine, key=_cpu_s), min(others, key=_cpu_s)
                ratio = ours["requests_per_cpu_s"] / theirs["requests_per_cpu_s"]
                turns = [
                    one["requests_per_cpu_s"] / other["requests_per_cpu_s"]
                    for one, other in zip(mine, others, strict=True)
                ]
                rows.append({"workers": workers, "routing": mode, "ratio": ratio,
                             "median_ratio_of_turns": float(np.median(turns)), "turns": turns,
                             "tailrace": ours, "dynosim": theirs})  # fmt: skip
                print(
                    f"{trace:9} {workers:3} workers {mode:12} "
                    f"{ours['requests_per_cpu_s']:>10,.0f}/s "
                    f"{theirs['requests_per_cpu_s']:>8,.0f}/s {ratio:>7.1f}x "
                    f"(median {np.median(turns):.0f})   TTFT "
                    f"{ours['mean_ttft_s']:.3f} / {theirs['mean_ttft_s']:.3f} s, E2E "
                    f"{ours['mean_e2e_s']:.2f} / {theirs['mean_e2e_s']:.2f} s, hits "
                    f"{ours['hit_rate']:.1%} / {theirs['hit_rate']:.1%}",
                    flush=True,
                )
    least = min(row["ratio"] for row in rows)
    return {"import_cpu_s": import_cpu_s, "goal": GOALS[trace], "least_ratio": least, "runs": rows}


def joined(known: dict[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a trace with earlier rows for other numbers of workers."""
    measured = {row["workers"] for row in found["runs"]}
    kept = [row for row in (known or {"runs": []})["runs"] if row["workers"] not in measured]
    rows = sorted([*kept, *found["runs"]], key=lambda row: (row["workers"], row["routing"]))
    return found | {"runs": rows, "least_ratio": min(row["ratio"] for row in rows)}


def main() -> int:
    """Measure; 0 if every ratio reaches its goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--mooncake", type=Path, metavar="FILE", help="Mooncake trace (.jsonl[.gz])"
    )
    parser.add_argument("--claude", type=Path, metavar="DIR", help="Claude Code sessions (weka)")
    parser.add_argument("--peer-python", type=Path, default=DEFAULT_PYTHON, metavar="PYTHON",
                        help=f"Python that has {PEER}; default: {DEFAULT_PYTHON}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=4, help="runs of each side")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="write the results to this file; other traces and numbers of workers "
                        "in it stay")  # fmt: skip
    given = parser.parse_args()
    chosen = {"mooncake": given.mooncake, "claude": given.claude}
    if not any(chosen.values()):
        parser.error("give --mooncake, --claude or both")
    if not given.peer_python.exists():
        parser.error(f"{given.peer_python} does not exist; `make peers` installs {PEER} there")
    results = {
        trace: measure(trace, source, given.peer_python, given.rounds, given.workers)
        for trace, source in chosen.items()
        if source is not None
    }
    if given.json is not None:
        known = json.loads(given.json.read_text("utf-8")) if given.json.is_file() else {}
        merged = known | {k: joined(known.get(k), found) for k, found in results.items()}
        write_text(given.json, json.dumps({"peer": f"{PEER} 1.6.1", **merged}, indent=1) + "\n")
    return 0 if all(r["least_ratio"] >= r["goal"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
