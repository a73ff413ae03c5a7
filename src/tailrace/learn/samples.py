"""What training learns from: observed decisions with a cost for every choice."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.files import atomic_path, check_target
from tailrace.policy.learned.observation import LIMIT, REPLICA_FEATURES, REQUEST_FEATURES

SUFFIX = ".npz"
#: Names of the features, written beside the arrays so that another version's are noticed.
_NAMES = {
    "replica_features": [feature.name for feature in REPLICA_FEATURES],
    "request_features": [feature.name for feature in REQUEST_FEATURES],
}


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
        """Allocate room for ``rows`` decisions over ``replicas`` replicas."""
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


def write_samples(samples: Samples, path: Path) -> None:
    """Write samples to a NumPy file: an array per field, and the names of the features."""
    check_target(path, (SUFFIX,))
    arrays: dict[str, Any] = samples.arrays()
    arrays |= {key: np.array(names) for key, names in _NAMES.items()}
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_samples(path: Path, memory: int | None = None) -> Samples:
    """Read what :func:`write_samples` has written, and check every number of it.

    ``memory``: units of the memory of the network that is to learn from it.
    """
    try:
        with path.open("rb") as raw:
            file = _opened(raw)
            if not isinstance(file, Mapping):
                raise ValueError("it is a single array")
            samples = _checked({name: np.asarray(file[name]) for name in file})
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise TailraceError(f"{path} holds no demonstrations: {error}") from None
    if memory is not None and samples.memory.shape[1] != memory:
        raise TailraceError(
            f"{path} was recorded with a memory of {samples.memory.shape[1]} units, and the "
            f"network has {memory}: record it with Demonstrations(student)"
        )
    return samples


def _opened(raw: BinaryIO) -> Any:
    """Return what NumPy makes of a file. Without pickle: it refuses arrays of objects."""
    try:
        return np.load(raw, allow_pickle=False)
    except ValueError:  # NumPy takes whatever it does not know for a pickle, and advises to load it
        raise ValueError("it is no NumPy archive") from None


def _checked(arrays: dict[str, NDArray[Any]]) -> Samples:
    """Return samples, or raise a ValueError that says what is wrong with them."""
    for key, names in _NAMES.items():
        found = arrays.pop(key, None)
        if found is not None and found.tolist() != names:
            raise ValueError(f"its {key} are not those of this version of Tailrace")
    missing = [field.name for field in fields(Samples) if field.name not in arrays]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    samples = Samples(**{field.name: arrays.pop(field.name) for field in fields(Samples)})
    if arrays:
        raise ValueError(f"it has {next(iter(arrays))}, which is not part of a demonstration")
    if samples.mask.ndim != 2 or not samples.mask.size:
        raise ValueError("it has no decisions")
    rows, replicas = samples.mask.shape
    width = samples.memory.shape[1] if samples.memory.ndim == 2 else 0
    for name, wanted in Samples.empty(rows, replicas, 0, width).arrays().items():
        array = getattr(samples, name)
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}, expected {wanted.dtype} "
                f"{list(wanted.shape)}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has numbers that are not finite")
    for name in ("replica_obs", "request_obs"):
        if (np.abs(getattr(samples, name)) > LIMIT).any():
            raise ValueError(f"{name} has numbers beyond +-{LIMIT:g}")
    if (samples.tried & ~samples.mask).any() or not samples.tried.any(axis=1).all():
        raise ValueError("every decision needs a choice with a cost, and only possible ones")
    return samples
