"""What training learns from: observed decisions with a cost for every choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.observation import REPLICA_FEATURES, REQUEST_FEATURES


@dataclass(frozen=True)
class Samples:
    """``K`` decisions over up to ``n`` replicas; rows of smaller clusters are padded and masked."""

    replica_obs: NDArray[np.float32]  #: [K, n, F]
    request_obs: NDArray[np.float32]  #: [K, G]
    mask: NDArray[np.bool_]  #: [K, n] choices that were possible
    costs: NDArray[np.float64]  #: [K, n] of each choice, s; inf where masked
    world: NDArray[np.int32]  #: [K] which traffic it comes from

    def __len__(self) -> int:
        return len(self.world)

    @classmethod
    def empty(cls, rows: int, replicas: int, world: int) -> "Samples":
        """Room for so many decisions over so many replicas."""
        return cls(
            np.zeros((rows, replicas, len(REPLICA_FEATURES)), np.float32),
            np.zeros((rows, len(REQUEST_FEATURES)), np.float32),
            np.zeros((rows, replicas), np.bool_),
            np.zeros((rows, replicas)),
            np.full(rows, world, np.int32),
        )

    def head(self, rows: int) -> "Samples":
        """The first rows."""
        return Samples(
            self.replica_obs[:rows],
            self.request_obs[:rows],
            self.mask[:rows],
            self.costs[:rows],
            self.world[:rows],
        )

    def advantages(self) -> NDArray[np.float64]:
        """Return minus the costs [K, n], centred per decision and scaled per world; 0 if masked."""
        costs = np.where(self.mask, self.costs, 0.0)
        count = np.maximum(self.mask.sum(axis=1, keepdims=True), 1)
        centred = np.where(self.mask, costs.sum(axis=1, keepdims=True) / count - costs, 0.0)
        scale = np.ones(len(self))
        for world in np.unique(self.world):
            rows = self.world == world
            scale[rows] = centred[rows][self.mask[rows]].std() + 1e-9
        return centred / scale[:, None]


def join(parts: Sequence[Samples]) -> Samples:
    """Put samples together, padded to the largest cluster."""
    n = max(p.mask.shape[1] for p in parts)

    def padded(array: NDArray[np.generic], fill: float) -> NDArray[np.generic]:
        width = [(0, 0)] * array.ndim
        width[1] = (0, n - array.shape[1])
        return np.pad(array, width, constant_values=fill)

    return Samples(
        np.concatenate([padded(p.replica_obs, 0) for p in parts]).astype(np.float32),
        np.concatenate([p.request_obs for p in parts]),
        np.concatenate([padded(p.mask, False) for p in parts]).astype(np.bool_),
        np.concatenate([padded(p.costs, np.inf) for p in parts]).astype(np.float64),
        np.concatenate([p.world for p in parts]),
    )
