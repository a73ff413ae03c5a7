"""What requests notice of a working autopilot: ``python benchmarks/autopilot_latency.py [--json]``.

Two of our routers with the same trivial backends, one with an autopilot that does a round whenever
it may, take turns: 1 KB chat requests one after the other on one connection.
Before that, streams fill the decision logs, so that there is something to fit and to simulate.
``share_of_a_core`` is what the autopilot took meanwhile. Needs a quiet machine.
"""

import argparse
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from autopilot import save_part
from bench_router import latency, read_answer, request_bytes
from router_rig import HOST, Contender, chat_body, children_of, cpu_s, rig
from tailrace.files import dumps

STREAMS, AT_ONCE = 600, 60
BODY_BYTES = 1024
ROUNDS, REQUESTS = 12, 2500
#: Of the distribution of latencies.
QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}


def fill(contender: Contender) -> None:
    """Send streams, AT_ONCE at a time."""

    def some(first: int) -> None:
        for number in range(first, STREAMS, AT_ONCE):
            body = chat_body(BODY_BYTES, number, stream=True, max_tokens=8)
            with socket.create_connection((HOST, contender.port)) as connection:
                connection.sendall(request_bytes(contender.port, body))
                read_answer(connection)

    threads = [threading.Thread(target=some, args=(first,)) for first in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def autopilot_of(contender: Contender) -> int:
    """Return the process of its autopilot."""
    for pid in children_of(contender.pids[0]):
        if b"tailrace.autopilot" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise SystemExit("there is no autopilot")


def simulates(file: Path) -> bool:
    """Whether the autopilot has simulated policies."""
    try:
        return bool(json.loads(file.read_text()).get("prospects"))
    except (OSError, ValueError):
        return False


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    bodies = [chat_body(BODY_BYTES, number) for number in range(32)]
    with rig() as made:
        made.start_backends()
        folders = {name: made.folder / name for name in ("without", "with")}
        routers = {
            name: made.start_router(
                "--set", f"decisions.folder={folder}",
                *(("--autopilot", "act", "--set", "autopilot.every_s=1") * (name == "with")),
            )
            for name, folder in folders.items()
        }  # fmt: skip
        for contender in routers.values():
            fill(contender)
        end = time.monotonic() + 120
        while not simulates(folders["with"] / "autopilot.json"):
            if time.monotonic() > end:
                raise SystemExit("the autopilot has simulated nothing")
            time.sleep(0.5)
        took: dict[str, list[list[float]]] = {name: [] for name in routers}
        pid = autopilot_of(routers["with"])
        began, used_s = time.monotonic(), cpu_s([pid])
        for _ in range(given.rounds):
            for name, contender in routers.items():
                took[name].append(latency(contender, bodies, REQUESTS))
        share = (cpu_s([pid]) - used_s) / (time.monotonic() - began)
        shown = json.loads((folders["with"] / "autopilot.json").read_text())
    found: dict[str, Any] = {
        name: {
            which: float(np.median([np.quantile(one, q) for one in rounds])) * 1e3
            for which, q in QUANTILES.items()
        }
        for name, rounds in took.items()
    }
    ratios = [
        float(np.quantile(a, 0.99) / np.quantile(b, 0.99))
        for a, b in zip(took["with"], took["without"], strict=True)
    ]
    found |= {
        "p99_with_over_without": float(np.median(ratios)),
        "p99_ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "share_of_a_core": share,
        "round_s": shown.get("took_s"),
        "policies_simulated": len(shown.get("prospects", [])),
        "requests": given.rounds * REQUESTS,
    }
    save_part({"latency": found})
    print(dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
