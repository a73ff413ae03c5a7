"""Speed of importing Claude Code sessions: ``python benchmarks/bench_import.py [FOLDER]``.

Without a folder of sessions it writes synthetic ones with the lengths of Claude Code: prompts of
about 140 000 tokens in blocks of 64, of which nearly all repeat the prompt before. Prints JSON: CPU
seconds to read them and to write them as Parquet, best of some rounds, compiled beforehand.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.workload import traces

BLOCK = 64
TURNS = 45
SEED = 7


def write_sessions(folder: Path, requests: int) -> None:
    """Write sessions of TURNS requests each, every prompt longer than the one before."""
    rng = np.random.default_rng(SEED)
    for number in range(-(-requests // TURNS)):
        blocks, at_s = int(rng.lognormal(6.6, 0.9)), 0.0
        entries: list[dict[str, Any]] = []
        for _ in range(min(TURNS, requests - number * TURNS)):
            took_s, think_s = float(rng.lognormal(1.8, 0.6)), float(rng.lognormal(2.3, 1.5))
            entries.append(
                {
                    "t": round(at_s),
                    "type": "s",
                    "model": "m",
                    "in": blocks * BLOCK,
                    "out": int(rng.lognormal(5.3, 1.0)) + 1,
                    "hash_ids": list(range(blocks)),
                    "api_time": took_s,
                    "think_time": think_s,
                }
            )
            at_s += took_s + think_s
            blocks += int(rng.lognormal(3.4, 1.1)) + 1
        session = {
            "id": f"session_{number}", "block_size": BLOCK, "hash_id_scope": "local",
            "tool_tokens": 12_500, "system_tokens": 2_500, "requests": entries,
        }  # fmt: skip
        (folder / f"session_{number:04}.json").write_text(json.dumps(session))


def best_s(rounds: int, run: Callable[[], object]) -> float:
    """Return the least CPU time of a call, s."""
    found = np.inf
    for _ in range(rounds):
        start = time.process_time()
        run()
        found = min(found, time.process_time() - start)
    return float(found)


def main() -> None:
    """Write, read and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="sessions to read")
    parser.add_argument("--requests", type=int, default=3330)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder
        if folder is None:
            folder = Path(temporary) / "sessions"
            folder.mkdir()
            write_sessions(folder, options.requests)
        table = traces.read(folder).table
        target = Path(temporary) / "requests.parquet"
        report = {
            "requests": len(table),
            "blocks": int((table.rows["prompt_tokens"] // BLOCK).sum()),
            "read_cpu_s": best_s(options.rounds, lambda: traces.read(folder)),
            "write_cpu_s": best_s(options.rounds, lambda: traces.write(table, target)),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
