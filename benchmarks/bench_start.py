"""How long `serve` takes until it listens and `simulate` until it is done: first start, and later.

    python benchmarks/bench_start.py                        # this checkout
    python benchmarks/bench_start.py --beside /path/to/old  # and another one, in turns
    python benchmarks/bench_start.py --json > docs/results/start.json

"Cold" is a new compile cache, "warm" the same one again, complete. The best of several warm starts
counts. Wall and processor time in seconds, all processes together. Python keeps its own compiled
modules, as it does for everybody who has not turned that off.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "tailrace.cli")
#: A backend that refuses connections: the router listens all the same.
SERVE = (*COMMAND, "serve", "-b", "http://127.0.0.1:9", "--listen", "127.0.0.1:0", "--admin", "off")
SIMULATE = (*COMMAND, "simulate", "--json")
#: Give up on a start after this, s.
LIMIT_S = 900.0
#: How many starts are measured: a cold one cannot be repeated.
STARTS = {"cold": 1, "warm": 3}


def processor_s() -> float:
    """Processor time of all processes that have ended so far, s."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def started(environment: dict[str, str]) -> float:
    """Return how long ``serve`` takes until it listens, s."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        SERVE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("listening on"):
                return time.perf_counter() - begun
        raise RuntimeError("serve ended before it listened")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def simulated(environment: dict[str, str]) -> float:
    """Return how long ``simulate`` takes, s."""
    begun = time.perf_counter()
    subprocess.run(
        SIMULATE, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        check=True, timeout=LIMIT_S,
    )  # fmt: skip
    return time.perf_counter() - begun


def timed(start: Callable[[dict[str, str]], float], environment: dict[str, str]) -> dict[str, Any]:
    """Return wall and processor time of one start."""
    before = processor_s()
    wall = start(environment)
    return {"wall_s": round(wall, 1), "processor_s": round(processor_s() - before, 1)}


def measured(checkout: Path) -> dict[str, Any]:
    """Return wall and processor time of each start of one checkout."""
    found: dict[str, Any] = {}
    for name, start in (("serve", started), ("simulate", simulated)):
        with tempfile.TemporaryDirectory(prefix="bench-start-") as cache:
            environment = os.environ | {
                "PYTHONPATH": str(checkout / "src"),
                "TAILRACE_CACHE_DIR": cache,
            }
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            once = (*COMMAND, name, "--help")
            subprocess.run(once, env=environment, capture_output=True, check=True)
            for state in ("cold", "warm"):
                if state == "warm":
                    # The helper was ended with its router. An older checkout has no such command.
                    finish = (*COMMAND, "warmup", name, "--quiet")
                    subprocess.run(finish, env=environment, capture_output=True, check=False)
                found[f"{name}_{state}"] = min(
                    (timed(start, environment) for _ in range(STARTS[state])),
                    key=lambda figures: figures["wall_s"],
                )
                print(
                    f"{checkout.name} {name} {state}: {found[f'{name}_{state}']}", file=sys.stderr
                )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="another checkout of Tailrace")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "this": measured(HERE),
    }
    if given.beside is not None:
        results["beside"] = measured(given.beside.resolve())
    if given.json:
        print(json.dumps(results, indent=1))
        return
    for which in ("this", "beside"):
        for name, figures in results.get(which, {}).items():
            wall, used = figures["wall_s"], figures["processor_s"]
            print(f"{which:7} {name:14} {wall:7.1f} s, processor {used:.1f} s")


if __name__ == "__main__":
    main()
