"""Fit the cost model by simulating a recorded run with candidates until the times agree.

Where ``interval_fit`` solves for sums of iterations that a simulation has placed, this compares the
outcome: first and last tokens of the whole simulated run against the recorded ones. Waiting in the
queue, which any error of the model changes, is then part of what is fitted.

The parameters are logarithms, so all stay positive and are free to be small: the base, the slope of
each segment of the token cost (slopes may fall from segment to segment, but never below zero), the
costs of context and prefill, and the overhead of a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tailrace.calibrate.interval_fit import OVERHEAD
from tailrace.config import Cluster, CostModel, Engine, Replica
from tailrace.sim.simulator import Simulation
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: A recorded time is trusted to one iteration and this share of itself: which iteration a request
#: falls into is chance, and the form of the model is off by about that much.
SHARE = 0.01
#: Standard deviation of the prior on each logarithm, around the start.
PRIOR = 20.0
#: Knots that are tried, in tokens. A further knot must lower the loss by KNOT_GAIN, or it would
#: follow what one recording happens to show.
KNOTS: tuple[tuple[float, ...], ...] = ((), (64.0,), (32.0, 256.0))
KNOT_GAIN = 0.15
#: Shares of an iteration that the base is taken to be at the start.
STARTS = (0.5, 0.3)
#: Steps of the finite differences in the logarithms: what a simulation does is no smooth function,
#: so a step has to be wide enough to average over its jumps.
STEPS = (0.1, 0.03)
_MOST_STEPS, _SETTLED = 15, 1e-3
#: A segment's slope is at least this share of the one before, so that rounding keeps it positive.
_LEAST_SLOPE = 1e-4


@dataclass(frozen=True)
class Times:
    """Requests of one replica in order of sending, and recorded times [R] in s from the sending.

    NaN: not known, or not to be fitted. Such requests are simulated all the same.
    """

    table: RequestTable
    first_s: Floats
    last_s: Floats


@dataclass(frozen=True)
class RunFit:
    """The cost model that a recorded run agrees with best."""

    model: CostModel
    overhead_ms: float
    """Time of a request outside of iterations."""
    loss: float
    uncertainty: dict[str, float]
    """Standard error of each coefficient as a share of it."""


def fit_run(
    parts: Sequence[Times],
    replica: Replica,
    near: CostModel | None = None,
    *,
    overhead_ms: float = 0.0,
    knots: Sequence[tuple[float, ...]] = KNOTS,
    starts: Sequence[float] = STARTS,
) -> RunFit:
    """Fit one cost model to parts of equal replicas.

    ``near`` is a model to start from as well, and its knots are tried too.
    """
    iteration_s = _iteration_s(parts)
    own = () if near is None else tuple(sorted(at for at, _ in near.knots))
    chosen: RunFit | None = None
    last: RunFit | None = None
    for places in sorted({*knots, own}, key=len):
        typical = _begin(iteration_s, starts[0], len(places))
        if last is None:
            begin = [_begin(iteration_s, share, 0) for share in starts]
        else:
            begin = [_as_values(last.model, last.overhead_ms, places, typical)]
            if places != own:
                begin.append(typical)
        if near is not None and places == own:
            begin.append(_as_values(near, overhead_ms, places, typical))
        last = min((_solve(parts, replica, places, b, iteration_s) for b in begin), key=_loss)
        if chosen is None or _price(last) < _price(chosen):
            chosen = last
    assert chosen is not None
    return chosen


def loss_of(
    parts: Sequence[Times], replica: Replica, model: CostModel, overhead_ms: float
) -> float:
    """Return the loss of a given model, as in :class:`RunFit`."""
    off = _residuals(parts, replica, model, overhead_ms, _iteration_s(parts))
    return float((np.sqrt(1.0 + off**2) - 1.0).sum())


def _loss(found: RunFit) -> float:
    return found.loss


def _price(found: RunFit) -> float:
    """Return the loss with what the knots have to be worth; of a loss below 1 nothing is learnt."""
    return (1.0 + found.loss) / (1.0 - KNOT_GAIN) ** len(found.model.knots)


def _iteration_s(parts: Sequence[Times]) -> float:
    """Return the median time between tokens, s."""
    gaps = [
        (part.last_s - part.first_s) / np.maximum(part.table.rows["output_tokens"] - 1, 1)
        for part in parts
    ]
    every = np.concatenate(gaps)
    known = every[np.isfinite(every) & (every > 0)]
    return float(np.median(known)) if len(known) else 0.01


def _begin(iteration_s: float, share: float, knots: int) -> Floats:
    """Return values to start from: ms of base, slopes [knots + 1], context, prefill, overhead."""
    ms = 1e3 * iteration_s
    # Falling, as of a mixture of experts: from there a fit finds its way to rising ones, while the
    # other start, the model with fewer knots, has equal ones.
    slopes = [(0.8 - share) * ms / 100 * 2.0 ** (knots - k) for k in range(knots + 1)]
    # A pair of tokens in a prefill costs about a hundredth of a token of context in a decode.
    # Recordings with few prefills hardly say more, and the fit stays near.
    return np.array([share * ms, *slopes, 3e-6 * ms, 3e-8 * ms, 0.5 * ms])


def _as_values(
    model: CostModel, overhead_ms: float, places: tuple[float, ...], typical: Floats
) -> Floats:
    """Return a model's values with other knots; what is zero becomes a small share of typical."""
    slopes = [
        model.per_token_ms + sum(change for at, change in model.knots if at <= place)
        for place in (0.0, *places)
    ]
    rest = (model.per_context_ms, model.per_prefill_ms, overhead_ms)
    values = np.array([model.base_ms, *slopes, *rest])
    found: Floats = np.maximum(values, 0.02 * typical)
    return found


