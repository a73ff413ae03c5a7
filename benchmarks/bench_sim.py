"""Speed of the simulator: routed requests per second and core, and how it scales.

    python benchmarks/bench_sim.py [--json] [--quick] [--vidur-python PYTHON]

The reference run is 4 replicas, sarathi, chat lengths, 80 % load, round_robin. Rates are per CPU
second of one process, so that other work on the machine matters little; each is the best of a few
repetitions on the same requests. With an interpreter that has the real ``vidur`` package (by
default .venv-vidur/bin/python, if it is there) the very same requests go through Vidur too.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tailrace.config import Cluster, Replica
from tailrace.policy import registry
from tailrace.seeds import Purpose, seeds
from tailrace.sim.simulator import Simulation, simulate
from tailrace.workload import library
from tailrace.workload.table import RequestTable

HERE = Path(__file__).parent
VIDUR_PYTHON = HERE.parent / ".venv-vidur" / "bin" / "python"
#: Saturation throughput of one reference replica on chat lengths, requests/s (tailrace capacity).
CHAT_RPS_PER_REPLICA = 7.35
SEED = seeds(Purpose.TUNING, 1)[0]

say = Console(stderr=True).log


def cluster(replicas: int, scheduler: str = "sarathi", caching: bool = False) -> Cluster:
    """Equal reference replicas."""
    kind = Replica(count=replicas, scheduler=scheduler, prefix_caching=caching)
    return Cluster(replicas=(kind,))


def chat(requests: int, replicas: int, load: float) -> RequestTable:
    """Chat requests with Poisson arrivals at a fraction of the cluster's capacity."""
    rate = load * replicas * CHAT_RPS_PER_REPLICA
    return library.make("chat", requests, rate, SEED, arrivals="poisson")


def requests_per_s(
    table: RequestTable, servers: Cluster, policy: str = "round_robin", repeat: int = 3
) -> float:
    """Requests routed and simulated to their end per CPU second; set-up is not counted."""
    chosen = registry.get(policy)
    best = 0.0
    for _ in range(repeat):
        simulation = Simulation(servers, table, lookahead=policy.startswith("lookahead"))
        rule = chosen.rule  # type: ignore[attr-defined]
        simulation.look_only_at(
            metrics=rule.uses_metrics, prefix=rule.uses_prefix, context=rule.uses_context
        )
        begin = time.process_time()
        simulation.run(chosen)
        best = max(best, len(table) / (time.process_time() - begin))
    return best


def reference_run(requests: int) -> float:
    """Requests per second of the reference run."""
    return requests_per_s(chat(requests, 4, 0.8), cluster(4), repeat=5)


