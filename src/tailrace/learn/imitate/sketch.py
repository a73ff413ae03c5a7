"""A linear sketch of a trained network, by which it makes a shortlist of a large cluster.

The network looks at every replica, and every replica at every other; in a cluster of dozens most of
them are out of the question. A weighted sum of a replica's features says which. It is fitted to the
network's own logits, in clusters as large as those it is for: one fitted to small clusters cost
3 % with 32 replicas.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.learn.imitate.fit import ObservationBatch
from tailrace.learn.samples import Samples
from tailrace.policy.learned.architecture import FEATURE_NAMES
from tailrace.policy.learned.network import Network

#: A replica counts e times less with every so much that its logit is behind the best,
DEPTH = 4.0
#: but never less than this: bad ones must not come out on top.
MIN_WEIGHT = 0.05
#: Ridge, as a share of the mean variance: features may depend on each other.
RIDGE = 1e-3


def fit(network: Network, groups: Sequence[Samples]) -> NDArray[np.float32]:
    """Return the weights [F] of the features; a larger sum is a better replica.

    Features that are hidden from the network (``ignore``) have the weight 0.
    """
    features = network.features
    shown = [k for k in range(features) if FEATURE_NAMES[k] not in network.config.ignore]
    squares, products = np.zeros((features, features)), np.zeros(features)
    for samples in groups:
        with torch.no_grad():
            logits = ObservationBatch.of(samples).log_policy(network).numpy().astype(np.float64)
        behind = np.where(samples.mask, logits.max(axis=1, where=samples.mask, initial=-np.inf,
                                                   keepdims=True) - logits, np.inf)  # fmt: skip
        weights = np.where(samples.mask, np.exp(-behind / DEPTH) + MIN_WEIGHT, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
        x = samples.replica_obs.astype(np.float64)
        x -= (weights[..., None] * x).sum(axis=1, keepdims=True)
        y = logits - (weights * logits).sum(axis=1, keepdims=True)
        squares += np.einsum("kn,knf,kng->fg", weights, x, x, optimize=True)
        products += np.einsum("kn,knf,kn->f", weights, x, y, optimize=True)
    squares, products = squares[np.ix_(shown, shown)], products[shown]
    squares += RIDGE * np.trace(squares) / max(1, len(shown)) * np.eye(len(shown))
    weights = np.zeros(features, np.float32)
    weights[shown] = np.linalg.solve(squares, products)
    return weights
