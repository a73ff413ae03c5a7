"""The compiled part of the live router: what happens at each decision and to each request.

Everything is entered into the records by the functions of ``view/ledger.py`` and
``view/prefix_index.py``, as in the simulator. One call does as much as possible, because handing
arrays to compiled code costs more than most of the work itself.

Content is counted in *units* (see content.py); ``per_token`` is how many of them make a token.
``keys`` [u + 1] and ``units`` [u + 1] are the runs of a prompt and, at the end, its *branch*: the
key under which the conversation's previous prompt and its answer were entered, and how much of
this prompt they can be at most.
"""

# mypy: disallow-untyped-defs=False

import numpy as np

from tailrace.compiled import jit
from tailrace.policy.learned import architecture as a
from tailrace.policy.learned.observation import _decode_s
from tailrace.policy.learned.policy import learned_scores
from tailrace.policy.rules import LEARNED, quantities, score
from tailrace.policy.rules.predicted import predicted_ttft
from tailrace.view import ledger, prefix_index
from tailrace.view.prefix_index import PrefixIndex
from tailrace.view.records import View
from tailrace.view.selection import NO_REPLICA, choose

LEARNED_CODE = LEARNED.code
#: Below so many runs, walking is as fast as searching.
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
#: Places of ``judge``'s whole results ...
CHOSEN, RUNNER_UP, CAUSE, REASON, FALLBACK_CHOICE, FEATURE, CACHED = range(7)
#: ... and of its figures: the reason's two, and what is predicted of the request.
OURS, THEIRS, CHOSEN_TTFT, PREDICTED_OUTPUT = range(4)
#: Main reason for the choice against the runner-up; the two figures say it for both.
(
    ONLY_ONE, ALIKE, MORE_CACHED, LESS_QUEUED, FASTER, FEWER_ANSWERS, MORE_MEMORY, EARLIER, OTHER,
) = range(9)  # fmt: skip


# ---- what the router sees -----------------------------------------------------------------------


@jit
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


@jit
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


