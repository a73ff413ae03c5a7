"""How often the autopilot's test is wrong, and how soon it is right.

``python benchmarks/autopilot.py [--json]``: two hours in which a candidate that is equal, better or
worse has its turns, on four emulated servers of mixed speed with a virtual clock, at 20 requests/s,
one block of a minute in five. The simulator's view of the servers is off by 10 % (standard
deviation) for each of them, drawn anew for each run. Every run has traffic of its own and one draw
of the turns, so runs are independent. Cases and test were set up on tuning seeds (``--tuning``);
the published runs are on evaluation seeds.
"""

import argparse
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

import tailrace
from autopilot_world import Twin, play_turns, requests, scenario
from tailrace.autopilot.blocks import cycles_of
from tailrace.autopilot.sequential import log_e_values, mean_effect
from tailrace.config import Scenario
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.files import dumps, write_text
from tailrace.router.decide.turns import Turns
from tailrace.seeds import Purpose, generator, seeds

RESULTS = Path(__file__).parents[1] / "docs/results/autopilot.json"
SHIPPED = Path(tailrace.__file__).parent / "policies/tailrace.tailrace"
ALPHA = 0.05
HOURS = 2.0
#: The candidate is found and shadowed meanwhile, s.
BEGIN_S = 600.0
BLOCK_S, BLOCKS, WASHOUT_S = 60.0, 5, 15.0
#: Standard deviation of the log of believed / true speed of each server.
TWIN_ERROR = 0.1
#: Workload, present policy, candidate; what is known of them from a tuning seed, in words.
CASES = {
    "equal, hot sessions": ("sessions-hot", "load_aware", "load_aware"),
    "equal, chat": ("chat", "lmetric", "lmetric"),
    "better, hot sessions": ("sessions-hot", "load_aware", "tailrace"),
    "better, chat": ("chat", "lmetric", "tailrace"),
    "worse, hot sessions": ("sessions-hot", "tailrace", "load_aware"),
    "worse, chat": ("chat", "tailrace", "lmetric"),
}
#: Runs that also play each policy alone, for the true difference.
TRUE_RUNS = 5


def one_run(case: str, seed: int, base: Scenario | None = None) -> dict[str, Any]:
    """Two hours in which a candidate has its turns; when the test decides, in s, if it does.

    ``base``: in another world than that of the case's workload.
    """
    workload, present, candidate = CASES[case]
    base = base or scenario(workload, HOURS)
    table = requests(base, seed)
    turns = Turns(seed, BLOCK_S, BLOCKS)

    def policy_at(now_s: float) -> str:
        return candidate if now_s >= BEGIN_S and turns.is_candidates(now_s) else present

    if candidate == present:  # turns change nothing
        result = play(base, table, policy_for(base, present), seed)
    else:
        result = play_turns(base, table, policy_at, seed)
    cost_s = composite_cost_s(result)
    twin = Twin.of(base, TWIN_ERROR, generator(seed, "twin"))
    predicted_s = twin.costs(result, present)
    found: dict[str, Any] = {"seed": seed, "twin_error": predicted_s.mean() / cost_s.mean() - 1}
    arrived_s = result.requests["arrived_s"]
    for name, told in (("told", (arrived_s, predicted_s)), ("untold", None)):
        cycles = cycles_of(
            turns, arrived_s, cost_s, told, washout_s=WASHOUT_S,
            begin_s=BEGIN_S, end_s=3600 * HOURS,
        )  # fmt: skip
        numbers, listed = sorted(cycles), [cycles[number] for number in sorted(cycles)]
        ends_s = [(number + 1) * turns.cycle_s for number in numbers]
        better, worse = log_e_values(listed, np.zeros(1))
        found[name] = {
            "better_at_s": _first(better[1:, 0], ends_s),
            "worse_at_s": _first(worse[1:, 0], ends_s),
            "effect": mean_effect(listed),
        }
    return found


