"""Replicas for a day: ``python benchmarks/autopilot_replicas.py [--json]``.

A day of chat with its daily rhythm on equal emulated servers with a virtual clock. Every five
minutes a rule says how many servers there should be: ``tailrace_replicas_wanted_high`` by the last
hour of requests, or a rule of utilisation, which divides the rate of the last five minutes by what
a server is meant to take. A new server serves five minutes later and is paid for at once; one that
goes finishes its requests.

The gauge has its default settings. What the rule means a server to take is found in two ways. Tuned
beforehand: the most with which, on tuning seeds, the share of requests within their targets is not
below the gauge's. In hindsight: the rule plays the evaluation days with every target, and the
replica-hours at which it would have had exactly the gauge's share on these days are interpolated,
which favours the rule. The interval resamples days.
"""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopilot import save_part
from tailrace.assess.assessment import ServerModel
from tailrace.autopilot.sizing import STRETCH_S, replicas_wanted
from tailrace.config import Cluster, Event, Replica, Scenario, Workload
from tailrace.evaluate.measure.metrics import slo_met
from tailrace.evaluate.measure.runner import play, policy_for, traffic
from tailrace.files import dumps
from tailrace.seeds import Purpose, generator, seeds
from tailrace.workload.table import RequestTable

Ints = NDArray[np.int64]

HOURS = 24.0
RATE_RPS = 10.0
MOST = 8
POLICY = "lmetric"
ATTAINMENT = 0.99
WINDOW_S = 3600.0
#: Requests/s that a server is meant to take by the rule of utilisation, among which it is tuned.
TARGETS = tuple(np.round(np.geomspace(4.4, 6.2, 15), 3).tolist())
TUNING_DAYS = 2
#: Samples of days for an interval, and its ends.
SAMPLES, ENDS = 4000, (0.025, 0.975)


def day(seed: int) -> RequestTable:
    """Return the requests of a day."""
    workload = Workload(
        name="chat", arrivals="diurnal", rate=RATE_RPS, requests=int(3600 * HOURS * RATE_RPS)
    )
    table = traffic(Scenario(workload=workload), RATE_RPS, seed)
    assert (table.rows["parent"] < 0).all()
    return table


def moments(table: RequestTable) -> NDArray[np.float64]:
    """Return when the number of servers is decided on, s."""
    return np.arange(STRETCH_S, float(table.rows["arrival_s"][-1]), STRETCH_S)


