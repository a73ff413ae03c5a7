"""Classes of requests: who sends them, how urgent they are, and what they are promised."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.table import DEFAULT_TPOT_SLO_S, DEFAULT_TTFT_SLO_S

#: Columns of the request table that tell classes apart.
_COLUMNS = ("priority", "tenant", "ttft_slo_s", "tpot_slo_s")


@dataclass(frozen=True)
class RequestClass:
    """A class of requests; those of one workload differ in at least one of the other fields."""

    name: str
    priority: int = 0  #: higher is more urgent
    tenant: int = -1  #: number of the customer, -1: unknown
    ttft_slo_s: float = DEFAULT_TTFT_SLO_S  #: target for the time to first token
    tpot_slo_s: float = DEFAULT_TPOT_SLO_S  #: target for the time per output token

    def mark(self, rows: NDArray[np.void]) -> None:
        """Make ``rows`` (dtype REQUEST) requests of this class."""
        for column in _COLUMNS:
            rows[column] = getattr(self, column)

    def members(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return which of ``rows`` [R] (dtype REQUEST) are of this class."""
        same = [rows[column] == getattr(self, column) for column in _COLUMNS]
        return np.asarray(np.logical_and.reduce(same))


def are_distinct(classes: Sequence[RequestClass]) -> bool:
    """Whether requests of the classes can be told apart, and their names too."""
    known = {tuple(getattr(c, column) for column in _COLUMNS) for c in classes}
    return len(known) == len({c.name for c in classes}) == len(classes)
