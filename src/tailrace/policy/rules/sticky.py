"""Rules that keep a session on one replica. The session's last replica is in the request view."""

import numpy as np

from tailrace.compiled import inner
from tailrace.policy.rules.quantities import pending_uncached, usable_last


@inner
def sticky_session(view, _params, scores):
    """The session's last replica; without one, fewest in flight."""
    for i in range(scores.size):
        scores[i] = view.replicas[i]["in_flight"]
    last = usable_last(view)
    if last >= 0:
        scores[last] = -1.0


@inner
def tolerant_sticky(view, params, scores):
    """The session's last replica while its work is within a multiple of the least."""
    tolerance = params[0]
    least = np.inf
    for i in range(scores.size):
        scores[i] = pending_uncached(view, i)
        if view.replicas[i]["available"] != 0:
            least = min(least, scores[i])
    last = usable_last(view)
    if last >= 0 and scores[last] <= tolerance * least:
        scores[last] = -1.0
