"""Calibration from recorded times: regression on iterations that the simulator reconstructs.

A log says when requests were sent, when their first token came and when they ended, but not what
the server did in between. So each replica is simulated with the requests it really got and the
model at hand; every wait for a first token and every answer is then the sum of the iterations that
the simulation puts there, and a fit of these sums to the recorded times gives the next model. At
the true model the reconstruction is the truth, and so it stays there. The model found is where
:func:`tailrace.calibrate.run_fit.fit_run` begins, which compares whole simulated runs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.calibrate.interval_fit import FIXED, FORMS, Fitted, Floats, Sums, fit
from tailrace.calibrate.iteration_fit import FIELDS, MAX_KNOTS, candidate_knots
from tailrace.calibrate.probes import BUDGETS
from tailrace.calibrate.recorded_capacity import (
    RECORDED,
    full_batch,
    kv_tokens,
    stated,
    token_budgets,
)
from tailrace.calibrate.recorded_parts import RecordedPart, part_of, sums_of_answers
from tailrace.calibrate.result import (
    ASSUMED,
    MEASURED,
    Calibrated,
    Calibration,
    Point,
    regimes,
    with_capacity,
)
from tailrace.calibrate.run_fit import RunFit, Times, fit_run, loss_of
from tailrace.config import Cluster, CostModel, Engine, Replica
from tailrace.errors import TailraceError
from tailrace.replay.recorded import RecordedTraffic
from tailrace.sim.result import SimResult
from tailrace.sim.simulator import Simulation, uses_reference
from tailrace.workload.table import RequestTable

LEAST_REQUESTS = 50
#: Requests, from the first of each replica on, that whole runs are simulated of.
MOST_REQUESTS = 1000
#: Shares of the KV memory that recorded times show, which are tried.
KV_SHARES = (0.9, 1.0, 1.1)
#: Passes of simulating and fitting, the gain below which one is no better than the one before,
#: and the share of a step below which there is nothing more to gain.
PASSES, SETTLED, LEAST_STEP = 20, 1e-3, 0.1
#: Requests that decide on the number of tokens per iteration, and the passes of a candidate.
SAMPLE, SAMPLE_PASSES = 600, 2
#: Possible jitters of recorded times, ms; what is not much longer counts less.
JITTERS_MS = (0.01, 0.3, 1.0, 3.0, 10.0, 30.0)
#: Errors of the time to first token beyond which the log does not fit the simulator.
DOUBTFUL = 0.25
_MOST_ERRORS = 99.0

TTFT_SHORT, TTFT_LONG = "first token, prompt <= 512", "first token, prompt > 512"
TPOT_SMALL, TPOT_LARGE = "answer, batch <= 8", "answer, batch > 8"
REGIMES = (TTFT_SHORT, TTFT_LONG, TPOT_SMALL, TPOT_LARGE)


@dataclass(frozen=True)
class _Explained:
    """Recorded times [k] of several parts as sums of iterations, and which time each is."""

    sums: Sums
    is_first: np.ndarray[tuple[int], np.dtype[np.bool_]]
    prompt: Floats
    batch: Floats
    """Mean number of tokens per iteration."""
    context: Floats
    simulated_ms: Floats


def calibrate_log(
    recorded: RecordedTraffic,
    known: Replica,
    *,
    same: bool = False,
    only: NDArray[np.bool_] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Calibrate every replica of a log. ``known``: what is known of the servers.

    ``same``: the replicas are equal, fit one cost model to all. ``only`` [R]: the requests whose
    recorded times may be used; of the others only what was asked when. ``progress`` gets the
    percent that are done.
    """
    report = progress or (lambda _: None)
    numbers = sorted(set(recorded.outcomes["replica"].tolist()))
    if numbers != list(range(len(numbers))):
        missing = next(k for k in range(len(numbers) + 1) if k not in numbers)
        raise TailraceError(
            f"the log has no answered request of replica {missing}; with --same the others can "
            "stand for it"
            if not same
            else f"the log has no request of replica {missing}"
        )
    groups = [numbers] if same else [[k] for k in numbers]
    found, split = [], [[part_of(recorded, k, only) for k in group] for group in groups]
    for group, parts in zip(groups, split, strict=True):  # before the first fit, which takes long
        if sum(int(np.isfinite(part.ttft_ms).sum()) for part in parts) < LEAST_REQUESTS and (
            only is not None or sum(len(part.table) for part in parts) < LEAST_REQUESTS
        ):
            other = "" if same or len(numbers) == 1 else ", or add --same if all replicas are equal"
            raise TailraceError(
                f"replica {group[0]} has only {len(parts[0].table)} answered requests in the log "
                f"and {LEAST_REQUESTS} are needed; record for longer{other}"
            )
    for done, (group, parts) in enumerate(zip(groups, split, strict=True)):
        name = f"replica {group[0]}" if len(group) == 1 else f"replicas {group[0]} to {group[-1]}"
        found.append(_calibrated(name, parts, known, recorded.settings))
        report(int(100 * (done + 1) / len(groups)))
    sure = Counter(c.replica.chunk_size for c in found if c.sources["chunk_size"] == MEASURED)
    for place, one in enumerate(found):
        common = sure.most_common(1)[0][0] if sure else one.replica.chunk_size
        if one.sources["chunk_size"] == ASSUMED and one.replica.chunk_size != common:
            # The log of a saturated server, for instance, fits several budgets, each with another
            # overhead: it is taken to be configured like the others.
            alike = known.model_copy(update={"chunk_size": common})
            again = _calibrated(one.name, split[place], alike, recorded.settings)
            found[place] = replace(again, sources={**again.sources, "chunk_size": ASSUMED})
    source = "recording of a server" if recorded.settings else "decision log"
    return Calibration(source, tuple(found))


