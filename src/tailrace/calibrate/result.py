"""What a calibration found: cost model and capacity of each replica, and how far to trust them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Replica
from tailrace.view.devices import REFERENCE

#: Device name of a replica whose cost model was measured.
DEVICE = "calibrated"
GIVEN, MEASURED, TOLD, ASSUMED = "given", "measured", "/metrics", "assumed"
#: Spread between repeats above which a machine counts as noisy.
NOISY = 0.05
#: Slow-down above which replicas count as sharing something.
INTERFERES = 1.10
#: Settings of a replica that a calibration looks at.
CAPACITY = ("num_blocks", "block_size", "batch_cap", "chunk_size")


@dataclass(frozen=True)
class Regime:
    """How well one kind of iterations is explained."""

    name: str
    count: int
    """Measured times."""
    mean_error: float
    """0.01 = 1 %."""
    max_error: float
    """For logs: the 99th percentile."""
    bias: float | None
    """Mean of predicted / measured - 1; None: not known."""
    spread: float | None = None
    """Typical deviation between repeats; None: there are none."""


@dataclass(frozen=True)
class Point:
    """One measured time, for plots."""

    regime: str
    tokens: float
    """T, or the prompt."""
    context: float
    measured_ms: float
    predicted_ms: float


@dataclass(frozen=True)
class Calibrated:
    """One replica, or several equal ones."""

    name: str
    replica: Replica
    overhead_ms: float
    """What a request takes beside its iterations; taken off, and not simulated."""
    uncertainty: dict[str, float]
    """Standard error of each coefficient, as a share of it."""
    sources: dict[str, str]
    """Where each setting of CAPACITY comes from: given, measured, /metrics or assumed."""
    regimes: tuple[Regime, ...]
    points: tuple[Point, ...] = field(repr=False)
    interference: float | None = None
    """Times with all replicas loaded / alone; None: not measured."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """All replicas of a cluster."""

    source: str
    """Where it comes from: endpoints, or the name of a log."""
    replicas: tuple[Calibrated, ...]

    def cluster(self) -> Cluster:
        """Return the cluster."""
        return Cluster(replicas=tuple(found.replica for found in self.replicas))


def with_capacity(
    known: Replica, found: dict[str, tuple[int, str]]
) -> tuple[Replica, dict[str, str]]:
    """Return a replica with the capacity found, and where each setting comes from.

    What was set explicitly in ``known`` stays; what nobody knows is the default, and assumed.
    ``num_blocks`` is always set: a measured replica has no preset to take it from.
    """
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name in ("block_size", "num_blocks", "batch_cap", "chunk_size"):
        if name in known.model_fields_set and getattr(known, name) is not None:
            values[name], sources[name] = getattr(known, name), GIVEN
        elif name in found:
            values[name], sources[name] = found[name]
        elif name == "num_blocks":
            values[name] = REFERENCE.kv_tokens // values["block_size"]
            sources[name] = ASSUMED
        else:
            values[name], sources[name] = getattr(known, name), ASSUMED
    update = {**values, "device": DEVICE, "speed": 1.0, "count": 1}
    return known.model_copy(update=update), {name: sources[name] for name in CAPACITY}


def regimes(
    names: Sequence[str],
    kind: Sequence[str],
    measured: NDArray[np.float64],
    predicted: NDArray[np.float64],
    spreads: NDArray[np.float64] | None = None,
    worst: float = 100.0,
) -> tuple[Regime, ...]:
    """Return the errors by regime, in the order of ``names``; ``worst`` is a percentile."""
    kinds = np.asarray(kind)
    off = predicted / measured - 1.0
    found = []
    for name in names:
        rows = np.flatnonzero(kinds == name)
        if len(rows):
            errors = np.abs(off[rows])
            spread = None if spreads is None else float(np.median(spreads[rows]))
            found.append(
                Regime(name, len(rows), float(errors.mean()), float(np.percentile(errors, worst)),
                       float(off[rows].mean()), spread)
            )  # fmt: skip
    return tuple(found)
