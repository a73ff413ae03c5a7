"""Statistics of a request table."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.prefix import repeated_tokens
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

QUANTILES = (5, 25, 50, 75, 90, 95, 99, 99.9)
IDC_WINDOWS_S = (1, 10, 60)


def statistics(table: RequestTable) -> dict[str, Any]:
    """Return counts, rates, dispersion, length quantiles, sessions and repetition of a table.

    Plain numbers, lists and dicts, ready for JSON; None where a statistic is undefined.
    Times are nominal for later turns. "repeated" is what an infinite cache would find if every
    request had ended before the next arrived.
    """
    rows = table.rows
    arrival_s = rows["arrival_s"]
    span_s = float(arrival_s[-1] - arrival_s[0])
    prompt_total = int(rows["prompt_tokens"].sum(dtype=np.int64))
    repeated = int(repeated_tokens(table).sum())
    with_answers = int(repeated_tokens(table, answers=True).sum())
    return {
        "requests": len(rows),
        "span_s": span_s,
        "rate_rps": (len(rows) - 1) / span_s if span_s > 0 else None,
        "gap_cv": gap_cv(arrival_s),
        "idc": {f"{w}s": index_of_dispersion(arrival_s, w) for w in IDC_WINDOWS_S},
        "prompt_tokens": _lengths(rows["prompt_tokens"]),
        "output_tokens": _lengths(rows["output_tokens"]),
        "sessions": _sessions(rows),
        "prompt_tokens_total": prompt_total,
        "output_tokens_total": int(rows["output_tokens"].sum(dtype=np.int64)),
        "distinct_prompt_tokens": prompt_total - repeated,
        "repeated_share": repeated / prompt_total,
        "repeated_share_with_answers": with_answers / prompt_total,
    }


def gap_cv(arrival_s: Floats) -> float | None:
    """Return the coefficient of variation of the gaps between sorted arrivals [n]."""
    gaps_s = np.diff(arrival_s)
    if gaps_s.size < 2 or gaps_s.mean() == 0:
        return None
    return float(gaps_s.std() / gaps_s.mean())


def index_of_dispersion(arrival_s: Floats, window_s: float) -> float | None:
    """Return variance / mean of the counts in whole windows from the first arrival on; Poisson: 1.

    None with fewer than ten windows.
    """
    window = np.floor((arrival_s - arrival_s[0]) / window_s)
    windows = int(window[-1])  # the last one is not complete
    if windows < 10:
        return None
    # Empty windows are not stored: a sparse year of seconds must not need a year of memory.
    _, counts = np.unique(window[window < windows], return_counts=True)
    mean = counts.sum() / windows
    variance = (counts.astype(np.float64) ** 2).sum() / windows - mean**2
    return float(variance / mean)


def _lengths(tokens: NDArray[np.int32]) -> dict[str, Any]:
    """Return mean, extremes and quantiles of lengths [n]."""
    values = np.percentile(tokens, QUANTILES)
    return {
        "mean": float(tokens.mean()),
        "min": int(tokens.min()),
        "max": int(tokens.max()),
        "quantiles": {f"p{q:g}": float(v) for q, v in zip(QUANTILES, values, strict=True)},
    }


def _sessions(rows: NDArray[np.void]) -> dict[str, Any] | None:
    """Return statistics of the conversations, None if there are none."""
    member = rows["session"] >= 0
    if not member.any():
        return None
    _, turns = np.unique(rows["session"][member], return_counts=True)
    think_s = rows["think_s"][rows["parent"] >= 0]
    median, p90 = np.percentile(think_s, [50, 90]) if think_s.size else (None, None)
    return {
        "count": len(turns),
        "requests": int(member.sum()),
        "turns_mean": float(turns.mean()),
        "turns_max": int(turns.max()),
        "think_s_median": None if median is None else float(median),
        "think_s_p90": None if p90 is None else float(p90),
    }
