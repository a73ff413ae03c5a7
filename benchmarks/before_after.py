"""Speed of this checkout against an older one: ``python benchmarks/before_after.py CHECKOUT``.

    git worktree add ../before 05b27bc
    python benchmarks/before_after.py ../before [sim decide env train router] [--rounds 3]

Each benchmark runs in both checkouts by turns, with this interpreter and each checkout's own
sources and scripts; the two routers run side by side in one ``bench_router.py``. Prints JSON: for
each figure the best round before and after, and ``speed``, after relative to before: above 1 is
faster.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def sim_figures(report: dict[str, Any]) -> dict[str, float]:
    """Simulated requests per CPU second."""
    return {"reference": report["requests_per_s"], **report["scaling_requests_per_s"]["server"]}


def decide_figures(report: dict[str, Any]) -> dict[str, float]:
    """Live decisions per CPU second: all that the router's state does for a request."""
    return {
        f"{row['policy']}, {row['replicas']} replicas": 1e6 / row["all"]["cpu_p50_us"]
        for row in report["live"]
    }


def env_figures(report: dict[str, Any]) -> dict[str, float]:
    """Decisions of the environments per CPU second."""
    return {
        "reference": report["decisions_per_s"],
        "single": report["single_decisions_per_s"],
        **{name: rates["decisions_per_s"] for name, rates in report["scenarios"].items()},
    }


def train_figures(report: dict[str, Any]) -> dict[str, float]:
    """PPO's decisions per CPU second, and relative to Stable-Baselines3's in the same run."""
    return {"steps_per_s": report["steps_per_s"], "ratio_to_sb3": report["ratio_to_sb3"]}


#: The simulator's benchmark without its start-up, which compiles everything again and again.
SIM = """
import json, bench_sim
bench_sim.requests_per_s(bench_sim.chat(100, 4, 0.8), bench_sim.cluster(4))
print(json.dumps({
    "requests_per_s": bench_sim.reference_run(100_000),
    "scaling_requests_per_s": bench_sim.scaling(100_000),
}))
"""
#: What Python runs for each benchmark, and what to read from the JSON it prints: rates only.
BENCHMARKS: dict[str, tuple[list[str], Callable[[dict[str, Any]], dict[str, float]]]] = {
    "sim": (["-c", SIM], sim_figures),
    "decide": (["benchmarks/bench_decide.py", "--json"], decide_figures),
    "env": (["benchmarks/bench_env.py", "--json", "--quick"], env_figures),
    "train": (["benchmarks/bench_train.py", "--json", "--quick"], train_figures),
}


def run(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """Run Python with a checkout's sources; return what it printed."""
    sources = f"{checkout / 'src'}{os.pathsep}{checkout / 'benchmarks'}"
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True, stdout=subprocess.PIPE, text=True, cwd=checkout,
        env=os.environ | {"PYTHONPATH": sources},
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def by_turns(before: Path, name: str, rounds: int) -> dict[str, Any]:
    """Run a benchmark in both checkouts by turns, the first of which only compiles.

    Other work on the machine can only slow a round down, so the best one of each side counts.
    """
    arguments, read = BENCHMARKS[name]
    figures: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        for side, checkout in (("before", before), ("after", HERE)):
            found = read(run(checkout, arguments))
            if number:
                for figure, value in found.items():
                    sides = figures.setdefault(figure, {"before": [], "after": []})
                    sides[side].append(value)
    return {
        figure: {
            "before": max(sides["before"]),
            "after": max(sides["after"]),
            "speed": max(sides["after"]) / max(sides["before"]),
            "rounds": sides,
        }
        for figure, sides in figures.items()
        if sides["before"] and sides["after"]
    }


def side_by_side(before: Path, rounds: int) -> dict[str, Any]:
    """Run both routers as contenders of one benchmark."""
    router = ["benchmarks/bench_router.py", "--json", "--alone"]
    report = run(HERE, [*router, "--before", str(before), "--rounds", str(rounds)])
    figures = {}
    for size, found in report["bodies"].items():
        pairs = {"one process": (found["peers"]["before"], found)}
        for count, several in found["several"].items():
            pairs[f"{count} processes"] = (found["peers"][f"before x{count}"], several)
        for name, (old, new) in pairs.items():
            figures[f"{size}, {name}"] = {
                "before": {key: old[key] for key in ("added_p50_ms", "rps", "cpu_us")},
                "after": {key: new[key] for key in ("added_p50_ms", "rps", "cpu_us")},
                "speed": {
                    "p50": old["p50_ms"] / new["p50_ms"],
                    "rps": new["rps"] / old["rps"],
                    "cpu": old["cpu_us"] / new["cpu_us"],
                },
            }
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("before", type=Path, metavar="CHECKOUT", help="the older checkout")
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help="default: all five")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    options = parser.parse_args()
    known = [*BENCHMARKS, "router"]
    strangers = sorted(set(options.names) - set(known))
    if strangers:
        parser.error(f"no benchmark called {', '.join(strangers)}; there are {', '.join(known)}")
    before = options.before.resolve()
    if not (before / "src" / "tailrace").is_dir():
        parser.error(f"{options.before} is no checkout of this repository")
    result = {
        name: side_by_side(before, options.rounds)
        if name == "router"
        else by_turns(before, name, options.rounds)
        for name in options.names or known
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
