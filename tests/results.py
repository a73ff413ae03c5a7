"""Hand-made simulation results with known figures."""

import numpy as np

from tailrace.sim.result import BATCH, FINISHED, REPLICA_RESULT, REQUEST_RESULT, SimResult
from tailrace.workload.table import RequestTable


def make_result(
    arrived,
    first,
    finished,
    *,
    prompt=100,
    output=11,
    status=FINISHED,
    scheduled=None,
    replicas=2,
    busy=None,
    batches=None,
    **columns,
):
    """Return a result of the given times (s); other columns by name; replica 0 by default."""
    count = len(arrived)
    table = RequestTable.build(
        np.sort(np.asarray(arrived, float)),
        np.broadcast_to(prompt, count),
        np.broadcast_to(output, count),
    )
    done = np.zeros(count, REQUEST_RESULT)
    done["arrived_s"] = arrived
    done["scheduled_s"] = arrived if scheduled is None else scheduled
    done["first_token_s"] = first
    done["finished_s"] = finished
    done["status"] = status
    for name, values in columns.items():
        done[name] = values
    totals = np.zeros(replicas, REPLICA_RESULT)
    totals["busy_s"] = 1.0 if busy is None else busy
    totals["requests"] = np.bincount(done["replica"][done["replica"] >= 0], minlength=replicas)
    return SimResult(table, done, totals, decisions=count, batches=batches)


def make_batches(*rows):
    """Return BATCH rows from tuples in the order of the dtype."""
    return np.array(list(rows), BATCH)
