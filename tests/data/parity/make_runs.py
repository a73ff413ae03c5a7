"""Make the small recorded runs beside this file: `python tests/data/parity/make_runs.py [FOLDER]`.

They have the file format of the runs recorded from Vidur but are Tailrace's own: the reference
engine made them once, after it had reproduced recorded runs of Vidur bit for bit. So they guard
against change; make them anew only if the rules of simulation are meant to change.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "benchmarks"))

from tailrace.config import Engine  # noqa: E402
from tailrace.sim.reference import ReferenceEngine  # noqa: E402
from vidur_routers import CANARY, make_router  # noqa: E402
from vidur_runs import RECORDED, read_run  # noqa: E402

REQUESTS = 40
LOGGED_ITERATIONS = 60
NO_CHECKSUMS = {"iterations": 0, "sum_T": 0, "sum_K": 0, "sum_W": 0.0}
COMMON = {
    "num_replicas": 2,
    "num_stages": 1,
    "batch_size_cap": 128,
    "effective_max_batch_size": 118,
    "block_size": 16,
    "num_blocks": 4000,
    "watermark_blocks_fraction": 0.01,
    "max_request_tokens": 4096,
    "python_seed": 42,
}


def main_run(scheduler, router, **settings):
    return COMMON | {
        "vidur": "main rules",
        "replica_scheduler": scheduler,
        "global_scheduler": router,
        "max_tokens_in_batch": 4096,
        **settings,
    }


def canary_run(router, **settings):
    return COMMON | {
        "vidur": "canary rules",
        "replica_scheduler": "vllm_v1",
        "global_scheduler": router,
        "num_replicas": 3,
        "num_blocks": 150,
        "chunk_size": 256,
        "prefix_caching": True,
        "num_preallocate_tokens": 32,
        "router_seed": 67,
        **settings,
    }


TIGHT = {"num_blocks": 62, "watermark_blocks_fraction": 0.0, "chunk_size": 64}
RUNS = {
    "sarathi_lor": main_run("sarathi", "lor", chunk_size=256),
    "sarathi_starved_lor": main_run("sarathi", "lor", **TIGHT),
    "sarathi_pp2_random": main_run(
        "sarathi", "random", num_stages=2, batch_size_cap=12, chunk_size=128, num_blocks=80
    ),
    "vllm_starved_random": main_run("vllm", "random", num_blocks=62, speeds=[1.0, 2.5]),
    "vllm_pp3_round_robin": main_run("vllm", "round_robin", num_stages=3, batch_size_cap=9),
    "orca_lor": main_run("orca", "lor", effective_max_batch_size=6),
    "faster_transformer_round_robin": main_run(
        "faster_transformer", "round_robin", num_blocks=1600
    ),
    "lightllm_lor": main_run("lightllm", "lor", block_size=1, num_blocks=2500, max_waiting_iters=4),
}
for number, router in enumerate(CANARY):
    starved = {"num_blocks": 50, "chunk_size": 128} if number % 2 else {}
    RUNS[f"v1_{router}"] = canary_run(router, **starved)
LOGGED = ("sarathi_starved_lor", "sarathi_pp2_random", "v1_lop_uncached")
TIES = ("sarathi_lor", "vllm_starved_random", "v1_lor")


def single_requests(rng):
    columns = {
        "arrived_at": np.cumsum(rng.exponential(0.02, REQUESTS)),
        "prefill_tokens": np.clip(rng.lognormal(5.0, 0.8, REQUESTS), 4, 700).astype(int),
        "decode_tokens": np.clip(rng.lognormal(3.0, 1.0, REQUESTS), 1, 200).astype(int),
    }
    columns["arrived_at"][5:8] = columns["arrived_at"][5]  # a group of simultaneous arrivals
    return columns


def session_requests(rng):
    """Conversations on a shared system prompt, and one-shot prompts that are nothing else."""
    columns = single_requests(rng)
    session = np.sort(rng.integers(0, 15, REQUESTS))
    rng.shuffle(session)
    turn = np.zeros(REQUESTS, int)
    group = session % 3
    shared = 16 * (3 + 4 * group)
    history = {}
    for k in range(REQUESTS):
        turn[k], before = history.get(session[k], (0, shared[k]))
        new = 0 if turn[k] == 0 and session[k] % 4 == 0 else int(rng.integers(5, 60))
        columns["prefill_tokens"][k] = before + new
        after = before + new + int(columns["decode_tokens"][k])
        history[session[k]] = (turn[k] + 1, after)
    return columns | {
        "session_id": session,
        "turn": turn,
        "shared_group": group,
        "shared_prefix_tokens": shared,
    }


def write_run(folder, name, settings, columns, recorded, checksums):
    settings = {"name": name, **settings, "num_requests": REQUESTS, "result": checksums}
    (folder / f"{name}.json").write_text(json.dumps(settings, indent=1) + "\n")
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *recorded])
        values = [np.asarray(v).tolist() for v in (*columns.values(), *recorded.values())]
        writer.writerows(zip(*values, strict=True))


def simulate(settings, columns):
    """Route and run what a folder with these settings and requests would say."""
    recorded = {column: np.zeros(REQUESTS, int) for column in RECORDED}
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), "run", settings, columns, recorded, NO_CHECKSUMS)
        run = read_run(Path(folder), "run")
    router = make_router(run.branch, run.router, run.router_settings)
    engine = ReferenceEngine(run.cluster, run.table, engine=Engine(vidur_compat=True))
    return engine.run(dispatcher=router, record_batches=True)


def make_run(folder, name):
    settings = RUNS[name]
    rng = np.random.default_rng(list(name.encode()))
    prefix_caching = settings.get("prefix_caching", False)
    columns = (session_requests if prefix_caching else single_requests)(rng)
    if name in TIES:  # arrivals exactly at the end of an iteration
        for request in (10, 20, 30):
            ends = simulate(settings, columns).batches["end_s"]
            arrivals = columns["arrived_at"]
            arrivals[request] = ends[ends > arrivals[request - 1]].min()
            np.maximum(arrivals, np.maximum.accumulate(arrivals), out=arrivals)
    result = simulate(settings, columns)
    recorded = {column: result.requests[field] for column, field in RECORDED.items()}
    if not prefix_caching:
        del recorded["cached_tokens"]
    totals = result.replicas
    checksums = {
        "iterations": int(totals["iterations"].sum()),
        "sum_T": int(totals["tokens"].sum()),
        "sum_K": int(totals["context"].sum()),
        "sum_W": float(totals["prefill_work"].sum()),
        "restarts": int(totals["preemptions"].sum()),
        "partial_prefill_restarts": int(totals["partial_preemptions"].sum()),
    }
    write_run(folder, name, settings, columns, recorded, checksums)
    if name in LOGGED:
        log = result.batches[:LOGGED_ITERATIONS]
        with (folder / f"{name}.iterations.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["replica", "stage", "start", "T", "K", "W"])
            fields = ("replica", "stage", "start_s", "tokens", "context", "prefill_work")
            writer.writerows(zip(*(log[field].tolist() for field in fields), strict=True))
    return checksums


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for run_name in RUNS:
        print(run_name, make_run(target, run_name))
