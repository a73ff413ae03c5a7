"""Tailrace against other routers' own programs, live, on identical arrivals.

    python benchmarks/live_rivals.py [--scenario demo ...] [--seeds 3] [--minutes 4] [--json]

Each contender gets emulated servers of its own, with empty caches, and the same requests at the
same times: Tailrace as a newcomer starts it (`tailrace serve -b URL ...`, told nothing of the
servers), Tailrace told how fast they are, and every program that is installed, with its own
defaults: sglang-router, smg and vllm-router in a virtual environment `.venv-peers`, nginx with
round robin and least_conn. The first two minutes are not counted: caches fill, and Tailrace learns
how fast the servers are. Servers take real time, so each contender takes --minutes, and the machine
must have nothing else to do. Needs the extra `serve`.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.console import Console

from live_ranks import awaited, config_of, started
from router_rig import HOST, PEER_PACKAGES, rig
from tailrace import scenario as scenarios
from tailrace.bench.load import run_load
from tailrace.config import Scenario
from tailrace.evaluate.measure.runner import traffic
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, seeds
from tailrace.terminal.tables import Column, number, print_columns

PLAIN, TOLD = "tailrace", "tailrace, speeds given"
CONTENDERS = (PLAIN, TOLD, *PEER_PACKAGES, "nginx least_conn", "nginx")
#: A busy vLLM sends several tokens in one event; one each would keep this machine busy.
TOKENS_PER_EVENT = 4
MODEL = "emulated"


def start(stack: ExitStack, scenario: Scenario, name: str) -> tuple[str | None, list[str]]:
    """Start servers and a contender before them; return its address, None: it is not there."""
    emulator = stack.enter_context(
        started(
            "emulate", "--scenario", scenario.name, "--port", "0", "--json",
            "--tokens-per-event", str(TOKENS_PER_EVENT), "--model", MODEL,
        )
    )  # fmt: skip
    urls = json.loads(awaited(emulator, r"(\{.*\})"))["urls"]
    made = stack.enter_context(rig())
    made.backends = urls
    if name not in (PLAIN, TOLD):
        peer = made.start_peer(name)
        return (None if peer is None else f"http://{HOST}:{peer.port}"), made.notes
    if name == PLAIN:
        servers = [part for url in urls for part in ("-b", url)]
    else:
        config = made.folder / "router.toml"
        config.write_text(config_of(scenario, urls), encoding="utf-8")
        servers = ["--config", str(config)]
    router = stack.enter_context(
        started(
            "serve", *servers, "--listen", f"{HOST}:0", "--admin", "off", "--log-level", "error",
            "--set", f"speeds.file={made.folder / 'speeds.json'}",
        )
    )  # fmt: skip
    return awaited(router, r"listening on (http://[^/]+)"), []


def compare(
    scenario: Scenario, names: Sequence[str], seed: int, warm_up_s: float
) -> dict[str, Any]:
    """Let all contenders serve the same requests, one contender after the other."""
    table = traffic(scenario, resolve_rate(scenario), seed)
    warm = float(np.mean(table.rows["arrival_s"] < warm_up_s))
    results: dict[str, Any] = {}
    notes: list[str] = []
    for name in names:
        with ExitStack() as stack:
            url, more = start(stack, scenario, name)
            notes += more
            if url is not None:
                print(f"  {name} ...", file=sys.stderr, flush=True)
                results[name] = run_load(url, table, model=MODEL).summary(warm)
    return {"seed": seed, "contenders": results, "notes": notes}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each contender's mean cost, and how it compares with the router told everything."""
    names = [name for name in runs[0]["contenders"] if all(name in r["contenders"] for r in runs)]
    costs = {name: [cost(r["contenders"][name]) for r in runs] for name in names}
    told = costs.get(TOLD)
    return {
        name: {
            "cost_s": float(np.mean(found)),
            "against_told": None if told is None else float(np.mean(np.divide(found, told))),
            "failed": sum(r["contenders"][name]["failed"] for r in runs),
        }
        for name, found in costs.items()
    }


def cost(metrics: dict[str, Any]) -> float:
    """Return a contender's cost, s; infinite if it answered nothing."""
    return np.inf if metrics["cost_s"] is None else float(metrics["cost_s"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", action="append", help="may be repeated (default: demo)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.0, help="of traffic, warm-up included")
    parser.add_argument("--warm-up", type=float, default=120.0, help="s that are not counted")
    parser.add_argument("--contender", action="append", help=f"default: {', '.join(CONTENDERS)}")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.warm_up >= 60.0 * given.minutes:
        parser.error("nothing is left after the warm-up: give more --minutes")
    found: dict[str, Any] = {
        "minutes": given.minutes,
        "warm_up_s": given.warm_up,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "scenarios": {},
    }
    for name in given.scenario or ["demo"]:
        loaded = with_capacity(scenarios.load(name))
        rate = resolve_rate(loaded)
        if rate is None:
            parser.error(f"scenario {name} has no rate, so --minutes says nothing")
        requests = int(rate * 60.0 * given.minutes)
        workload = loaded.workload.model_copy(update={"requests": requests})
        scenario = loaded.model_copy(update={"workload": workload})
        runs = []
        for seed in seeds(Purpose.EVALUATION, given.seeds):
            print(f"{name}, seed {seed}: {requests} requests ...", file=sys.stderr, flush=True)
            runs.append(compare(scenario, given.contender or CONTENDERS, seed, given.warm_up))
        found["scenarios"][name] = {"summary": summary(runs), "runs": runs}
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, figures in found["scenarios"].items():
        show(name, figures)


def show(name: str, figures: dict[str, Any]) -> None:
    """Print a table of one scenario, the best first."""
    rows = sorted(figures["summary"].items(), key=lambda row: float(row[1]["cost_s"]))

    def mean(metric: str) -> list[str]:
        found = ([run["contenders"][who][metric] for run in figures["runs"]] for who, _ in rows)
        return ["-" if None in values else number(float(np.mean(values))) for values in found]

    print(f"{name}: means of {len(figures['runs'])} seeds, after the warm-up")
    print_columns(
        Console(),
        [
            Column(("", "router"), [who for who, _ in rows], left=True),
            Column(("", "cost s"), [number(row["cost_s"]) for _, row in rows]),
            Column(("TTFT", "mean s"), mean("ttft_s_mean")),
            Column(("", "P99 s"), mean("ttft_s_p99")),
            Column(("E2E", "mean s"), mean("e2e_s_mean")),
            Column(("", "failed"), [str(row["failed"]) for _, row in rows]),
        ],
    )
    for note in {note for run in figures["runs"] for note in run["notes"]}:
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
