"""``linear_es``: a linear score over the observation, as a policy that runs at full speed.

The compiled network can play a linear score exactly. A pair of units carries z and -z, and
gelu(z) - gelu(-z) = z. Layer normalisation sees z, -z, c, -c: their mean is 0, and dividing by
sqrt((z*z + c*c)/2) keeps the order of the replicas, which is all that decides.
"""

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.learned.architecture import NetworkConfig, tensor_shapes
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.policy.shipped import LINEAR

#: Columns with a weight. Against the mean or the best of the cluster is left out: it adds the same
#: to the score of every replica.
COLUMNS = tuple(
    k for k, f in enumerate(REPLICA_FEATURES) if not f.name.endswith(("_vs_mean", "_vs_best"))
)
CONFIG = NetworkConfig(hidden=4, attention=1, heads=1, scorer_hidden=2, value_hidden=1)
_CONSTANT = 100.0


def tensors_of(weights: NDArray[np.float64]) -> dict[str, NDArray[np.float32]]:
    """Return the network that prefers the replica of largest ``weights`` [len(COLUMNS)] . x."""
    features = len(REPLICA_FEATURES)
    shapes = tensor_shapes(CONFIG, features, len(REQUEST_FEATURES))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith(".var"):
            tensors[name][...] = 1
    tensors["actor.input.weight"][0, list(COLUMNS)] = weights
    tensors["actor.input.weight"][1] = -tensors["actor.input.weight"][0]
    tensors["actor.input.bias"][2:] = (_CONSTANT, -_CONSTANT)
    tensors["actor.norm.weight"][:] = _CONSTANT / np.sqrt(2)
    for layer in ("actor.hidden", "scorer.hidden"):
        tensors[f"{layer}.weight"][:2, :2] = ((1, -1), (-1, 1))
    tensors["scorer.output.weight"][0] = (1, -1)
    return tensors


def policy_of(weights: NDArray[np.float64]) -> LearnedPolicy:
    """Return the policy of a linear score."""
    return LearnedPolicy(CONFIG, tensors_of(weights), LINEAR)
