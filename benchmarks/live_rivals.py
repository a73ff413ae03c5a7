"""Tailrace against other routers' own programs, live, on identical arrivals.

    python benchmarks/live_rivals.py --keep FOLDER [--scenario hot-sessions ...] [--at-once 3]

Each contender gets emulated servers of its own, with empty caches, and the same requests at the
same times: Tailrace as a newcomer starts it (`tailrace serve -b URL ...`, told nothing of the
servers), Tailrace told how fast they are, and every program that is installed, with its own
defaults: sglang-router, smg and vllm-router in a virtual environment `.venv-peers`, nginx with
round robin and least_conn. The first part of the traffic is not counted: caches fill, and Tailrace
learns how fast the servers are.

A run is one contender on one scenario and seed. It is kept in FOLDER, and a second call makes only
the runs that are missing; `--at-most N` ends after N of them. Runs take real time and share this
machine: what the load generator and the emulated servers were late by is kept and printed, and a
run in which it was much is marked. Needs the extra `serve`.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import live_rivals_table
from live_ranks import awaited, config_of, started
from router_rig import HOST, PEER_PACKAGES, Rig, cpu_s, fetch_text, rig
from tailrace import scenario as scenarios
from tailrace.bench.load import run_load
from tailrace.bench.result import LoadResult
from tailrace.config import Scenario
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import traffic
from tailrace.files import write_text
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, seeds

PLAIN, TOLD = "tailrace", "tailrace, speeds given"
CONTENDERS = (PLAIN, TOLD, *PEER_PACKAGES, "nginx least_conn", "nginx")
#: A busy vLLM sends several tokens in one event; one each would keep this machine busy.
TOKENS_PER_EVENT = 4
MODEL = "emulated"
POLL_S = 0.2


class Plan(NamedTuple):
    """Traffic in front of a scenario's servers."""

    servers: str
    """Scenario whose servers they are."""
    workload: dict[str, Any]
    """Settings of the traffic that differ from that scenario's."""
    minutes: float
    warm_up_s: float


PLANS = {
    "hot-sessions": Plan("demo", {}, 4.0, 120.0),
    "agents": Plan("agents", {}, 3.0, 60.0),
    "bursty-chat": Plan(
        "uniform-chat-80", {"arrivals": "gamma", "arrival_cv": 6.0, "load": 0.7}, 2.0, 40.0
    ),
    "mixed-speeds": Plan("mixed-speed", {}, 2.0, 40.0),
}


def scenario_of(plan: Plan) -> Scenario:
    """Return the scenario with as many requests as its minutes take."""
    loaded = with_capacity(scenarios.load(plan.servers))
    workload = loaded.workload.model_copy(update=plan.workload)
    rate = resolve_rate(loaded.model_copy(update={"workload": workload}))
    assert rate is not None, "the scenarios of PLANS have a rate"
    workload = workload.model_copy(update={"requests": int(rate * 60.0 * plan.minutes)})
    return loaded.model_copy(update={"workload": workload})


def start(stack: ExitStack, scenario: Scenario, servers: list[str], name: str, made: Rig) -> str:
    """Start a contender in front of the servers; return its address, empty: it is not there."""
    made.backends = servers
    if name not in (PLAIN, TOLD):
        peer = made.start_peer(name)
        return "" if peer is None else f"http://{HOST}:{peer.port}"
    if name == PLAIN:
        about = [part for url in servers for part in ("-b", url)]
    else:
        config = made.folder / "router.toml"
        config.write_text(config_of(scenario, servers), encoding="utf-8")
        about = ["--config", str(config)]
    router = stack.enter_context(
        started(
            "serve", *about, "--listen", f"{HOST}:0", "--admin", "off", "--log-level", "error",
            "--set", f"speeds.file={made.folder / 'speeds.json'}",
        )
    )  # fmt: skip
    return awaited(router, r"listening on (http://[^/]+)")


