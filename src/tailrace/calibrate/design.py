"""Which probes to run again: those that make the least certain coefficients surer, for their time.

Every run of a probe adds to what is known of the coefficients (the information matrix of the fit).
Runs are chosen one by one, each the one that takes most off the sum of the squared relative errors
of the coefficients per second: the A-optimal design of experiments, found greedily.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tailrace.calibrate import probes as p
from tailrace.calibrate.interval_fit import FIXED, Fitted, Floats, Stretches, summed
from tailrace.calibrate.iteration_fit import FIELDS
from tailrace.calibrate.probes import Measurement, Probe
from tailrace.config import CostModel

#: An error of a knot's place counts this share of one of a coefficient: knots are far apart.
PLACES = 0.1


def most_telling(
    measurements: Sequence[Measurement],
    fitted: Fitted,
    took_s: Mapping[Probe, float],
    token_budget: int,
    seconds: float,
) -> list[Probe]:
    """Return the probes to run in the next ``seconds``, as often as they are to be run.

    ``fitted``: what the measurements say so far.
    """
    rows = p.stretches(measurements, token_budget)
    relative = _relative_columns(rows, fitted.model)
    once_ms, always_ms = p.noise_parts_ms(measurements)
    systematic = (fitted.form * rows.ms) ** 2 + always_ms**2
    runs = np.array([float(len(m.samples)) for m in measurements])
    cost_s = np.array([took_s[m.probe] for m in measurements])
    chosen: list[Probe] = []
    left_s = seconds
    while (cost_s <= left_s).any():
        weight = 1.0 / (systematic + once_ms**2 / runs)
        more = 1.0 / (systematic + once_ms**2 / (runs + 1)) - weight
        gain = _gain(relative, weight, more) / cost_s
        best = int(np.argmax(np.where(cost_s <= left_s, gain, -1.0)))
        chosen.append(measurements[best].probe)
        runs[best] += 1
        left_s -= cost_s[best]
    return chosen


def _relative_columns(rows: Stretches, model: CostModel) -> Floats:
    """Return the columns of the fit [R, coefficients], each times its coefficient.

    So the errors of the solution are shares. The overhead of a request is the last one, in ms.
    """
    fixed = summed(rows).fixed
    values = [getattr(model, name) for name in FIELDS]
    columns = [fixed[:, k] * value for k, value in enumerate(values) if value > 0.0]
    for knot, slope in model.knots:
        columns.append(slope * rows.summed(np.maximum(rows.tokens - knot, 0.0)))
        # The fit has to tell this knot from its neighbours too.
        columns.append(slope * knot / PLACES * rows.summed((rows.tokens > knot).astype(np.float64)))
    return np.column_stack([*columns, fixed[:, FIXED - 1]])


def _gain(columns: Floats, weight: Floats, more: Floats) -> Floats:
    """Return by how much ``more`` weight on each row [R] alone lowers the sum of the variances.

    The last column, the overhead, is not counted: nothing is simulated with it.
    """
    inverse = np.linalg.pinv((columns.T * weight) @ columns)
    seen = columns @ inverse  # [R, coefficients]
    leverage = np.einsum("rc,rc->r", seen, columns)
    found: Floats = (seen[:, :-1] ** 2).sum(axis=1) * more / (1.0 + more * leverage)
    return found