def _calibrated(
    name: str, parts: Sequence[RecordedPart], known: Replica, settings: Mapping[str, int]
) -> Calibrated:
    found = stated(settings)
    running = [part.occupancy() for part in parts]
    most = max(part.running() for part in running)
    seen = full_batch(running) if "batch_cap" not in found else None
    assumed = (known.batch_cap, ASSUMED) if seen is None else (seen, MEASURED)
    cap, source = found.get("batch_cap", assumed)
    found["batch_cap"] = (cap, source) if cap >= most else (most, MEASURED)
    replica, _ = with_capacity(known, found)
    if "num_blocks" not in found:
        tokens, is_full = kv_tokens(running, replica.batch_cap)
        found["num_blocks"] = (int(tokens) // replica.block_size, MEASURED if is_full else ASSUMED)
    replica, _ = with_capacity(known, found)
    if uses_reference(Cluster(replicas=(replica,)), Engine()):
        raise TailraceError(
            f"a log is calibrated on the compiled engine, which has no scheduler "
            f"{replica.scheduler} of {replica.num_stages} stages"
        )
    start = _first_guess(parts)
    times = [part.times(-(-MOST_REQUESTS // len(parts))) for part in parts]
    if found["num_blocks"][1] != MEASURED and not any(len(part.table.runs) for part in parts):
        # Nothing is shared and nothing is evicted: no caches are needed, and it is twice as fast.
        uncached = {"prefix_caching": False}
    else:
        uncached = {}
    if "chunk_size" not in known.model_fields_set:
        budgets = token_budgets(settings)
        if budgets:
            quick = replica.model_copy(update=uncached)
            best = _nearest(times, quick, [{"chunk_size": budget} for budget in budgets])
            found["chunk_size"] = (best["chunk_size"], RECORDED)
        else:
            found["chunk_size"] = _token_budget(parts, replica, start)
    replica, _ = with_capacity(known, found)
    if found["num_blocks"][1] == MEASURED and "num_blocks" not in known.model_fields_set:
        sizes = [{"num_blocks": int(share * found["num_blocks"][0])} for share in KV_SHARES]
        found["num_blocks"] = (_nearest(times, replica, sizes)["num_blocks"], MEASURED)
    replica, sources = with_capacity(known, found)
    fitted, explained, _ = _settle(parts, replica, start, PASSES)
    quick = replica.model_copy(update=uncached)
    refined = fit_run(times, quick, fitted.model, overhead_ms=fitted.overhead_ms)
    if refined.loss < loss_of(times, quick, fitted.model, fitted.overhead_ms):
        fitted = _with(fitted, refined)
        explained = _looked_at(parts, replica, fitted.model)
    measured = explained.sums.ms
    predicted = explained.simulated_ms + fitted.overhead_ms * explained.is_first
    kinds = _kinds(explained)
    result = Calibrated(
        name=name,
        replica=replica.model_copy(update={"cost": fitted.model, "count": len(parts)}),
        overhead_ms=fitted.overhead_ms,
        uncertainty=fitted.uncertainty,
        sources=sources,
        regimes=regimes(REGIMES, kinds, measured, predicted, worst=_MOST_ERRORS),
        points=_points(explained, kinds, predicted),
    )
    warnings = []
    if fitted.undetermined:
        warnings.append(f"the log says nothing about {', '.join(fitted.undetermined)}")
    doubtful = [r for r in result.regimes if r.mean_error > DOUBTFUL]
    if doubtful:
        warnings.append(
            f"the times of {doubtful[0].name} are off by {doubtful[0].mean_error:.0%} on average: "
            "give what you know of the servers (--chunk-size, --batch-cap, --num-blocks), and "
            "check with `tailrace replay`"
        )
    return replace(result, warnings=tuple(warnings))


def _nearest(
    times: Sequence[Times], replica: Replica, choices: Sequence[dict[str, int]]
) -> dict[str, int]:
    """Return the settings with which a model without knots agrees best with the recorded times."""
    if len(choices) == 1:
        return choices[0]
    losses = [
        fit_run(times, replica.model_copy(update=choice), knots=((),), starts=(0.5,)).loss
        for choice in choices
    ]
    return choices[int(np.argmin(losses))]


def _with(fitted: Fitted, refined: RunFit) -> Fitted:
    """Return a fit with another model; what the data say nothing about stays so."""
    return replace(
        fitted,
        model=refined.model,
        overhead_ms=refined.overhead_ms,
        uncertainty=refined.uncertainty,
    )


# ---- the loop -----------------------------------------------------------------------------------


def _settle(
    parts: Sequence[RecordedPart], replica: Replica, model: CostModel, passes: int
) -> tuple[Fitted, _Explained, float]:
    """Simulate and fit in turn as long as simulated times come nearer to the recorded ones.

    A step that leads away is halved: near saturation a slightly slower model makes long queues,
    and iterations summed up over those say little. Returns the fit, with the model that came
    nearest, and its distance.
    """
    explained = _looked_at(parts, replica, model)
    fitted, step = _fitted(explained.sums), 1.0
    best, best_explained = replace(fitted, model=model), explained
    nearest = _distance(explained, fitted.overhead_ms)
    for _ in range(passes):
        trial = _blend(best.model, fitted.model, step)
        overhead_ms = (1.0 - step) * best.overhead_ms + step * fitted.overhead_ms
        explained = _looked_at(parts, replica, trial)
        distance = _distance(explained, overhead_ms)
        if distance < (1.0 - SETTLED) * nearest:
            nearest, step = distance, 1.0
            fitted = _fitted(explained.sums)
            best = replace(fitted, model=trial, overhead_ms=overhead_ms)
            best_explained = explained
        else:
            step /= 2
            if step < LEAST_STEP:
                break
    return best, best_explained, nearest


def _fitted(sums: Sums) -> Fitted:
    """Fit with the jitter and the error of the model's form that make the log likeliest.

    On a busy machine waits are longer by chance, by some ms whatever their length; were only
    relative errors counted, the shortest waits would decide.
    """
    plain = Sums(sums.fixed, np.zeros((len(sums.ms), 0)), (), sums.ms)
    rough = (
        (fit(plain, noise_ms=jitter_ms, form=form), jitter_ms)
        for jitter_ms in JITTERS_MS
        for form in FORMS
    )
    likeliest, jitter_ms = min(rough, key=lambda found: found[0].surprise)
    return fit(sums, noise_ms=jitter_ms, form=likeliest.form)


def _looked_at(parts: Sequence[RecordedPart], replica: Replica, model: CostModel) -> _Explained:
    """Return the recorded times as sums of iterations simulated with a model."""
    now = replica.model_copy(update={"cost": model})
    return _joined([_explained(part, now) for part in parts])


def _distance(explained: _Explained, overhead_ms: float) -> float:
    """Return how far simulated times are from recorded ones.

    With the overhead of requests: without it, a model would do best that has it in its iterations.
    """
    simulated_ms = explained.simulated_ms + overhead_ms * explained.is_first
    off = np.abs(np.log(np.maximum(simulated_ms, 1e-3) / explained.sums.ms))
    return float(np.minimum(off, 1.0).mean())


def _blend(a: CostModel, b: CostModel, share: float) -> CostModel:
    """Return a model between two; of knots that only one has, that share of the slope."""
    slopes: dict[float, float] = {}
    for model, weight in ((a, 1.0 - share), (b, share)):
        for knot, slope in model.knots:
            slopes[knot] = slopes.get(knot, 0.0) + weight * slope
    kept = sorted(slopes.items(), key=lambda item: -item[1])[:MAX_KNOTS]
    values = {name: (1.0 - share) * getattr(a, name) + share * getattr(b, name) for name in FIELDS}
    return CostModel(**values, knots=tuple(sorted((k, s) for k, s in kept if s > 0.0)))


def _explained(part: RecordedPart, replica: Replica) -> _Explained:
    """Simulate the requests of a replica and sum up the iterations of each recorded time."""
    result = _simulated(part.table, replica)
    batches = result.batches
    assert batches is not None
    done = result.requests
    tokens = batches["tokens"].astype(np.float64)
    columns = [np.ones(len(batches)), tokens, batches["context"], batches["prefill_work"]]
    knots = candidate_knots(tokens)
    columns += [np.maximum(tokens - knot, 0.0) for knot in knots]
    # Sums up to any moment, an iteration under way counting by the share that is over.
    edges = np.ravel(np.column_stack([batches["start_s"], batches["end_s"]]))
    spans = []
    for begin, end, ms in (
        ("arrived_s", "first_token_s", part.ttft_ms),
        ("first_token_s", "finished_s", part.answer_ms),
    ):
        rows = np.flatnonzero(np.isfinite(ms) & (ms > 0))
        spans.append((rows, done[begin][rows], done[end][rows], ms[rows]))
    count = sum(len(rows) for rows, *_ in spans)
    matrix = np.zeros((count, len(columns)))
    for j, column in enumerate(columns):
        total = np.cumsum(column)
        level = np.ravel(np.column_stack([total - column, total]))
        matrix[:, j] = np.concatenate(
            [np.interp(end, edges, level) - np.interp(begin, edges, level)
             for _, begin, end, _ in spans]
        )  # fmt: skip
    is_first = np.concatenate([np.full(len(spans[0][0]), True), np.full(len(spans[1][0]), False)])
    fixed = np.column_stack([matrix[:, : FIXED - 1], is_first.astype(np.float64)])
    ms = np.concatenate([ms for *_, ms in spans])
    rows = np.concatenate([rows for rows, *_ in spans])
    iterations = np.maximum(matrix[:, 0], 1e-9)
    return _Explained(
        Sums(fixed, matrix[:, FIXED - 1 :], knots, ms),
        is_first,
        part.table.rows["prompt_tokens"][rows].astype(np.float64),
        matrix[:, 1] / iterations,
        matrix[:, 2] / iterations,
        1e3 * np.concatenate([end - begin for _, begin, end, _ in spans]),
    )


def _simulated(table: RequestTable, replica: Replica) -> SimResult:
    simulation = Simulation(
        Cluster(replicas=(replica,)), table, engine=Engine(exact=True), record_batches=True
    )
    simulation.replay(np.zeros(len(table), np.int64))
    return simulation.result()


def _joined(parts: Sequence[_Explained]) -> _Explained:
    if len(parts) == 1:
        return parts[0]
    knots = sorted(set.intersection(*(set(part.sums.knots) for part in parts)))
    hinges = [part.sums.hinges[:, [part.sums.knots.index(k) for k in knots]] for part in parts]
    fixed, ms = (np.concatenate([getattr(p.sums, name) for p in parts]) for name in ("fixed", "ms"))
    return _Explained(
        Sums(fixed, np.concatenate(hinges), knots, ms),
        *(
            np.concatenate([getattr(p, name) for p in parts])
            for name in ("is_first", "prompt", "batch", "context", "simulated_ms")
        ),
    )


# ---- what is not known --------------------------------------------------------------------------


def _first_guess(parts: Sequence[RecordedPart]) -> CostModel:
    """Return a model from the answers alone, without a simulation.

    Every iteration gives each answer under way a token, so an answer of n tokens took n - 1 of
    them. What else was in them is known from the log: the other answers under way on average, and
    the prompts whose first token came meanwhile.
    """
    rows = [sums_of_answers(part) for part in parts]
    fixed, ms = (np.concatenate([r[k] for r in rows]) for k in (0, 1))
    if len(ms) < FIXED:
        raise TailraceError("the log has no streamed answers of two tokens or more to learn from")
    return _fitted(Sums(fixed, np.zeros((len(ms), 0)), (), ms)).model


def _token_budget(
    parts: Sequence[RecordedPart], replica: Replica, start: CostModel
) -> tuple[int, str]:
    """Return the tokens per iteration that explain a part of the log best."""
    largest = max(int(part.table.rows["prompt_tokens"].max()) for part in parts)
    sample = [part.beginning(SAMPLE // len(parts)) for part in parts]
    errors: dict[int, float] = {}
    for budget in BUDGETS:
        now = replica.model_copy(update={"chunk_size": budget})
        errors[budget] = _settle(sample, now, start, SAMPLE_PASSES)[2]
        if budget >= 2 * largest:
            break
    best = min(errors, key=lambda budget: errors[budget])
    others = min((e for budget, e in errors.items() if budget != best), default=0.0)
    return best, MEASURED if errors[best] < 0.9 * others else ASSUMED


# ---- errors -------------------------------------------------------------------------------------


def _kinds(explained: _Explained) -> list[str]:
    first = np.where(explained.prompt <= 512, TTFT_SHORT, TTFT_LONG)
    answer = np.where(explained.batch <= 8, TPOT_SMALL, TPOT_LARGE)
    return [str(k) for k in np.where(explained.is_first, first, answer)]


def _points(explained: _Explained, kinds: Sequence[str], predicted: Floats) -> tuple[Point, ...]:
    """Return at most a few hundred of the times, evenly chosen, for plots."""
    some = np.unique(np.linspace(0, len(kinds) - 1, 400).astype(int))
    return tuple(
        Point(
            kinds[k],
            float(explained.prompt[k] if explained.is_first[k] else explained.batch[k]),
            float(explained.context[k]),
            float(explained.sums.ms[k]),
            float(predicted[k]),
        )
        for k in some
    )
