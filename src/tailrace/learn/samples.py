"""What training learns from: observed decisions with a cost for every choice."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES


@dataclass(frozen=True)
class Samples:
    """``K`` decisions over ``n`` replicas each."""

    replica_obs: NDArray[np.float32]  #: [K, n, F]
    request_obs: NDArray[np.float32]  #: [K, G]
    mask: NDArray[np.bool_]  #: [K, n] choices that were possible
    prior: NDArray[np.float64]  #: [K, n] standardised scores of the network's rule; 0 without one
    memory: NDArray[np.float32]  #: [K, M] of the network before the decision
    tried: NDArray[np.bool_]  #: [K, n] choices whose cost is known
    costs: NDArray[np.float64]  #: [K, n] of each choice tried, s
    world: NDArray[np.int32]  #: [K] which traffic it comes from

    def __len__(self) -> int:
        return len(self.world)

    @property
    def replicas(self) -> int:
        """How many replicas the decisions are about."""
        return int(self.mask.shape[1])

    @classmethod
    def empty(cls, rows: int, replicas: int, world: int, memory: int = 0) -> "Samples":
        """Room for so many decisions over so many replicas."""
        return cls(
            np.zeros((rows, replicas, len(REPLICA_FEATURES)), np.float32),
            np.zeros((rows, len(REQUEST_FEATURES)), np.float32),
            np.zeros((rows, replicas), np.bool_),
            np.zeros((rows, replicas)),
            np.zeros((rows, memory), np.float32),
            np.zeros((rows, replicas), np.bool_),
            np.zeros((rows, replicas)),
            np.full(rows, world, np.int32),
        )

    def head(self, rows: int) -> "Samples":
        """The first rows."""
        return Samples(*(array[:rows] for array in self.arrays().values()))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def regrets(self) -> NDArray[np.float64]:
        """Return what each choice costs more than the cheapest [K, n], s; 0 where unknown."""
        least = self.costs.min(axis=1, where=self.tried, initial=np.inf)
        return np.where(self.tried, self.costs - least[:, None], 0.0)

    def advantages(self) -> NDArray[np.float64]:
        """Return minus the costs [K, n], centred per decision; scaled per world; 0 if unknown."""
        costs = np.where(self.tried, self.costs, 0.0)
        count = np.maximum(self.tried.sum(axis=1, keepdims=True), 1)
        centred = np.where(self.tried, costs.sum(axis=1, keepdims=True) / count - costs, 0.0)
        scale = np.ones(len(self))
        for world in np.unique(self.world):
            rows = self.world == world
            scale[rows] = centred[rows][self.tried[rows]].std() + 1e-9
        return centred / scale[:, None]


def by_cluster_size(parts: Iterable[Samples]) -> list[Samples]:
    """Put samples together, one group for each number of replicas, in rising order."""
    by_size: dict[int, list[Samples]] = defaultdict(list)
    for part in parts:
        if len(part):
            by_size[part.replicas].append(part)
    return [
        Samples(
            *(
                np.concatenate([getattr(part, field.name) for part in by_size[n]])
                for field in fields(Samples)
            )
        )
        for n in sorted(by_size)
    ]
