"""What each part of training is good for: the same small run with one thing changed.

    python benchmarks/ablation.py [--json] [--seeds 3] [-o docs/results/ablation.json]

Every variant is trained with three seeds on three scenarios with a small budget, and judged on
tuning seeds (traffic that training never sees) by the geometric mean over scenarios of the mean
composite cost, divided by that of least_outstanding. Runs are kept in --folder and not repeated.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace import scenario as scenarios
from tailrace.evaluate.judge.compare import compare
from tailrace.files import atomic_path
from tailrace.learn import settings as s
from tailrace.learn.trainer import Trainer
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.seeds import Purpose, seeds

SCENARIOS = ("uniform-chat-80", "mixed-speed", "hot-sessions-mixed-speed")
RULES = ("least_outstanding", "lmetric", "load_aware", "least_predicted_ttft", "lookahead")
BASE: dict[str, Any] = {
    "name": "ablation",
    "scenarios": list(SCENARIOS),
    "updates": 4,
    "demonstrations": {"rounds": 2, "worlds": 6, "decisions": 1000},
    "branching": {"worlds": 9, "states": 30, "epochs": 8, "learning_rate": 5e-4,
                  "final_learning_rate": 5e-4},
    "evaluation": {"every": 1000, "worlds": 1, "requests": 2000,
                   "baselines": ["least_outstanding", "lmetric"]},
}  # fmt: skip
#: PPO with about the same simulated decisions as four updates of branching.
PPO: dict[str, Any] = {
    "advantage": "gae",
    "objective": "clipped",
    "updates": 20,
    "ppo": {"clusters": 48, "decisions": 128, "warmup": 64, "minibatch": 1024, "epochs": 3,
            "learning_rate": 1e-4, "target_kl": 0.01, "kl_stop": True},
}  # fmt: skip
PREFIX = [f.name for f in (*REPLICA_FEATURES, *REQUEST_FEATURES) if f.source == "prefix index"]
REQUEST = [f.name for f in REQUEST_FEATURES if f.source == "request"]
#: The reward of the system this one set out to better: throughput, balance and run-long averages
#: instead of the cost of requests, tightly clipped, discounted by 0.95 per decision.
ORIGINAL: dict[str, Any] = {
    "reward": {"e2e": 0.0, "ttft": 0.0, "late": 0.0, "lost": 0.0, "throughput": 1.0,
               "balance": 1.0, "improvement": 1.0, "bound": 0.1},
    "ppo": {"discount_by": "decision", "gamma": 0.95, "gae_lambda": 0.95},
}  # fmt: skip
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "cloning only": [{"updates": 0}],
    "branching": [],
    "GAE": [PPO],
    "grouped GAE": [PPO, {"advantage": "grouped"}],
    "GAE, decoupled critic": [PPO, {"network": {"decoupled_critic": True}}],
    "GAE, the original's reward": [PPO, ORIGINAL],
    "GAE without cloning": [PPO, {"demonstrations": {"rounds": 0}, "ppo": {"norm_updates": 2}}],
    "branching, no prefix features": [{"network": {"ignore": PREFIX}}],
    "branching, no request features": [{"network": {"ignore": REQUEST}}],
    "branching, GRU": [{"network": {"memory": 16}}],
    "branching, prior logit": [{"network": {"prior": "lmetric"}}],
}


def settings_of(variant: str, seed: int) -> s.TrainSettings:
    """Return the settings of a run."""
    data = BASE
    for change in VARIANTS[variant]:
        data = scenarios.merged(data, change)
    return s.build(data, {"seed": seed})


def train(task: tuple[str, int, Path]) -> tuple[str, float]:
    """Train unless it was done before; returns the policy file and the seconds it took."""
    variant, seed, folder = task
    run = folder / f"{variant.replace(' ', '-').replace(',', '').replace(chr(39), '')}-{seed}"
    began = time.monotonic()
    if not (run / "health.json").exists():
        resume = (run / "state.safetensors").exists()
        Trainer(run, None if resume else settings_of(variant, seed), jobs=1).run()
    # The last policy, not the best: choosing one by validation would blur the difference.
    return str(run / "last.tailrace"), time.monotonic() - began


def judge(policies: Sequence[str], count: int, requests: int, jobs: int) -> dict[str, list[float]]:
    """Return the cost of every policy in every scenario, divided by least_outstanding's."""
    ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    for name in SCENARIOS:
        scenario = scenarios.load(name)
        workload = scenario.workload.model_copy(update={"requests": requests})
        scenario = scenario.model_copy(update={"workload": workload})
        numbers = seeds(Purpose.TUNING, count)
        found = compare(scenario, policies, numbers, jobs, warmup_fraction=0.05)
        costs = {entry.policy: entry.mean.cost_s for entry in found.entries}
        for policy in policies:
            ratios[policy].append(costs[policy] / costs[RULES[0]])
    return ratios


def main() -> None:
    """Train and judge all variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds per variant")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablation"))
    parser.add_argument("-o", "--output", type=Path, help="write the JSON to a file, too")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="some of the variants")
    options = parser.parse_args()
    files: dict[str, list[str]] = {}
    tasks = [(v, seed, options.folder) for v in options.only for seed in range(options.seeds)]
    with WorkerPool(options.jobs) as pool:
        for (variant, seed, _), (path, seconds) in zip(tasks, pool.map(train, tasks), strict=True):
            files.setdefault(variant, []).append(path)
            print(f"{variant}, seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
    everything = [*RULES, *(path for paths in files.values() for path in paths)]
    ratios = judge(everything, 5, 4000, options.jobs)
    scores = {policy: float(np.exp(np.mean(np.log(found)))) for policy, found in ratios.items()}
    result: dict[str, Any] = {
        "scenarios": SCENARIOS,
        "judged_on": "5 tuning seeds, 4000 requests each, the first 5 % left out",
        "rules": {rule: round(scores[rule], 4) for rule in RULES},
        "variants": {
            variant: {
                "score": round(float(np.mean([scores[p] for p in paths])), 4),
                "by_seed": [round(scores[p], 4) for p in paths],
                "by_scenario": np.mean([ratios[p] for p in paths], axis=0).round(4).tolist(),
            }
            for variant, paths in files.items()
        },
    }
    text = json.dumps(result, indent=1)
    if options.output:
        with atomic_path(options.output) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
        return
    for name, score in result["rules"].items():
        print(f"{name:32} {score:.4f}")
    for name, found in result["variants"].items():
        print(f"{name:32} {found['score']:.4f}  {found['by_seed']}")


if __name__ == "__main__":
    main()
