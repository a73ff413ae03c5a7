"""Policies live, in front of emulated servers, on identical arrivals; and simulated beside it.

    python benchmarks/live_ranks.py [--json]

For each policy the scenario's servers are emulated anew (empty caches), `tailrace serve` is put in
front of them, and the same requests are sent at the same times. Servers take real time, so a policy
takes about as long as its traffic: half a minute. Needs the extra `serve`.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from scipy.stats import kendalltau

from tailrace import scenario as scenarios
from tailrace.bench.load import run_load
from tailrace.config import Scenario
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import run, traffic
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, seeds
from tailrace.terminal.tables import Column, number, print_columns

POLICIES = ("tailrace", "load_aware", "lmetric", "cache_aware", "least_outstanding", "round_robin")
STOP_S = 15.0
#: Share of the first requests left out: caches are empty and sessions short.
WARMUP = 0.2


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a tailrace command; it is stopped in the end whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def awaited(process: subprocess.Popen[str], pattern: str) -> str:
    """Return what a pattern finds in the next lines a process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(pattern, line)
        if found:
            return found[1]
    raise RuntimeError(f"{process.args!r} ended with {process.wait()} before it was ready")


def config_of(scenario: Scenario, urls: Sequence[str]) -> str:
    """Return the router's settings: where the servers are and how fast."""
    lines = []
    for url, replica in zip(urls, scenario.cluster.expanded(), strict=True):
        lines.append(
            f'[[backends]]\nurl = "{url}"\n[backends.server]\ndevice = "{replica.device}"\n'
            f"speed = {replica.speed}\n"
        )
    return "\n".join(lines)


def live(scenario: Scenario, policy: str, seed: int) -> dict[str, Any]:
    """Play a scenario with real time and real HTTP."""
    table = traffic(scenario, resolve_rate(scenario), seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        started("emulate", "--scenario", scenario.name, "--port", "0", "--json") as emulator,
    ):
        urls = json.loads(awaited(emulator, r"(\{.*\})"))["urls"]
        config = Path(folder) / "router.toml"
        config.write_text(config_of(scenario, urls), encoding="utf-8")
        with started(
            "serve", "--config", str(config), "-p", policy, "--listen", "127.0.0.1:0",
            "--admin", "off", "--log-level", "error",
        ) as router:  # fmt: skip
            url = awaited(router, r"listening on (http://[^/]+)")
            result = run_load(url, table)
    return result.summary(WARMUP)


def simulated(scenario: Scenario, policy: str, seed: int) -> dict[str, Any]:
    """Play the same in the simulator."""
    result = run(scenario, policy, resolve_rate(scenario), seed)
    summary = summarise(result, WARMUP)
    return {
        "cost_s": summary.cost_s,
        "ttft_s_mean": summary.ttft_s.mean,
        "ttft_s_p99": summary.ttft_s.p99,
        "e2e_s_mean": summary.e2e_s.mean,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="demo")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("-p", "--policy", action="append", help=f"default: {' '.join(POLICIES)}")
    parser.add_argument("--seed", type=int, default=seeds(Purpose.TUNING, 1)[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    loaded = with_capacity(scenarios.load(given.scenario))
    workload = loaded.workload.model_copy(update={"requests": given.requests})
    scenario = loaded.model_copy(update={"workload": workload})
    rows: list[dict[str, Any]] = []
    for policy in given.policy or POLICIES:
        print(f"{policy}: live, {given.requests} requests ...", file=sys.stderr, flush=True)
        rows.append(
            {
                "policy": policy,
                "live": live(scenario, policy, given.seed),
                "simulated": simulated(scenario, policy, given.seed),
            }
        )
    rows.sort(key=lambda row: row["live"]["cost_s"])
    costs = {w: [row[w]["cost_s"] for row in rows] for w in ("live", "simulated")}
    agreement: Any = kendalltau(costs["live"], costs["simulated"])
    found: dict[str, Any] = {
        "scenario": given.scenario,
        "requests": given.requests,
        "seed": given.seed,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rank_agreement": float(agreement.statistic),
        "policies": rows,
    }
    if given.json:
        print(json.dumps(found, indent=2))
        return
    show(found)


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    rows = found["policies"]

    def cells(where: str, name: str) -> list[str]:
        return [number(row[where][name]) for row in rows]

    print_columns(
        Console(),
        [
            Column(("", "policy"), [row["policy"] for row in rows], left=True),
            Column(("live", "cost s"), cells("live", "cost_s")),
            Column(("TTFT", "mean s"), cells("live", "ttft_s_mean")),
            Column(("", "P99 s"), cells("live", "ttft_s_p99")),
            Column(("E2E", "mean s"), cells("live", "e2e_s_mean")),
            Column(("simulated", "cost s"), cells("simulated", "cost_s")),
            Column(("TTFT", "mean s"), cells("simulated", "ttft_s_mean")),
            Column(("", "P99 s"), cells("simulated", "ttft_s_p99")),
            Column(("E2E", "mean s"), cells("simulated", "e2e_s_mean")),
        ],
    )
    Console().print(
        Text(
            f"{found['requests']} requests of {found['scenario']}, the same for all. Agreement of "
            f"the ranks, live and simulated (Kendall's tau): {found['rank_agreement']:.2f}"
        )
    )


if __name__ == "__main__":
    main()