def by_simulation(table: RequestTable) -> Ints:
    """Return the servers wanted at each moment, by the autopilot's gauge."""
    model = ServerModel(Cluster(replicas=(Replica(count=MOST // 2),)))
    arrived_s, found = table.rows["arrival_s"], []
    for at in moments(table).tolist():
        rows = table.rows[(arrived_s >= at - WINDOW_S) & (arrived_s < at)]
        wanted = replicas_wanted(
            RequestTable(rows, table.runs), model, POLICY, attainment=ATTAINMENT
        )
        found.append(wanted.high)
    return np.array(found)


def by_utilisation(table: RequestTable, target_rps: float) -> Ints:
    """Return the servers wanted at each moment, by the rate of the last five minutes."""
    at = moments(table)
    arrived_s = table.rows["arrival_s"]
    counts = np.searchsorted(arrived_s, at) - np.searchsorted(arrived_s, at - STRETCH_S)
    return np.clip(np.ceil(counts / STRETCH_S / target_rps), 1, MOST).astype(np.int64)


def served(table: RequestTable, wanted: Ints) -> dict[str, float]:
    """Play the day with the servers wanted; return what it took and what came of it."""
    at = moments(table)
    # Up: when the new server has started, unless it is not wanted any more by then. Down: at once.
    later = np.concatenate([[wanted[0]], wanted[:-1]])
    there = np.minimum(wanted, later)
    events, before = [], MOST
    for moment, count in zip([0.0, *at.tolist()], [int(wanted[0]), *there.tolist()], strict=True):
        kind = "drain" if count < before else "return"
        changed = range(min(count, before), max(count, before))
        events += [Event(at_s=moment, replica=k, kind=kind) for k in changed]
        before = count
    base = Scenario(cluster=Cluster(replicas=(Replica(count=MOST),)), events=tuple(events))
    met = slo_met(play(base, table, policy_for(base, POLICY), 0))
    hour = (table.rows["arrival_s"] // 3600).astype(np.int64)
    by_hour = np.bincount(hour, met) / np.bincount(hour)
    return {
        "replica_hours": float((int(wanted[0]) + wanted.sum()) * STRETCH_S / 3600),
        "attainment": float(met.mean()),
        "worst_hour": float(by_hour[np.bincount(hour) > 100].min()),
    }


def hours_at(attainment: float, rule: list[list[dict[str, float]]]) -> float | None:
    """Return the replica-hours a day at which the rule has an attainment on average over days.

    ``rule``: of each day and each target. Between two targets it is interpolated; None: beyond the
    targets that were tried.
    """
    shares, hours = (
        np.mean([[tried[name] for tried in day] for day in rule], axis=0)
        for name in ("attainment", "replica_hours")
    )
    # By rising hours; more servers that happen to serve worse are not taken.
    order = np.argsort(hours)
    shares, hours = np.maximum.accumulate(shares[order]), hours[order]
    if not shares[0] <= attainment <= shares[-1]:
        return None
    return float(np.interp(attainment, shares, hours))


def saving(days: list[dict[str, Any]]) -> float | None:
    """Return the share of replica-hours that the gauge saves at equal attainment."""
    gauge = {
        name: float(np.mean([day["wanted"][name] for day in days]))
        for name in ("attainment", "replica_hours")
    }
    needed = hours_at(gauge["attainment"], [day["by_target"] for day in days])
    return None if needed is None else 1 - gauge["replica_hours"] / needed


def interval(days: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return both ends for the saving, and the share of samples that the targets did not cover."""
    rng = generator(0, "days")
    drawn = (
        saving([days[k] for k in rng.integers(len(days), size=len(days))]) for _ in range(SAMPLES)
    )
    found = [value for value in drawn if value is not None]
    low, high = np.quantile(found, ENDS).tolist()
    return low, high, 1 - len(found) / SAMPLES


def main() -> None:
    """Tune the rule, play the days, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()

    def played(seed: int) -> dict[str, Any]:
        table = day(seed)
        return {
            "seed": seed,
            "wanted": served(table, by_simulation(table)),
            "by_target": [served(table, by_utilisation(table, rps)) for rps in TARGETS],
            "always": served(table, np.full(len(moments(table)), MOST)),
        }

    tuning = [played(seed) for seed in seeds(Purpose.TUNING, TUNING_DAYS, 930)]
    least = np.mean([day["wanted"]["attainment"] for day in tuning])
    shares = [
        np.mean([day["by_target"][k]["attainment"] for day in tuning]) for k in range(len(TARGETS))
    ]
    tuned = max(k for k, share in enumerate(shares) if share >= least)
    days = [played(seed) for seed in seeds(Purpose.EVALUATION, given.days, 730_000)]
    for one in (*tuning, *days):
        one["utilisation"] = one["by_target"][tuned]
    means = {
        rule: {
            name: float(np.mean([day[rule][name] for day in days]))
            for name in ("replica_hours", "attainment", "worst_hour")
        }
        for rule in ("wanted", "utilisation", "always")
    }
    low, high, uncovered = interval(days)
    equal = {
        "rule_replica_hours": hours_at(
            means["wanted"]["attainment"], [day["by_target"] for day in days]
        ),
        "saving": saving(days), "low": low, "high": high, "samples_not_covered": uncovered,
    }  # fmt: skip
    found = {
        "targets_rps": TARGETS, "target_rps": TARGETS[tuned], "tuning": tuning, "days": days,
        "means": means, "at_equal_attainment": equal,
    }  # fmt: skip
    save_part({"replicas": found})
    print(dumps(found) if given.json else {**means, "at equal attainment": equal})


if __name__ == "__main__":
    main()
