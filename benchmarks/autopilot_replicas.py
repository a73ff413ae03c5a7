"""Replicas for a day: ``python benchmarks/autopilot_replicas.py [--json]``.

A day of chat with its daily rhythm on equal emulated servers with a virtual clock. Every five
minutes a rule says how many servers there should be: ``tailrace_replicas_wanted_high`` by the last
hour of requests, or a rule of utilisation, which divides the rate of the last five minutes by what
a server is meant to take. A new server serves five minutes later and is paid for at once; one that
goes finishes its requests. What a server is meant to take is tuned on a tuning seed: the most with
which the share of requests within their targets is not below that of ``replicas_wanted``. The
figures are of evaluation seeds.
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
from tailrace.seeds import Purpose, seeds
from tailrace.workload.table import RequestTable

Ints = NDArray[np.int64]

HOURS = 24.0
RATE_RPS = 10.0
MOST = 8
POLICY = "lmetric"
ATTAINMENT = 0.99
WINDOW_S = 3600.0
#: Requests/s that a server is meant to take by the rule of utilisation, among which it is tuned.
TARGETS = tuple(np.round(np.geomspace(1.0, 6.0, 28), 3).tolist())


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


def main() -> None:
    """Tune the rule, play the days, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    table = day(seeds(Purpose.TUNING, 1, 930)[0])
    tuning = {"wanted": served(table, by_simulation(table))}
    least, target_rps = tuning["wanted"]["attainment"], TARGETS[0]
    for target in TARGETS:
        tried = served(table, by_utilisation(table, target))
        if tried["attainment"] >= least:
            target_rps, tuning["utilisation"] = target, tried
    days: list[dict[str, Any]] = []
    for seed in seeds(Purpose.EVALUATION, given.days, 730_000):
        table = day(seed)
        always = np.full(len(moments(table)), MOST)
        days.append(
            {
                "seed": seed,
                "wanted": served(table, by_simulation(table)),
                "utilisation": served(table, by_utilisation(table, target_rps)),
                "always": served(table, always),
            }
        )
    rules = ("wanted", "utilisation", "always")
    means = {
        rule: {
            name: float(np.mean([day[rule][name] for day in days]))
            for name in ("replica_hours", "attainment", "worst_hour")
        }
        for rule in rules
    }
    found = {"target_rps": target_rps, "tuning": tuning, "days": days, "means": means}
    save_part({"replicas": found})
    print(dumps(found) if given.json else means)


if __name__ == "__main__":
    main()
