"""Binary heap of future arrivals that depend on the run: follow-up turns, rerouted requests.

Ordered by (time, request), so that a run repeats exactly.
"""

from tailrace.compiled import inner


@inner
def _before(heap, a, b):
    if heap[a]["time"] != heap[b]["time"]:
        return heap[a]["time"] < heap[b]["time"]
    return heap[a]["request"] < heap[b]["request"]


@inner
def _swap(heap, a, b):
    time, request = heap[a]["time"], heap[a]["request"]
    heap[a]["time"], heap[a]["request"] = heap[b]["time"], heap[b]["request"]
    heap[b]["time"], heap[b]["request"] = time, request


@inner
def push(heap, cluster, time, request):
    """Add an arrival of ``request`` at ``time`` (s)."""
    at = cluster["heap_size"]
    heap[at]["time"] = time
    heap[at]["request"] = request
    cluster["heap_size"] += 1
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@inner
def pop(heap, cluster):
    """Remove the earliest arrival; return its request."""
    request = heap[0]["request"]
    cluster["heap_size"] -= 1
    size = cluster["heap_size"]
    _swap(heap, 0, size)
    at = 0
    while True:
        least = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < size and _before(heap, child, least):
                least = child
        if least == at:
            return request
        _swap(heap, at, least)
        at = least
