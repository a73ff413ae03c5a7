"""Compiled code of the live router: what a worker sees, how it decides, what happens to a request.

Everything is entered into the records by the functions of ``view/ledger.py`` and
``view/prefix_index.py``, as in the simulator. One call does as much as possible, and scalars travel
in preallocated records (``DECISION``, ``ATTEMPT``), because handing arguments to compiled code
costs more than most of the work itself.

Content is counted in *units* (see intake/prompt_blocks.py). ``keys`` [u + 1] and ``units`` [u + 1]
are the runs of a prompt and, at the end, its *branch*: the key under which the conversation's
previous prompt and its answer were entered, and how much of this prompt they can be at most.

Arrays with a dimension of workers are those of :class:`~tailrace.router.state.shared_state
.SharedState`; the others are the caller's own rows.
"""

# mypy: disallow-untyped-defs=False

import math

import numpy as np

from tailrace.compiled import inlined, inner, jit
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.observation import _decode_s
from tailrace.policy.learned.policy import learned_scores
from tailrace.policy.rules import LEARNED, quantities, score
from tailrace.policy.rules.predicted import predicted_ttft
from tailrace.router.state import server_model
from tailrace.view import ledger, prefix_index
from tailrace.view.holding import has_room, is_saturated
from tailrace.view.prefix_index import PrefixIndex
from tailrace.view.records import HISTORY_S, View
from tailrace.view.selection import NO_REPLICA, choose

LEARNED_CODE = LEARNED.code
#: Up to this many runs, walking is as fast as searching.
SHORT = 8
#: No compiled rule: the scores were filled in by a policy written in Python.
NO_RULE = -1

#: Rows of the router records: one for each policy that decides, so that they share neither
#: random numbers nor round robin's cursor. The first is the ledger's.
MAIN, CANARY, SHADOW, FALLBACK = range(4)
#: Rows of the score matrix.
SCORES, FALLBACK_SCORES, TTFT, SHADOW_SCORES = range(4)
#: Why a decision is the fallback rule's.
NO_CAUSE, CAUSE_NAN, CAUSE_RANGE, CAUSE_GUARD, CAUSE_ERROR, CAUSE_TIME = range(6)
#: Scalars of one decision. Each policy has a record of its own for each of its roles, so that the
#: configuration is written once.
DECISION = np.dtype(
    [
        # about the request
        ("branch_at", "i8"),  # run from which the branch counts, -1: there is none
        ("total_units", "i8"),  # units of all runs
        ("units_per_token", "f8"),
        ("max_output", "f8"),  # tokens the client allows
        # results; the fallback rule must decide if ``cause`` is set before
        ("cause", "i8"),  # why the fallback rule decides
        ("chosen", "i8"),
        ("runner_up", "i8"),
        ("reason", "i8"),
        ("feature", "i8"),  # first one out of range, -1: none
        ("cached_tokens", "i8"),  # of the prompt on the chosen replica
        ("ours", "f8"),  # the reason's number for the chosen replica ...
        ("theirs", "f8"),  # ... and for the runner-up
        ("ttft_s", "f8"),  # predicted on the chosen replica
        ("predicted_output", "f8"),  # tokens
        # configuration
        ("worker", "i8"),
        ("workers", "i8"),
        ("view_row", "i8"),  # row of the shared arrays that holds what the worker sees
        ("prior_output", "f8"),  # expected tokens of an answer before any has ended
        ("row", "i8"),  # of the router records
        ("code", "i8"),  # of the compiled rule, NO_RULE: none
        ("lowest_id_wins", "i8"),
        ("fallback_code", "i8"),
        ("fallback_lowest_id_wins", "i8"),
        ("guard_ratio", "f8"),  # inf: no guard
        ("guard_s", "f8"),
        ("bounds_at", "i8"),  # where the trained range begins in ``guard``
    ]
)
#: Scalars of one request at one replica, written before each call about it.
ATTEMPT = np.dtype(
    [
        ("replica", "i8"),
        ("now", "f8"),  # s
        ("prompt_tokens", "i8"),
        ("cached_tokens", "i8"),  # as believed when it was sent
        ("predicted_output", "f8"),  # tokens, as the decision saw it
        ("branch_at", "i8"),  # as in DECISION
        ("total_units", "i8"),
        ("units_per_token", "f8"),
        ("sent_at", "f8"),  # s
        ("answering", "i8"),  # 1: its first token is in the ledger
        ("streamed", "i8"),  # tokens so far
        ("output", "i8"),  # tokens of a complete answer; -1: there is none to learn from
        ("index_later", "i8"),  # 1: the prefix index learns at the first token, not when sent
    ]
)
#: What is believed of a replica's prefix cache.
BELIEF = np.dtype(
    [
        ("caching", "i8"),  # indexes its memory is divided among, one per worker; 0: no cache
        ("answers", "i8"),  # 1: earlier answers are found in it
        ("exact", "i8"),  # 1: the server's own events say what it evicts
    ]
)
#: Main reason for the choice against the runner-up.
(
    ONLY_ONE, ALIKE, MORE_CACHED, LESS_QUEUED, FASTER, FEWER_ANSWERS, MORE_MEMORY, EARLIER, OTHER,
) = range(9)  # fmt: skip


