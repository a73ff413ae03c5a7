"""Train on recorded traffic beside the standard scenarios: the last stages of the shipped policy.

    python benchmarks/train_recorded.py TRACES --from runs/wide-0/best.tailrace -o runs/recorded-0
    python benchmarks/train_recorded.py TRACES --devices --from runs/recorded-0/last.tailrace \
        -o runs/devices-0
    python benchmarks/average_policies.py runs/recorded-0/last.tailrace runs/devices-0/best.tailrace
    python benchmarks/train_recorded.py TRACES --steady --from averaged.tailrace -o runs/steady-0
    python benchmarks/train_recorded.py TRACES --steady --long --from runs/steady-0/best.tailrace \
        -o runs/steady-1
    python benchmarks/average_policies.py runs/steady-1/checkpoints/000001.tailrace \
        runs/steady-1/checkpoints/000007.tailrace --share 0.5 --run runs/steady-1

TRACES is a folder of recordings, as for `tailrace evaluate --suite real`, without those of single
GPU servers. Only conversations of the
half `train` are played, so that the other half can judge. Prints the outcome as JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tailrace as tr
from tailrace.learn import settings
from tailrace.learn.trainer import Trainer
from tailrace.scenario import merged

#: Scenarios that are left out: hundreds of short requests per second, on which all good policies
#: are level, or near twins of others.
LEFT_OUT = (
    "vtc_arena-equal-4-50", "vtc_arena-equal-8-80", "vtc_arena-long-context-4-50",
    "vtc_arena-long-context-4-85", "nat_sample-equal-4-50", "nat_sample-long-context-4-50",
    "nat_sample-large-kv-85",
)  # fmt: skip
#: Clusters of several kinds of servers: workload, load, and servers of each kind.
DEVICES: tuple[tuple[str, float, dict[str, int]], ...] = (
    ("chat", 0.75, {"h100-llama2-7b": 2, "a40-llama2-7b": 2}),
    ("chat", 0.9, {"a100-llama3-8b": 2, "a40-llama2-7b": 2}),
    ("code-completion", 0.85, {"h100-llama2-7b": 1, "a100-llama3-8b": 3}),
    ("chat", 0.5, {"h100-llama2-7b": 1, "a40-llama2-7b": 5}),
    ("chat", 0.9, {"h100-llama2-7b": 2, "a40-llama2-7b": 4}),
    ("sessions-hot", 0.75, {"h100-llama2-7b": 1, "a100-llama3-8b": 2, "a40-llama2-7b": 1}),
    ("chat", 0.85, {"h100-llama2-70b-tp4": 1, "a100-llama2-70b-tp4": 2}),
)
#: Large clusters of equal servers: workload, load, number of servers.
LARGE: tuple[tuple[str, float, int], ...] = (
    ("chat", 0.9, 6), ("chat", 0.95, 8), ("chat", 0.9, 11), ("chat", 0.8, 13), ("chat", 0.95, 14),
    ("chat", 0.9, 16), ("mixed", 0.95, 10), ("code-completion", 0.85, 12), ("reasoning", 0.9, 16),
    ("chat", 0.9, 20), ("multi-turn-chat", 0.9, 9), ("sessions-hot", 0.9, 12),
)  # fmt: skip
#: Without the features that grow with what a replica was sent: a policy that likes one of them
#: sends more to the busiest. Large clusters of equal servers had tails twice as long.
STEADY: dict[str, Any] = {
    "network": {"ignore": ["throughput", "throughput_vs_mean", "recent_work",
                           "recent_work_vs_mean", "trend"]},
    "updates": 8,
    "randomise": {"share": 0.2},
    "demonstrations": {"rounds": 1},
    "branching": {"tail_weight": 0.1},
}  # fmt: skip
#: The same for longer.
LONG: dict[str, Any] = {
    "updates": 24,
    "demonstrations": {"rounds": 2, "worlds": 200, "decisions": 1000},
    "branching": {"worlds": 84, "states": 24},
    "evaluation": {"every": 3, "randomised": 24, "average_checkpoints": 4},
}


def mixed_devices() -> list[dict[str, Any]]:
    """Return the scenarios of DEVICES."""
    return [
        {
            "name": f"devices-{number}",
            "workload": {"name": workload, "arrivals": "poisson", "load": load},
            "cluster": {"replicas": [{"device": d, "count": n} for d, n in servers.items()]},
        }
        for number, (workload, load, servers) in enumerate(DEVICES)
    ]


def large() -> list[dict[str, Any]]:
    """Return the scenarios of LARGE."""
    return [
        {
            "name": f"large-{count}-{workload}",
            "workload": {"name": workload, "arrivals": "poisson", "load": load},
            "cluster": {"replicas": [{"device": "a100-llama3-8b", "count": count}]},
        }
        for workload, load, count in LARGE
    ]


def main() -> None:
    """Make the scenarios, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--from", dest="start", required=True, help="policy to start from")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--devices", action="store_true", help="add clusters of several kinds of servers"
    )
    parser.add_argument(
        "--steady",
        action="store_true",
        help="hide features that feed on themselves",
    )
    parser.add_argument("--long", action="store_true", help="with --steady: more of it")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    work = given.out.with_name(f"{given.out.name}-traces")
    found = tr.recorded(given.traces, work, half="train", jobs=given.jobs)
    preset = settings.read("recorded")
    preset["scenarios"] += [s.model_dump(mode="json") for s in found if s.name not in LEFT_OUT]
    if given.devices:
        preset["scenarios"] += 2 * mixed_devices()
        preset["demonstrations"] |= {"rounds": 1, "worlds": 72}
    if given.steady:
        preset["scenarios"] += mixed_devices() + large()
        preset = merged(merged(preset, STEADY), LONG if given.long else {})
    outcome = Trainer(given.out, settings.build(preset, {"start": given.start}), given.jobs).run()
    rule, score = outcome.best_rule
    print(json.dumps({"best": str(outcome.best), "score": outcome.best_score, rule: score}))


if __name__ == "__main__":
    main()
