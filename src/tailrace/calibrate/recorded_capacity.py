"""Capacity of a recorded server: what the recording states, and what its times show of it.

Engines with data parallelism (several schedulers that step together, as mixtures of experts run)
are simulated as one server with the sum of their sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.view.devices import REFERENCE
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: Where a setting comes from that the recording states.
RECORDED = "recording"
#: A request has waited if it was longer than so many times the median iteration.
_WAITED = 5.0
#: Moments needed to say that KV memory was full.
_LEAST_MOMENTS = 5
#: Below this share of the batch cap, something else than the cap keeps requests waiting.
_BELOW_CAP = 0.95
#: KV memory beyond what was ever held, where nothing shows its size.
_ROOM = 1.25


@dataclass(frozen=True)
class Occupancy:
    """When requests [R] of one server ran; s from the start of the run, NaN: not known."""

    table: RequestTable
    begin_s: Floats
    first_s: Floats
    last_s: Floats

    def running(self) -> int:
        """Return how many ran at once, at most."""
        known = np.isfinite(self.begin_s) & np.isfinite(self.last_s)
        moments = np.concatenate([self.begin_s[known], self.last_s[known]])
        steps = np.repeat([1, -1], int(known.sum()))
        order = np.lexsort((steps, moments))
        return int(np.cumsum(steps[order]).max(initial=1))

    def held(self, at_s: float) -> tuple[int, float]:
        """Return how many ran at a moment, and the tokens in KV memory they had by then."""
        now = np.flatnonzero((self.begin_s < at_s) & (at_s < self.last_s))
        rows = self.table.rows[now]
        answered = (at_s - self.first_s[now]) / np.maximum(
            self.last_s[now] - self.first_s[now], 1e-9
        )
        tokens = rows["prompt_tokens"] + rows["output_tokens"] * np.clip(answered, 0.0, 1.0)
        return len(now), float(tokens.sum())


def stated(settings: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """Return the capacity that a recording's settings state, by the names of a replica's fields."""
    ranks = settings.get("data_parallel_size", 1)
    found = {}
    for name, setting, times in (
        ("block_size", "block_size", 1),
        ("num_blocks", "num_gpu_blocks", ranks),
        ("batch_cap", "max_num_seqs", ranks),
    ):
        if setting in settings:
            found[name] = (times * settings[setting], RECORDED)
    return found


def token_budgets(settings: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tokens per iteration that the settings allow for; empty: they state nothing.

    Engines that step together may each have the budget, or be held up by one another.
    """
    budget = settings.get("max_num_batched_tokens")
    if budget is None:
        return ()
    return tuple(sorted({budget, budget * settings.get("data_parallel_size", 1)}))


def kv_tokens(parts: Sequence[Occupancy], batch_cap: int) -> tuple[float, bool]:
    """Return the KV memory in tokens, and whether the times show it.

    It shows when requests wait although the batch is not full: what is held then is all there is.
    """
    full: list[float] = []
    capped = 0
    most = 0.0
    for part in parts:
        known = np.isfinite(part.begin_s) & np.isfinite(part.last_s)
        if not known.any():
            continue
        gaps = (part.last_s - part.first_s) / np.maximum(part.table.rows["output_tokens"] - 1, 1)
        patience_s = _WAITED * float(np.median(gaps[known]))
        longest_s = float((part.last_s - part.table.rows["arrival_s"])[known].max())
        arrival_s = part.table.rows["arrival_s"]
        unknown_s = arrival_s[~known]
        for row in np.flatnonzero(known):
            at_s = float(part.begin_s[row])
            count, tokens = part.held(at_s)
            most = max(most, tokens, part.held(float(part.first_s[row]))[1])
            # Requests whose times are not known may run as well.
            sooner = unknown_s[unknown_s < arrival_s[row]]
            if len(sooner) and sooner.max() > at_s - longest_s:
                continue
            if at_s - arrival_s[row] > patience_s:
                if count < _BELOW_CAP * batch_cap:
                    full.append(tokens)
                else:
                    capped += 1
    if len(full) >= _LEAST_MOMENTS and len(full) > capped:
        return float(np.median(full)), True
    return max(float(REFERENCE.kv_tokens), _ROOM * most), False