# ---- what the router sees -----------------------------------------------------------------------


@inner
def matched_units(index, r, keys, units, branch_at, answers):
    """Leading units of a prompt that replica ``r`` has, as far as the index knows.

    A run is never known without the runs before it, since these are touched later and therefore
    evicted later; so in a long prompt the last known run is searched for. ``answers`` = 0 leaves
    the branch out.
    """
    count = keys.size - 1
    if count <= SHORT:
        matched = prefix_index.match_tokens(index, r, keys[:count], units[:count])
    else:
        matched = np.int64(0)
        known = _known_runs(index, r, keys, units, count)
        if known > 0:
            for k in range(known - 1):
                matched += units[k]
            last = known - 1
            matched += prefix_index.match_tokens(index, r, keys[last:known], units[last:known])
    if branch_at >= 0 and answers != 0:
        more = prefix_index.match_tokens(index, r, keys[count:], units[count:])
        if more > 0:
            for k in range(branch_at):
                more += units[k]
            matched = max(matched, more)
    return matched


@inner
def _known_runs(index, r, keys, units, count):
    """How many of the first runs are known at least in part."""
    low, high = 0, 1  # low runs are known, run number high - 1 is tried next
    bound = count + 1
    while high < bound:
        if prefix_index.match_tokens(index, r, keys[high - 1 : high], units[high - 1 : high]) > 0:
            low = high
        else:
            bound = high
        # Twice as far as long as all is known, then halfway.
        high = min(2 * high, bound - 1) if bound > count and high < count else (low + bound) // 2
        if high <= low:
            break
    return low


