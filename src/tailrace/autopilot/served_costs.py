"""What requests really cost and which policy decided, from the decision log, without their content.

A window of traffic that is simulated has a limit of requests; what is judged has none, or a busy
router would never complete a cycle of turns within it. So this keeps a few bytes per request.
"""

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.policy import registry
from tailrace.view.objective import composite_cost
from tailrace.workload import decision_log
from tailrace.workload.table import DEFAULT_TTFT_SLO_S

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ServedCosts:
    """Requests that were answered, that servers failed, or that were rejected, in any order."""

    arrived_s: Floats
    """Unix times [R]."""
    cost_s: Floats
    """[R], a lost request costing what view/objective.py says."""
    policy: NDArray[np.int64]
    """Number of the policy that decided [R]."""
    policies: tuple[str, ...]
    """Their names as in the log, by number."""

    @classmethod
    def read(cls, folder: Path, since: float) -> "ServedCosts":
        """Read the requests that arrived at Unix time ``since`` or later."""
        arrived, cost, policy = array("d"), array("d"), array("q")
        numbers: dict[str, int] = {}
        failed: dict[Any, tuple[float, float, int]] = {}
        for _, _, data in decision_log.records(folder, since):
            at, name = float(data["arrived"]), str(data.get("policy"))
            number = numbers.setdefault(name, len(numbers))
            last, request = data.get("last"), data.get("id")
            if data.get("outcome") in decision_log.LOSSES:
                spent_s = 0.0 if last is None else max(0.0, float(last) - at)
                failed[request] = (at, _cost(spent_s, spent_s, data, lost=True), number)
                continue
            first = data.get("first")
            if data.get("outcome") != "done" or first is None or last is None:
                continue
            failed.pop(request, None)  # another attempt has succeeded
            arrived.append(at)
            cost.append(_cost(float(last) - at, float(first) - at, data, lost=False))
            policy.append(number)
        for at, spent, number in failed.values():
            arrived.append(at)
            cost.append(spent)
            policy.append(number)
        return cls(
            np.array(arrived, np.float64), np.array(cost, np.float64), np.array(policy, np.int64),
            tuple(numbers),
        )  # fmt: skip

    def by(self, policy: str) -> NDArray[np.bool_]:
        """Return whether a policy decided [R]."""
        name = registry.get(policy).name
        number = self.policies.index(name) if name in self.policies else -1
        return np.asarray(self.policy == number, np.bool_)


def _cost(e2e_s: float, ttft_s: float, data: dict[str, Any], *, lost: bool) -> float:
    target_s = data.get("ttft_slo_s")
    late_s = max(0.0, ttft_s - float(DEFAULT_TTFT_SLO_S if target_s is None else target_s))
    return float(composite_cost(e2e_s, ttft_s, late_s, lost))
