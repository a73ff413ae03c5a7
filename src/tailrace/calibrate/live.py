"""Calibration of live endpoints, one after the other or all at once."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.calibrate import probes as p
from tailrace.calibrate.endpoint import LiveEndpoint
from tailrace.calibrate.probes import Endpoint, Probe
from tailrace.calibrate.result import (
    ASSUMED,
    INTERFERES,
    MEASURED,
    NOISY,
    TOLD,
    Calibrated,
    Calibration,
    Point,
    regimes,
    with_capacity,
)
from tailrace.calibrate.survey import FEW_SAMPLES, Limits, Survey, survey
from tailrace.config import Replica
from tailrace.errors import TailraceError

#: What is measured with one and with all replicas at work.
SHARED = (Probe(1, 960), Probe(8, p.SHORT_PROMPT, 48))
SHARED_REPEATS = 5
#: Largest share of the KV memory that probes may hold, and what they may hold if it is unknown.
KV_SHARE, KV_UNKNOWN = 0.5, 65_536


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a calibration of live endpoints."""

    seconds: float = 240.0
    """Time limit for measuring each replica, s."""
    precision: float = 0.005
    """Standard error of the coefficients, as a share of them, that is good enough to stop."""
    max_prompt: int = 8192
    """Tokens."""
    max_batch: int = 256
    """Requests at once."""
    known: Replica = field(default_factory=Replica)
    """What is known of the servers; settings that are not set explicitly are looked for."""
    together: bool = False
    """Measure all replicas at once, as they are when the cluster is busy."""
    same: bool = False
    """The replicas are equal: fit one cost model to all."""
    model: str | None = None


