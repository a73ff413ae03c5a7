"""Calibration from profiles in Vidur's layout: the fit of ``tailrace fit`` as a cluster."""

from pathlib import Path
from typing import Any

from tailrace.calibrate.iteration_fit import fit_profiles
from tailrace.calibrate.result import Calibrated, Calibration, Regime, with_capacity
from tailrace.config import Replica


def calibrate_profiles(known: Replica, mlp: Path, attention: Path, **model: Any) -> Calibration:
    """Return a cluster of one replica; ``known``: what is known of the server.

    Files and ``model`` as for :func:`tailrace.calibrate.iteration_fit.fit_profiles`.
    """
    replica, sources = with_capacity(known, {})
    fitted = fit_profiles(mlp, attention, block_size=replica.block_size, **model)
    found = Calibrated(
        name=str(mlp),
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
