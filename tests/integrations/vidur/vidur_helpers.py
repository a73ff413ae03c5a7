"""The same requests on the same cluster, in real Vidur and in Tailrace's simulator."""

import numpy as np

from tailrace.config import Cluster, Replica
from tailrace.seeds import Purpose, seeds
from tailrace.workload import library

SEED = seeds(Purpose.TUNING, 1)[0]
TIMES = ("arrived_s", "scheduled_s", "first_token_s", "finished_s")


def cluster(scheduler="sarathi", speeds=(1.0, 1.0, 1.0, 1.0), **settings):
    """Replicas of one scheduler, with memory for everybody unless said otherwise."""
    kinds = tuple(Replica(scheduler=scheduler, speed=speed, **settings) for speed in speeds)
    return Cluster(replicas=kinds)


def chat(requests=300, rate=20.0):
    return library.make("chat", requests, rate, SEED, arrivals="poisson")


def largest_difference(a, b):
    """Largest difference of any time of any request, s; inf if one of them never got so far."""
    pairs = [(a.requests[name], b.requests[name]) for name in TIMES]
    if any((np.isnan(x) != np.isnan(y)).any() for x, y in pairs):
        return np.inf
    return max(float(np.nanmax(np.abs(x - y))) for x, y in pairs)
