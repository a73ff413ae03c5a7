"""The trained policy a run starts from (``start``), and what it may learn that it did not know.

Features that are newer than its file have weight 0 and are hidden from it. A run with
demonstrations learns how they are distributed and shows them to it; other runs leave it as it is.
"""

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.learn.settings import TrainSettings
from tailrace.policy import registry
from tailrace.policy.learned.architecture import NetworkConfig
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy


def policy_of(settings: TrainSettings) -> LearnedPolicy:
    """Return the policy a run starts from."""
    policy = registry.get(settings.start)
    if not isinstance(policy, LearnedPolicy):
        raise TailraceError(
            f"training can start from a trained policy only, and {settings.start} is none; "
            "name `tailrace` or a .tailrace file"
        )
    return policy


def network_of(start: LearnedPolicy, settings: TrainSettings) -> NetworkConfig:
    """Return the shape of a run's network: that of its start, and features to hide."""
    newer = _newer(start, settings)
    kept = (name for name in start.config.ignore if name not in newer)
    ignore = tuple(dict.fromkeys((*kept, *settings.network.ignore)))
    return start.config.model_copy(update={"ignore": ignore})


def tensors_of(start: LearnedPolicy, settings: TrainSettings) -> dict[str, NDArray[np.float32]]:
    """Return the tensors to begin with, in which newer features have not varied so far."""
    newer = _newer(start, settings)
    tensors = dict(start.tensors)
    for part, features in (("replica", REPLICA_FEATURES), ("request", REQUEST_FEATURES)):
        var = tensors[f"{part}_norm.var"].copy()
        var[[feature.name in newer for feature in features]] = 0.0
        tensors[f"{part}_norm.var"] = var
    return tensors


def _newer(start: LearnedPolicy, settings: TrainSettings) -> set[str]:
    """Return the features newer than the start that the run can learn about."""
    return set(start.about.get("newer", ())) if settings.demonstrations.rounds else set()
