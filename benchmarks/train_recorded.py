"""Train on recorded traffic beside the standard scenarios: the last stages of the shipped policy.

    python benchmarks/train_recorded.py TRACES --from runs/wide-0/best.tailrace -o runs/recorded-0
    python benchmarks/train_recorded.py TRACES --devices --from runs/recorded-0/last.tailrace \
        -o runs/devices-0
    python benchmarks/average_policies.py runs/recorded-0/last.tailrace runs/devices-0/best.tailrace

TRACES is a folder of recordings, as for `tailrace evaluate --suite real`. Only conversations of the
half `train` are played, so that the other half can judge. Prints the outcome as JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tailrace as tr
from tailrace.learn import settings
from tailrace.learn.trainer import Trainer

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


def main() -> None:
    """Make the scenarios, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--from", dest="start", required=True, help="policy to start from")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--devices", action="store_true", help="add clusters of several kinds of servers"
    )
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    work = given.out.with_name(f"{given.out.name}-traces")
    found = tr.recorded(given.traces, work, half="train", jobs=given.jobs)
    preset = settings.read("recorded")
    preset["scenarios"] += [s.model_dump(mode="json") for s in found if s.name not in LEFT_OUT]
    if given.devices:
        preset["scenarios"] += 2 * mixed_devices()
        preset["demonstrations"] |= {"rounds": 1, "worlds": 72}
    outcome = Trainer(given.out, settings.build(preset, {"start": given.start}), given.jobs).run()
    rule, score = outcome.best_rule
    print(json.dumps({"best": str(outcome.best), "score": outcome.best_score, rule: score}))


if __name__ == "__main__":
    main()