@jit
def _cached_tokens(index, replica, r, prompt, keys, units, branch_at, total, answers):
    """Prompt tokens that a replica is believed to have cached: whole blocks, never all of them."""
    matched = matched_units(index, r, keys, units, branch_at, answers)
    size = replica["block_size"]
    tokens = matched * prompt // max(1, total)
    return min(tokens // size * size, (prompt - 1) // size * size)


@jit
def cached_on(entries, slots, totals, replicas, r, prompt, keys, units, branch_at, total, answers):
    """The same from Python."""
    index = PrefixIndex(entries, slots, totals)
    return _cached_tokens(index, replicas[r], r, prompt, keys, units, branch_at, total, answers[r])


@jit
def show(
    request, replicas, routers, entries, slots, totals, caching, answers, keys, units,
    branch_at, total, per_token, prior_output, most_output,
):  # fmt: skip
    """Complete what the router sees for a decision; ``request`` [1] has all that arrived with it.

    ``caching`` and ``answers`` int64 [n]: whether a replica's cache, and the answers in it, are
    believed in; the former says among how many indexes its memory is divided. ``most_output``:
    tokens the client allows.
    """
    index = PrefixIndex(entries, slots, totals)
    router = routers[MAIN]
    mean = ledger.mean_output(router, prior_output)
    request[0]["predicted_output"] = min(mean, most_output)
    prompt = request[0]["prompt_tokens"]
    for r in range(replicas.size):
        replica = replicas[r]
        replica["cached_tokens"] = 0
        if caching[r] != 0:
            replica["cached_tokens"] = _cached_tokens(
                index, replica, r, prompt, keys, units, branch_at, total, answers[r]
            )
            replica["index_tokens"] = np.int64(prefix_index.held_tokens(index, r) / per_token)
    ledger.look(replicas, router, request[0]["now"])
    for k in range(1, routers.size):
        rng, cursor = routers[k]["rng"], routers[k]["cursor"]
        routers[k] = router
        routers[k]["rng"], routers[k]["cursor"] = rng, cursor


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


@jit
def judge(
    request, replicas, costs, routers, row, code, params, lowest_id_wins, fallback, fallback_params,
    fallback_lowest, cause, bounds, guard_ratio, guard_s, scores, whole, figures,
):  # fmt: skip
    """Decide: the policy's choice, or the fallback rule's if ``cause`` or the guard says so.

    ``scores`` [4, n], ``whole`` int64 and ``figures`` float64 take the results. ``bounds``
    float32 [2, F + G] is the range a learned policy was trained in; no columns: unknown.
    ``guard_ratio`` = inf: no guard.
    """
    n = replicas.size
    view = View(request[0], replicas, costs, routers[row])
    chosen = NO_REPLICA
    whole[FEATURE] = -1
    if cause == NO_CAUSE:
        own = scores[SCORES, :n]
        chosen = rate(request, replicas, costs, routers, row, code, params, own, lowest_id_wins)
        if _any_nan(replicas, own):
            cause = CAUSE_NAN
        elif bounds.shape[1] > 0:
            whole[FEATURE] = _out_of_range(params, replicas, bounds)
            if whole[FEATURE] >= 0:
                cause = CAUSE_RANGE
    for i in range(n):
        scores[TTFT, i] = predicted_ttft(view, i)
    safe = scores[FALLBACK_SCORES, :n]
    other = NO_REPLICA
    if cause != NO_CAUSE or guard_ratio < np.inf:
        other = rate(
            request, replicas, costs, routers, FALLBACK, fallback, fallback_params, safe,
            fallback_lowest,
        )  # fmt: skip
    if cause == NO_CAUSE and other != NO_REPLICA:
        bound = scores[TTFT, other] * guard_ratio + guard_s
        if scores[TTFT, chosen] > bound:
            cause = CAUSE_GUARD
    used = SCORES if cause == NO_CAUSE else FALLBACK_SCORES
    if cause != NO_CAUSE:
        chosen = other
    whole[CHOSEN] = chosen
    whole[CAUSE] = cause
    whole[FALLBACK_CHOICE] = other
    whole[RUNNER_UP] = _runner_up(replicas, scores[used, :n], chosen)
    _explain(view, scores, used, whole, figures)
    figures[PREDICTED_OUTPUT] = request[0]["predicted_output"]
    if chosen != NO_REPLICA:
        whole[CACHED] = replicas[chosen]["cached_tokens"]
        figures[CHOSEN_TTFT] = scores[TTFT, chosen]
    return chosen


@jit
def decide(
    request, replicas, costs, routers, entries, slots, totals, caching, answers, keys, units,
    branch_at, total, per_token, prior_output, most_output, row, code, params, lowest_id_wins,
    fallback, fallback_params, fallback_lowest, bounds, guard_ratio, guard_s, scores, whole,
    figures,
):  # fmt: skip
    """:func:`show` and :func:`judge` in one call, for policies that are compiled."""
    show(
        request, replicas, routers, entries, slots, totals, caching, answers, keys, units,
        branch_at, total, per_token, prior_output, most_output,
    )  # fmt: skip
    return judge(
        request, replicas, costs, routers, row, code, params, lowest_id_wins, fallback,
        fallback_params, fallback_lowest, NO_CAUSE, bounds, guard_ratio, guard_s, scores, whole,
        figures,
    )  # fmt: skip


@jit
def _any_nan(replicas, scores):
    found = False
    for i in range(scores.size):
        found |= replicas[i]["available"] != 0 and np.isnan(scores[i])
    return found


@jit
def _out_of_range(params, replicas, bounds):
    """Number of the first feature that lies outside ``bounds``, -1: all lie within."""
    features, globals_ = np.int64(params[a.FEATURES]), np.int64(params[a.GLOBALS])
    f = params.view(np.float32)
    x, g = np.int64(params[a.X]), np.int64(params[a.G])
    for i in range(replicas.size):
        if replicas[i]["available"] == 0:
            continue
        for k in range(features):
            value = f[x + i * features + k]
            if not bounds[0, k] <= value <= bounds[1, k]:
                return k
    for k in range(globals_):
        if not bounds[0, features + k] <= f[g + k] <= bounds[1, features + k]:
            return features + k
    return -1


@jit
def _runner_up(replicas, scores, chosen):
    """The best available replica but the chosen one; -1: there is no other."""
    second = NO_REPLICA
    for i in range(scores.size):
        if i == chosen or replicas[i]["available"] == 0:
            continue
        if second == NO_REPLICA or scores[i] < scores[second] or np.isnan(scores[second]):
            second = i
    return second


@jit
def _explain(view, scores, used, whole, figures):
    """Find what speaks most for the choice against the runner-up, in seconds for this request."""
    c, u = whole[CHOSEN], whole[RUNNER_UP]
    whole[REASON] = ONLY_ONE
    if c == NO_REPLICA or u == NO_REPLICA:
        return
    ours, theirs, request = view.replicas[c], view.replicas[u], view.request
    our_rate = max(1e-9, ours["prefill_tokens_per_s"])
    their_rate = max(1e-9, theirs["prefill_tokens_per_s"])
    whole[REASON] = ALIKE if scores[used, c] == scores[used, u] else OTHER
    best = 1e-6
    a, b = ours["cached_tokens"], theirs["cached_tokens"]
    best = _weigh((a - b) / our_rate, best, MORE_CACHED, a, b, whole, figures)
    a, b = ours["queued_uncached"], theirs["queued_uncached"]
    best = _weigh(b / their_rate - a / our_rate, best, LESS_QUEUED, a, b, whole, figures)
    gain = (request["prompt_tokens"] - ours["cached_tokens"]) * (1 / their_rate - 1 / our_rate)
    best = _weigh(gain, best, FASTER, our_rate, their_rate, whole, figures)
    a, b = ours["in_flight"], theirs["in_flight"]
    gain = (_decode_s(view, u) - _decode_s(view, c)) * request["predicted_output"]
    best = _weigh(gain if a < b else 0.0, best, FEWER_ANSWERS, a, b, whole, figures)
    held, others_held = quantities.kv_used(ours), quantities.kv_used(theirs)
    # Memory costs nothing until it runs out: only a nearly full runner-up is worth the word.
    gain = others_held - held if others_held > 0.9 else 0.0
    best = _weigh(gain, best, MORE_MEMORY, held, others_held, whole, figures)
    if whole[REASON] == OTHER:
        a, b = scores[TTFT, c], scores[TTFT, u]
        _weigh(b - a, best, EARLIER, a, b, whole, figures)


@jit
def _weigh(gain, best, reason, ours, theirs, whole, figures):
    """Take a reason if it gains more than the best so far, s; return what the best gains now."""
    if gain <= best:
        return best
    whole[REASON] = reason
    figures[OURS], figures[THEIRS] = ours, theirs
    return gain


# ---- what happens to a request ------------------------------------------------------------------


@jit
def opened(
    replicas, routers, entries, slots, totals, r, now, prompt, cached, predicted, keys, units,
    branch_at, total, caching, per_token,
):  # fmt: skip
    """A request leaves for replica ``r``; ``predicted`` output as the decision saw it.

    Returns when the last of the runs it may find cached was used before, s (-inf: there is none),
    and how many of the ``cached`` tokens are an earlier answer.
    """
    ledger.sent(replicas[r], prompt, cached, ledger.whole_tokens(predicted), now)
    routers[MAIN]["decisions"] += 1
    used_at = -np.inf
    answer = 0
    if caching[r] != 0:
        index = PrefixIndex(entries, slots, totals)
        count = keys.size - 1
        if cached > 0:
            known = _known_runs(index, r, keys, units, count)
            if known > 0:
                slot = prefix_index._find(entries[r]["key"], slots[r], keys[known - 1])
                used_at = entries[r, slots[r, slot]]["used_at"]
            if branch_at >= 0:
                # Of what this index knows: another worker's may have known more.
                place = replicas[r]
                own = _cached_tokens(index, place, r, prompt, keys, units, branch_at, total, 1)
                without = _cached_tokens(index, place, r, prompt, keys, units, -1, total, 0)
                answer = max(0, min(cached, own) - without)
        if branch_at >= 0:
            # The blocks of this prompt take the place of the turn before and its answer.
            _remove(entries[r], slots[r], totals[r], keys[count])
        capacity = np.int64(replicas[r]["capacity_tokens"] * per_token) // caching[r]
        prefix_index.insert(index, r, keys[:count], units[:count], capacity, now)
    return used_at, answer


@jit
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
def answered(replicas, r, prompt, cached, sent_at, streamed):
    """Its first ``streamed`` tokens have come back."""
    ledger.answering(replicas[r], prompt, cached, sent_at)
    replicas[r]["context_tokens"] += prompt + streamed


@jit
def ended(
    request, replicas, costs, routers, entries, slots, totals, r, now, prompt, cached, predicted,
    sent_at, answering, streamed, output, keys, units, caching, per_token,
):  # fmt: skip
    """A request ended. ``output`` >= 0: well, after so many tokens; -1: it was lost on the way.

    ``answering`` and ``streamed`` say whether and how far it is in the ledger as answering.
    Returns the seconds of an iteration with all that were in flight there, this one included.
    """
    replica = replicas[r]
    decode_s = _decode_s(View(request[0], replicas, costs, routers[MAIN]), r)
    if answering == 0:
        ledger.answering(replica, prompt, cached, sent_at)
    else:
        replica["context_tokens"] -= prompt + streamed
    expected = ledger.whole_tokens(predicted)
    if output < 0:
        replica["in_flight"] -= 1
        replica["answering_prompts"] -= prompt
        replica["predicted_tokens"] -= expected
        # What did stream back counts as throughput, but is no finished answer to learn from.
        replica["finished_tokens"] += streamed
        return decode_s
    ledger.finished(replica, routers[MAIN], prompt, expected, output)
    if caching[r] != 0:
        count = keys.size - 1
        last = units[count - 1]
        units[count - 1] = last + np.int64(output * per_token)  # it continues the last run
        capacity = np.int64(replica["capacity_tokens"] * per_token) // caching[r]
        index = PrefixIndex(entries, slots, totals)
        prefix_index.insert(index, r, keys[:count], units[:count], capacity, now)
        units[count - 1] = last
    return decode_s
