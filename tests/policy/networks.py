"""Networks with random weights for the tests of learned policies; without torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.learned.architecture import NetworkConfig, tensor_shapes
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy

#: Small, so that it can be run without the compiler too; odd sizes on purpose.
SMALL = {"hidden": 10, "attention": 6, "heads": 3, "scorer_hidden": 5, "value_hidden": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"memory": 7},
    "decoupled": {"decoupled_critic": True},
    "prior": {"prior": "load_aware", "prior_weight": 1.5},
    "critic_memory": {"memory": 4, "decoupled_critic": True, "critic_memory": 5},
    "all": {"memory": 3, "decoupled_critic": True, "prior": "cache_aware"},
}


def small(variant: str = "plain", **changes: Any) -> NetworkConfig:
    """Settings of a small network of one of the VARIANTS."""
    return NetworkConfig(**(SMALL | VARIANTS[variant] | changes))


def random_tensors(
    config: NetworkConfig,
    seed: int = 0,
    features: int = N_REPLICA_FEATURES,
    globals_: int = N_REQUEST_FEATURES,
) -> dict[str, NDArray[np.float32]]:
    """Weights of about unit gain, and a normaliser that does something."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config, features, globals_).items():
        scale = 2 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.5
        tensors[name] = np.asarray(rng.normal(0, scale, shape), np.float32)
        if name.endswith((".var", ".count")):
            tensors[name] = np.asarray(np.abs(tensors[name]) + np.float32(0.001))
    return tensors


def random_policy(variant: str = "plain", seed: int = 0) -> LearnedPolicy:
    config = small(variant)
    return LearnedPolicy(config, random_tensors(config, seed))


def random_inputs(
    n: int, seed: int, features: int = N_REPLICA_FEATURES, globals_: int = N_REQUEST_FEATURES
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], NDArray[np.float32]]:
    """Observations [n, F] and [G], a mask [n] with something in it, and a prior [n]."""
    rng = np.random.default_rng(seed)
    mask = rng.random(n) < 0.7
    mask[rng.integers(n)] = True
    return (
        rng.normal(0, 2, (n, features)).astype(np.float32),
        rng.normal(0, 2, globals_).astype(np.float32),
        mask,
        rng.normal(0, 1, n).astype(np.float32),
    )
