"""Workloads by name: where the rest of the program gets all its traffic."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import get_args

import numpy as np

from tailrace import config
from tailrace.errors import TailraceError, unknown_name
from tailrace.workload import fitted
from tailrace.workload.arrivals import (
    ArrivalProcess,
    ClientPool,
    Diurnal,
    GammaRenewal,
    Mmpp2,
    Poisson,
    replay,
)
from tailrace.workload.catalogue import BUILT_IN
from tailrace.workload.classes import RequestClass
from tailrace.workload.compose import WorkloadSpec, compose, mix, with_think_scale
from tailrace.workload.draft import retime
from tailrace.workload.lengths import Streams
from tailrace.workload.recorded.resample import ConversationPool
from tailrace.workload.table import (
    DEFAULT_TPOT_SLO_S,
    DEFAULT_TTFT_SLO_S,
    RequestTable,
    scale_prompts,
)

NATIVE = "native"
TRACE = "trace"
RESAMPLED = "resampled"
_DAY_S = 86_400.0
_TRACE_SUFFIXES = (".csv", ".jsonl", ".json", ".parquet", ".gz")

#: Arrival processes by name, made from (coefficient of variation, span of the table in s).
_PROCESSES: Mapping[str, Callable[[float, float], ArrivalProcess]] = {
    "poisson": lambda _cv, _span_s: Poisson(),
    "gamma": lambda cv, _span_s: GammaRenewal(cv),
    "mmpp": lambda cv, _span_s: _bursty(cv),
    # A table shorter than a day runs through a whole day, or the profile would hardly move.
    "diurnal": lambda _cv, span_s: Diurnal(fitted.HOURLY_SWINGING, min(_DAY_S, span_s)),
    "onoff": lambda _cv, _span_s: fitted.CODE_ARRIVALS,
    "cox": lambda _cv, _span_s: fitted.CHAT_ARRIVALS,
    "pool": lambda _cv, _span_s: ClientPool(),
}

#: Processes that the settings accept.
_OFFERED = [name for name in get_args(config.ArrivalsName) if name in _PROCESSES]

_SPECS = {spec.name: spec for spec in BUILT_IN}


def names() -> list[str]:
    """Return the names of the built-in workloads."""
    return list(_SPECS)


def describe(name: str) -> WorkloadSpec:
    """Return the description of a built-in workload."""
    if name not in _SPECS:
        raise unknown_name("workload", name, _SPECS)
    return _SPECS[name]


def max_tokens(name: str, prompt_scale: float = 1.0) -> int:
    """Return an upper bound of prompt and answer together of a built-in workload, in tokens."""
    lengths = [part.content.max_lengths for part in describe(name).parts]
    # A prompt of a few runs is rounded run by run.
    return max(math.ceil(prompt * prompt_scale) + 3 + output for prompt, output in lengths)


def mixture(name: str, shares: Mapping[str, float]) -> WorkloadSpec:
    """Return a mixture of built-in workloads, by their shares of the requests."""
    for part, share in shares.items():
        describe(part)
        if not (share > 0 and math.isfinite(share)):
            raise TailraceError(f"the share of {part} must be positive, got {share}")
    if not shares:
        raise TailraceError("a mixture needs at least one workload")
    described = ", ".join(f"{part} {share:g}" for part, share in shares.items())
    return mix(
        name, f"Mixture: {described}.", "composition of built-in workloads", 5.0, shares, BUILT_IN
    )


def make(
    name: str | WorkloadSpec,
    requests: int,
    rate: float | None,
    seed: int,
    *,
    arrivals: str = NATIVE,
    arrival_cv: float = 2.0,
    prompt_scale: float = 1.0,
    think_scale: float = 1.0,
    ttft_slo_s: float = DEFAULT_TTFT_SLO_S,
    tpot_slo_s: float = DEFAULT_TPOT_SLO_S,
) -> RequestTable:
    """Make exactly ``requests`` rows of a built-in workload (or a mixture).

    ``rate`` is in requests per second, later turns included; None takes the workload's own.
    Another arrival process than the native one sets when single requests and conversations begin.
    Requests of a workload with classes have the targets of their class.
    """
    spec = describe(name) if isinstance(name, str) else name
    spec = with_think_scale(spec, think_scale)
    rate_rps = spec.default_rate_rps if rate is None else rate
    _check(requests, rate_rps)
    if arrivals in (TRACE, RESAMPLED):
        raise TailraceError(
            f"workload '{spec.name}' has no recorded arrivals to replay; choose another process "
            f"({', '.join([NATIVE, *_OFFERED])}), or name a file of requests"
        )
    process = None
    if arrivals != NATIVE:
        process = _process(arrivals, arrival_cv, requests / rate_rps)
    table = scale_prompts(compose(spec, requests, rate_rps, seed, process), prompt_scale)
    if not spec.classes:
        table.rows["ttft_slo_s"] = ttft_slo_s
        table.rows["tpot_slo_s"] = tpot_slo_s
    return table


def classes_of(workload: str) -> tuple[RequestClass, ...]:
    """Return the classes of a workload's requests; empty: it has none, or is a file."""
    return _SPECS[workload].classes if workload in _SPECS else ()


def from_settings(settings: config.Workload, rate: float | None, seed: int) -> RequestTable:
    """Make the table that settings describe; see :func:`_from_settings`."""
    table = _from_settings(settings, rate, seed)
    if not settings.session_ids:
        table.rows["session"] = -1
        table.rows["turn"] = 0
    return table


