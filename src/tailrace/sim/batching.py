"""Resident requests of a server: slots, blocks they hold, preemption, and the waiting queue.

The decodes of a server advance together, one token each per decode iteration ("tick"), so nothing
is stored per token: a slot keeps ``tokens processed - tick``, which stays constant, and the tick
at which it is done. Blocks are allocated in one of two ways:

* counted (all but vllm_v1 with preallocation): every decode takes one block each ``block_size``
  ticks, so ``phase[k]`` counts the decodes that take one at ticks = k (mod block_size) and an
  iteration costs O(1), a whole stretch of them O(block_size);
* one by one (vllm_v1 with preallocation): a slot knows the tick of its next block event (needs one,
  or fills one).

With prefix caching or preallocation blocks are *explicit*: each request has blocks of its own (see
kvcache.py). Counted decodes make theirs findable later, when somebody may find them; how many
blocks they hold follows from the tokens they have processed.

At most one resident request is partly prefilled, and it is the last slot: a new request is
admitted only after all earlier ones got what they need of the token budget.

The waiting queue is a list in the order of arrival. Of a server that serves by priority (vLLM's
``--scheduling-policy priority``) it is a pairing heap: O(1) to insert, O(log n) to take the first
out, and no memory but two links per request, which are copied with it.
"""

import numpy as np

from tailrace.compiled import inner
from tailrace.sim import kvcache
from tailrace.sim.types import (
    DONE,
    RUNNING,
    SLOT_CHUNK,
    SLOT_EVENT,
    SLOT_FINISH,
    SLOT_OFFSET,
    SLOT_REQUEST,
    SLOT_ROW,
    VLLM_V1,
    WAITING,
)

NO_TICK = np.int64(2**62)


