"""The objective: what a request costs, in seconds. The only copy of the formula and its weights.

The simulator's accounts, the look-ahead, training, the evaluation and the default reward all use
this one. Order of operations matters: training and evaluation are reproducible to the last bit.
"""

from typing import Any

from tailrace.compiled import jit

#: Cost of a second in the system, without a first token, and past the target without one.
E2E_WEIGHT, TTFT_WEIGHT, LATE_WEIGHT = 0.2, 1.0, 2.0
#: Seconds a lost request costs on top of what it had cost by then. Without it, requests sent to a
#: replica that is about to die would be the cheapest.
LOST_COST_S = 30.0


def composite_cost(e2e_s: Any, ttft_s: Any, late_s: Any, lost: Any) -> Any:
    """Return the composite cost in s of one request, of each of several, or of all together.

    ``e2e_s`` in the system, ``ttft_s`` until the first token, ``late_s`` past the target without
    one, ``lost`` requests that failed; numbers, or NumPy arrays [R].
    """
    cost = E2E_WEIGHT * e2e_s + TTFT_WEIGHT * ttft_s + LATE_WEIGHT * late_s
    return cost + LOST_COST_S * lost


#: The same for numbers in compiled code.
compiled_cost = jit(composite_cost)
