"""Time of one iteration: the calibrated cost model, as arrays and as compiled functions.

``T`` = tokens in the batch, ``K`` = context tokens of its decodes, ``W`` = sum over prefill
chunks of chunk*(context + chunk/2). The order of operations is Vidur's reference order; do not
rearrange it, equal arrival and iteration-end instants depend on the last bit.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit
from tailrace.config import CostModel
from tailrace.view.records import COST, MAX_KNOTS


@inner
def token_ms(cost, tokens):
    """Part of the iteration time that depends on the number of tokens only, ms."""
    ms = cost["base_ms"] + cost["per_token_ms"] * tokens
    for k in range(MAX_KNOTS):  # they ascend, see cost_rows
        over = tokens - cost["knot"][k]
        if over <= 0.0:
            break
        ms += cost["slope_ms"][k] * over
    return ms


@jit
def iteration_s(cost, tokens, context, prefill_work, divisor):
    """Seconds of one iteration; ``divisor`` = stages * speed."""
    ms = token_ms(cost, tokens)
    ms += cost["per_context_ms"] * context
    ms += cost["per_prefill_ms"] * prefill_work
    return ms / divisor * 1e-3


@jit
def prefill_tokens_per_s(cost, budget, speed):
    """Prompt tokens per second of a replica that does nothing but full prefill iterations."""
    return budget / (token_ms(cost, float(budget)) / speed * 1e-3)


def cost_rows(models: Sequence[CostModel]) -> NDArray[np.void]:
    """Return the models as rows [n] of dtype COST."""
    rows = np.zeros(len(models), COST)
    rows["knot"] = np.inf
    for i, (row, model) in enumerate(zip(rows, models, strict=True)):
        if i and model is models[i - 1]:
            rows[i] = rows[i - 1]
            continue
        row["base_ms"] = model.base_ms
        row["per_token_ms"] = model.per_token_ms
        row["per_context_ms"] = model.per_context_ms
        row["per_prefill_ms"] = model.per_prefill_ms
        for k, (knot, slope) in enumerate(sorted(model.knots)):
            row["knot"][k] = knot
            row["slope_ms"][k] = slope
    return rows
