"""Compiles half of what a simulation needs in a helper process, beside the command itself."""

import contextlib
from collections.abc import Callable
from typing import Any

import numba

from tailrace import compiled
from tailrace.policy.warmup import compile_rules
from tailrace.sim import active_blocks, engine, schedulers
from tailrace.sim.allocation import Allocation, new_fleet, new_tables
from tailrace.sim.kvcache import KvCache, PromptContent


def helper() -> contextlib.AbstractContextManager[Callable[[], int | None]]:
    """Let a helper process compile its half (see :func:`tailrace.compiled.helper`)."""
    return compiled.helper(__name__)


def compile_parts() -> None:
    """Compile how servers form their batches, and what else the engine comes to late."""
    typeof: Any = numba.typeof
    room = Allocation()
    fleet, tables = new_fleet(room, 1), new_tables(room, 1)
    kv = KvCache(fleet.extents[0, 0], fleet.buckets[0, 0], fleet.held[0, 0], fleet.rows_free[0, 0])
    content = PromptContent(tables.facts[0], tables.pieces[0])
    given = fleet.servers[0, 0], fleet.slots[0, 0], fleet.phase[0, 0], kv, fleet.requests[0]
    types = tuple(map(typeof, (*given, content, 0.0)))
    for form in (schedulers._form_vllm_v1, schedulers._form_vllm, schedulers._form_sarathi):
        form.compile(types)
    everything = tuple(map(typeof, (fleet, tables, 0)))
    engine._apply_event.compile((*everything, numba.from_dtype(tables.events.dtype)))
    engine._queue.compile((*everything, typeof(0)))
    active_blocks.count.compile(everything)


if __name__ == "__main__":
    compile_parts()
    compile_rules()
    compiled.mark(__spec__.name)