def scaling(requests: int) -> dict[str, dict[str, float]]:
    """Requests per second over load, replicas, output length and kind of server."""
    by: dict[str, dict[str, float]] = {
        "load": {},
        "replicas": {},
        "output_tokens": {},
        "server": {},
    }
    for load in (0.3, 0.6, 0.8, 0.95, 1.2):
        by["load"][str(load)] = requests_per_s(chat(requests, 4, load), cluster(4))
    for replicas in (4, 32, 256):
        by["replicas"][str(replicas)] = requests_per_s(
            chat(requests, replicas, 0.8), cluster(replicas)
        )
    for factor in (0.25, 1, 4, 16):
        table = chat(requests, 4, 0.8 / max(1, factor))
        table.rows["output_tokens"] = np.maximum(table.rows["output_tokens"] * factor, 1)
        mean = f"{table.rows['output_tokens'].mean():.0f}"
        by["output_tokens"][mean] = requests_per_s(table, cluster(4))
    for name, servers, workload in (
        ("vllm_v1, chat", cluster(4, "vllm_v1"), "chat"),
        ("vllm_v1 with prefix cache, chat", cluster(4, "vllm_v1", True), "chat"),
        ("vllm_v1 with prefix cache, sessions-hot", cluster(4, "vllm_v1", True), "sessions-hot"),
    ):
        table = library.make(workload, requests // 4, 0.8 * 4 * CHAT_RPS_PER_REPLICA, SEED)
        by["server"][name] = requests_per_s(table, servers)
    return by


def decisions(requests: int) -> dict[str, float]:
    """Decisions per second of each policy on 4 replicas, simulation included."""
    table = chat(requests, 4, 0.8)
    few = chat(max(requests // 20, 1000), 4, 0.8)
    return {
        rule.name: requests_per_s(few if rule.in_engine else table, cluster(4), rule.name)
        for rule in registry.rules()
    }


def in_child(statement: str, **environment: str) -> dict[str, Any]:
    """Run a statement of this file in a fresh process; it prints JSON."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import json, bench_sim; {statement}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def long_run(requests: int) -> dict[str, float]:
    """One run from making the requests to the result: CPU time per request, peak memory."""
    simulate(cluster(4), chat(100, 4, 0.8), "round_robin")
    marks = [time.process_time()]
    table = chat(requests, 4, 0.8)
    marks.append(time.process_time())
    simulation = Simulation(cluster(4), table)
    simulation.look_only_at(metrics=False, prefix=False, context=False)
    marks.append(time.process_time())
    simulation.run(registry.get("round_robin"))
    marks.append(time.process_time())
    result = simulation.result()
    marks.append(time.process_time())
    assert (result.requests["finished_s"] > 0).all()
    making, set_up, simulating, collecting = np.diff(marks) / requests * 1e6
    return {
        "requests": requests,
        "us_per_request": float(simulating),
        "making_us": float(making),
        "set_up_us": float(set_up),
        "collecting_us": float(collecting),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def memory() -> list[dict[str, Any]]:
    """Cost per request and peak memory for growing runs, each in a process of its own."""
    sizes = (10_000, 100_000, 1_000_000)
    return [in_child(f"print(json.dumps(bench_sim.long_run({n})))") for n in sizes]


def start_up() -> dict[str, float]:
    """Seconds (wall) from starting Python to the first result: compiling, then from the cache."""
    statement = "bench_sim.long_run(100); print('{}')"
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            in_child(statement, TAILRACE_CACHE_DIR=folder)
            times.append(time.perf_counter() - begin)
    return {"first_use_s": times[0], "later_s": times[1]}


def vidur(python: Path, requests: int) -> dict[str, Any]:
    """The reference run in the real Vidur, and the same requests here."""
    table = chat(requests, 4, 0.8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.csv"
        columns = ("arrival_s", "prompt_tokens", "output_tokens")
        lines = [",".join(columns)]
        lines += [f"{float(r[0])!r},{r[1]},{r[2]}" for r in table.rows[list(columns)].tolist()]
        file.write_text("\n".join(lines) + "\n")
        out = Path(folder) / "times.csv"
        command = [str(python), str(HERE / "vidur_peer.py"), "--requests", str(file), "--json"]
        done = subprocess.run(
            [*command, "--out", str(out)], check=True, capture_output=True, text=True
        )
        peer: dict[str, Any] = json.loads(done.stdout)
        times = np.genfromtxt(out, delimiter=",", names=True)
    ours = simulate(cluster(4), table, "round_robin").requests
    pairs = (
        ("scheduled_at", "scheduled_s"),
        ("first_token_at", "first_token_s"),
        ("completed_at", "finished_s"),
    )
    peer["max_diff_s"] = float(max(np.abs(times[a] - ours[b]).max() for a, b in pairs))
    peer["tailrace_requests_per_cpu_s"] = requests_per_s(table, cluster(4), repeat=20)
    return peer


def measure(quick: bool, vidur_python: Path) -> dict[str, Any]:
    """Everything, as plain data."""
    size = 20_000 if quick else 200_000
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("requests_per_s", lambda: reference_run(size)),
        ("scaling_requests_per_s", lambda: scaling(size)),
        ("policy_decisions_per_s", lambda: decisions(size // 2)),
        ("start_up", start_up),
    ]
    if not quick:
        steps.append(("memory", memory))
    if vidur_python.exists():
        steps.append(("vidur", lambda: vidur(vidur_python, 2000)))
    requests_per_s(chat(100, 4, 0.8), cluster(4))  # compile
    report: dict[str, Any] = {"machine": machine(), "seed": SEED}
    for name, step in steps:
        say(f"measuring {name} …")
        report[name] = step()
    if "vidur" in report:
        peer = report["vidur"]
        ratio = peer["tailrace_requests_per_cpu_s"] / peer["requests_per_cpu_s"]
        report["ratio_to_vidur"] = ratio
    return report


def machine() -> str:
    """What this was measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the requests, no memory run"
    )
    parser.add_argument(
        "--vidur-python", type=Path, default=VIDUR_PYTHON, help="interpreter with the vidur package"
    )
    arguments = parser.parse_args()
    report = measure(arguments.quick, arguments.vidur_python)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    Console().print_json(json.dumps(report))


if __name__ == "__main__":
    main()
