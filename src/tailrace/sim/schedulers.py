"""How a server forms its next batch: sarathi, vllm and vllm_v1 on one pipeline stage.

Each ``_form_*`` function sets the slots' chunks, allocates blocks and sets ``tokens``, ``work`` and
``batched`` of the server. :func:`form` then sets the clock: one iteration or, if only decodes take
part, a whole stretch of equal iterations up to the next change.
"""

import numpy as np

from tailrace.compiled import inlined, inner
from tailrace.sim import batching, kvcache
from tailrace.sim.batching import ceil_div
from tailrace.sim.types import (
    SARATHI,
    SLOT_CHUNK,
    SLOT_EVENT,
    SLOT_OFFSET,
    SLOT_REQUEST,
    SLOT_ROW,
    VLLM,
)
from tailrace.view.cost_model import iteration_s, token_ms


@inlined
def form(server, slots, phase, kv, requests, content, cost, now):
    """Start the next iteration at ``now`` (s). False if no batch can be formed."""
    preemptions = server["preemptions"]
    server["tokens"] = 0
    while True:
        before = server["preemptions"]
        _form_batch(server, slots, phase, kv, requests, content, now)
        # If all were evicted, the queue can be served at once; Vidur waits for an arrival.
        if server["tokens"] > 0 or server["preemptions"] == before or server["compat"]:
            break
    if server["tokens"] == 0:
        server["ready_at"] = np.inf
        server["stuck"] = server["queue_len"] > 0 and not server["compat"]
        return False
    server["busy"] = 1
    server["start"] = now
    server["pace"] = server["speed"]
    server["steps"] = 1
    decodes_only = server["decoding"] == 1 and server["batched"] == server["n_decodes"]
    # After an eviction vllm_v1 admits no request, but it may in the very next iteration.
    settled = server["preemptions"] == preemptions
    if decodes_only and settled and not server["exact"]:
        server["steps"] = _stretch(server)
    server["until"] = stretch_end(server, cost, server["steps"])
    return True


@inlined
def _form_batch(server, slots, phase, kv, requests, content, now):
    server["tokens"] = 0
    server["work"] = 0.0
    server["batched"] = 0
    server["decoding"] = 0
    server["parked"] = 0
    server["parked_context"] = 0
    scheduler = server["scheduler"]
    if scheduler == SARATHI:
        _form_sarathi(server, slots, phase, kv, requests, content, now)
    elif scheduler == VLLM:
        _form_vllm(server, slots, phase, kv, requests, content, now)
    else:
        _form_vllm_v1(server, slots, phase, kv, requests, content, now)


@inner
def _stretch(server):
    """Decode iterations until a request is done or, at worst, blocks run short."""
    steps = server["next_finish"] - server["tick"]
    if not server["counted"]:
        return min(steps, max(server["next_event"] - server["tick"], 1))
    if server["caching"]:
        if server["queue_len"] > 0 and server["n_slots"] < server["batch_cap"]:
            return 1  # a decode may fill a block that the next request needs, which then fits
        steps = min(steps, max(server["next_fill"] - server["tick"], 1))
    # The blocks of the first iteration are allocated already; block_size more cost one per decode.
    # sarathi and vllm want one block left over, vllm_v1 can spare it.
    spare = server["free_blocks"] - 1
    safe = 1 + max(spare, 0) // server["n_decodes"] * server["block_size"]
    return min(steps, safe)