def calibrate_urls(
    urls: Sequence[str],
    options: CalibrationOptions,
    *,
    headers: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Calibrate the servers at some addresses; ``progress`` is called with the percentage done."""
    return asyncio.run(_calibrate(urls, options, headers or {}, progress or (lambda _: None)))


async def _calibrate(
    urls: Sequence[str],
    options: CalibrationOptions,
    headers: Mapping[str, str],
    progress: Callable[[int], None],
) -> Calibration:
    if len(set(urls)) != len(urls):
        raise TailraceError("an address is given twice; name each server once")
    endpoints = [LiveEndpoint(url, headers) for url in urls]
    try:
        limits, reported = [], []
        for endpoint in endpoints:
            await endpoint.open(options.model)
            found = await _reported(endpoint)
            reported.append(found)
            limits.append(_limits(endpoint, options, found))
        done = [0.0] * len(endpoints)

        def update(k: int, share: float) -> None:
            done[k] = share
            progress(int(100 * sum(done) / len(done)))

        jobs = [
            survey(endpoint, limit, lambda share, k=k: update(k, share))  # type: ignore[misc]
            for k, (endpoint, limit) in enumerate(zip(endpoints, limits, strict=True))
        ]
        surveys = list(await asyncio.gather(*jobs)) if options.together else [await j for j in jobs]
        shared: list[float | None] = [None] * len(endpoints)
        if len(endpoints) > 1:
            shared = await interference(endpoints)
    finally:
        for endpoint in endpoints:
            await endpoint.close()
    groups = [list(range(len(urls)))] if options.same else [[k] for k in range(len(urls))]
    return Calibration(
        "live endpoints",
        tuple(
            calibrated(
                ", ".join(urls[k] for k in group),
                [surveys[k] for k in group],
                options,
                reported[group[0]],
                max(shared[k] or 0.0 for k in group) or None,
                counts=all(endpoints[k].counts_tokens for k in group),
            )
            for group in groups
        ),
    )


def reported_capacity(urls: Sequence[str]) -> dict[str, int]:
    """Return what all of some servers say of their KV caches; of several sizes the smallest."""

    async def ask() -> list[dict[str, tuple[int, str]]]:
        endpoints = [LiveEndpoint(url) for url in urls]
        try:
            return [await _reported(endpoint) for endpoint in endpoints]
        finally:
            for endpoint in endpoints:
                await endpoint.close()

    each = asyncio.run(ask())
    names = set.intersection(*(set(found) for found in each)) if each else set()
    return {name: min(found[name][0] for found in each) for name in sorted(names)}


async def _reported(endpoint: LiveEndpoint) -> dict[str, tuple[int, str]]:
    """Return the capacity that a server tells."""
    snapshot = await endpoint.metrics()
    found: dict[str, tuple[int, str]] = {}
    if snapshot.block_size:
        found["block_size"] = (snapshot.block_size, TOLD)
    if snapshot.kv_tokens:
        found["num_blocks"] = (max(1, snapshot.kv_tokens // (snapshot.block_size or 16)), TOLD)
    return found


def _limits(
    endpoint: LiveEndpoint, options: CalibrationOptions, reported: dict[str, tuple[int, str]]
) -> Limits:
    known, _ = with_capacity(options.known, reported)
    assert known.num_blocks is not None
    held = known.num_blocks * known.block_size
    is_known = "num_blocks" in reported or "num_blocks" in options.known.model_fields_set
    prompt = options.max_prompt
    if endpoint.max_model_len is not None:
        prompt = min(prompt, endpoint.max_model_len)
    given = options.known.model_fields_set
    cap = options.known.batch_cap if "batch_cap" in given else options.max_batch
    return Limits(
        seconds=options.seconds,
        prompt=min(prompt, held // 2),
        batch=min(options.max_batch, cap),
        context=int(held * KV_SHARE) if is_known else KV_UNKNOWN,
        token_budget=options.known.chunk_size if "chunk_size" in given else None,
        precision=options.precision,
    )


def calibrated(
    name: str,
    surveys: Sequence[Survey],
    options: CalibrationOptions,
    reported: dict[str, tuple[int, str]] | None = None,
    slowdown: float | None = None,
    *,
    counts: bool = True,
) -> Calibrated:
    """Fit one cost model to the surveys of one replica, or of several equal ones.

    ``reported`` is the capacity the server reports, ``slowdown`` its times with all replicas loaded
    over those alone, ``counts`` whether it says how long prompts are.
    """
    found = dict(reported or {})
    first = surveys[0]
    found["chunk_size"] = (first.token_budget, first.budget_source)
    cap = max((s.batch_cap or 0 for s in surveys), default=0)
    largest = max(s.largest_batch for s in surveys)
    default = options.known.batch_cap
    found["batch_cap"] = (cap, MEASURED) if cap else (max(default, largest), ASSUMED)
    replica, sources = with_capacity(options.known, found)
    measurements = [m for s in surveys for m in s.measurements]
    rows = p.stretches(measurements, replica.chunk_size)
    fitted = p.fitted(measurements, replica.chunk_size)
    replica = replica.model_copy(update={"cost": fitted.model, "count": len(surveys)})
    kinds = [m.probe.regime for m in measurements]
    spreads = np.array([m.spread for m in measurements])
    points = tuple(
        Point(
            m.probe.regime,
            float(m.probe.prompt if m.probe.is_prefill else m.probe.batch),
            float(np.median([s.context for s in m.samples])),
            m.ms,
            float(predicted),
        )
        for m, predicted in zip(measurements, fitted.predicted_ms, strict=True)
    )
    result = Calibrated(
        name=name,
        replica=replica,
        overhead_ms=fitted.overhead_ms,
        uncertainty=fitted.uncertainty,
        sources=sources,
        regimes=regimes(p.REGIMES, kinds, rows.ms, fitted.predicted_ms, spreads),
        points=points,
        interference=slowdown,
    )
    warnings = _warnings(result, surveys, fitted.undetermined, counts=counts)
    return replace(result, warnings=tuple(warnings))


def _warnings(
    found: Calibrated, surveys: Sequence[Survey], undetermined: Sequence[str], *, counts: bool
) -> list[str]:
    notes = []
    spread = max(s.spread for s in surveys)
    if spread > NOISY:
        notes.append(
            f"repeats of one measurement differ by {spread:.0%} typically: the machine was noisy, "
            "calibrate again when nothing else runs on it"
        )
    few = min(s.fewest for s in surveys)
    if few < FEW_SAMPLES:
        notes.append(
            f"some measurements were made only {few} time{'s' * (few > 1)}: raise --budget"
        )
    if found.interference is not None and found.interference > INTERFERES:
        notes.append(
            f"with all replicas at work it takes {found.interference:.2f} times as long: they "
            "share a machine; --together measures them under load"
        )
    if undetermined:
        notes.append(f"nothing was measured that shows {', '.join(undetermined)}")
    if not counts:
        notes.append("the server does not count the tokens of prompts: a token per word is assumed")
    left_out = {text for s in surveys for text in s.left_out}
    if left_out:
        notes.append(
            f"{len(left_out)} measurements were left out, e.g. {min(left_out)}; "
            "a larger --budget has them"
        )
    return notes


async def interference(endpoints: Sequence[Endpoint]) -> list[float | None]:
    """Return for each replica its times with all of them at work / alone, the larger of two kinds.

    One kind is reading a prompt, the other answering eight. None: it could not be measured.
    """
    alone = [await _medians(endpoint) for endpoint in endpoints]
    together = await asyncio.gather(*(_medians(endpoint) for endpoint in endpoints))
    ratios = [b / a for a, b in zip(alone, together, strict=True)]
    return [float(np.nanmax(r)) if np.isfinite(r).any() else None for r in ratios]


async def _medians(endpoint: Endpoint) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    medians = []
    for probe in SHARED:
        values = []
        for _ in range(SHARED_REPEATS):
            replies = await endpoint.ask(probe)
            failed = any(reply.failure is not None for reply in replies)
            found = None if failed else p.sample(probe, replies)
            if found is not None:
                values.append(found.ms)
        medians.append(float(np.median(values)) if values else np.nan)
    return np.array(medians)
