"""Recordings of servers as vLLM's benchmarks write them, made by the simulator."""

import json

import numpy as np

from tailrace.config import Cluster, Engine
from tailrace.sim.simulator import Simulation
from tailrace.workload.table import RequestTable

CLOCK_S = 5000.0


def conversations(count, rate, seed):
    """Return a table with Poisson arrivals and lengths like those of chats."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    prompt = np.clip(rng.lognormal(6.2, 0.9, count), 16, 6000).astype(np.int64)
    output = np.clip(rng.lognormal(5.3, 0.5, count), 2, 900).astype(np.int64)
    return RequestTable.build(arrival - arrival[0], prompt, output)


def record(folder, replica, table, *, overhead_ms=0.0, noise=0.0, leave_out=(), **settings):
    """Simulate a server and write its times; ``noise``: share by which times are off at random.

    ``leave_out``: columns that are not written. ``settings``: of the engine, by vLLM's names.
    """
    simulation = Simulation(Cluster(replicas=(replica,)), table, engine=Engine(exact=True))
    simulation.replay(np.zeros(len(table), np.int64))
    done = simulation.result().requests
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "requests.jsonl").open("w") as file:
        for k, row in enumerate(table.rows):
            sent = float(done["arrived_s"][k])
            first = float(done["first_token_s"][k]) - sent
            answer = float(done["finished_s"][k]) - float(done["first_token_s"][k])
            first = first * (1 + noise * abs(rng.normal())) + 1e-3 * overhead_ms
            answer *= 1 + noise * rng.normal()
            line = {
                "request_id": f"bench-{k}",
                "input_toks": int(row["prompt_tokens"]),
                "output_toks": int(row["output_tokens"]),
                "queued_ts": CLOCK_S + sent,
                "scheduled_ts": CLOCK_S + float(done["scheduled_s"][k]),
                "first_token_ts": CLOCK_S + sent + first,
                "last_token_ts": CLOCK_S + sent + first + max(answer, 1e-6),
            }
            for name in leave_out:
                del line[name]
            file.write(json.dumps(line) + "\n")
    if settings:
        (folder / "meta.json").write_text(json.dumps({"engine_kwargs": settings}))
    return folder
