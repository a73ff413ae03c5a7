"""The autopilot's figures on emulated servers: ``python benchmarks/autopilot.py PART [--json]``.

``errors``: how often the sequential test puts a policy in charge that is equal, better or worse.
Four servers of mixed speed, 20 requests/s, two hours per run; the simulator's view of the servers
is off by 10 % (standard deviation) for each. The candidate gets one block of a minute in five. The
cases were chosen, and the test set up, on a tuning seed; the runs are on evaluation seeds.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

from autopilot_world import Twin, play_turns, requests, scenario
from tailrace.autopilot.blocks import cycles_of
from tailrace.autopilot.sequential import log_e_values, mean_effect
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.files import dumps, write_text
from tailrace.router.decide.turns import Turns
from tailrace.seeds import Purpose, generator, seeds

RESULTS = Path(__file__).parents[1] / "docs/results/autopilot.json"
ALPHA = 0.05
HOURS = 2.0
#: The candidate is found and shadowed meanwhile, s.
BEGIN_S = 600.0
BLOCK_S, BLOCKS, WASHOUT_S = 60.0, 5, 15.0
#: Draws of the turns for each run of equal policies.
DRAWS = 20
#: Standard deviation of the log of believed / true speed of each server.
TWIN_ERROR = 0.1
#: Workload, present policy, candidate; what is known of them from a tuning seed, in words.
CASES = {
    "equal, hot sessions": ("sessions-hot", "load_aware", "load_aware"),
    "better, hot sessions": ("sessions-hot", "load_aware", "tailrace"),
    "worse, hot sessions": ("sessions-hot", "tailrace", "load_aware"),
    "better, chat": ("chat", "lmetric", "tailrace"),
    "worse, chat": ("chat", "tailrace", "lmetric"),
    "equal, chat": ("chat", "lmetric", "lmetric"),
}


def one_run(case: str, seed: int) -> dict[str, Any]:
    """Two hours in which a candidate has its turns; when the test decides, in s, if it does.

    If candidate and present policy are the same, turns change nothing, and the same two hours serve
    for several draws of the turns.
    """
    workload, present, candidate = CASES[case]
    base = scenario(workload, HOURS)
    table = requests(base, seed)
    draws = [Turns(seed + 10**9 * k, BLOCK_S, BLOCKS) for k in range(DRAWS)]
    if candidate == present:
        result = play(base, table, policy_for(base, present), seed)
    else:
        draws = draws[:1]

        def policy_at(now_s: float) -> str:
            return candidate if now_s >= BEGIN_S and draws[0].is_candidates(now_s) else present

        result = play_turns(base, table, policy_at, seed)
    cost_s = composite_cost_s(result)
    twin = Twin.of(base, TWIN_ERROR, generator(seed, "twin"))
    predicted_s = twin.costs(result, present)
    arrived_s = result.requests["arrived_s"]
    found: dict[str, Any] = {"seed": seed, "twin_error": predicted_s.mean() / cost_s.mean() - 1}
    for name, told in (("told", predicted_s), ("untold", None)):
        found[name] = []
        for turns in draws:
            cycles = cycles_of(
                turns, arrived_s, cost_s, told, washout_s=WASHOUT_S, begin_s=BEGIN_S,
                end_s=3600 * HOURS,
            )  # fmt: skip
            numbers, listed = sorted(cycles), [cycles[number] for number in sorted(cycles)]
            ends_s = [(number + 1) * turns.cycle_s for number in numbers]
            better, worse = log_e_values(listed, np.zeros(1))
            found[name].append(
                {
                    "better_at_s": _first(better[1:, 0], ends_s),
                    "worse_at_s": _first(worse[1:, 0], ends_s),
                    "effect": mean_effect(listed),
                }
            )
    return found


def _first(logs: Any, ends_s: list[float]) -> float | None:
    reached = np.flatnonzero(logs >= np.log(1 / ALPHA))
    return ends_s[reached[0]] if len(reached) else None


def true_effect(case: str, seed: int) -> float:
    """Cost of the candidate alone relative to that of the present policy alone, less 1."""
    workload, present, candidate = CASES[case]
    base = scenario(workload, HOURS)
    table = requests(base, seed)
    costs = [
        composite_cost_s(play_turns(base, table, lambda _, name=name: name, seed)).mean()  # type: ignore[misc]
        for name in (candidate, present)
    ]
    return float(costs[0] / costs[1] - 1)


def errors(runs: dict[str, int], kept: dict[str, Any]) -> dict[str, Any]:
    """All cases; runs that were ``kept`` from an interrupted call are not repeated."""
    for case in CASES:
        entry = kept.setdefault(case, {"runs": []})
        wanted = seeds(Purpose.EVALUATION, runs[case.split(",")[0]], 700_000)
        done = {run["seed"] for run in entry["runs"]}
        for seed in wanted:
            if seed not in done:
                entry["runs"].append(one_run(case, seed))
                save_part({"errors": kept})
        if "true_effect" not in entry:
            entry["true_effect"] = 0.0 if "equal" in case else true_effect(case, wanted[0])
        entry["summary"] = {name: _summary(entry["runs"], name) for name in ("told", "untold")}
        save_part({"errors": kept})
    return kept


def _summary(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    draws = [draw for run in runs for draw in run[name]]
    better, worse = ([draw[f"{which}_at_s"] for draw in draws] for which in ("better", "worse"))
    # A candidate that was dismissed does not take over any more.
    switched = [
        b for b, w in zip(better, worse, strict=True) if b is not None and (w is None or b <= w)
    ]
    gone = [w for w in worse if w is not None]
    return {
        "runs": len(runs),
        "draws_of_turns": len(draws),
        "take_overs": len(switched),
        "median_minutes_to_take_over": _minutes(switched),
        "longest_minutes_to_take_over": max(switched, default=0.0) / 60 or None,
        "dismissed": len(gone),
        "median_minutes_to_dismissal": _minutes(gone),
        "mean_effect": float(np.mean([draw["effect"] for draw in draws])),
    }


def _minutes(seconds: list[float]) -> float | None:
    return float(np.median(seconds)) / 60 if seconds else None


def _read() -> dict[str, Any]:
    if not RESULTS.exists():
        return {}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def save_part(part: dict[str, Any]) -> None:
    """Put a part of the figures into the file of results."""
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    write_text(RESULTS, dumps(_read() | part | {"made_on": machine}) + "\n")


def main() -> None:
    """Measure a part and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["errors"])
    parser.add_argument("--equal", type=int, default=100, help="runs of equal policies")
    parser.add_argument("--other", type=int, default=20, help="runs of different policies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    runs = {"equal": given.equal, "better": given.other, "worse": given.other}
    found = errors(runs, _read().get("errors", {}))
    summary = {
        case: entry["summary"] | {"true": entry["true_effect"]} for case, entry in found.items()
    }
    print(dumps(summary) if given.json else "\n".join(f"{k}: {v}" for k, v in summary.items()))


if __name__ == "__main__":
    main()
