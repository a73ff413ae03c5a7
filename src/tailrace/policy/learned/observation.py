"""What a learned policy sees: every feature with its name, unit, scaling and source.

:func:`observe` computes it from a :class:`~tailrace.view.records.View` alone, so the simulator, the
Vidur plug-in and the live router show a policy the same numbers. There is one row per replica,
without the replica's number, and one vector for the request and the cluster.

To add a feature: append it to a table, and fill ``COLUMN.name`` or ``REQUEST_COLUMN.name`` in the
function named above that table.

Counts, tokens and seconds are shown as ``log1p(x / unit)``. Where comparing replicas matters, a
second feature ``NAME_vs_mean`` is the difference from the mean over the available replicas. Numbers
are finite and within ``+-LIMIT``.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from tailrace.compiled import inner, positions, vectorised
from tailrace.policy.learned.logarithm import log
from tailrace.policy.rules import quantities
from tailrace.policy.rules.predicted import predicted_ttft, prefill_s, queued_prefill_s
from tailrace.view.cost_model import token_ms
from tailrace.view.records import HISTORY_S, RECENT_WORK_S

LIMIT = 10.0
#: Units of the logarithms: quantities well below one unit are shown close to zero.
TOKENS, SECONDS, TOKENS_PER_S = 64.0, 0.1, 100.0


@dataclass(frozen=True)
class Feature:
    """One number a learned policy sees."""

    name: str
    unit: str
    """Of the quantity before scaling."""
    scaling: str
    """How the number is computed from the quantity."""
    source: str
    """ledger, metrics, prefix index, request, configuration or cost model."""
    help: str
    """What it means."""


_LOG = "log1p(x)"
_SIGNED_LOG = "sign(x) log1p(|x|)"
_LOG_TOKENS = f"log1p(x/{TOKENS:g})"
_LOG_SECONDS = f"log1p(x/{SECONDS:g})"

#: Of each replica by itself; ``_show_replica`` fills them in.
_OWN = (
    Feature("queued", "requests", _LOG, "ledger", "sent, without a first token"),
    Feature("in_flight", "requests", _LOG, "ledger", "sent, not finished"),
    Feature(
        "oldest_wait", "s", _LOG_SECONDS, "ledger", "waiting time of the oldest queued request"
    ),
    Feature("mean_wait", "s", _LOG_SECONDS, "ledger", "mean waiting time of the queued"),
    Feature("queued_tokens", "tokens", _LOG_TOKENS, "ledger", "prompts of the queued"),
    Feature(
        "queued_uncached",
        "tokens",
        _LOG_TOKENS,
        "ledger",
        "prompts of the queued, less what is believed cached",
    ),
    Feature(
        "context",
        "tokens",
        _LOG_TOKENS,
        "ledger",
        "prompt and output tokens so far of the answering requests",
    ),
    Feature(
        "tokens_to_come",
        "tokens",
        _LOG_TOKENS,
        "ledger",
        "predicted outputs of those in flight, less what has streamed back",
    ),
    Feature(
        "throughput",
        "tokens/s",
        f"log1p(x/{TOKENS_PER_S:g})",
        "ledger",
        f"output tokens streamed back, fading with {HISTORY_S:g} s",
    ),
    Feature(
        "recent_work",
        "tokens",
        _LOG_TOKENS,
        "ledger",
        "uncached prompt tokens sent recently, fading",
    ),
    Feature(
        "trend",
        "requests",
        _SIGNED_LOG,
        "ledger",
        f"in flight, less its moving average over {HISTORY_S:g} s",
    ),
    Feature("kv_used", "share", "x", "metrics", "KV memory held; by the ledger without metrics"),
    Feature(
        "waiting",
        "requests",
        _LOG,
        "metrics",
        "server's queue and what was sent since; queued without metrics",
    ),
    Feature("metrics_age", "s", _LOG_SECONDS, "metrics", "age of the snapshot; 0 without metrics"),
    Feature("has_metrics", "0/1", "x", "metrics", "0: no snapshot, the ledger is used instead"),
    Feature(
        "kv_free", "share", "clip(x, -1, 1)", "ledger", "KV memory left including this request"
    ),
    Feature(
        "slots_left", "share", "clip(x, -1, 1)", "ledger", "batch slots left before the request"
    ),
    Feature("cached", "tokens", _LOG_TOKENS, "prefix index", "prompt tokens believed cached here"),
    Feature(
        "cached_share", "share", "x", "prefix index", "share of the prompt believed cached here"
    ),
    Feature("uncached", "tokens", _LOG_TOKENS, "prefix index", "prompt tokens to be computed here"),
    Feature(
        "index_fill",
        "share",
        "clip(x, -1, 1)",
        "prefix index",
        "tokens the index holds for it / KV memory",
    ),
    Feature("is_last", "0/1", "x", "ledger", "the session's previous request went here"),
    Feature("prefill_s", "s", _LOG_SECONDS, "cost model", "to compute the uncached part alone"),
    Feature("ttft", "s", _LOG_SECONDS, "cost model", "predicted time to first token here"),
    Feature("ttft_to_slo", "ratio", "log(x)", "cost model", "ttft as a multiple of the target"),
    Feature(
        "decode",
        "s",
        "log1p(x/0.01)",
        "cost model",
        "duration of an iteration that decodes all in flight",
    ),
    Feature("speed", "tokens/s", "log(x/10000)", "cost model", "prefill throughput when idle"),
    Feature("queued_s", "s", _LOG_SECONDS, "cost model", "to compute the prompts of the queued"),
    Feature(
        "own_s", "s", _LOG_SECONDS, "cost model", "to compute the uncached part, with attention"
    ),
    Feature("saved_s", "s", _LOG_SECONDS, "cost model", "saved by what is believed cached here"),
    Feature(
        "prefill_load",
        "share",
        _LOG,
        "cost model",
        f"time to compute recent_work / {RECENT_WORK_S:g} s",
    ),
    Feature(
        "room", "ratio", "log(x)", "configuration", "prompts like this one its KV memory holds"
    ),
)

#: Also shown as the difference from the mean over the available replicas.
_COMPARED = (
    "queued",
    "in_flight",
    "oldest_wait",
    "queued_uncached",
    "context",
    "tokens_to_come",
    "throughput",
    "recent_work",
    "kv_used",
    "waiting",
    "kv_free",
    "cached_share",
    "uncached",
    "ttft",
    "decode",
    "speed",
    "queued_s",
    "own_s",
    "saved_s",
    "prefill_load",
)


def _compared(name: str) -> Feature:
    own = next(feature for feature in _OWN if feature.name == name)
    return Feature(
        f"{name}_vs_mean",
        own.unit,
        f"{own.scaling}, minus its mean",
        own.source,
        f"{own.help}: difference to the mean over the available replicas",
    )


#: Of each replica [F].
REPLICA_FEATURES = (
    *_OWN,
    *(_compared(name) for name in _COMPARED),
    Feature("ttft_vs_best", "s", f"{_LOG_SECONDS}, minus the least", "cost model", "ttft - least"),
    Feature(
        "cached_share_vs_best", "share", "x, minus the largest", "prefix index", "share - largest"
    ),
    Feature(
        "saved_s_vs_best",
        "s",
        f"{_LOG_SECONDS}, minus the largest",
        "cost model",
        "saved_s - largest",
    ),
)

#: Of the request and of the cluster [G]; ``_show_request`` and ``_show_cluster`` fill them in.
REQUEST_FEATURES = (
    Feature("prompt", "tokens", _LOG_TOKENS, "request", "prompt length"),
    Feature("predicted_output", "tokens", _LOG_TOKENS, "request", "predicted answer length"),
    Feature(
        "waited",
        "s",
        _LOG_SECONDS,
        "request",
        "time since arrival, if it could not be sent at once",
    ),
    Feature("turn", "requests", _LOG, "request", "turns of its session before it"),
    Feature("in_session", "0/1", "x", "request", "1: it belongs to a session"),
    Feature("ttft_slo", "s", "log(x)", "request", "target for the time to first token"),
    Feature("tpot_slo", "s", "log(x/0.05)", "request", "target for the time per output token"),
    Feature("replicas", "replicas", _LOG, "configuration", "available replicas"),
    Feature(
        "arrival_rate",
        "requests/s",
        _LOG,
        "ledger",
        f"per available replica, fading with {HISTORY_S:g} s",
    ),
    Feature("mean_in_flight", "requests", _LOG, "ledger", "mean over the available replicas"),
    Feature("in_flight_spread", "requests", _LOG, "ledger", "most minus least in flight"),
    Feature("in_flight_cv", "ratio", "x", "ledger", "coefficient of variation of in flight"),
    Feature("mean_uncached", "tokens", _LOG_TOKENS, "ledger", "mean of the queued uncached tokens"),
    Feature(
        "uncached_cv",
        "ratio",
        "x",
        "ledger",
        "coefficient of variation of the queued uncached tokens",
    ),
    Feature("mean_kv_used", "share", "x", "metrics", "mean KV memory held, as kv_used"),
    Feature("best_ttft", "s", _LOG_SECONDS, "cost model", "least predicted time to first token"),
    Feature("best_cached_share", "share", "x", "prefix index", "largest cached share"),
    Feature(
        "cached_replicas", "share", "x", "prefix index", "share of replicas with any of it cached"
    ),
    Feature("best_saved_s", "s", _LOG_SECONDS, "cost model", "largest saved_s"),
    Feature("least_own_s", "s", _LOG_SECONDS, "cost model", "least own_s"),
    Feature("mean_prefill_load", "share", _LOG, "cost model", "mean of prefill_load, as shown"),
)

N_REPLICA_FEATURES = len(REPLICA_FEATURES)
N_REQUEST_FEATURES = len(REQUEST_FEATURES)

#: Columns of REPLICA_FEATURES and REQUEST_FEATURES by name: ``row[COLUMN.queued]``.
COLUMN = positions(feature.name for feature in REPLICA_FEATURES)
REQUEST_COLUMN = positions(feature.name for feature in REQUEST_FEATURES)
_FIRST_COMPARED = len(_OWN)
_N_COMPARED = len(_COMPARED)
_SOURCE = np.array([getattr(COLUMN, name) for name in _COMPARED], np.int64)
#: Columns that ``_rescale`` covers, in whole vectors. Those after ``_OWN`` are filled in later.
_WHOLE = -(-len(_OWN) // 16) * 16
_ZERO, _SMALLEST, _LARGEST = np.float32(0.0), np.float32(1e-30), np.float32(1e30)


def _scaling(feature: Feature) -> tuple[bool, bool, float, float]:
    """Return whether the number is a logarithm, whether it is signed, and its (per unit, plus)."""
    if feature.scaling == _SIGNED_LOG:
        return True, True, 1.0, 1.0
    found = re.fullmatch(r"log(1p)?\(x(?:/([0-9.]+))?\)", feature.scaling)
    if found is None:
        return False, False, 0.0, 1.0
    return True, False, 1.0 / float(found[2] or 1), 1.0 if found[1] else 0.0


_SCALING = [_scaling(feature) for feature in _OWN]
_SCALING += [(False, False, 0.0, 1.0)] * (_WHOLE - len(_OWN))
_IS_LOG = np.array([scaling[0] for scaling in _SCALING])
_IS_SIGNED = np.array([scaling[1] for scaling in _SCALING])
_PER_UNIT = np.array([scaling[2] for scaling in _SCALING], np.float32)
_PLUS = np.array([scaling[3] for scaling in _SCALING], np.float32)


@inner
def observe(view, replica_obs, request_obs):
    """Fill ``replica_obs`` float32 [n, F] and ``request_obs`` float32 [G] from a view.

    Rows of unavailable replicas are filled too, but influence nothing else.
    """
    last = quantities.usable_last(view)
    for i in range(view.replicas.size):
        _show_replica(view, i, i == last, replica_obs[i])
        _rescale(replica_obs[i])
    _compare(view.replicas, replica_obs)
    _show_request(view, request_obs)
    _show_cluster(view, replica_obs, request_obs)
    for i in range(view.replicas.size):
        _bound(replica_obs[i])
    _bound(request_obs)


@inner
def _show_replica(view, i, is_last, row):
    """Fill the columns of ``_OWN``."""
    replica, request = view.replicas[i], view.request
    now = request["now"]
    queued, in_flight = replica["queued"], replica["in_flight"]
    capacity = max(1.0, float(replica["capacity_tokens"]))
    slots = max(1.0, float(replica["batch_cap"]))
    has_metrics = quantities.has_metrics(replica)
    uncached = quantities.uncached(view, i)
    held = quantities.in_flight_tokens(replica)
    ttft = predicted_ttft(view, i)
    # Unscaled quantities; ``_rescale`` follows.
    row[COLUMN.queued] = queued
    row[COLUMN.in_flight] = in_flight
    row[COLUMN.oldest_wait] = now - replica["oldest_sent"] if queued > 0 else 0.0
    mean_sent = replica["queued_since_sum"] / max(1, queued)
    row[COLUMN.mean_wait] = now - mean_sent if queued > 0 else 0.0
    row[COLUMN.queued_tokens] = replica["queued_tokens"]
    row[COLUMN.queued_uncached] = replica["queued_uncached"]
    row[COLUMN.context] = replica["context_tokens"]
    streamed = replica["context_tokens"] - replica["answering_prompts"]
    row[COLUMN.tokens_to_come] = replica["predicted_tokens"] - streamed
    watched_s = max(1.0, view.router["watched_s"])
    row[COLUMN.throughput] = replica["recent_tokens"] / watched_s
    row[COLUMN.recent_work] = quantities.recent_work(view, i)
    row[COLUMN.trend] = in_flight - _mean_in_flight(view, i)
    row[COLUMN.kv_used] = quantities.kv_used(replica)
    row[COLUMN.waiting] = quantities.waiting_now(replica)
    row[COLUMN.metrics_age] = now - replica["metrics_at"] if has_metrics else 0.0
    row[COLUMN.has_metrics] = 1.0 if has_metrics else 0.0
    row[COLUMN.kv_free] = _within((capacity - held - request["prompt_tokens"]) / capacity, 1.0)
    row[COLUMN.slots_left] = _within((slots - in_flight) / slots, 1.0)
    row[COLUMN.cached] = replica["cached_tokens"]
    row[COLUMN.cached_share] = quantities.matched_share(view, i)
    row[COLUMN.uncached] = uncached
    row[COLUMN.index_fill] = _within(replica["index_tokens"] / capacity, 1.0)
    row[COLUMN.is_last] = 1.0 if is_last else 0.0
    row[COLUMN.prefill_s] = uncached / max(1e-9, replica["prefill_tokens_per_s"])
    row[COLUMN.ttft] = ttft
    row[COLUMN.ttft_to_slo] = max(1e-9, ttft) / max(1e-9, request["ttft_slo_s"])
    row[COLUMN.decode] = _decode_s(view, i)
    row[COLUMN.speed] = max(1e-9, replica["prefill_tokens_per_s"])
    prompt, cached = float(request["prompt_tokens"]), float(replica["cached_tokens"])
    row[COLUMN.queued_s] = queued_prefill_s(view, i)
    row[COLUMN.own_s] = prefill_s(view, i, cached, prompt)
    row[COLUMN.saved_s] = prefill_s(view, i, 0.0, cached)
    busy_s = quantities.recent_work(view, i) / max(1e-9, replica["prefill_tokens_per_s"])
    row[COLUMN.prefill_load] = busy_s / RECENT_WORK_S
    row[COLUMN.room] = capacity / max(1.0, prompt)


@vectorised
def _rescale(row):
    """Scale the quantities of ``_OWN`` in ``row``, as the table says.

    It covers a few columns more, so that whole vectors are computed.
    """
    for k in range(_WHOLE):
        x = row[k]
        size = abs(x) if _IS_SIGNED[k] else max(x, _ZERO)
        inner = min(max(size * _PER_UNIT[k] + _PLUS[k], _SMALLEST), _LARGEST)
        number = log(inner)
        number = -number if _IS_SIGNED[k] and x < _ZERO else number
        row[k] = number if _IS_LOG[k] else x


@inner
def _mean_in_flight(view, i):
    """Moving average of the requests in flight on a replica; at first the current number."""
    replica, watched_s = view.replicas[i], view.router["watched_s"]
    if watched_s <= 0.0:
        return float(replica["in_flight"])
    return replica["recent_in_flight"] / watched_s


@inner
def _decode_s(view, i):
    """Seconds of an iteration in which all requests in flight and the current one decode."""
    replica, cost = view.replicas[i], view.costs[i]
    decodes = min(replica["in_flight"] + 1, replica["batch_cap"])
    context = min(
        quantities.in_flight_tokens(replica) + view.request["prompt_tokens"],
        replica["capacity_tokens"],
    )
    ms = token_ms(cost, float(decodes)) + cost["per_context_ms"] * context
    return ms / replica["speed"] * 1e-3


@inner
def _compare(replicas, replica_obs):
    """Fill the columns that compare a replica with the available ones."""
    for k in range(_N_COMPARED):
        mean = np.float32(_mean(replicas, replica_obs, _SOURCE[k]))
        for i in range(replicas.size):
            replica_obs[i, _FIRST_COMPARED + k] = replica_obs[i, _SOURCE[k]] - mean
    least, largest, most_saved, _ = _best(replicas, replica_obs)
    for i in range(replicas.size):
        replica_obs[i, COLUMN.ttft_vs_best] = replica_obs[i, COLUMN.ttft] - least
        share = replica_obs[i, COLUMN.cached_share]
        replica_obs[i, COLUMN.cached_share_vs_best] = share - largest
        replica_obs[i, COLUMN.saved_s_vs_best] = replica_obs[i, COLUMN.saved_s] - most_saved


@inner
def _mean(replicas, replica_obs, column):
    """Mean of a column over the available replicas; 0 without any."""
    total, count = 0.0, 0
    for i in range(replicas.size):
        if replicas[i]["available"] != 0:
            total += replica_obs[i, column]
            count += 1
    return total / max(1, count)


@inner
def _best(replicas, replica_obs):
    """Least ttft, largest cached share, most saved_s and least own_s, as shown; 0 without any."""
    least, largest, any_available = np.inf, 0.0, False
    most_saved, least_own = 0.0, np.inf
    for i in range(replicas.size):
        if replicas[i]["available"] != 0:
            any_available = True
            least = min(least, replica_obs[i, COLUMN.ttft])
            largest = max(largest, replica_obs[i, COLUMN.cached_share])
            most_saved = max(most_saved, replica_obs[i, COLUMN.saved_s])
            least_own = min(least_own, replica_obs[i, COLUMN.own_s])
    if not any_available:
        return 0.0, 0.0, 0.0, 0.0
    return least, largest, most_saved, least_own


@inner
def _show_request(view, out):
    """Fill the columns of the request."""
    request = view.request
    out[REQUEST_COLUMN.prompt] = _log(request["prompt_tokens"], TOKENS)
    out[REQUEST_COLUMN.predicted_output] = _log(request["predicted_output"], TOKENS)
    out[REQUEST_COLUMN.waited] = _log(request["now"] - request["arrived_at"], SECONDS)
    out[REQUEST_COLUMN.turn] = _log(request["turn"], 1.0)
    out[REQUEST_COLUMN.in_session] = 1.0 if request["session"] >= 0 else 0.0
    out[REQUEST_COLUMN.ttft_slo] = math.log(max(1e-9, request["ttft_slo_s"]))
    out[REQUEST_COLUMN.tpot_slo] = math.log(max(1e-9, request["tpot_slo_s"]) / 0.05)


@inner
def _show_cluster(view, replica_obs, out):
    """Fill the columns of the cluster; needs those of the replicas."""
    replicas = view.replicas
    mean, count = quantities.in_flight_mean(replicas)
    least, most = quantities.in_flight_range(replicas)
    uncached = squares = uncached_squares = cached = 0.0
    for i in range(replicas.size):
        if replicas[i]["available"] != 0:
            tokens = float(replicas[i]["queued_uncached"])
            uncached += tokens / count
            uncached_squares += tokens * tokens / count
            squares += float(replicas[i]["in_flight"]) ** 2 / count
            cached += (replicas[i]["cached_tokens"] > 0) / count
    best_ttft, best_share, most_saved, least_own = _best(replicas, replica_obs)
    rate = view.router["recent_arrivals"] / max(1.0, view.router["watched_s"])
    out[REQUEST_COLUMN.replicas] = _log(count, 1.0)
    out[REQUEST_COLUMN.arrival_rate] = _log(rate / max(1, count), 1.0)
    out[REQUEST_COLUMN.mean_in_flight] = _log(mean, 1.0)
    out[REQUEST_COLUMN.in_flight_spread] = _log(most - least, 1.0)
    out[REQUEST_COLUMN.in_flight_cv] = _variation(mean, squares)
    out[REQUEST_COLUMN.mean_uncached] = _log(uncached, TOKENS)
    out[REQUEST_COLUMN.uncached_cv] = _variation(uncached, uncached_squares)
    out[REQUEST_COLUMN.mean_kv_used] = _mean(replicas, replica_obs, COLUMN.kv_used)
    out[REQUEST_COLUMN.best_ttft] = best_ttft
    out[REQUEST_COLUMN.best_cached_share] = best_share
    out[REQUEST_COLUMN.cached_replicas] = cached
    out[REQUEST_COLUMN.best_saved_s] = most_saved
    out[REQUEST_COLUMN.least_own_s] = least_own
    out[REQUEST_COLUMN.mean_prefill_load] = _mean(replicas, replica_obs, COLUMN.prefill_load)


@inner
def _variation(mean, mean_square):
    """Coefficient of variation from a mean and a mean square; 0 if the mean is."""
    if mean <= 0.0:
        return 0.0
    return math.sqrt(max(0.0, mean_square - mean * mean)) / mean


@inner
def _log(value, unit):
    """Scale a non-negative quantity; negative rounding errors count as zero."""
    return math.log1p(max(0.0, value / unit))


@inner
def _within(value, limit):
    return min(max(value, -limit), limit)


@inner
def _bound(row):
    """Clip every number to LIMIT; NaN becomes zero."""
    for k in range(row.size):
        value = row[k]
        row[k] = 0.0 if np.isnan(value) else _within(value, LIMIT)
