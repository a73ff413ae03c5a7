"""Calibration from profiles in Vidur's layout: the fit of ``tailrace fit`` as a cluster."""

from dataclasses import dataclass
from pathlib import Path

from tailrace.calibrate.iteration_fit import fit_profiles
from tailrace.calibrate.result import Calibrated, Calibration, Regime, with_capacity
from tailrace.config import Replica


@dataclass(frozen=True)
class Profiles:
    """Files of profiles, and the model they are of."""

    mlp: Path
    attention: Path
    layers: int
    tensor_parallel: int = 1
    all_reduce: Path | None = None


def calibrate_profiles(profiles: Profiles, known: Replica) -> Calibration:
    """Return a cluster of one replica; ``known``: what is known of the server."""
    replica, sources = with_capacity(known, {})
    fitted = fit_profiles(
        profiles.mlp,
        profiles.attention,
        layers=profiles.layers,
        tensor_parallel=profiles.tensor_parallel,
        all_reduce_csv=profiles.all_reduce,
        block_size=replica.block_size,
    )
    found = Calibrated(
        name=str(profiles.mlp),
        replica=replica.model_copy(update={"cost": fitted.model}),
        overhead_ms=0.0,
        uncertainty={},
        sources=sources,
        regimes=tuple(
            Regime(name.replace("_", ", "), e.count, e.mean, e.max, None)
            for name, e in fitted.errors.items()
        ),
        points=(),
        warnings=tuple(f"the profiles say nothing about {name}" for name in fitted.undetermined),
    )
    return Calibration("profiles", (found,))