def measure(plan_name: str, name: str, seed: int) -> dict[str, Any]:
    """Let one contender serve the requests of one seed."""
    plan = PLANS[plan_name]
    scenario = scenario_of(plan)
    table = traffic(scenario, resolve_rate(scenario), seed)
    counted = table.rows["arrival_s"] >= plan.warm_up_s
    found: dict[str, Any] = {"scenario": plan_name, "contender": name, "seed": seed}
    with ExitStack() as stack:
        emulator = stack.enter_context(
            started(
                "emulate", "--scenario", plan.servers, "--port", "0", "--json",
                "--tokens-per-event", str(TOKENS_PER_EVENT), "--model", MODEL,
            )
        )  # fmt: skip
        servers = json.loads(awaited(emulator, r"(\{.*\})"))["urls"]
        made = stack.enter_context(rig())
        url = start(stack, scenario, servers, name, made)
        if not url:
            return found | {"missing": made.notes}
        result = run_load(url, table, model=MODEL)
        found["emulator_lag"] = emulator_lag([fetch_text(f"{u}/metrics") for u in servers])
        found["emulator_cpu_s"] = cpu_s([emulator.pid])
    found |= result.summary(1.0 - float(counted.mean()))
    found |= by_request(result, counted)
    found["load_average"] = os.getloadavg()[0]
    return found


def by_request(result: LoadResult, counted: NDArray[np.bool_]) -> dict[str, Any]:
    """Return cost in s of each counted request, and in which 10 s it was to arrive."""
    costs = composite_cost_s(result.simulated())[counted]
    windows = (result.table.rows["arrival_s"][counted] // 10.0).astype(int)
    return {"costs_s": np.round(costs, 5).tolist(), "windows": windows.tolist()}


def emulator_lag(pages: list[str]) -> dict[str, float]:
    """Return what share of the servers' iterations ended more than 10 and 50 ms late."""
    late: dict[str, float] = {}
    for page in pages:
        for bound, count in re.findall(
            r'emulation_lag_seconds_bucket\{.*le="(.*?)".*\} (\S+)', page
        ):
            late[bound] = late.get(bound, 0.0) + float(count)
    total = max(late["+Inf"], 1.0)
    return {f"over_{ms}_ms": 1.0 - late[str(ms / 1e3)] / total for ms in (10, 50)}


# ---- all runs ------------------------------------------------------------------------------------


def file_of(folder: Path, run: tuple[str, str, int]) -> Path:
    """Return where a run (scenario, contender, seed) is kept."""
    plan, name, seed = run
    return folder / f"{plan}.{name.replace(' ', '_').replace(',', '')}.{seed}.json"


def play(folder: Path, missing: list[tuple[str, str, int]], at_once: int) -> None:
    """Make runs in processes of their own, a few at a time."""
    waiting = list(missing)
    running: dict[tuple[str, str, int], subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            run = waiting.pop(0)
            print("  " + ", ".join(map(str, run)), file=sys.stderr, flush=True)
            order = [sys.executable, __file__, "--keep", str(folder), "--run", *map(str, run)]
            running[run] = subprocess.Popen(order)
        time.sleep(POLL_S)
        for run, process in list(running.items()):
            if process.poll() is not None:
                del running[run]
                if process.returncode != 0:
                    print(f"  failed: {', '.join(map(str, run))}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is missing, and print everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--scenario", action="append", choices=PLANS, help="default: all")
    parser.add_argument("--contender", action="append", help=f"default: {', '.join(CONTENDERS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--at-most", type=int, help="runs to make in this call; 0: only print")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    if given.run:
        plan, name, seed = given.run
        run = (plan, name, int(seed))
        write_text(file_of(given.keep, run), json.dumps(measure(*run)))
        return
    runs = [
        (plan, name, seed)
        for plan in given.scenario or PLANS
        for name in given.contender or CONTENDERS
        for seed in seeds(Purpose.EVALUATION, given.seeds)
    ]
    missing = [run for run in runs if not file_of(given.keep, run).exists()]
    play(given.keep, missing[: given.at_most], given.at_once)
    kept = [file_of(given.keep, run) for run in runs]
    done = [json.loads(path.read_text()) for path in kept if path.exists()]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    found = {
        "machine": machine,
        "runs_at_once": given.at_once,
        "plans": {name: plan._asdict() for name, plan in PLANS.items()},
        "scenarios": live_rivals_table.summaries(done, PLAIN, TOLD),
    }
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        live_rivals_table.show(found)


if __name__ == "__main__":
    main()
