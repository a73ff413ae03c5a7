"""A real fine-tuning: ``PYTHONPATH=tests python benchmarks/autopilot_finetune.py [--json]``.

An hour of traffic at 4 requests/s under ``tailrace`` becomes a decision log. A pilot that may
act does its rounds on it: it fits the servers, looks at the gap to a look-ahead, trains further in
a process of its own (PyTorch, at most ``--cpu-s`` of CPU time) and simulates the result beside all
other policies. What was trained is then played alone, and in turns under the sequential test, on
traffic that it has never seen. The world was chosen on tuning seeds; the traffic of the log and of
the trials has evaluation seeds. The clock is virtual, the training is not.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import autopilot
from autopilot import save_part
from autopilot_world import cluster, requests, scenario
from flights import Router  # type: ignore[import-not-found]
from replay.logged import write_log  # type: ignore[import-not-found]
from tailrace.autopilot.fine_tuning import is_possible
from tailrace.autopilot.pilot import LEAST_GAP, Orders, Pilot
from tailrace.config import Scenario
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.files import dumps
from tailrace.router.settings import AutopilotSettings
from tailrace.seeds import Purpose, seeds

#: Long answers on servers whose speeds differ by a factor of fifteen: more than the shipped policy
#: has seen. On the scenarios that are shipped, a look-ahead gains 5 % at most.
WORLD, SPEEDS, RATE_RPS = "reasoning", (3.0, 1.0, 1.0, 0.2, 0.2), 4.0
PRESENT = "tailrace"
LOGGED_S = 3600.0
#: Runs of two hours, for the cost alone and for the test.
RUNS = 5
CPU_S = 1800


def logged(base: Scenario, folder: Path, seed: int) -> None:
    """Write the decision log of an hour under the present policy."""
    count = int(LOGGED_S * RATE_RPS)
    traffic = base.workload.model_copy(update={"requests": count})
    write_log(folder, base.cluster, requests(base.model_copy(update={"workload": traffic}), seed),
              policy=PRESENT)  # fmt: skip


def trained(base: Scenario, folder: Path, seed: int, cpu_s: int) -> tuple[dict[str, Any], str]:
    """Fly until a fine-tuned policy is in the portfolio; return what was found, and the policy."""
    began = time.time()
    logged(base, folder / "decisions", seed)
    router = Router()
    router.roles |= {"policy": PRESENT, "settings_policy": PRESENT}
    settings = AutopilotSettings(mode="act", window_s=2 * LOGGED_S, finetune_s=cpu_s)
    file = folder / "autopilot.json"
    orders = Orders(folder / "decisions", file, settings)
    # Requests of the log arrive from now on; while training runs, its clock stands still.
    end_s = began + LOGGED_S + 120
    pilot = Pilot(orders, router, clock=lambda: end_s)
    pilot.round()
    shown = json.loads(file.read_text())
    (note,) = [s for s in shown["steps"] if s["about"] == "fine-tuning"]
    found = {
        "twin_error": shown["twin_error"],
        "gap": note["evidence"]["gap"],
        "first_round": [shown["says"], note["what"]],
        "prospects_before": shown["prospects"],
    }
    if not pilot._tuning.is_running:
        return found, ""
    start = time.monotonic()
    while pilot._tuning._process is not None and pilot._tuning._process.poll() is None:
        time.sleep(1.0)
    found["training_s"] = time.monotonic() - start
    for _ in range(2):  # collected, then simulated
        pilot.round()
    shown = json.loads(file.read_text())
    made = pilot._tuning.policies()
    found["says"] = [s["what"].replace(str(folder), "") for s in shown["steps"]]
    found["prospects"] = [{**p, "policy": Path(p["policy"]).name} for p in shown["prospects"]]
    if not made:
        return found, ""
    costs = {p["policy"]: p["cost_s"] for p in shown["prospects"]}
    found["gained_in_the_twin"] = (
        1 - costs[made[-1]] / costs[PRESENT] if made[-1] in costs else None
    )
    found["stage"], found["candidate"] = pilot.state.stage, Path(pilot.state.candidate).name
    return found, made[-1]


def tried(base: Scenario, policy: str, purpose: Purpose) -> dict[str, Any]:
    """Play it alone and in turns on other traffic."""
    logs, runs = [], []
    autopilot.CASES["tuned"] = (WORLD, PRESENT, policy)
    for seed in seeds(purpose, RUNS, 725_000):
        table = requests(base, seed)
        costs = [
            composite_cost_s(play(base, table, policy_for(base, name), seed)).mean()
            for name in (policy, PRESENT)
        ]
        logs.append(float(np.log(costs[0] / costs[1])))
        runs.append(autopilot.one_run("tuned", seed, base)["told"])
    spread = float(np.std(logs, ddof=1) / np.sqrt(len(logs)))
    return {
        "true_effect": float(np.expm1(np.mean(logs))),
        "standard_error": spread,
        "runs": runs,
        "take_overs": sum(run["better_at_s"] is not None for run in runs),
        "dismissed": sum(run["worse_at_s"] is not None for run in runs),
    }


def main() -> None:
    """Train, try and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-s", type=int, default=CPU_S, help="CPU time of the training, s")
    parser.add_argument("--keep", type=Path, help="copy the trained policy to this file")
    parser.add_argument("--tuning", action="store_true", help="on tuning seeds; nothing is kept")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    assert is_possible(), "fine-tuning needs PyTorch"
    purpose = Purpose.TUNING if given.tuning else Purpose.EVALUATION
    world = scenario(WORLD, autopilot.HOURS, RATE_RPS)
    base = world.model_copy(update={"cluster": cluster(SPEEDS)})
    with tempfile.TemporaryDirectory() as name:
        found, policy = trained(base, Path(name), seeds(purpose, 1, 724_000)[0], given.cpu_s)
        found |= {
            "workload": WORLD,
            "speeds": SPEEDS,
            "rate_rps": RATE_RPS,
            "cpu_s": given.cpu_s,
            "least_gap": LEAST_GAP,
        }
        if policy:
            if given.keep:
                shutil.copy(policy, given.keep)
            found["live"] = tried(base, policy, purpose)
    if not given.tuning:
        save_part({"fine_tuning": found})
    print(dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