@inner
def _cached_tokens(index, replica, r, prompt, keys, units, branch_at, total, answers):
    """Prompt tokens that a replica is believed to have cached: whole blocks, never all of them."""
    matched = matched_units(index, r, keys, units, branch_at, answers)
    size = replica["block_size"]
    tokens = matched * prompt // max(1, total)
    return min(tokens // size * size, (prompt - 1) // size * size)


@jit
def cached_on(
    entries, slots, totals, replicas, beliefs, r, prompt, keys, units, branch_at, total
):  # fmt: skip
    """:func:`_cached_tokens` for callers in Python."""
    index, answers = PrefixIndex(entries, slots, totals), beliefs[r]["answers"]
    return _cached_tokens(index, replicas[r], r, prompt, keys, units, branch_at, total, answers)


@jit
def without_room(holding, replicas, full):
    """Fill ``full`` bool [n]: which of ``replicas`` [n] REPLICA_VIEW have no room; return how many.

    ``holding`` [1] HOLDING: an array, which costs a call from Python a third of what a row does.
    """
    count, saturated = 0, is_saturated(holding[0], replicas)
    for i in range(replicas.size):
        full[i] = not has_room(holding[0], replicas[i], saturated)
        count += full[i]
    return count


@jit
def least_work_s(
    entries, slots, totals, replicas, seen, beliefs, hidden, prompt, keys, units, branch_at, total
):  # fmt: skip
    """Prefill of a prompt where it takes least, s; ``hidden`` bool [n] do not count, 0: all are.

    ``replicas`` and ``seen`` [n] REPLICA_VIEW: this worker's own, and what it sees of all workers.
    """
    least = np.inf
    for r in range(hidden.size):
        if hidden[r]:
            continue
        cached = np.int64(0)
        if beliefs[r]["caching"] != 0:
            cached = cached_on(
                entries, slots, totals, replicas, beliefs, r, prompt, keys, units, branch_at, total
            )
        least = min(least, (prompt - cached) / max(seen[r]["prefill_tokens_per_s"], 1.0))
    return least if least < np.inf else 0.0


@inner
def show(decision, request, replicas, routers, entries, slots, totals, beliefs, keys, units):
    """Fill the row that a worker sees: the sum of what all have sent, the union of their indexes.

    ``request`` [1] holds all that is known of the request but the predicted output. A worker alone
    sees its own row, so nothing is copied.
    """
    d = decision[0]
    me, workers, n = d["worker"], d["workers"], beliefs.size
    now, prompt = request[0]["now"], request[0]["prompt_tokens"]
    own, seen = replicas[me, :n], replicas[d["view_row"], :n]
    ledger.look(own, routers[me, MAIN], now)
    _sum_routers(me, workers, routers, routers[d["view_row"]], now)
    mean = ledger.mean_output(routers[d["view_row"], MAIN], d["prior_output"])
    request[0]["predicted_output"] = min(mean, d["max_output"])
    for r in range(n):
        if workers > 1:
            seen[r] = own[r]
        view, belief = seen[r], beliefs[r]
        view["cached_tokens"] = 0
        held = np.int64(0)
        for w in range(workers):
            if replicas[w, r]["block_size"] == 0:
                continue  # it does not run
            if w != me:
                keep = math.exp(min(0.0, routers[w, MAIN]["looked_at"] - now) / HISTORY_S)
                ledger.add(view, replicas[w, r], keep)
            if belief["caching"] != 0:
                index = PrefixIndex(entries[w], slots[w], totals[w])
                cached = _cached_tokens(
                    index, view, r, prompt, keys, units, d["branch_at"], d["total_units"],
                    belief["answers"],
                )  # fmt: skip
                view["cached_tokens"] = max(view["cached_tokens"], cached)
                held += prefix_index.held_tokens(index, r)
        if belief["caching"] != 0:
            view["index_tokens"] = np.int64(held / d["units_per_token"])


@inner
def _sum_routers(me, workers, routers, seen, now):
    """Sum the router records into ``seen`` [4]; each keeps its own random numbers and cursor."""
    for k in range(seen.size):
        rng, cursor = seen[k]["rng"], seen[k]["cursor"]
        seen[k] = routers[me, MAIN]
        router = seen[k]
        router["rng"], router["cursor"] = rng, cursor
        for w in range(workers):
            if w != me:
                other = routers[w, MAIN]
                keep = math.exp(min(0.0, other["looked_at"] - now) / HISTORY_S)
                router["decisions"] += other["decisions"]
                router["finished"] += other["finished"]
                router["finished_tokens"] += other["finished_tokens"]
                router["recent_arrivals"] += other["recent_arrivals"] * keep


# ---- the choice ---------------------------------------------------------------------------------


@jit
def rate(request, replicas, costs, routers, row, code, params, scores, lowest_id_wins):
    """Let the policy of a code fill ``scores`` [n]; return its choice."""
    view = View(request[0], replicas, costs, routers[row])
    if code == LEARNED_CODE:
        learned_scores(view, params, scores)
    elif code != NO_RULE:
        score(code, view, params, scores)
    return choose(scores, replicas, routers[row], lowest_id_wins)


@inlined
def _judge(decision, request, replicas, costs, routers, params, guard, scores):
    """Decide: the policy's choice, or the fallback rule's if ``cause`` or the guard says so.

    ``replicas`` [n] and ``routers`` [4] are what the worker sees. ``params`` are the policy's.
    ``guard`` float64: the fallback rule's parameters, then the lowest and the highest value of each
    feature that a learned policy was trained with (nothing if that is unknown). ``scores`` [4, n]
    and the results of ``decision`` are filled.
    """
    d = decision[0]
    n, row, cause = replicas.size, d["row"], d["cause"]
    view = View(request[0], replicas, costs, routers[row])
    chosen = NO_REPLICA
    d["feature"] = -1
    if cause == NO_CAUSE:
        own = scores[SCORES, :n]
        if d["code"] == LEARNED_CODE:
            learned_scores(view, params, own)
        elif d["code"] != NO_RULE:
            score(d["code"], view, params, own)
        chosen = choose(own, replicas, routers[row], d["lowest_id_wins"] != 0)
        if _any_nan(replicas, own):
            cause = CAUSE_NAN
        elif guard.size > d["bounds_at"]:
            d["feature"] = _out_of_range(params, replicas, guard[d["bounds_at"] :])
            if d["feature"] >= 0:
                cause = CAUSE_RANGE
    for i in range(n):
        scores[TTFT, i] = predicted_ttft(view, i)
    safe = scores[FALLBACK_SCORES, :n]
    other = NO_REPLICA
    if cause != NO_CAUSE or d["guard_ratio"] < np.inf:
        safe_view = View(request[0], replicas, costs, routers[FALLBACK])
        score(d["fallback_code"], safe_view, guard[: d["bounds_at"]], safe)
        lowest = d["fallback_lowest_id_wins"] != 0
        other = choose(safe, replicas, routers[FALLBACK], lowest)
    if cause == NO_CAUSE and other != NO_REPLICA:
        bound = scores[TTFT, other] * d["guard_ratio"] + d["guard_s"]
        if scores[TTFT, chosen] > bound:
            cause = CAUSE_GUARD
    used = SCORES if cause == NO_CAUSE else FALLBACK_SCORES
    if cause != NO_CAUSE:
        chosen = other
    d["chosen"] = chosen
    d["cause"] = cause
    d["runner_up"] = _runner_up(replicas, scores[used, :n], chosen)
    _explain(view, scores, used, d)
    d["predicted_output"] = request[0]["predicted_output"]
    if chosen != NO_REPLICA:
        d["cached_tokens"] = replicas[chosen]["cached_tokens"]
        d["ttft_s"] = scores[TTFT, chosen]
    return chosen


@jit
def judge(decision, request, replicas, costs, routers, params, guard, scores):
    """:func:`_judge` for callers in Python."""
    return _judge(decision, request, replicas, costs, routers, params, guard, scores)


@jit
def decide(
    decision, request, replicas, routers, entries, slots, totals, costs, beliefs, keys, units,
    params, guard, scores,
):  # fmt: skip
    """:func:`show` and :func:`_judge` in one call, for policies that are compiled."""
    show(decision, request, replicas, routers, entries, slots, totals, beliefs, keys, units)
    row = decision[0]["view_row"]
    seen = replicas[row, : beliefs.size]
    return _judge(decision, request, seen, costs, routers[row], params, guard, scores)


@inner
def _any_nan(replicas, scores):
    found = False
    for i in range(scores.size):
        found |= replicas[i]["available"] != 0 and np.isnan(scores[i])
    return found


@inner
def _out_of_range(params, replicas, bounds):
    """Number of the first feature outside its bounds, -1: none.

    ``bounds`` [2 (F + G)]: the lowest values of all features, then the highest.
    """
    features, globals_ = np.int64(params[a.FEATURES]), np.int64(params[a.GLOBALS])
    low, high = bounds[: features + globals_], bounds[features + globals_ :]
    f = params.view(np.float32)
    x, g = np.int64(params[a.X]), np.int64(params[a.G])
    for i in range(replicas.size):
        if replicas[i]["available"] == 0:
            continue
        for k in range(features):
            if not low[k] <= f[x + i * features + k] <= high[k]:
                return k
    for k in range(features, features + globals_):
        if not low[k] <= f[g + k - features] <= high[k]:
            return k
    return -1


@inner
def _runner_up(replicas, scores, chosen):
    """The best available replica but the chosen one; -1: there is no other."""
    second = NO_REPLICA
    for i in range(scores.size):
        if i == chosen or replicas[i]["available"] == 0:
            continue
        if second == NO_REPLICA or scores[i] < scores[second] or np.isnan(scores[second]):
            second = i
    return second


@inner
def _explain(view, scores, used, d):
    """Find what speaks most for the choice against the runner-up, in seconds for this request."""
    c, u = d["chosen"], d["runner_up"]
    d["reason"] = ONLY_ONE
    if c == NO_REPLICA or u == NO_REPLICA:
        return
    ours, theirs, request = view.replicas[c], view.replicas[u], view.request
    our_rate = max(1e-9, ours["prefill_tokens_per_s"])
    their_rate = max(1e-9, theirs["prefill_tokens_per_s"])
    d["reason"] = ALIKE if scores[used, c] == scores[used, u] else OTHER
    best = 1e-6
    a, b = ours["cached_tokens"], theirs["cached_tokens"]
    best = _weigh((a - b) / our_rate, best, MORE_CACHED, a, b, d)
    a, b = ours["queued_uncached"], theirs["queued_uncached"]
    best = _weigh(b / their_rate - a / our_rate, best, LESS_QUEUED, a, b, d)
    gain = (request["prompt_tokens"] - ours["cached_tokens"]) * (1 / their_rate - 1 / our_rate)
    best = _weigh(gain, best, FASTER, our_rate, their_rate, d)
    a, b = ours["in_flight"], theirs["in_flight"]
    gain = (_decode_s(view, u) - _decode_s(view, c)) * request["predicted_output"]
    best = _weigh(gain if a < b else 0.0, best, FEWER_ANSWERS, a, b, d)
    held, others_held = quantities.kv_used(ours), quantities.kv_used(theirs)
    # Memory costs nothing until it runs out: only a nearly full runner-up is worth the word.
    gain = others_held - held if others_held > 0.9 else 0.0
    best = _weigh(gain, best, MORE_MEMORY, held, others_held, d)
    if d["reason"] == OTHER:
        a, b = scores[TTFT, c], scores[TTFT, u]
        _weigh(b - a, best, EARLIER, a, b, d)


@inner
def _weigh(gain, best, reason, ours, theirs, d):
    """Take a reason if it gains more than the best so far, s; return what the best gains now."""
    if gain <= best:
        return best
    d["reason"] = reason
    d["ours"], d["theirs"] = ours, theirs
    return gain


# ---- what happens to a request ------------------------------------------------------------------


@jit
def opened(attempt, replicas, routers, entries, slots, totals, beliefs, keys, units):
    """A request leaves for a replica.

    Returns when the last of the runs it may find cached was used before, s (-inf: there is none),
    and how many of the cached tokens are an earlier answer.
    """
    t = attempt[0]
    r, now, prompt, cached = t["replica"], t["now"], t["prompt_tokens"], t["cached_tokens"]
    branch_at, total = t["branch_at"], t["total_units"]
    replica, parts = replicas[r], beliefs[r]["caching"]
    ledger.sent(replica, prompt, cached, ledger.whole_tokens(t["predicted_output"]), now)
    routers[MAIN]["decisions"] += 1
    used_at = -np.inf
    answer = 0
    if parts != 0:
        index = PrefixIndex(entries, slots, totals)
        count = keys.size - 1
        if cached > 0:
            known = _known_runs(index, r, keys, units, count)
            if known > 0:
                slot = prefix_index._find(entries[r]["key"], slots[r], keys[known - 1])
                used_at = entries[r, slots[r, slot]]["used_at"]
            if branch_at >= 0:
                # Of what this index knows: another worker's may have known more.
                # Numba would compile a function again for every plain number it is given.
                yes, no, none = np.int64(1), np.int64(0), np.int64(-1)
                own = _cached_tokens(index, replica, r, prompt, keys, units, branch_at, total, yes)
                without = _cached_tokens(index, replica, r, prompt, keys, units, none, total, no)
                answer = max(0, min(cached, own) - without)
        if t["index_later"] == 0:
            _enter(index, replica, beliefs[r], t, keys, units)
    return used_at, answer


@inner
def _enter(index, replica, belief, t, keys, units):
    """Enter a prompt into the prefix index."""
    r, count = t["replica"], keys.size - 1
    if t["branch_at"] >= 0:
        # The blocks of this prompt take the place of the turn before and its answer.
        _remove(index.entries[r], index.slots[r], index.totals[r], keys[count])
    capacity = index_capacity(replica, belief, t["units_per_token"])
    prefix_index.insert(index, r, keys[:count], units[:count], capacity, t["now"])


@inner
def index_capacity(replica, belief, units_per_token):
    """Units that the index may hold for a replica before it takes the oldest for evicted."""
    units = np.int64(replica["capacity_tokens"] * units_per_token)
    if belief["exact"] != 0:
        return 2 * units  # only against what no event speaks of; lengths are estimates
    return units // belief["caching"]


@jit
def enter_runs(replicas, entries, slots, totals, beliefs, r, keys, units, units_per_token, now):
    """Replica ``r`` has stored runs of which its events speak."""
    if beliefs[r]["caching"] != 0:
        capacity = index_capacity(replicas[r], beliefs[r], units_per_token)
        prefix_index.insert(PrefixIndex(entries, slots, totals), r, keys, units, capacity, now)


@jit
def remove_runs(entries, slots, totals, r, keys):
    """Replica ``r`` has evicted runs."""
    for k in range(keys.size):
        _remove(entries[r], slots[r], totals[r], keys[k])


@jit
def shorten_run(entries, slots, totals, r, key, units):
    """Replica ``r`` has evicted the end of a run and keeps ``units`` of it."""
    entry = slots[r, prefix_index._find(entries[r]["key"], slots[r], key)]
    if entry != 0 and entries[r, entry]["tokens"] > units:
        totals[r]["held_tokens"] -= entries[r, entry]["tokens"] - units
        entries[r, entry]["tokens"] = units


@jit
def latest_runs(entries, r, keys, units):
    """Fill ``keys`` and ``units`` with the runs of replica ``r`` that were used last, newest first.

    Returns how many there are.
    """
    count = 0
    entry = entries[r, 0]["older"]
    while entry != 0 and count < keys.size:
        keys[count], units[count] = entries[r, entry]["key"], entries[r, entry]["tokens"]
        count += 1
        entry = entries[r, entry]["older"]
    return count


@jit
def indexed(attempt, replicas, entries, slots, totals, beliefs, keys, units):
    """The first token of a request has come back, and the prefix index learns of its prompt."""
    t = attempt[0]
    r = t["replica"]
    if beliefs[r]["caching"] != 0:
        index = PrefixIndex(entries, slots, totals)
        _enter(index, replicas[r], beliefs[r], t, keys, units)


@inner
def _remove(entries, slots, totals, key):
    """Forget one run, if it is known. Runs after it must not be known."""
    slot = prefix_index._find(entries["key"], slots, key)
    entry = slots[slot]
    if entry != 0:
        prefix_index._empty_slot(entries["key"], slots, slot)
        prefix_index._unlink(entries, entry)
        totals["held_tokens"] -= entries[entry]["tokens"]
        totals["count"] -= 1
        entries[entry]["newer"] = totals["free"]
        totals["free"] = entry


@jit
def answered(replicas, models, r, prompt, cached, sent_at, streamed):
    """Its first ``streamed`` tokens have come back."""
    server_model.prefilled(models[r], prompt, cached)
    ledger.answering(replicas[r], prompt, cached, sent_at)
    replicas[r]["context_tokens"] += prompt + streamed


@jit
def ended(
    attempt, request, replicas, costs, routers, entries, slots, totals, beliefs, keys, units
):  # fmt: skip
    """A request has ended, or was lost on the way.

    Returns the seconds of an iteration with all that were in flight there, this one included.
    """
    t = attempt[0]
    r, prompt, streamed, output = t["replica"], t["prompt_tokens"], t["streamed"], t["output"]
    replica, parts = replicas[r], beliefs[r]["caching"]
    decode_s = _decode_s(View(request[0], replicas, costs, routers[MAIN]), r)
    if t["answering"] == 0:
        ledger.answering(replica, prompt, t["cached_tokens"], t["sent_at"])
    else:
        replica["context_tokens"] -= prompt + streamed
    expected = ledger.whole_tokens(t["predicted_output"])
    if output < 0:
        ledger.cancelled(replica, prompt, expected, streamed)
        return decode_s
    ledger.finished(replica, routers[MAIN], prompt, expected, output)
    if parts != 0:
        count = keys.size - 1
        last = units[count - 1]
        units[count - 1] = last + np.int64(output * t["units_per_token"])  # continues the last run
        capacity = index_capacity(replica, beliefs[r], t["units_per_token"])
        index = PrefixIndex(entries, slots, totals)
        prefix_index.insert(index, r, keys[:count], units[:count], capacity, t["now"])
        units[count - 1] = last
    return decode_s


@jit
def evict_until(entries, slots, totals, r, used_at):
    """Forget the runs that replica ``r`` last used at ``used_at`` (s) or before; return how many.

    The server has evicted them.
    """
    evicted = 0
    mine, totals_r = entries[r], totals[r]
    while totals_r["count"] > 0 and mine[mine[0]["newer"]]["used_at"] <= used_at:
        prefix_index._evict_oldest(mine, slots[r], totals_r)
        evicted += 1
    return evicted
