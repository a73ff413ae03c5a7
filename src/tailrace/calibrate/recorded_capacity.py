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
#: A request that queued for more than this multiple of the median iteration has waited.
_WAITED = 5.0
#: Moments needed to say that the batch or KV memory was full, and the least cap that is believed.
_LEAST_MOMENTS, _LEAST_CAP = 5, 8
#: Moments that are looked at, of a longer recording.
MOST_MOMENTS = 500
#: Share of those moments at which a full batch has to be full.
_MOSTLY = 0.8
#: Share of the most that is ever held, which is held typically when KV memory is full.
_NEARLY = 0.75
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
    is_exact: bool
    """Whether ``begin_s`` is what the server says; else it is the first token."""

    def known(self) -> NDArray[np.bool_]:
        """Return which requests' times are known."""
        known: NDArray[np.bool_] = np.isfinite(self.begin_s) & np.isfinite(self.last_s)
        return known

    def running(self) -> int:
        """Return how many ran at once, at most."""
        known = self.known()
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
    """Return the capacity that a recording's settings state, by the names of a replica's fields.

    Each is at most what a replica may have.
    """
    ranks = settings.get("data_parallel_size", 1)
    found = {}
    for name, setting, times, most in (
        ("block_size", "block_size", 1, 4096),
        ("num_blocks", "num_gpu_blocks", ranks, 2**26),
        ("batch_cap", "max_num_seqs", ranks, 4096),
    ):
        if setting in settings:
            found[name] = (min(times * settings[setting], most), RECORDED)
    return found


def token_budgets(settings: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tokens per iteration that the settings allow for; empty: they state nothing.

    Engines that step together may each have the budget, or be held up by one another.
    """
    budget = settings.get("max_num_batched_tokens")
    if budget is None:
        return ()
    ranks = settings.get("data_parallel_size", 1)
    return tuple(sorted({min(tokens, 2**20) for tokens in (budget, budget * ranks)}))


def full_batch(parts: Sequence[Occupancy]) -> int | None:
    """Return the batch cap if the times show it: requests waited and began when one had ended.

    Then about as many ran at each beginning as ever did. None: it does not show.
    """
    most = max(part.running() for part in parts)
    counts = [count for part in parts for count, _ in _waited(part)]
    if len(counts) < _LEAST_MOMENTS or most < _LEAST_CAP:
        return None
    at_cap = np.mean(np.array(counts) + 1 >= _BELOW_CAP * most)
    return most if at_cap >= _MOSTLY else None


def kv_tokens(parts: Sequence[Occupancy], batch_cap: int) -> tuple[float, bool]:
    """Return the KV memory in tokens, and whether the times show it.

    It shows when requests wait although the batch is not full: what is held then is all there is,
    and about as much as ever is. Other waits, as for a long prompt before, come at any fill.
    """
    waited = [moment for part in parts if part.is_exact for moment in _waited(part)]
    full = [tokens for count, tokens in waited if count < _BELOW_CAP * batch_cap]
    held = [
        part.held(float(part.first_s[row]))[1]
        for part in parts
        for row in _some(np.flatnonzero(part.known()))
    ]
    if len(full) >= _LEAST_MOMENTS and len(full) > len(waited) / 2:
        longest = max(
            int((part.table.rows["prompt_tokens"] + part.table.rows["output_tokens"]).max())
            for part in parts
        )
        # A request begins when it fits, so that some room may be left each time.
        size = float(np.percentile(full, 90))
        if size >= _ROOM * longest and np.median(full) >= _NEARLY * np.percentile(held, 95):
            return size, True
    return max(float(REFERENCE.kv_tokens), _ROOM * max(held, default=0.0)), False


def _some(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return at most MOST_MOMENTS of the rows, evenly: each is compared with all requests."""
    if len(rows) <= MOST_MOMENTS:
        return rows
    return rows[np.linspace(0, len(rows) - 1, MOST_MOMENTS).astype(np.int64)]


def _waited(part: Occupancy) -> list[tuple[int, float]]:
    """Return requests that ran, and the tokens they held, whenever one began that had waited."""
    known = part.known()
    if not known.any():
        return []
    arrival_s = part.table.rows["arrival_s"]
    gaps = (part.last_s - part.first_s) / np.maximum(part.table.rows["output_tokens"] - 1, 1)
    patience_s = _WAITED * float(np.median(gaps[known]))
    longest_s = float((part.last_s - arrival_s)[known].max())
    unknown_s = arrival_s[~known]
    found = []
    for row in _some(np.flatnonzero(known & (part.begin_s - arrival_s > patience_s))):
        at_s = float(part.begin_s[row])
        # Requests whose times are not known may have run as well.
        sooner = unknown_s[unknown_s < arrival_s[row]]
        if not len(sooner) or sooner.max() <= at_s - longest_s:
            found.append(part.held(at_s))
    return found