def _first(logs: Any, ends_s: list[float]) -> float | None:
    reached = np.flatnonzero(logs >= np.log(1 / ALPHA))
    return ends_s[reached[0]] if len(reached) else None


def true_effect(case: str, seeds: list[int]) -> float:
    """Cost of the candidate alone relative to that of the present policy alone, less 1."""
    workload, present, candidate = CASES[case]
    base = scenario(workload, HOURS)
    logs = []
    for seed in seeds:
        table = requests(base, seed)
        costs = [
            composite_cost_s(play(base, table, policy_for(base, name), seed)).mean()
            for name in (candidate, present)
        ]
        logs.append(np.log(costs[0] / costs[1]))
    return float(np.expm1(np.mean(logs)))


def errors(runs: dict[str, int], kept: dict[str, Any], purpose: Purpose) -> dict[str, Any]:
    """All cases; runs that were ``kept`` from an interrupted call are not repeated.

    Those of another shipped policy are.
    """
    shipped = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()[:16]
    for case, (_, *policies) in CASES.items():
        entry = kept.setdefault(case, {"runs": []})
        if "tailrace" in policies and entry.get("shipped") != shipped:
            entry = kept[case] = {"runs": [], "shipped": shipped}
        wanted = seeds(purpose, runs[case.split(",")[0]], 720_000)
        done = {run["seed"] for run in entry["runs"]}
        for seed in wanted:
            if seed not in done:
                entry["runs"].append(one_run(case, seed))
                _keep(kept, purpose)
        if "true_effect" not in entry:
            some = wanted[:TRUE_RUNS]
            entry["true_effect"] = 0.0 if "equal" in case else true_effect(case, some)
        entry["summary"] = {name: _summary(entry["runs"], name) for name in ("told", "untold")}
        _keep(kept, purpose)
    return kept


def _keep(found: dict[str, Any], purpose: Purpose) -> None:
    if purpose == Purpose.EVALUATION:
        save_part({"errors": found})


def _summary(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    better, worse = ([run[name][f"{which}_at_s"] for run in runs] for which in ("better", "worse"))
    # A candidate that was dismissed does not take over any more.
    switched = [
        b for b, w in zip(better, worse, strict=True) if b is not None and (w is None or b <= w)
    ]
    gone = [w for b, w in zip(better, worse, strict=True) if w is not None and (b is None or w < b)]
    effects = [run[name]["effect"] for run in runs]
    return {
        "runs": len(runs),
        "take_overs": len(switched),
        "median_minutes_to_take_over": _minutes(switched),
        "longest_minutes_to_take_over": max(switched, default=0.0) / 60 or None,
        "dismissed": len(gone),
        "median_minutes_to_dismissal": _minutes(gone),
        "mean_effect": float(np.mean(effects)),
        "effect_deviation": float(np.std(effects)),
    }


def _minutes(seconds: list[float]) -> float | None:
    return float(np.median(seconds)) / 60 if seconds else None


def read_results() -> dict[str, Any]:
    """Return the figures so far."""
    if not RESULTS.exists():
        return {}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def save_part(part: dict[str, Any]) -> None:
    """Put a part of the figures into the file of results."""
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    write_text(RESULTS, dumps(read_results() | part | {"made_on": machine}) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--equal", type=int, default=50, help="runs of each case of equal policies")
    parser.add_argument("--other", type=int, default=10, help="runs of each other case")
    parser.add_argument("--tuning", action="store_true", help="on tuning seeds; nothing is kept")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    runs = {"equal": given.equal, "better": given.other, "worse": given.other}
    purpose = Purpose.TUNING if given.tuning else Purpose.EVALUATION
    found = errors(runs, {} if given.tuning else read_results().get("errors", {}), purpose)
    summary = {
        case: entry["summary"] | {"true": entry["true_effect"]} for case, entry in found.items()
    }
    print(dumps(summary) if given.json else "\n".join(f"{k}: {v}" for k, v in summary.items()))


if __name__ == "__main__":
    main()
