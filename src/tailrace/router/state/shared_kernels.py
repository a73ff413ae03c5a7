"""Decisions with the state of all workers: the sum of what they have sent, the union of what they
know of prompts. The counterpart of ``kernels.show`` and ``kernels.decide``."""

# mypy: disallow-untyped-defs=False

import math

import numpy as np

from tailrace.compiled import jit
from tailrace.router.state.kernels import MAIN, NO_CAUSE, _cached_tokens, judge
from tailrace.view import ledger, prefix_index
from tailrace.view.prefix_index import PrefixIndex
from tailrace.view.records import HISTORY_S, RECENT_WORK_S


@jit
def gather(
    request, me, replicas, routers, entries, slots, totals, seen, seen_routers, caching, answers,
    keys, units, branch_at, total, per_token, prior_output, most_output,
):  # fmt: skip
    """Fill ``seen`` [n] and ``seen_routers`` for a decision of worker ``me``.

    ``replicas`` [w, room] to ``totals`` [w, room] are the rows of all; see :class:`SharedState`.
    The rest is as in ``kernels.show``.
    """
    now = request[0]["now"]
    n = seen.size
    ledger.look(replicas[me, :n], routers[me, MAIN], now)
    _sum_routers(me, routers, seen_routers, now)
    router = seen_routers[MAIN]
    request[0]["predicted_output"] = min(ledger.mean_output(router, prior_output), most_output)
    prompt = request[0]["prompt_tokens"]
    for r in range(n):
        seen[r] = replicas[me, r]
        view = seen[r]
        view["cached_tokens"] = 0
        held = np.int64(0)
        for w in range(replicas.shape[0]):
            if replicas[w, r]["block_size"] == 0:
                continue  # it does not run
            if w != me:
                keep = math.exp(min(0.0, routers[w, MAIN]["looked_at"] - now) / HISTORY_S)
                _add(view, replicas[w, r], keep)
            if caching[r] != 0:
                index = PrefixIndex(entries[w], slots[w], totals[w])
                cached = _cached_tokens(
                    index, view, r, prompt, keys, units, branch_at, total, answers[r]
                )
                view["cached_tokens"] = max(view["cached_tokens"], cached)
                held += prefix_index.held_tokens(index, r)
        if caching[r] != 0:
            view["index_tokens"] = np.int64(held / per_token)


@jit
def _sum_routers(me, routers, seen_routers, now):
    """Every policy has random numbers and a cursor of its own; all else is the sum of all."""
    for k in range(seen_routers.size):
        rng, cursor = seen_routers[k]["rng"], seen_routers[k]["cursor"]
        seen_routers[k] = routers[me, MAIN]
        router = seen_routers[k]
        router["rng"], router["cursor"] = rng, cursor
        for w in range(routers.shape[0]):
            if w != me:
                other = routers[w, MAIN]
                keep = math.exp(min(0.0, other["looked_at"] - now) / HISTORY_S)
                router["decisions"] += other["decisions"]
                router["finished"] += other["finished"]
                router["finished_tokens"] += other["finished_tokens"]
                router["recent_arrivals"] += other["recent_arrivals"] * keep


@jit
def _add(view, other, keep):
    """Add what another worker has sent to a replica; ``keep``: how its averages have faded."""
    if other["queued"] > 0 and (view["queued"] == 0 or other["oldest_sent"] < view["oldest_sent"]):
        view["oldest_sent"] = other["oldest_sent"]
    view["in_flight"] += other["in_flight"]
    view["queued"] += other["queued"]
    view["queued_tokens"] += other["queued_tokens"]
    view["queued_uncached"] += other["queued_uncached"]
    view["queued_since_sum"] += other["queued_since_sum"]
    view["context_tokens"] += other["context_tokens"]
    view["answering_prompts"] += other["answering_prompts"]
    view["predicted_tokens"] += other["predicted_tokens"]
    view["sent_tokens"] += other["sent_tokens"]
    view["sent_requests"] += other["sent_requests"]
    fade = math.exp((other["recent_at"] - view["recent_at"]) / RECENT_WORK_S)
    view["recent_work"] += other["recent_work"] * fade
    view["finished"] += other["finished"]
    view["finished_tokens"] += other["finished_tokens"]
    view["streamed"] += other["streamed"]
    view["recent_tokens"] += other["recent_tokens"] * keep
    view["recent_in_flight"] += other["recent_in_flight"] * keep
    if other["metrics_at"] > view["metrics_at"]:
        view["metrics_at"] = other["metrics_at"]
        view["waiting"] = other["waiting"]
        view["running"] = other["running"]
        view["kv_used"] = other["kv_used"]


@jit
def decide(
    request, me, replicas, routers, entries, slots, totals, seen, seen_routers, costs, caching,
    answers, keys, units, branch_at, total, per_token, prior_output, most_output, row, code,
    params, lowest_id_wins, fallback, fallback_params, fallback_lowest, bounds, guard_ratio,
    guard_s, scores, whole, figures,
):  # fmt: skip
    """:func:`gather` and ``kernels.judge`` in one call."""
    gather(
        request, me, replicas, routers, entries, slots, totals, seen, seen_routers, caching,
        answers, keys, units, branch_at, total, per_token, prior_output, most_output,
    )  # fmt: skip
    return judge(
        request, seen, costs, seen_routers, row, code, params, lowest_id_wins, fallback,
        fallback_params, fallback_lowest, NO_CAUSE, bounds, guard_ratio, guard_s, scores, whole,
        figures,
    )  # fmt: skip
