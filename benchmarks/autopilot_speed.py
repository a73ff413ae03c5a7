"""What a round costs: ``python benchmarks/autopilot_speed.py [--json]``.

An hour of traffic at 20 requests/s on four servers of mixed speed, replayed under every policy that
a live router can follow but for look-aheads, rules with their tuned constants too, as many as 40,
in one process on one core. Seconds of CPU time, after everything was compiled. Tuning seed.
"""

import argparse
import time
from typing import Any

import numpy as np

from autopilot import save_part
from autopilot_world import requests, scenario
from tailrace.assess.assessment import ServerModel, candidates
from tailrace.autopilot.twin import Twin, Window
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.files import dumps
from tailrace.policy import registry, shipped
from tailrace.replay.recorded import OUTCOME, RecordedTraffic
from tailrace.seeds import Purpose, seeds
from tailrace.sim.result import SimResult
from tailrace.workload.table import RequestTable

POLICIES = 40


def recorded(result: SimResult) -> RecordedTraffic:
    """A simulation as a router would have recorded it, in the order of arrival."""
    done = result.requests
    order = np.argsort(done["arrived_s"], kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rows = result.table.rows[order].copy()
    rows["arrival_s"] = done["arrived_s"][order] - done["arrived_s"][order[0]]
    rows["parent"] = np.where(rows["parent"] >= 0, place[rows["parent"]], -1)
    outcomes = np.zeros(len(order), OUTCOME)
    for name, source in (
        ("arrived_s", "arrived_s"), ("sent_s", "arrived_s"), ("scheduled_s", "scheduled_s"),
        ("first_s", "first_token_s"), ("last_s", "finished_s"), ("replica", "replica"),
    ):  # fmt: skip
        outcomes[name] = done[source][order]
    return RecordedTraffic(RequestTable(rows, result.table.runs), outcomes, (), 0)


def portfolio(twin: Twin) -> list[str]:
    """Return 40 policies."""
    names = candidates(twin.model.cluster)
    for name in list(names):
        tuned = name + shipped.TUNED_SUFFIX
        try:
            registry.get(tuned)
        except TailraceError:
            continue
        names.append(tuned)
    return list(dict.fromkeys(names))[:POLICIES]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--hours", type=float, default=1.0)
    given = parser.parse_args()
    found: dict[str, Any] = {"hours": given.hours}
    for workload in ("sessions-hot", "chat"):
        base = scenario(workload, given.hours)
        table = requests(base, seeds(Purpose.TUNING, 1, 900)[0])
        result = play(base, table, policy_for(base, "load_aware"), 0)
        window = Window(recorded(result), 0.0, np.zeros(0))
        twin = Twin(ServerModel(base.cluster))
        names = portfolio(twin)
        short = play(base, requests(scenario(workload, 0.01), 1), policy_for(base, names[0]), 0)
        few = Window(recorded(short), 0.0, np.zeros(0))
        twin.prospects(few, names)  # compiles
        began = time.process_time()
        costs = twin.prospects(window, names)
        found[workload] = {
            "requests": len(table),
            "policies": len(costs),
            "cpu_s": time.process_time() - began,
            "best": [(c.policy, c.cost_s) for c in costs[:5]],
        }
    if given.hours == 1.0:
        save_part({"speed": found})
    print(dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
