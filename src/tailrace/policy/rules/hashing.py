"""Rules that hash the prompt's beginning to replicas.

Rendezvous hashing: each replica draws a number from the prefix, the largest wins. It spreads
prefixes like a ring with very many virtual nodes, and a replica that leaves moves only its own.
"""

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.predicted import predicted_ttft
from tailrace.policy.rules.quantities import in_flight_mean
from tailrace.view.selection import mix

FIRST_HASH = 1
SECOND_HASH = 2


@inner
def draw(key, i, salt):
    """Number in [0, 1) that replica ``i`` draws from a key, such as the hash of a prefix."""
    seed = mix(np.uint64(i) ^ (np.uint64(salt) << np.uint64(32)))
    return np.float64(mix(key ^ seed) >> np.uint64(11)) * 2.0**-53


@inner
def prefix_hash(view, params, scores):
    """The replica of the largest draw while its load is bounded; else fewest in flight."""
    load_factor = params[0]
    for i in range(scores.size):
        scores[i] = view.replicas[i]["in_flight"]
    owner = _winner(view, FIRST_HASH, -1)
    mean, count = in_flight_mean(view.replicas)
    if owner >= 0 and scores[owner] <= load_factor * (mean + 1.0 / count):
        scores[owner] = -1.0


@inner
def rendezvous_hash(view, _params, scores):
    """The replica of the largest draw from the session, or from the whole prompt without one."""
    session = view.request["session"]
    key = mix(np.uint64(session)) if session >= 0 else view.request["content_hash"]
    for i in range(scores.size):
        scores[i] = -draw(key, i, FIRST_HASH)


@inner
def dual_map(view, params, scores):
    """Two candidates by hash: the more cached while its first token is in time, else the faster."""
    slo_share = params[0]
    scores[:] = np.inf
    first = _winner(view, FIRST_HASH, -1)
    if first < 0:
        return
    scores[first] = predicted_ttft(view, first)
    second = _winner(view, SECOND_HASH, first)
    if second < 0:
        return
    scores[second] = predicted_ttft(view, second)
    lead = view.replicas[first]["cached_tokens"] - view.replicas[second]["cached_tokens"]
    warm = first if lead > 0 else second
    if lead != 0 and scores[warm] <= slo_share * view.request["ttft_slo_s"]:
        scores[warm] = -1.0


@inner
def _winner(view, salt, taken):
    """Available replica of the largest draw other than ``taken``, -1 if there is none."""
    best, best_draw = -1, -1.0
    for i in range(view.replicas.size):
        if view.replicas[i]["available"] != 0 and i != taken:
            number = draw(view.request["prefix_hash"], i, salt)
            if number > best_draw:
                best, best_draw = i, number
    return best
