"""Small runs of the reference engine whose every iteration takes exactly one second."""

import numpy as np

from tailrace.config import Cluster, CostModel, Engine, Replica
from tailrace.sim.reference import ReferenceEngine
from tailrace.workload.table import RequestTable

ONE_SECOND = CostModel(base_ms=1000.0, per_token_ms=0.0)


def table_of(rows, **columns):
    """Table of rows (arrival, prompt, output) or (arrival, prompt, output, runs)."""
    arrival, prompt, output = np.array([row[:3] for row in rows], float).T
    runs = [list(row[3]) if len(row) > 3 else [] for row in rows]
    return RequestTable.build(
        arrival, prompt.astype(np.int64), output.astype(np.int64), runs, **columns
    )


def replica_of(scheduler, **settings):
    defaults = {"num_blocks": 1000, "watermark": 0.0}
    return Replica(cost=ONE_SECOND, scheduler=scheduler, **(defaults | settings))


def play(scheduler, rows, *, compat=False, **settings):
    """Run rows on one replica and record its batches."""
    cluster = Cluster(replicas=(replica_of(scheduler, **settings),))
    engine = ReferenceEngine(cluster, table_of(rows), engine=Engine(vidur_compat=compat))
    return engine.run(replicas=np.zeros(len(rows), int), record_batches=True)


def batches_of(result):
    """(decodes, prefills, tokens) of every iteration."""
    return [tuple(int(b[k]) for k in ("decodes", "prefills", "tokens")) for b in result.batches]
