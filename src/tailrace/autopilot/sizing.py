"""How many replicas the traffic of the next minutes needs to keep its targets."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.assess.assessment import ServerModel, slowest_first
from tailrace.config import Cluster, Scenario
from tailrace.evaluate.measure.metrics import slo_met
from tailrace.replay.what_if import replayed, resized
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: Seconds of recent traffic that stand for the next minutes, with more or fewer requests.
RECENT_S = 600.0
#: Rates are compared from one such stretch to the next, s: about what starting a replica takes.
STRETCH_S = 300.0
#: Of the changes of the rate: what the lower end, the figure and the upper end are for.
QUANTILES = (0.1, 0.5, 0.9)
#: Changes of the rate that are known beforehand: a tenth up and down, so that few stretches do.
PRIOR_CHANGES = (1 / 1.1, 1.0, 1.1)
#: Most replicas, relative to the present ones.
MOST_TIMES = 2


@dataclass(frozen=True)
class ReplicasWanted:
    """Fewest replicas that keep the targets if the rate changes as it usually does, and less, and
    more."""

    replicas: int
    low: int
    high: int


def replicas_wanted(
    table: RequestTable, model: ServerModel, policy: str, *, attainment: float
) -> ReplicasWanted:
    """Size the cluster for the next minutes by the last ones.

    ``attainment``: share of requests that must be within both of their targets. The fastest
    replicas come first; beyond those there are, the same again.
    """
    arrived_s = table.rows["arrival_s"]
    recent = table.rows[arrived_s >= arrived_s[-1] - RECENT_S].copy()
    recent["parent"] = -1
    recent["arrival_s"] -= recent["arrival_s"][0]
    each, order = model.cluster.expanded(), slowest_first(model.cluster)[::-1]
    cluster = Cluster(replicas=tuple(each[k] for k in order))
    overhead = [model.overhead_ms[k % len(model.overhead_ms)] for k in order]
    most = MOST_TIMES * cluster.size

    def meets(factor: float) -> Callable[[int], bool]:
        rows = recent.copy()
        rows["arrival_s"] /= factor
        traffic = RequestTable(rows, table.runs)

        def enough(count: int) -> bool:
            scenario = Scenario(cluster=resized(cluster, count))
            met = slo_met(replayed(scenario, traffic, policy, 0, overhead))
            return bool(met.mean() >= attainment)

        return enough

    low, usual, high = (
        fewest(meets(factor), most)
        for factor in np.quantile(changes(arrived_s), QUANTILES).tolist()
    )
    return ReplicasWanted(usual, min(low, usual), max(high, usual))


def changes(arrived_s: Floats) -> Floats:
    """Return by which factors the rate has changed from each stretch to the next, and usual ones.

    Arrivals in s, in their order.
    """
    stretches = int((arrived_s[-1] - arrived_s[0]) // STRETCH_S)
    if stretches < 2:
        return np.array(PRIOR_CHANGES)
    edges = arrived_s[-1] - STRETCH_S * np.arange(stretches, -1, -1)
    counts = np.maximum(np.histogram(arrived_s, edges)[0], 1).astype(np.float64)
    return np.concatenate([counts[1:] / counts[:-1], PRIOR_CHANGES])


def fewest(enough: Callable[[int], bool], most: int) -> int:
    """Return the smallest number from 1 to ``most`` that is enough; ``most`` if none is."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
