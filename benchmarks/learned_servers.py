"""How well the router's learned server models predict latencies it has not seen.

    python benchmarks/learned_servers.py                            # four emulated servers
    python benchmarks/learned_servers.py -b URL -b URL --shrink 2.5 --rate 4   # your own
    python benchmarks/learned_servers.py --json > docs/results/learned_emulated.json

A plain router, which knows nothing about its servers, routes one load and learns; a router that
knows what was learned so far routes each further one. The recording of each further load is then
simulated, every request on the server it went to and at the moment it was sent, with the cost
models and overheads that were known before it. Mean TTFT and end-to-end time of all of them are
compared with the recorded ones. Several short loads rather than one, because the servers' machine
may be faster at one time than at another. Real vLLM servers for -b: ``python -m
tests.vllm.serve_two FOLDER``.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.assess.live import RouterProcess, router, servers
from tailrace.assess.loads import conversations
from tailrace.bench.load import run_load
from tailrace.bench.result import LoadResult
from tailrace.calibrate.live import reported_capacity
from tailrace.config import Cluster, CostModel, Replica
from tailrace.replay import recorded
from tailrace.replay.fidelity import Floats, agreement, fidelity
from tailrace.router.state.server_model import (
    BASE,
    CONTEXT,
    OVERHEAD,
    OVERHEAD_S,
    PREFILL,
    TOKEN,
)
from tailrace.seeds import Purpose, seeds
from tailrace.view.replicas import replica_costs
from tailrace.workload import decision_log, library

#: File in the folder of decisions in which a router keeps what it has learned.
LEARNED = "servers.json"


def learned_cost(factors: list[float]) -> CostModel:
    """Return the cost model that follows from factors, as in ``server_model.apply``."""
    prior = replica_costs([Replica()])[0]
    knots = [(float(k), float(s) * factors[TOKEN])
             for k, s in zip(prior["knot"], prior["slope_ms"], strict=True) if s > 0]  # fmt: skip
    return CostModel(
        base_ms=float(prior["base_ms"]) * factors[BASE],
        per_token_ms=float(prior["per_token_ms"]) * factors[TOKEN],
        knots=tuple(knots),
        per_context_ms=float(prior["per_context_ms"]) * factors[CONTEXT],
        per_prefill_ms=float(prior["per_prefill_ms"]) * factors[PREFILL],
    )


def learned_servers(file: Path, urls: tuple[str, ...]) -> tuple[Cluster, tuple[float, ...]]:
    """Return the servers as a router has learned them, and the overhead of each in ms."""
    known = json.loads(file.read_text(encoding="utf-8"))["servers"]
    missing = [url for url in urls if url not in known]
    if missing:
        raise SystemExit(f"too little traffic to learn {missing[0]}; give more --requests")
    factors = [known[url]["factors"] for url in urls]
    capacity = reported_capacity(urls)
    replicas = tuple(Replica(cost=learned_cost(f), **capacity) for f in factors)
    return Cluster(replicas=replicas), tuple(1e3 * OVERHEAD_S * f[OVERHEAD] for f in factors)


def send(live: RouterProcess, given: argparse.Namespace, seed: int) -> LoadResult:
    """Send one load through a router and wait until it is idle."""
    table = library.make(conversations(given.shrink), given.requests, given.rate, seed)
    found = run_load(live.url, table, api="chat", salt=time.time_ns() % 10**9)
    live.wait_until_idle()
    return found


def as_figures(recorded_s: Floats, predicted_s: Floats) -> dict[str, float]:
    """Return one latency of the same requests [k], recorded and predicted, s."""
    found = agreement("", recorded_s, predicted_s)
    return {
        "recorded_mean_s": round(found.recorded_mean_s, 4),
        "predicted_mean_s": round(found.simulated_mean_s, 4),
        "mean_error": round(found.mean_error, 4),
        "p50_error": round(found.p50_error, 4),
        "p99_error": round(found.p99_error, 4),
        "typical_error_of_a_request": round(found.typical_error, 4),
    }


def predictions(logs: list[Path]) -> dict[str, float]:
    """Return the router's own predictions of first tokens at the decisions, against the record."""
    lines = [d for log in logs for _, _, d in decision_log.records(log)]
    done = [d for d in lines if d.get("outcome") == "done" and d.get("predicted_ttft_s")]
    seen = np.array([d["first"] - d["sent"] for d in done])
    ours = np.array([d["predicted_ttft_s"] for d in done])
    return {
        "recorded_mean_s": round(float(seen.mean()), 4),
        "predicted_mean_s": round(float(ours.mean()), 4),
        "mean_error": round(float(ours.mean() / seen.mean() - 1), 4),
    }


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Learn from one load, then predict each further one from those before it."""
    learned = folder / LEARNED
    logs, found, known, overheads_ms = [], [], [], []
    with servers(given.backend, given.speeds) as urls:
        for number, seed in enumerate(seeds(Purpose.TUNING, given.rounds + 1)):
            log = folder / f"load-{number}"
            if number:
                before = folder / f"before-{number}.json"
                shutil.copy(learned, before)
            keeps = ("--set", f"speeds.file={learned}")
            with router(urls, log, "-p", given.policy, *keeps) as live:
                send(live, given, seed)
                known = [replica["known"] for replica in live.get("/status")["replicas"]]
            if number:
                cluster, overhead_ms = learned_servers(before, urls)
                overheads_ms.append([round(ms, 2) for ms in overhead_ms])
                found.append(fidelity(recorded.read(log), cluster, overhead_ms=overhead_ms))
                logs.append(log)
    latencies = {
        name: as_figures(*(
            np.concatenate([part[name] for part in parts])
            for parts in ([f.recorded_s for f in found], [f.simulated_s for f in found])
        ))
        for name in ("TTFT", "E2E")
    }  # fmt: skip
    return {
        "servers": "given" if given.backend else given.speeds,
        "policy": given.policy,
        "loads": given.rounds,
        "requests": given.requests,
        "rate": given.rate,
        "shrink": given.shrink,
        "load_average": round(os.getloadavg()[0], 1),
        "known": known,
        "overhead_ms": overheads_ms,
        **latencies,
        "mean_error_by_load": {
            name: [round(a.mean_error, 4) for f in found for a in f.latencies if a.name == name]
            for name in ("TTFT", "E2E")
        },
        "TTFT predicted at the decision": predictions(logs),
        "hit_rate": [[f.recorded_hit_rate, f.simulated_hit_rate] for f in found],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-b", "--backend", action="append", default=[], metavar="URL", help="a server")
    add("--speeds", default="1.5,1,1,0.6", help="of emulated servers")
    add("--rounds", type=int, default=1, help="loads that are predicted")
    add("--requests", type=int, default=600, help="of each load")
    add("--rate", type=float, default=12.0, help="requests/s")
    add("--shrink", type=float, default=1.0, help="factor by which prompts and answers are shorter")
    add("--policy", default="tailrace")
    add("-o", "--out", type=Path, help="folder that keeps the recordings")
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="learned-") as scratch:
        found = measure(given, given.out or Path(scratch))
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name in ("TTFT", "E2E", "TTFT predicted at the decision"):
        f = found[name]
        print(f"{name}: {f['predicted_mean_s']:.3f} s predicted, {f['recorded_mean_s']:.3f} s "
              f"recorded ({f['mean_error']:+.0%})")  # fmt: skip


if __name__ == "__main__":
    main()