@inner
def stretch_end(server, cost, steps):
    """End, in s, of the first ``steps`` iterations of the current stretch."""
    divisor = server["pace"]
    if steps == 1:
        context = (server["context"] - server["parked_context"]) * server["decoding"]
        seconds = iteration_s(cost, server["tokens"], context, server["work"], divisor)
        return server["start"] + seconds
    context = steps * server["context"] + server["n_decodes"] * (steps * (steps - 1) // 2)
    ms = steps * token_ms(cost, server["tokens"]) + cost["per_context_ms"] * context
    return server["start"] + ms / divisor * 1e-3


@inner
def steps_ended(server, cost, now):
    """Iterations of the current stretch that ended at or before ``now``."""
    low, high = 0, server["steps"] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if stretch_end(server, cost, middle) <= now:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def interrupt(server, cost, now):
    """Cut the current stretch short, to end with the iteration running at ``now`` (s)."""
    if server["busy"] == 0 or server["steps"] == 1:
        return
    steps = steps_ended(server, cost, now)
    if steps == 0 or stretch_end(server, cost, steps) < now:
        steps += 1
    server["steps"] = steps
    server["until"] = stretch_end(server, cost, steps)


@inner
def _decodes_take_part(server):
    active = server["n_decodes"] - server["parked"]
    server["decoding"] = 1 if active > 0 else 0
    server["tokens"] = active
    server["batched"] = active


@inner
def _add_chunk(server, processed, chunk):
    server["tokens"] += chunk
    server["work"] += chunk * (processed + chunk / 2)
    server["batched"] += 1


# ---- sarathi ------------------------------------------------------------------------------------


@inner
def _form_sarathi(server, slots, phase, kv, requests, content, now):
    """Form a sarathi batch: decodes, then prompts in order; blocks for whole prompts."""
    _allocate_decode_blocks(server, slots, phase, kv, requests, content)
    _decodes_take_part(server)
    budget = server["chunk_size"] - server["tokens"]
    if server["n_slots"] > server["n_decodes"]:
        i = server["n_slots"] - 1
        request = requests[slots[SLOT_REQUEST, i]]
        chunk = min(request["prompt"] - request["processed"], max(budget, 0))
        slots[SLOT_CHUNK, i] = chunk
        if chunk > 0:
            _add_chunk(server, request["processed"], chunk)
        budget -= chunk
    while server["queue_len"] > 0 and server["n_slots"] < server["batch_cap"] and budget > 0:
        request = requests[server["queue_head"]]
        blocks = ceil_div(request["prompt"], server["block_size"])
        if server["free_blocks"] - blocks < server["watermark_blocks"]:
            break
        server["free_blocks"] -= blocks
        chunk = min(request["prompt"], budget)
        r = batching.dequeue(server, requests)
        batching.add_slot(server, slots, kv, requests, r, chunk, now)
        _add_chunk(server, 0, chunk)
        budget -= chunk


@inner
def _allocate_decode_blocks(server, slots, phase, kv, requests, content):
    """Give sarathi's and vllm's decodes a free block each before they run, needed or not."""
    if server["n_decodes"] == 0:
        return
    due = phase[server["tick"] % server["block_size"]]
    if server["free_blocks"] - due >= 1:
        server["free_blocks"] -= due
        return
    if server["scheduler"] == VLLM:
        _sort_by_sent(server, slots, requests)
    i = 0
    while i < server["n_decodes"]:
        while server["free_blocks"] < 1 and i < server["n_slots"]:
            batching.preempt_last(server, slots, phase, kv, requests, content)
        if i >= server["n_slots"]:
            break  # it had to evict itself
        request = requests[slots[SLOT_REQUEST, i]]
        processed = slots[SLOT_OFFSET, i] + server["tick"]
        held = batching.decode_blocks(server, request["prompt"], processed)
        if processed > held * server["block_size"]:
            server["free_blocks"] -= 1
        i += 1


@inner
def _sort_by_sent(server, slots, requests):
    """Sort the decodes by the time they were sent: stable insertion, as most are in order."""
    rows = slots.shape[0]
    for i in range(1, server["n_decodes"]):
        j = i
        while (
            j > 0
            and requests[slots[SLOT_REQUEST, j - 1]]["sent"]
            > requests[slots[SLOT_REQUEST, j]]["sent"]
        ):
            for k in range(rows):
                slots[k, j - 1], slots[k, j] = slots[k, j], slots[k, j - 1]
            j -= 1


# ---- vllm ---------------------------------------------------------------------------------------


@inner
def _form_vllm(server, slots, phase, kv, requests, content, now):
    """Form a vllm batch: whole prompts if any can be admitted, otherwise the decodes."""
    longest = 0
    admitted = 0
    while server["queue_len"] > 0 and server["n_slots"] < server["batch_cap"]:
        request = requests[server["queue_head"]]
        prompt = request["prompt"]
        blocks = ceil_div(prompt, server["block_size"])
        if server["free_blocks"] - blocks < server["watermark_blocks"]:
            break
        longest = max(longest, prompt)
        if (admitted + 1) * longest > server["max_batch_tokens"]:
            break
        server["free_blocks"] -= blocks
        r = batching.dequeue(server, requests)
        batching.add_slot(server, slots, kv, requests, r, prompt, now)
        _add_chunk(server, 0, prompt)
        admitted += 1
    if admitted == 0:
        _allocate_decode_blocks(server, slots, phase, kv, requests, content)
        _decodes_take_part(server)


# ---- vllm_v1 ------------------------------------------------------------------------------------


@inner
def _form_vllm_v1(server, slots, phase, kv, requests, content, now):
    """Form a vllm_v1 batch: running requests, then new ones unless a request was evicted."""
    preemptions = server["preemptions"]
    all_served = True
    if server["counted"]:
        due = server["fresh"] + phase[server["tick"] % server["block_size"]]
        if due <= server["free_blocks"]:
            batching.take_counted(server, kv, due)
            server["fresh"] = 0
            server["reached"] = server["tick"] + 1
            # A look-ahead's ghost has the server's next_fill but no cache of its own.
            if server["caching"] and server["tick"] >= server["next_fill"]:
                batching.make_all_findable(server, slots, kv, content)
        elif server["explicit"]:
            all_served = _squeeze_cached(server, slots, phase, kv, requests, content)
        else:
            all_served = _squeeze_decodes(server, slots, phase, kv, requests, content)
    elif server["n_decodes"] > 0 and server["tick"] >= server["next_event"]:
        all_served = _grow_decodes(server, slots, phase, kv, requests, content)
    _decodes_take_part(server)
    budget = server["chunk_size"] - server["tokens"]
    if server["n_slots"] > server["n_decodes"] and all_served:
        i = server["n_slots"] - 1
        request = requests[slots[SLOT_REQUEST, i]]
        chunk = min(request["prompt"] - request["processed"], budget)
        grown = _grow_prefill(server, slots, kv, requests, content, i, chunk)
        while not grown:
            served = server["n_decodes"]
            if batching.preempt_one(server, slots, phase, kv, requests, content, served) == i:
                break
            i -= 1
            grown = _grow_prefill(server, slots, kv, requests, content, i, chunk)
        _decodes_take_part(server)  # some of them may have been preempted
        if grown:
            slots[SLOT_CHUNK, i] = chunk
            _add_chunk(server, request["processed"], chunk)
            budget -= chunk
    if server["preemptions"] == preemptions:
        _admit_vllm_v1(server, slots, kv, requests, content, budget, now)


@inner
def _squeeze_decodes(server, slots, phase, kv, requests, content):
    """Serve decode by decode when counted blocks run short, preempting requests as needed.

    False: one had to preempt itself, and those behind it are parked.
    """
    i = 0
    while i < server["n_decodes"]:
        request = requests[slots[SLOT_REQUEST, i]]
        processed = slots[SLOT_OFFSET, i] + server["tick"]
        held = batching.decode_blocks(server, request["prompt"], processed)
        need = ceil_div(processed + 1, server["block_size"]) - held
        while need > server["free_blocks"]:
            victim = batching.preempt_one(server, slots, phase, kv, requests, content, i)
            if victim == i:
                batching.park(server, slots, requests, i)
                return False
            if victim < i:
                i -= 1
        server["free_blocks"] -= need
        i += 1
    server["fresh"] = 0
    return True


@inner
def _squeeze_cached(server, slots, phase, kv, requests, content):
    """The same with prefix caching: decode by decode, with nothing left to do later."""
    batching.stop_counting(server, slots, kv, requests)
    all_served = _grow_decodes(server, slots, phase, kv, requests, content)
    if all_served:
        server["fresh"] = 0
    server["next_fill"] = server["tick"] + 1
    return all_served


@inner
def _grow_decodes(server, slots, phase, kv, requests, content):
    """Serve the decodes that need or fill a block at this tick, block by block.

    False: one had to preempt itself, and those behind it are parked.
    """
    tick = server["tick"]
    size = server["block_size"]
    next_event = batching.NO_TICK
    i = 0
    while i < server["n_decodes"]:
        if slots[SLOT_EVENT, i] > tick:
            next_event = min(next_event, slots[SLOT_EVENT, i])
            i += 1
            continue
        r = slots[SLOT_REQUEST, i]
        request = requests[r]
        after = slots[SLOT_OFFSET, i] + tick + 1
        missing = after - request["blocks"] * size  # tokens beyond what is held
        need = ceil_div(missing, size) if missing > 0 else 0
        while need > server["free_blocks"]:
            victim = batching.preempt_one(server, slots, phase, kv, requests, content, i)
            if victim == i:
                batching.park(server, slots, requests, i)
                return False
            if victim < i:
                i -= 1
        if need > 0:
            count = min(need + server["extra_blocks"], server["free_blocks"])
            batching.take_blocks(server, kv, request, count)
        if server["caching"]:
            batching.make_findable(server, kv, content, slots[SLOT_ROW, i], r, after)
        event = batching.next_block_event(server, request, slots[SLOT_OFFSET, i], tick + 1)
        slots[SLOT_EVENT, i] = event
        next_event = min(next_event, event)
        i += 1
    server["next_event"] = next_event
    return True


@inner
def _grow_prefill(server, slots, kv, requests, content, i, chunk):
    """Take blocks for ``chunk`` more prompt tokens of slot ``i``; False if there are not enough."""
    r = slots[SLOT_REQUEST, i]
    request = requests[r]
    before = request["processed"]
    after = before + chunk
    size = server["block_size"]
    held = request["blocks"] if server["explicit"] else ceil_div(before, size)
    need = ceil_div(after, size) - held
    if need > server["free_blocks"]:
        return False
    if not server["explicit"]:
        server["free_blocks"] -= need
        return True
    if need > 0:
        count = min(need + server["extra_blocks"], server["free_blocks"])
        batching.take_blocks(server, kv, request, count)
    if server["caching"]:
        batching.make_findable(server, kv, content, slots[SLOT_ROW, i], r, after)
    return True


@inner
def _admit_vllm_v1(server, slots, kv, requests, content, budget, now):
    while (
        server["queue_len"] > 0
        and server["n_slots"] < server["batch_cap"]
        and budget > 0
        and server["free_blocks"] > 0
    ):
        r = server["queue_head"]
        request = requests[r]
        if not _reuse_prefix(server, kv, request, content, r, budget):
            break
        chunk = min(request["prompt"] - request["processed"], budget)
        batching.dequeue(server, requests)
        batching.add_slot(server, slots, kv, requests, r, chunk, now)
        i = server["n_slots"] - 1
        _grow_prefill(server, slots, kv, requests, content, i, chunk)
        _add_chunk(server, request["processed"], chunk)
        budget -= chunk


@inner
def _reuse_prefix(server, kv, request, content, r, budget):
    """Hold the cached blocks of a waiting request if its first chunk fits; else change nothing."""
    size = server["block_size"]
    # Without real blocks (look-ahead), what the router believes to be cached counts as taken.
    hits = request["believed"] // size
    idle = hits
    row = 0
    if server["caching"]:
        # add_slot takes the same row: the top of the stack.
        row = kv.rows_free[kv.rows_free[kv.rows_free.size - 1] - 1]
        kvcache.begin_row(kv, row)
        hits, idle = 0, 0
        if request["restarts"] > 0 or not kvcache.is_private(content, r):
            hits, idle = kvcache.longest_prefix(server, kv, content, r, request["prompt"], row)
    computed = hits * size
    chunk = min(request["prompt"] - computed, budget)
    need = ceil_div(computed + chunk, size) - hits
    if need > server["free_blocks"] - idle:
        return False
    if server["caching"]:
        kvcache.reuse(server, kv, row, hits)
        request["blocks"] = hits
    else:
        server["free_blocks"] -= hits
    request["processed"] = computed
    return True
