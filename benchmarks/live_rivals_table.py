"""Figures of live_rivals.py: means over seeds, ratios with intervals, and the table.

Ratios compare a contender's cost with that of plain Tailrace on the same requests. Their intervals
come from a bootstrap over windows of 10 s of arrivals, drawn for both together and within each
seed: three seeds alone would say little.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tailrace.evaluate.judge.bootstrap import bounds
from tailrace.seeds import generator
from tailrace.terminal.tables import Column, number, print_columns

SAMPLES = 2000
#: Beyond these the machine did not keep up, and a run is marked: the load generator's P99, s, and
#: the share of the servers' iterations that ended more than 50 ms late.
LATE_S, LATE_ITERATIONS = 0.05, 0.01
_MEANS = (
    "cost_s", "ttft_s_mean", "ttft_s_p99", "e2e_s_mean", "slo_attainment", "goodput_rps",
    "prefix_hit_rate", "lateness_s_p50", "lateness_s_p99", "lateness_s_max",
)  # fmt: skip


def summaries(runs: Sequence[dict[str, Any]], plain: str, told: str) -> dict[str, Any]:
    """Return the figures of each scenario and contender from their runs."""
    found: dict[str, Any] = {}
    for scenario in dict.fromkeys(run["scenario"] for run in runs):
        of = [run for run in runs if run["scenario"] == scenario]
        names = dict.fromkeys(run["contender"] for run in of)
        by_seed = {
            name: {r["seed"]: r for r in of if r["contender"] == name and "missing" not in r}
            for name in names
        }
        found[scenario] = {
            name: _figures(kept) | {
                "against_plain": _ratio(kept, by_seed.get(plain, {})),
                "against_told": _ratio(kept, by_seed.get(told, {})),
            }
            for name, kept in by_seed.items()
            if kept
        }  # fmt: skip
    return found


def _figures(kept: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return means over seeds, and what concerns the machine."""
    runs = list(kept.values())
    means: dict[str, Any] = {}
    for metric in _MEANS:
        values = [run[metric] for run in runs]
        means[metric] = None if None in values else float(np.mean(values))
    lags = [run["emulator_lag"] for run in runs]
    return means | {
        "costs_s_by_seed": {seed: run["cost_s"] for seed, run in kept.items()},
        "requests": sum(run["requests"] for run in runs),
        "failed": sum(run["failed"] for run in runs),
        "emulator_lag": {key: float(np.mean([lag[key] for lag in lags])) for key in lags[0]},
        "seeds_in_which_the_machine_was_late": [
            seed
            for seed, run in kept.items()
            if run["lateness_s_p99"] > LATE_S or run["emulator_lag"]["over_50_ms"] > LATE_ITERATIONS
        ],
    }


def _ratio(
    kept: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the ratio of two contenders' costs over the seeds that both have."""
    seeds = [seed for seed in kept if seed in base]
    if not seeds:
        return None
    rng = generator(0, "windows")
    mine = np.zeros(SAMPLES)
    others = np.zeros(SAMPLES)
    for seed in seeds:
        costs = _by_window(kept[seed])
        base_costs = _by_window(base[seed])
        drawn = rng.integers(len(costs), size=(SAMPLES, len(costs)))
        requests = costs[drawn, 1].sum(axis=1)
        mine += costs[drawn, 0].sum(axis=1) / requests
        others += base_costs[drawn, 0].sum(axis=1) / requests
    by_seed = {seed: kept[seed]["cost_s"] / base[seed]["cost_s"] for seed in seeds}
    low, high = bounds(mine / others)
    ratio = sum(kept[s]["cost_s"] for s in seeds) / sum(base[s]["cost_s"] for s in seeds)
    return {"ratio": ratio, "low": low, "high": high, "by_seed": by_seed}


def _by_window(run: dict[str, Any]) -> NDArray[np.float64]:
    """Return the sum of costs in s and the number of requests of each window [w, 2]."""
    windows = np.array(run["windows"])
    windows = windows - windows.min()
    sums = np.bincount(windows, np.array(run["costs_s"]))
    counts = np.bincount(windows).astype(float)
    return np.stack([sums, counts], axis=1)[counts > 0]


def show(found: dict[str, Any]) -> None:
    """Print a table per scenario, the best first."""
    for scenario, contenders in found["scenarios"].items():
        rows = sorted(contenders.items(), key=lambda row: float(row[1]["cost_s"]))
        seeds = max(len(row["costs_s_by_seed"]) for _, row in rows)
        print(f"{scenario}: means of up to {seeds} seeds; cost relative to plain Tailrace")
        print_columns(
            Console(width=140),
            [
                Column(("", "router"), [who for who, _ in rows], left=True),
                Column(("", "seeds"), [str(len(row["costs_s_by_seed"])) for _, row in rows]),
                Column(("", "cost s"), [number(row["cost_s"]) for _, row in rows]),
                Column(("relative", "[95 %]"), [_interval(row) for _, row in rows]),
                Column(("TTFT", "mean s"), [number(row["ttft_s_mean"]) for _, row in rows]),
                Column(("", "P99 s"), [number(row["ttft_s_p99"]) for _, row in rows]),
                Column(("E2E", "mean s"), [number(row["e2e_s_mean"]) for _, row in rows]),
                Column(("", "SLO"), [number(row["slo_attainment"]) for _, row in rows]),
                Column(("", "failed"), [str(row["failed"]) for _, row in rows]),
                Column(("late by", "P99 ms"), [_ms(row["lateness_s_p99"]) for _, row in rows]),
                Column(("servers late", ">50 ms"), [_late(row) for _, row in rows]),
            ],
        )
        for who, row in rows:
            if row["seeds_in_which_the_machine_was_late"]:
                print(
                    f"  {who}: the machine was late in {row['seeds_in_which_the_machine_was_late']}"
                )


def _interval(row: dict[str, Any]) -> str:
    ratio = row["against_plain"]
    if ratio is None:
        return "-"
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _late(row: dict[str, Any]) -> str:
    return f"{row['emulator_lag']['over_50_ms']:.2%}"
