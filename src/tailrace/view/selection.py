"""Choosing a replica by scores: masks, ties and random numbers."""

import numpy as np

from tailrace.compiled import inner, jit

NO_REPLICA = -1


@inner
def random_u64(router):
    """Next number of the router's generator (SplitMix64)."""
    router["rng"] = router["rng"] + np.uint64(0x9E3779B97F4A7C15)
    return mix(router["rng"])


@jit
def mix(value):
    """Hash one integer (the finaliser of SplitMix64)."""
    z = np.uint64(value)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inner
def random_below(router, n):
    """Random integer in [0, n). The bias of the modulus is below 2**-50 for n < 1024."""
    return np.int64(random_u64(router) % np.uint64(n))


@inner
def any_available(replicas):
    """Whether some replica of ``replicas`` [n] REPLICA_VIEW may get requests."""
    for i in range(replicas.size):  # noqa: SIM110 (Numba knows no any() of a generator)
        if replicas[i]["available"] != 0:
            return True
    return False


@jit
def choose(scores, replicas, router, lowest_id_wins):
    """Return the available replica of least score, ties at random; NO_REPLICA if there is none.

    A NaN score never wins against a number. ``scores`` [n], ``replicas`` [n] REPLICA_VIEW.
    """
    best = NO_REPLICA
    best_score = np.inf
    ties = 0
    for i in range(scores.size):
        if replicas[i]["available"] == 0:
            continue
        score = scores[i]
        if np.isnan(score):
            score = np.inf
        if best == NO_REPLICA or score < best_score:
            best, best_score, ties = i, score, 1
        elif score == best_score and not lowest_id_wins:
            ties += 1
            if random_below(router, ties) == 0:
                best = i
    return best
