"""The cost model that a predictor of Vidur amounts to, found by asking it.

A policy sees the calibrated cost model of every replica. Inside Vidur the truth is its
execution-time predictor, so that one is asked for a few hundred iterations and the model is fitted
to the answers. Imports Vidur.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tailrace.calibrate.iteration_fit import FitResult, fit_iterations
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.interface import new_batch

DECODES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 256, 1024, 2048, 4096)  # tokens of each decode
CHUNKS = (16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
BEFORE = (0, 512, 2048)  # tokens prefilled before the chunk


@dataclass(frozen=True)
class Member:
    """A request of an imagined iteration, as far as Vidur looks at it."""

    num_processed_tokens: int
    is_prefill_complete: bool
    id: int = -1


def iterations(chunk_size: int) -> Iterator[tuple[list[Member], list[int]]]:
    """Yield imagined iterations: members and the tokens of each; chunks up to ``chunk_size``."""
    chunks = [chunk for chunk in CHUNKS if chunk <= chunk_size] or [chunk_size]
    batches = [[Member(context, True)] * n for n in DECODES for context in CONTEXTS]
    for batch in batches:
        yield batch, [1] * len(batch)
    for chunk in chunks:
        for before in BEFORE:
            prefill = Member(before, False)
            yield [prefill], [chunk]
            for batch in batches[:: len(CONTEXTS) + 2]:
                yield [*batch, prefill], [1] * len(batch) + [chunk]


def measured_cost(predictor: Any, chunk_size: int, replica_id: Any) -> FitResult:
    """Fit the cost model to what a predictor says of one-stage iterations on a replica."""
    rows: list[tuple[float, float, float, float]] = []
    for members, tokens in iterations(chunk_size):
        batch = new_batch(members, tokens, replica_id)
        try:
            seconds = predictor.get_execution_time(batch, 0).total_time
        except (KeyError, IndexError):  # beyond the table of the predictor
            continue
        context = sum(m.num_processed_tokens for m in members if m.is_prefill_complete)
        work = sum(
            n * (m.num_processed_tokens + n / 2)
            for m, n in zip(members, tokens, strict=True)
            if not m.is_prefill_complete
        )
        rows.append((float(sum(tokens)), float(context), float(work), seconds * 1e3))
    if len(rows) < len(DECODES):
        raise TailraceError(
            "Vidur's predictor knows too few iterations to fit a cost model; name a device preset"
        )
    total, before, works, ms = zip(*rows, strict=True)
    return fit_iterations(total, before, works, ms, balance=True)