def _from_settings(settings: config.Workload, rate: float | None, seed: int) -> RequestTable:
    """Make the table that settings describe: a built-in workload, or a file of requests.

    ``rate`` (requests/s) follows from the settings' ``rate`` or ``load``; None: the traffic's own.
    Of a file the first ``requests`` rows are taken (fewer if it has fewer). With ``arrivals`` =
    native they keep their pattern, rescaled to ``rate``; with trace they are replayed at their
    recorded times x ``time_scale``, and rescaled only if the settings name a rate; with any other
    process they are re-timed at ``rate``. With resampled the whole file is what conversations are
    drawn from at ``rate``, see recorded/resample.py.
    """
    path = Path(settings.name)
    if settings.name in _SPECS or not (path.is_file() or _looks_like_a_path(settings.name)):
        return make(
            settings.name,
            settings.requests,
            rate,
            seed,
            arrivals=settings.arrivals,
            arrival_cv=settings.arrival_cv,
            prompt_scale=settings.prompt_scale,
            think_scale=settings.think_scale,
            ttft_slo_s=settings.ttft_slo_s,
            tpot_slo_s=settings.tpot_slo_s,
        )
    if settings.arrivals == RESAMPLED:
        recording, has_slos = _recording(path, path.stat().st_mtime_ns if path.is_file() else 0)
        rate_rps = _recorded_rate(recording.table) if rate is None else rate
        table = recording.draw(settings.requests, rate_rps, seed)
        table = scale_prompts(table, settings.prompt_scale)
        table.rows["think_s"] *= settings.think_scale
        return table if has_slos else _with_targets(table, settings)
    from tailrace.workload import traces  # its readers of files take long to import

    trace = traces.read(path)
    table = RequestTable(trace.table.rows[: settings.requests].copy(), trace.table.runs)
    table = scale_prompts(table, settings.prompt_scale)
    table.rows["think_s"] *= settings.think_scale
    if not trace.has_slos:
        _with_targets(table, settings)
    if settings.arrivals == TRACE:
        rate = settings.rate
    if not trace.has_arrivals and settings.arrivals in (NATIVE, TRACE):
        raise TailraceError(
            f"{path} has no arrival times to replay; "
            f"set arrivals to a process: {', '.join(_OFFERED)}"
        )
    return _retimed(table, settings, rate, seed)


def _with_targets(table: RequestTable, settings: config.Workload) -> RequestTable:
    """Set the latency targets of the settings."""
    table.rows["ttft_slo_s"] = settings.ttft_slo_s
    table.rows["tpot_slo_s"] = settings.tpot_slo_s
    return table


@lru_cache(maxsize=4)
def _recording(path: Path, changed_ns: int) -> tuple[ConversationPool, bool]:  # noqa: ARG001
    """Read a file to draw from, and whether it has latency targets of its own."""
    from tailrace.workload import traces

    trace = traces.read(path, sort=True)
    return ConversationPool(trace.table), trace.has_slos


def _retimed(
    table: RequestTable, settings: config.Workload, rate: float | None, seed: int
) -> RequestTable:
    """Apply arrivals, time scale and rate to a table read from a file."""
    root = table.rows["parent"] < 0
    root_s = table.rows["arrival_s"][root]
    roots, requests = int(root.sum()), len(table)
    if settings.arrivals in (NATIVE, TRACE):
        root_s = replay(root_s, settings.time_scale)
        if rate is not None and root_s[-1] > 0:
            _check(requests, rate)
            # Later turns follow in their own time, so only the starts are rescaled.
            root_s = root_s * (requests / rate / root_s[-1])
    else:
        rate_rps = rate if rate is not None else _recorded_rate(table)
        _check(requests, rate_rps)
        process = _process(settings.arrivals, settings.arrival_cv, requests / rate_rps)
        rng = Streams(seed, "file").rng("arrivals")
        root_s = process.times(rate_rps * roots / requests, roots, rng)
    table = retime(table, root_s)
    table.validate()
    return table


def _process(name: str, cv: float, span_s: float) -> ArrivalProcess:
    """Return the process of a name."""
    if name not in _PROCESSES:
        raise unknown_name("arrival process", name, [NATIVE, TRACE, *_PROCESSES])
    if not (cv > 0 and math.isfinite(cv)):
        raise TailraceError(f"arrival_cv must be positive, got {cv}")
    return _PROCESSES[name](cv, span_s)


def _bursty(cv: float) -> Mmpp2:
    b = fitted.BURSTY_ARRIVALS
    return Mmpp2(b.high, b.low, b.mean_high_s, b.mean_low_s, cv)


def _check(requests: int, rate_rps: float) -> None:
    if requests < 1:
        raise TailraceError(f"requests must be at least 1, got {requests}")
    if not (rate_rps > 0 and math.isfinite(rate_rps)):
        raise TailraceError(
            f"rate must be a positive number of requests per second, got {rate_rps}"
        )


def _recorded_rate(table: RequestTable) -> float:
    """Return requests per second as recorded, 1 if they all came at once."""
    span_s = float(np.ptp(table.rows["arrival_s"]))
    return len(table) / span_s if span_s > 0 else 1.0


def _looks_like_a_path(name: str) -> bool:
    return "/" in name or Path(name).suffix in _TRACE_SUFFIXES