@inner
def ceil_div(a, b):
    """Quotient of integers, rounded up."""
    return -(-a // b)


# ---- waiting queue: a list through REQUEST_STATE.next, or a heap --------------------------------


@inner
def enqueue(server, requests, r):
    """Put a request into the waiting queue: at its end, or to its place by priority."""
    if server["ordered"]:
        _enqueue_by_priority(server, requests, r)
        return
    requests[r]["next"] = -1
    if server["queue_len"] == 0:
        server["queue_head"] = r
    else:
        requests[server["queue_tail"]]["next"] = r
    server["queue_tail"] = r
    server["queue_len"] += 1


@inner
def _enqueue_first(server, requests, r):
    requests[r]["next"] = server["queue_head"] if server["queue_len"] > 0 else -1
    if server["queue_len"] == 0:
        server["queue_tail"] = r
    server["queue_head"] = r
    server["queue_len"] += 1


@inner
def enqueue_sorted(server, requests, r):
    """Insert a request into the queue of vllm_v1, which is ordered by (time sent, id)."""
    sent = requests[r]["sent"]
    before = -1
    at = server["queue_head"] if server["queue_len"] > 0 else -1
    while at >= 0 and (requests[at]["sent"] < sent or (requests[at]["sent"] == sent and at < r)):
        before = at
        at = requests[at]["next"]
    if before < 0:
        _enqueue_first(server, requests, r)
    elif at < 0:
        enqueue(server, requests, r)
    else:
        requests[before]["next"] = r
        requests[r]["next"] = at
        server["queue_len"] += 1


@inner
def dequeue(server, requests):
    """Take the first waiting request."""
    r = server["queue_head"]
    if server["ordered"]:
        server["queue_head"] = pop_heap(requests, r)
    else:
        server["queue_head"] = requests[r]["next"]
    server["queue_len"] -= 1
    requests[r]["next"] = -1
    return r


@inner
def _goes_before(requests, a, b):
    """Whether request ``a`` goes before ``b``: by (priority, time sent, id), as in vLLM."""
    if requests[a]["priority"] != requests[b]["priority"]:
        return requests[a]["priority"] < requests[b]["priority"]
    if requests[a]["sent"] != requests[b]["sent"]:
        return requests[a]["sent"] < requests[b]["sent"]
    return a < b


@inner
def _meld(requests, a, b):
    """Join two heaps; return the root. The root's ``next`` is the caller's to set."""
    if _goes_before(requests, b, a):
        a, b = b, a
    requests[b]["next"] = requests[a]["child"]
    requests[a]["child"] = b
    return a


@inner
def _enqueue_by_priority(server, requests, r):
    requests[r]["next"] = -1
    requests[r]["child"] = -1
    if server["queue_len"] == 0:
        server["queue_head"] = r
    else:
        server["queue_head"] = _meld(requests, server["queue_head"], r)
    server["queue_len"] += 1


@inner
def pop_heap(requests, root):
    """Return the root of a heap without its root; -1: it is empty."""
    pairs = -1
    a = requests[root]["child"]
    requests[root]["child"] = -1
    while a >= 0:  # join the children in pairs
        b = requests[a]["next"]
        following = -1
        if b >= 0:
            following = requests[b]["next"]
            a = _meld(requests, a, b)
        requests[a]["next"] = pairs
        pairs = a
        a = following
    joined = -1
    while pairs >= 0:  # then the pairs, the last ones first
        following = requests[pairs]["next"]
        joined = pairs if joined < 0 else _meld(requests, joined, pairs)
        pairs = following
    if joined >= 0:
        requests[joined]["next"] = -1
    return joined


# ---- requests without a first token, as sent (servers by priority only) -------------------------


@inner
def note_sent(server, requests, r):
    """Enter a request that was sent now."""
    last = server["newest"]
    requests[r]["older"] = last
    requests[r]["newer"] = -1
    if last >= 0:
        requests[last]["newer"] = r
    else:
        server["oldest"] = r
    server["newest"] = r


@inner
def _note_answered(server, requests, r):
    """Take out a request that has its first token."""
    older, newer = requests[r]["older"], requests[r]["newer"]
    if older >= 0:
        requests[older]["newer"] = newer
    else:
        server["oldest"] = newer
    if newer >= 0:
        requests[newer]["older"] = older
    else:
        server["newest"] = older


# ---- blocks -------------------------------------------------------------------------------------


@inner
def _phase_index(server, offset):
    """Ticks (mod block size) at which a decode takes a block, in counted mode.

    sarathi and vllm take it once the processed tokens exceed what is held, vllm_v1 a token earlier.
    """
    lead = 0 if server["scheduler"] == VLLM_V1 else 1
    return (lead - offset) % server["block_size"]


@inner
def blocks_due(server, phase, first_tick, ticks):
    """Blocks the decodes take in ``ticks`` iterations from ``first_tick`` on, in counted mode."""
    size = server["block_size"]
    due = (ticks // size) * server["n_decodes"]
    at = first_tick % size
    for _ in range(ticks % size):
        due += phase[at]
        at += 1
        if at == size:
            at = 0
    return due


@inner
def decode_blocks(server, prompt, processed):
    """Blocks a decode holds before its next iteration, in counted mode."""
    if server["scheduler"] == VLLM_V1 and processed > prompt + 1:
        return ceil_div(processed, server["block_size"])
    return ceil_div(processed - 1, server["block_size"])


@inner
def _prefill_blocks(server, prompt, processed):
    """Blocks a partly prefilled request holds, in counted mode."""
    whole = prompt if server["scheduler"] != VLLM_V1 else processed
    return ceil_div(whole, server["block_size"])


@inner
def take_blocks(server, kv, request, count):
    """Give a request ``count`` more blocks, in explicit mode."""
    if server["caching"]:
        kvcache.take(server, kv, count)
    else:
        server["free_blocks"] -= count
    request["blocks"] += count


@inner
def take_counted(server, kv, count):
    """Take ``count`` blocks for the decodes, in counted mode."""
    if not server["caching"]:
        server["free_blocks"] -= count
    elif count > 0:
        kvcache.take(server, kv, count)


@inner
def release_row(server, kv, row, request):
    """Give back all blocks of a request, last first, in explicit mode."""
    if server["caching"]:
        kvcache.release(server, kv, row, request["blocks"])
    else:
        server["free_blocks"] += request["blocks"]
    request["blocks"] = 0
    top = kv.rows_free.size - 1
    kv.rows_free[kv.rows_free[top]] = row
    kv.rows_free[top] += 1


@inner
def make_findable(server, kv, content, row, r, tokens):
    """Register the blocks that are full once ``tokens`` tokens are processed.

    Blocks of private content are registered only when their request is preempted.
    """
    # Most decode iterations fill no block: the comparison spares them a division.
    if tokens >= kvcache.next_full(server, kv, row) and not kvcache.is_private(content, r):
        kvcache.register(server, kv, content, row, r, tokens // server["block_size"])


@inner
def make_all_findable(server, slots, kv, content):
    """Register the blocks that decodes fill in the iteration being formed, in counted mode.

    Then the last extent of a request grows by itself, if that is possible (see kvcache.py).
    """
    server["next_fill"] = NO_TICK
    for i in range(server["n_decodes"]):
        r, row = slots[SLOT_REQUEST, i], slots[SLOT_ROW, i]
        if kvcache.is_private(content, r) or kvcache.is_growing(kv, row):
            continue
        make_findable(server, kv, content, row, r, slots[SLOT_OFFSET, i] + server["reached"])
        let_grow(server, slots, kv, content, i)


@inner
def let_grow(server, slots, kv, content, i):
    """Let the last extent of decode ``i`` grow by itself, or note when it fills its next block."""
    r, row, offset = slots[SLOT_REQUEST, i], slots[SLOT_ROW, i], slots[SLOT_OFFSET, i]
    if not kvcache.is_private(content, r) and not kvcache.grow(kv, content, row, r, offset):
        fills = kvcache.next_full(server, kv, row) - 1 - offset
        server["next_fill"] = min(server["next_fill"], fills)


@inner
def stop_counting(server, slots, kv, requests):
    """Bring the blocks of all decodes up to date, before the iteration being formed."""
    server["reached"] = server["tick"]
    for i in range(server["n_decodes"]):
        request = requests[slots[SLOT_REQUEST, i]]
        processed = slots[SLOT_OFFSET, i] + server["tick"]
        request["blocks"] = decode_blocks(server, request["prompt"], processed)
        slots[SLOT_EVENT, i] = server["tick"]
        # A first output token is computed, but its block is made findable with the next one.
        behind = 1 if processed == request["prompt"] + 1 else 0
        kvcache.stop_growing(server, kv, slots[SLOT_ROW, i], behind)


@inner
def _keep_for_itself(server, kv, content, row, r, tokens):
    """Register the full blocks of a private request that is about to be preempted."""
    if server["caching"] and kvcache.is_private(content, r):
        kvcache.register(server, kv, content, row, r, tokens // server["block_size"])


@inner
def next_block_event(server, request, offset, tick):
    """Next tick, from ``tick`` on, at which a decode needs or fills a block, if not counted."""
    size = server["block_size"]
    due = request["blocks"] * size - offset
    if not server["caching"] or due <= tick:
        return due
    if due <= tick + size:
        return due - 1  # it fills its last block then; without blocks ahead always so
    return tick + (-1 - offset - tick) % size


# ---- slots --------------------------------------------------------------------------------------


@inner
def copy_slot(source, i, target, k):
    """Copy slot ``i`` of one matrix to slot ``k`` of another. Written out: no loop is unrolled."""
    target[SLOT_REQUEST, k] = source[SLOT_REQUEST, i]
    target[SLOT_FINISH, k] = source[SLOT_FINISH, i]
    target[SLOT_OFFSET, k] = source[SLOT_OFFSET, i]
    target[SLOT_CHUNK, k] = source[SLOT_CHUNK, i]
    target[SLOT_EVENT, k] = source[SLOT_EVENT, i]
    target[SLOT_ROW, k] = source[SLOT_ROW, i]


@inner
def _move_slot(slots, source, target):
    if source != target:
        copy_slot(slots, source, slots, target)


@inner
def add_slot(server, slots, kv, requests, r, chunk, now):
    """Make a request resident, with ``chunk`` prompt tokens in the iteration being formed."""
    i = server["n_slots"]
    request = requests[r]
    request["status"] = RUNNING
    if np.isnan(request["scheduled"]):
        request["scheduled"] = now
    if request["cached"] < 0:
        request["cached"] = request["processed"]
    slots[SLOT_REQUEST, i] = r
    slots[SLOT_CHUNK, i] = chunk
    if server["explicit"]:
        top = kv.rows_free.size - 1
        kv.rows_free[top] -= 1
        slots[SLOT_ROW, i] = kv.rows_free[kv.rows_free[top]]
    server["n_slots"] += 1


@inner
def _is_fresh(server, request):
    """Whether a new decode needs a block at once: its prompt filled the last one (vllm_v1)."""
    return server["scheduler"] == VLLM_V1 and request["prompt"] % server["block_size"] == 0


@inner
def become_decode(server, slots, phase, requests, i):
    """Make slot ``i``, the first after the decodes, a decode: its prompt and one token are done."""
    request = requests[slots[SLOT_REQUEST, i]]
    tick = server["tick"]
    offset = request["processed"] - tick
    finish = tick + request["prompt"] + request["output"] - request["processed"]
    slots[SLOT_OFFSET, i] = offset
    slots[SLOT_FINISH, i] = finish
    server["next_finish"] = min(server["next_finish"], finish)
    server["n_decodes"] += 1
    server["context"] += request["processed"]
    if server["counted"]:
        phase[_phase_index(server, offset)] += 1
        if request["processed"] == request["prompt"] + 1 and _is_fresh(server, request):
            server["fresh"] += 1
    else:
        event = next_block_event(server, request, offset, tick)
        if request["processed"] % server["block_size"] == 0:
            event = tick  # the first output token filled a block that is not findable yet
        slots[SLOT_EVENT, i] = event
        server["next_event"] = min(server["next_event"], event)


@inner
def _leave_decodes(server, slots, phase, kv, requests, i, ahead):
    """Release the blocks of decode slot ``i`` and stop counting it; return its processed tokens."""
    request = requests[slots[SLOT_REQUEST, i]]
    processed = slots[SLOT_OFFSET, i] + server["tick"]
    server["context"] -= processed
    if server["counted"]:
        phase[_phase_index(server, slots[SLOT_OFFSET, i])] -= 1
        request["blocks"] = decode_blocks(server, request["prompt"], processed) + ahead
    if server["explicit"]:
        release_row(server, kv, slots[SLOT_ROW, i], request)
    else:
        server["free_blocks"] += request["blocks"]
        request["blocks"] = 0
    return processed


@inner
def preempt_last(server, slots, phase, kv, requests, content):
    """Preempt the last resident request."""
    _preempt(server, slots, phase, kv, requests, content, server["n_slots"] - 1, False)


@inner
def preempt_one(server, slots, phase, kv, requests, content, served):
    """Preempt the last resident request or, by priority, the least urgent; return its slot.

    ``served``: so many leading slots have got their blocks for the iteration being formed.
    """
    i = server["n_slots"] - 1
    if server["ordered"]:
        i = _least_urgent(server, slots, requests)
    _preempt(server, slots, phase, kv, requests, content, i, i < served)
    return i


@inner
def _least_urgent(server, slots, requests):
    """Slot of the highest (priority, time sent); of several, the first admitted, as in vLLM."""
    worst = 0
    priority = requests[slots[SLOT_REQUEST, 0]]["priority"]
    sent = requests[slots[SLOT_REQUEST, 0]]["sent"]
    for i in range(1, server["n_slots"]):
        request = requests[slots[SLOT_REQUEST, i]]
        if request["priority"] > priority or (
            request["priority"] == priority and request["sent"] > sent
        ):
            worst, priority, sent = i, request["priority"], request["sent"]
    return worst


@inner
def _preempt(server, slots, phase, kv, requests, content, i, served):
    """Evict the request of slot ``i``: its blocks are freed and it is prefilled again.

    ``served``: a decode that has got its block for the iteration being formed.
    """
    r = slots[SLOT_REQUEST, i]
    request = requests[r]
    total = request["prompt"] + request["output"]
    if i < server["n_decodes"]:
        before = slots[SLOT_OFFSET, i] + server["tick"]
        just_joined = before == request["prompt"] + 1
        ahead = 0
        if server["explicit"]:
            computed = before + 1 if served else before - just_joined
            _keep_for_itself(server, kv, content, slots[SLOT_ROW, i], r, computed)
        if served:
            held = decode_blocks(server, request["prompt"], before)
            ahead = ceil_div(before + 1, server["block_size"]) - held
        elif server["counted"] and just_joined and _is_fresh(server, request):
            server["fresh"] -= 1
        processed = _leave_decodes(server, slots, phase, kv, requests, i, ahead)
        server["n_decodes"] -= 1
        server["preempted_context"] += processed
        request["context"] = processed
        request["prompt"] = processed
    else:
        server["partial_preemptions"] += 1
        if server["explicit"]:
            _keep_for_itself(server, kv, content, slots[SLOT_ROW, i], r, request["processed"])
            release_row(server, kv, slots[SLOT_ROW, i], request)
        else:
            held = _prefill_blocks(server, request["prompt"], request["processed"])
            server["free_blocks"] += held
        if server["compat"]:
            # Vidur's defect: the rest of the prompt turns into output.
            request["prompt"] = request["processed"]
    request["output"] = total - request["prompt"]
    request["processed"] = 0
    request["restarts"] += 1
    request["status"] = WAITING
    server["preemptions"] += 1
    server["n_slots"] -= 1
    for k in range(i, server["n_slots"]):
        _move_slot(slots, k + 1, k)
    if server["ordered"]:
        _enqueue_by_priority(server, requests, r)
    elif server["scheduler"] == VLLM_V1:
        enqueue_sorted(server, requests, r)
    else:
        _enqueue_first(server, requests, r)


@inner
def park(server, slots, requests, first):
    """Let the decodes from slot ``first`` on sit out the iteration being formed.

    In vLLM a request that has to preempt itself ends the round: those behind it get nothing.
    """
    server["parked"] = server["n_decodes"] - first
    server["parked_context"] = 0
    server["fresh"] = 0
    server["next_event"] = server["tick"]  # look at them all next time
    for i in range(first, server["n_decodes"]):
        request = requests[slots[SLOT_REQUEST, i]]
        processed = slots[SLOT_OFFSET, i] + server["tick"]
        server["parked_context"] += processed
        if processed == request["prompt"] + 1 and server["counted"]:
            server["fresh"] += _is_fresh(server, request)


@inner
def unpark(server, slots, phase):
    """Shift the decodes that sat out the iteration that ends by one tick, so that none is lost."""
    for i in range(server["n_decodes"] - server["parked"], server["n_decodes"]):
        if server["counted"]:
            phase[_phase_index(server, slots[SLOT_OFFSET, i])] -= 1
            phase[_phase_index(server, slots[SLOT_OFFSET, i] - 1)] += 1
        slots[SLOT_OFFSET, i] -= 1
        slots[SLOT_FINISH, i] += 1
        slots[SLOT_EVENT, i] += 1
    server["parked"] = 0
    server["parked_context"] = 0
    server["next_event"] = server["tick"]


@inner
def _settle(requests, r, end, notices):
    request = requests[r]
    request["done"] = end
    request["status"] = DONE
    notices[1, 1 + notices[1, 0]] = r
    notices[1, 0] += 1


@inner
def retire_decodes(server, slots, phase, kv, requests, end, notices):
    """Remove the decodes that are done at this tick, keeping the order of the others."""
    tick = server["tick"]
    kept = 0
    next_finish = NO_TICK
    decodes = server["n_decodes"]
    for i in range(decodes):
        finish = slots[SLOT_FINISH, i]
        if finish <= tick:
            r = slots[SLOT_REQUEST, i]
            requests[r]["processed"] = _leave_decodes(server, slots, phase, kv, requests, i, 0)
            _settle(requests, r, end, notices)
        else:
            next_finish = min(next_finish, finish)
            _move_slot(slots, i, kept)
            kept += 1
    for i in range(decodes, server["n_slots"]):
        _move_slot(slots, i, i - decodes + kept)
    server["n_slots"] -= decodes - kept
    server["n_decodes"] = kept
    server["next_finish"] = next_finish


@inner
def advance_prefills(server, slots, phase, kv, requests, content, end, notices):
    """Account for the prompt tokens of the last iteration; finished prompts become decodes."""
    kept = server["n_decodes"]
    for i in range(server["n_decodes"], server["n_slots"]):
        r = slots[SLOT_REQUEST, i]
        request = requests[r]
        request["processed"] += slots[SLOT_CHUNK, i]
        slots[SLOT_CHUNK, i] = 0
        if request["processed"] < request["prompt"]:
            _move_slot(slots, i, kept)
            kept += 1
            continue
        request["processed"] += 1  # the first output token comes with the end of the prompt
        if np.isnan(request["first"]):
            request["first"] = end
            notices[0, 1 + notices[0, 0]] = r
            notices[0, 0] += 1
            if server["ordered"]:
                _note_answered(server, requests, r)
        server["preempted_context"] -= request["context"]
        request["context"] = 0
        if request["output"] == 1:
            if server["explicit"]:
                release_row(server, kv, slots[SLOT_ROW, i], request)
            else:
                held = _prefill_blocks(server, request["prompt"], request["prompt"])
                server["free_blocks"] += held
            _settle(requests, r, end, notices)
            continue
        _move_slot(slots, i, kept)
        become_decode(server, slots, phase, requests, kept)
        if server["caching"] and server["counted"]:
            let_grow(server, slots, kv, content, kept)
        kept += 1
    server["n_slots"] = kept
