"""Fit the cost model to measured stretches of time, each made of one or more iterations.

A prompt longer than the token budget takes several iterations of which a client sees only the end,
so the unit here is not an iteration, as in ``calibrate/iteration_fit.py``, but a sum of them. The
least squares and the choice of knots are the ones of ``calibrate/iteration_fit.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.calibrate.iteration_fit import (
    FIELDS,
    MAX_KNOTS,
    Problem,
    candidate_knots,
    choose_knots,
    cost_model,
    undetermined_fields,
)
from tailrace.config import CostModel
from tailrace.errors import TailraceError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OVERHEAD = "overhead_ms"
#: Coefficients that are always there: those of the model, and the overhead of a request.
FIXED = len(FIELDS) + 1
#: Nobody measures better than this share, so a fit is never thought to be better.
PRECISION = 1e-4
#: Share that the form of the model may be off by; noise counts as far as it is more than that.
SYSTEMATIC = 3e-3
#: The shares among which :func:`likeliest` chooses.
FORMS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2)
#: A deviation, in those expected, beyond which it does not matter how far beyond.
GROSS = 4.0
#: Parameters a knot counts as: its place, its slope, and one for the choice among many.
KNOT_PRICE = 3
#: Residuals beyond so many times their usual size count less.
HUBER = 2.5
_ROUNDS = 4


@dataclass(frozen=True)
class Stretches:
    """Measured stretches of time [R] and the iterations [n] they are made of.

    Iteration k belongs to stretch ``row[k]``. ``requests`` [R] says how often the overhead of a
    request is in a stretch: 1 for a time to first token, 0 for times between tokens.
    """

    row: Ints
    tokens: Floats
    """T of the iteration."""
    context: Floats
    """K."""
    work: Floats
    """W."""
    ms: Floats
    requests: Floats

    def summed(self, values: Floats) -> Floats:
        """Return the sums [R] of a quantity [n] of the iterations over each stretch."""
        return np.bincount(self.row, values, minlength=len(self.ms)).astype(np.float64)


@dataclass(frozen=True)
class Fitted:
    """A cost model and how well it explains what was measured."""

    model: CostModel
    overhead_ms: float
    """What a request takes beside its iterations: network, HTTP, tokenising."""
    predicted_ms: Floats
    """[R] of the stretches it was fitted to."""
    uncertainty: dict[str, float] = field(default_factory=dict)
    """Standard error of each coefficient as a share of it; what is zero is left out."""
    undetermined: tuple[str, ...] = ()
    """Coefficients the data say nothing about."""
    form: float = SYSTEMATIC
    """What the form of the model was taken to be off by."""
    surprise: float = 0.0
    """-2 log likelihood of the data but for a constant, outliers cut off."""

    @property
    def worst_error(self) -> float:
        """Standard error of the least certain coefficient of the model, as a share of it."""
        return max(
            (error for name, error in self.uncertainty.items() if name != OVERHEAD), default=np.inf
        )


@dataclass(frozen=True)
class Sums:
    """Stretches as the fit needs them: sums over their iterations."""

    fixed: Floats
    """[R, FIXED]: iterations, T, K, W, requests."""
    hinges: Floats
    """[R, knots]: the sums of max(T - knot, 0)."""
    knots: Sequence[float]
    ms: Floats


def summed(stretches: Stretches) -> Sums:
    """Sum the iterations of each stretch."""
    parts = stretches
    each = (np.ones_like(parts.tokens), parts.tokens, parts.context, parts.work)
    fixed = (*map(parts.summed, each), parts.requests)
    knots = candidate_knots(parts.tokens)
    hinges = [parts.summed(np.maximum(parts.tokens - knot, 0.0)) for knot in knots]
    columns = np.column_stack(hinges) if hinges else np.zeros((len(parts.ms), 0))
    return Sums(np.column_stack(fixed), columns, knots, parts.ms)


def likeliest(sums: Sums, *, noise_ms: Floats | float = 0.0) -> Fitted:
    """Fit the model, and find out meanwhile what its form is off by.

    Where the form is right, long times count as exactly as they were measured; where it is not,
    all count by their relative errors, or the longest would bend everything to themselves.
    """
    found = [fit(sums, noise_ms=noise_ms, form=form) for form in FORMS]
    return min(found, key=lambda fitted: fitted.surprise)


def fit(sums: Sums, *, noise_ms: Floats | float = 0.0, form: float = SYSTEMATIC) -> Fitted:
    """Fit the model by non-negative least squares on relative errors, outliers counting less.

    ``noise_ms`` (of each stretch [R], or of all) is what repeats differ by: times that are mostly
    noise, compared with what the ``form`` of the model is off by, count less. A knot is taken only
    if it explains more than chance would.
    """
    if len(sums.ms) < FIXED or not np.all(np.isfinite(sums.ms)) or (sums.ms <= 0).any():
        raise TailraceError(
            f"a calibration needs at least {FIXED} measured times, got {len(sums.ms)} usable ones"
        )
    matrix = np.column_stack([sums.fixed, sums.hinges])
    weight = 1.0 / np.hypot(sums.ms, np.asarray(noise_ms) / form)
    trust = np.ones_like(weight)
    for _ in range(_ROUNDS):
        w = weight * trust
        weighted = matrix * w[:, None]
        columns, values = _solved(weighted, sums.ms * w, len(sums.knots), form)
        predicted = matrix[:, columns] @ values
        off = np.abs(predicted - sums.ms) * weight
        usual = max(1.4826 * float(np.median(off)), PRECISION)
        trust = np.minimum(1.0, HUBER * usual / np.maximum(off, 1e-12))
    knots = [sums.knots[c - FIXED] for c in columns[FIXED:]]
    model = cost_model(values, knots, values[FIXED:])
    # A request that asks for nothing but its overhead says nothing about the model.
    unknown = undetermined_fields(sums.fixed[:, : len(FIELDS)] * weight[:, None])
    rms = float(np.sqrt(np.mean((off * trust) ** 2)))
    errors = _uncertainty(matrix[:, columns] * (weight * trust)[:, None], values, rms)
    names = (*FIELDS, OVERHEAD, *(f"knot {knot:g}" for knot in knots))
    known = {n: float(e) for n, e in zip(names, errors, strict=True) if np.isfinite(e)}
    surprise = float((np.minimum(off / form, GROSS) ** 2 - 2 * np.log(weight / form)).sum())
    overhead_ms = float(values[FIXED - 1])
    return Fitted(model, overhead_ms, predicted, known, unknown, form, surprise)


def _solved(matrix: Floats, target: Floats, knots: int, form: float) -> tuple[list[int], Floats]:
    """Return the columns used and their coefficients; the number of knots is that of least BIC."""
    problem = Problem(matrix, target)
    always = list(range(FIXED))
    rows = len(target)
    best: tuple[float, list[int], Floats] | None = None
    for count in range(MAX_KNOTS + 1):
        chosen = sorted(choose_knots(problem, FIXED, knots, count)) if count else []
        if len(chosen) < count:
            break
        values, residual = problem.solve([*always, *chosen])
        error = residual**2 / rows + form**2
        score = rows * np.log(error) + KNOT_PRICE * count * np.log(rows)
        if best is not None and score >= best[0]:
            break
        best = (score, [*always, *chosen], values)
    assert best is not None
    return best[1], best[2]


def _uncertainty(matrix: Floats, values: Floats, rms: float) -> Floats:
    """Return standard errors as shares of the coefficients; inf for those that are zero."""
    used = np.flatnonzero(values > 0.0)
    out = np.full(len(values), np.inf)
    part = matrix[:, used]
    norm = np.linalg.norm(part, axis=0)
    part = part / norm
    spare = max(len(part) - len(used), 1)
    scale = rms * np.sqrt(len(part) / spare)
    variance = np.diag(np.linalg.pinv(part.T @ part))
    out[used] = scale * np.sqrt(np.maximum(variance, 0.0)) / norm / values[used]
    return out
