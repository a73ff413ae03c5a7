"""Compiled: what a server has evicted is forgotten here too."""

# mypy: disallow-untyped-defs=False

from tailrace.compiled import jit
from tailrace.view import prefix_index


@jit
def evict_until(entries, slots, totals, r, used_at):
    """Forget what replica ``r`` last used at ``used_at`` (s) or before. Returns how many runs."""
    evicted = 0
    mine, totals_r = entries[r], totals[r]
    while totals_r["count"] > 0 and mine[mine[0]["newer"]]["used_at"] <= used_at:
        prefix_index._evict_oldest(mine, slots[r], totals_r)
        evicted += 1
    return evicted