def _as_model(values: Floats, places: tuple[float, ...]) -> CostModel:
    count = len(places)
    slopes = [float(values[1])]
    for slope in values[2 : 2 + count]:
        slopes.append(max(float(slope), _LEAST_SLOPE * slopes[-1]))
    return CostModel(
        base_ms=float(values[0]),
        per_token_ms=slopes[0],
        knots=tuple((at, slopes[k + 1] - slopes[k]) for k, at in enumerate(places)),
        per_context_ms=float(values[2 + count]),
        per_prefill_ms=float(values[3 + count]),
    )


def _solve(
    parts: Sequence[Times],
    replica: Replica,
    places: tuple[float, ...],
    begin: Floats,
    iteration_s: float,
) -> RunFit:
    """Gauss-Newton with a robust loss, with ever finer differences."""

    def off(logs: Floats) -> Floats:
        values = begin * np.exp(np.clip(logs, -12.0, 8.0))
        return np.concatenate(
            [
                _residuals(parts, replica, _as_model(values, places), values[-1], iteration_s),
                logs / PRIOR,
            ]
        )

    logs = np.zeros(len(begin))
    for step in STEPS:
        found = least_squares(
            off, logs, jac=_differences(off, step), loss="soft_l1", max_nfev=_MOST_STEPS,
            ftol=_SETTLED, xtol=_SETTLED,
        )  # fmt: skip
        logs = found.x
    values = begin * np.exp(np.clip(logs, -12.0, 8.0))
    return RunFit(
        _as_model(values, places),
        float(values[-1]),
        float(found.cost),
        _uncertainty(np.asarray(found.jac), np.asarray(found.fun), places),
    )


def _differences(off: Callable[[Floats], Floats], step: float) -> Callable[[Floats], Floats]:
    """Return a function for the Jacobian [residuals, logs] by central differences."""

    def jacobian(logs: Floats) -> Floats:
        return np.stack(
            [(off(logs + step * way) - off(logs - step * way)) / (2 * step)
             for way in np.eye(len(logs))],
            axis=1,
        )  # fmt: skip

    return jacobian


def _residuals(
    parts: Sequence[Times],
    replica: Replica,
    model: CostModel,
    overhead_ms: float,
    iteration_s: float,
) -> Floats:
    """Return simulated less recorded times in expected deviations: first token, answer, end."""
    now = replica.model_copy(update={"cost": model, "count": 1})
    found = []
    for part in parts:
        first_s, last_s = simulated(part.table, now, overhead_ms)
        for was, is_now in (
            (part.first_s, first_s),
            (part.last_s, last_s),
            (part.last_s - part.first_s, last_s - first_s),
        ):
            known = np.isfinite(was)
            found.append((is_now - was)[known] / (iteration_s + SHARE * was[known]))
    return np.concatenate(found)


def simulated(table: RequestTable, replica: Replica, overhead_ms: float) -> tuple[Floats, Floats]:
    """Simulate a replica; return first and last tokens [R] in s from the sending."""
    simulation = Simulation(Cluster(replicas=(replica,)), table, engine=Engine())
    simulation.replay(np.zeros(len(table), np.int64))
    done = simulation.result().requests
    late = 1e-3 * overhead_ms - done["arrived_s"]
    return done["first_token_s"] + late, done["finished_s"] + late


def _uncertainty(jacobian: Floats, off: Floats, places: tuple[float, ...]) -> dict[str, float]:
    """Return standard errors; columns are of logarithms, so they are shares already."""
    names = [
        "base_ms", "per_token_ms", *(f"knot {at:g}" for at in places),
        "per_context_ms", "per_prefill_ms", OVERHEAD,
    ]  # fmt: skip
    spare = max(len(off) - 2 * len(names), 1)
    scale = float(np.sqrt((off**2).sum() / spare))
    variance = np.diag(np.linalg.pinv(jacobian.T @ jacobian))
    errors = scale * np.sqrt(np.maximum(variance, 0.0))
    return {name: float(error) for name, error in zip(names, errors, strict=True)}
