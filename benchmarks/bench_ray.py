"""Workers on Ray beside processes of this machine: throughput for one and two, and the overhead.

    unshare -rn bash -c 'ip link set lo up; python benchmarks/bench_ray.py [--json]'

The work is what training hands out: demonstrations of the preset ``quick``, labelled by look-ahead,
with a network of its shape in every task. Throughput is by the wall clock, the median of several
turns that the places take one after another, so it says something only if ``load_average`` says
that nothing else was on. Overhead is that of a task that does nothing.
"""

import argparse
import json
import os
import pickle
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from bench_sim import machine
from tailrace.integrations.ray.pool import connect, executor_factory, packed
from tailrace.learn import settings as s
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.learn.worlds import LabelTask, label
from tailrace.parallel import WorkerPool, running_on
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES

WORLDS, DECISIONS, TURNS, EMPTY = 10, 1500, 5, 200

say = Console(stderr=True).log


def tasks() -> list[LabelTask]:
    """Demonstrations of a small round."""
    over = {"demonstrations": {"worlds": WORLDS, "decisions": DECISIONS, "warmup": 200}}
    settings = s.build(s.read("quick"), over)
    network = Network(settings.network, len(REPLICA_FEATURES), len(REQUEST_FEATURES))
    packed = pack(network.config, network.tensors())
    return WorldSchedule(settings).label_tasks(0, packed, False, None)


def seconds(pool: WorkerPool, work: Sequence[LabelTask]) -> float:
    """How long a pool takes for them."""
    begin = time.perf_counter()
    for _ in pool.map(label, work):
        pass
    return time.perf_counter() - begin


def overhead_ms(pool: WorkerPool) -> float:
    """Time of a task that does nothing, when they come one by one, ms."""
    begin = time.perf_counter()
    for _ in range(EMPTY):
        list(pool.map(abs, [0]))
    return (time.perf_counter() - begin) / EMPTY * 1e3


def measure() -> dict[str, Any]:
    """Everything, as plain data."""
    work = tasks()
    report: dict[str, Any] = {
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "tasks": len(work),
        "decisions": WORLDS * DECISIONS,
        "task_kb": len(packed(work[0])[0]) / 1e3,
        "shared_kb": sum(array.nbytes for array in packed(work[0])[1]) / 1e3,
        "result_kb": len(pickle.dumps(label(work[0]), pickle.HIGHEST_PROTOCOL)) / 1e3,
    }
    say("starting Ray …")
    begin = time.perf_counter()
    connect(None, 2)
    report["ray_start_s"] = time.perf_counter() - begin
    with ExitStack() as stack:
        pools = {
            "here": stack.enter_context(WorkerPool(1)),
            "processes_2": stack.enter_context(WorkerPool(2)),
        }
        for count in (1, 2):
            with running_on(executor_factory("ray", count)):
                pools[f"ray_{count}"] = stack.enter_context(WorkerPool(1))
        for name, pool in pools.items():
            say(f"warming up {name} …")
            seconds(pool, [*work, *work])
        taken: dict[str, list[float]] = {name: [] for name in pools}
        for turn in range(TURNS):
            say(f"turn {turn + 1} of {TURNS} …")
            for name, pool in pools.items():
                taken[name].append(seconds(pool, work))
        report["decisions_per_s"] = {
            name: report["decisions"] / statistics.median(times) for name, times in taken.items()
        }
        report["overhead_ms"] = {
            name: overhead_ms(pools[name]) for name in ("processes_2", "ray_1", "ray_2")
        }
    rates = report["decisions_per_s"]
    report["ray_1_against_here"] = rates["ray_1"] / rates["here"]
    report["ray_2_against_processes_2"] = rates["ray_2"] / rates["processes_2"]
    report["ray_2_against_ray_1"] = rates["ray_2"] / rates["ray_1"]
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    report = measure()
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    Console().print_json(json.dumps(report))


if __name__ == "__main__":
    main()
