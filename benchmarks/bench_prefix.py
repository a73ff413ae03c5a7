"""Speed of the simulator's prefix caches on long prompts and hot sessions.

    python benchmarks/bench_prefix.py [--requests 3000] [--before CHECKOUT]

Prints JSON: requests per CPU second with ``least_outstanding``, with and without prefix caches, and
a digest of the results. Set-up (tables, keys, chains) is counted apart. ``--before`` runs the very
same requests with the sources of another checkout as well, such as one that keeps caches block by
block, and says whether the results agree to the last bit. Digests are of runs that step through
every iteration (``exact``): a stretch of decode iterations at once rounds times differently.
Those of hot sessions depend on the processor, too: NumPy rounds arrivals differently with AVX-512.

The long prompts are synthetic, with the lengths of coding agents: sessions that begin with a shared
prompt of 15 000 tokens and grow to hundreds of thousands, a median of 200 output tokens, a run of
content per turn, and side tasks that branch off and come back.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.config import Cluster, Engine, Replica
from tailrace.policy import registry
from tailrace.sim.simulator import Simulation
from tailrace.workload import library
from tailrace.workload.table import RequestTable

SHARED_TOKENS = 15_000
MOST_TOKENS = 500_000
SEED = 7


def coding_agents(requests: int) -> RequestTable:
    """Sessions of coding agents; about 100 000 prompt tokens per request."""
    rng = np.random.default_rng(SEED)
    rows: list[tuple[float, int, list[tuple[int, int]]]] = []
    segment = 1
    while len(rows) < requests:
        now = rng.uniform(0.0, 1.5 * requests)
        content = [(0, SHARED_TOKENS)]
        parked: list[tuple[int, int]] = []  # the main task's content during a side task
        for _ in range(rng.geometric(1 / 80)):
            if parked and rng.random() < 0.2:
                content, parked = parked, []
            elif not parked and rng.random() < 0.03:
                parked = content
                content = content[: 1 + int(rng.integers(len(content)))]
            new = int(rng.lognormal(7.2, 1.1)) + 16
            if sum(tokens for _, tokens in content) + new > MOST_TOKENS:
                break
            content = [*content, (segment, new)]
            segment += 1
            rows.append((now, int(rng.lognormal(5.3, 1.0)) + 1, content))
            now += rng.lognormal(2.5, 1.4) + 2.0
    rows = sorted(rows[:requests], key=lambda row: row[0])
    return RequestTable.build(
        np.array([now for now, _, _ in rows]),
        np.array([sum(tokens for _, tokens in content) for _, _, content in rows]),
        np.array([output for _, output, _ in rows]),
        [content for _, _, content in rows],
    )


def cluster(workload: str, caching: bool) -> Cluster:
    """Servers for a workload: eight with room for a million tokens each, or four plain ones."""
    common: dict[str, Any] = {"scheduler": "vllm_v1", "prefix_caching": caching}
    if workload == "sessions-hot":
        return Cluster(replicas=(Replica(count=4, **common),))
    long_context = {"num_blocks": 65_536, "chunk_size": 8192, "speed": 4.0}
    return Cluster(replicas=(Replica(count=8, **common, **long_context),))


def measure(table: RequestTable, servers: Cluster, least_s: float) -> dict[str, Any]:
    """Best rate of runs that take ``least_s`` CPU seconds together, at least one."""
    policy = registry.get("least_outstanding")
    best = spent = 0.0
    while spent <= least_s:
        begin = time.process_time()
        simulation = Simulation(servers, table)
        simulation.look_only_at(metrics=False, prefix=False, context=False)
        set_up = time.process_time()
        simulation.run(policy)
        took = time.process_time() - set_up
        best, spent = max(best, len(table) / took), spent + took
    exact = Simulation(servers, table, engine=Engine(exact=True))
    exact.run(policy)
    result = exact.result()
    digest = hashlib.sha256(result.requests.tobytes() + result.replicas.tobytes())
    return {
        "requests_per_s": round(best),
        "set_up_s": round(set_up - begin, 4),
        "cached_share": float(
            result.requests["cached_tokens"].sum() / table.rows["prompt_tokens"].sum()
        ),
        "preemptions": int(result.replicas["preemptions"].sum()),
        "digest": digest.hexdigest()[:16],
    }


def workloads(requests: int) -> dict[str, RequestTable]:
    """Tables by name; hot sessions are shorter, so there are more of them."""
    return {
        "coding-agents": coding_agents(requests),
        "sessions-hot": library.make("sessions-hot", 5 * requests, 23.5, SEED),
    }


def measure_all(requests: int, least_s: float) -> dict[str, Any]:
    """All workloads with these sources."""
    report: dict[str, Any] = {}
    for name, table in workloads(requests).items():
        few = RequestTable(table.rows[:50], table.runs)
        for caching in (False, True):
            measure(few, cluster(name, caching), 0.0)  # compile
        report[name] = {
            "requests": len(table),
            "blocks": int((table.rows["prompt_tokens"].astype(np.int64) // 16).sum()),
            "runs": len(table.runs),
            "without_caches": measure(table, cluster(name, False), least_s),
            "with_caches": measure(table, cluster(name, True), least_s),
        }
    return report


def in_checkout(folder: Path, requests: int, least_s: float) -> dict[str, Any]:
    """The same with the sources of another checkout."""
    done = subprocess.run(
        [sys.executable, __file__, "--requests", str(requests), "--seconds", str(least_s)],
        env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=3000, help="coding agents' requests")
    parser.add_argument("--seconds", type=float, default=1.0, help="least CPU time per figure")
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    arguments = parser.parse_args()
    report = measure_all(arguments.requests, arguments.seconds)
    if arguments.before:
        before = in_checkout(arguments.before, arguments.requests, arguments.seconds)
        for name, figures in report.items():
            old, new = before[name]["with_caches"], figures["with_caches"]
            figures["before"] = before[name]
            figures["speed"] = new["requests_per_s"] / old["requests_per_s"]
            figures["equal"] = old["digest"] == new["digest"]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
