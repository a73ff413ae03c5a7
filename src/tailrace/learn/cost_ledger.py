"""Running cost of a cluster's requests in worlds other than our simulator.

It keeps the simulator's accounts (sim/cost_accounts.py) from events of real Vidur or of a live
router. Those worlds number their requests without limit, so each request occupies a slot that is
reused after it ends.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.env.reward import RewardSettings
from tailrace.sim import cost_accounts
from tailrace.sim.types import CLUSTER, REQUEST_FACT, REQUEST_STATE

#: Requests there is room for at first; it doubles when they are more.
PLACES = 64


class CostLedger:
    """Cost accounts of one cluster. Times in s, of one clock, which need not begin at 0."""

    def __init__(
        self, reward: RewardSettings | None = None, latency_limit_s: float | None = None
    ) -> None:
        """Begin without requests; ``reward`` gives targets and curves."""
        reward = reward or RewardSettings()
        self._cluster: Any = np.zeros(1, CLUSTER)[0]
        self._cluster["deadline_next"] = self._cluster["deadline_last"] = -1
        self._cluster["late_share"] = 1.0
        self._cluster["latency_limit"] = latency_limit_s or np.inf
        reward.shape(self._cluster)
        self._requests = np.zeros(PLACES, REQUEST_STATE)
        self._facts = np.zeros(PLACES, REQUEST_FACT)
        self._free = list(range(PLACES))
        self._places: dict[int, int] = {}
        self._unanswered: set[int] = set()

    def __contains__(self, number: int) -> bool:
        """Whether a request is in the system."""
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def is_unanswered(self, number: int) -> bool:
        """Whether a request is in the system and has no first token yet."""
        return number in self._unanswered

    @property
    def ended_at(self) -> float:
        """When the last request ended."""
        return float(self._cluster["ended_at"])

    def arrived(
        self,
        number: int,
        at: float,
        ttft_slo_s: float,
        output_tokens: int = 0,
        tpot_slo_s: float = 0.0,
    ) -> None:
        """A request has come to the router; nothing happens if it is there already.

        ``output_tokens`` that it will have, where that is known: without it there are no terms of
        the time per output token.
        """
        if number in self._places:
            return
        if not self._free:
            self._grow()
        place = self._places[number] = self._free.pop()
        self._unanswered.add(number)
        self._requests[place]["arrived"] = at
        self._facts[place]["ttft_slo"] = ttft_slo_s
        self._facts[place]["tpot_slo"] = tpot_slo_s
        self._facts[place]["output"] = output_tokens
        cost_accounts.arrived(self._cluster, self._requests, self._facts, place)

    def first_token(self, number: int, at: float) -> None:
        """Its first token has come."""
        if number not in self._unanswered:
            return
        self._unanswered.discard(number)
        place = self._places[number]
        self._requests[place]["first"] = at
        cost_accounts.answered(self._cluster, self._requests, self._facts, place)

    def ended(self, number: int, at: float, *, lost: bool = False) -> None:
        """It is over: complete, or ``lost``. An answer that did not stream came all at once."""
        if number not in self._places:
            return
        self.first_token(number, at)
        place = self._places.pop(number)
        self._requests[place]["done"] = at
        cost_accounts.ended(self._cluster, self._requests, self._facts, place, lost)
        self._free.append(place)

    def accrued(self, now: float) -> NDArray[np.float64]:
        """Return what has accrued by ``now``, [cost_accounts.N_TERMS]."""
        terms = np.zeros(cost_accounts.N_TERMS)
        cost_accounts.read(self._cluster, self._requests, now, terms)
        return terms

    def _grow(self) -> None:
        size = len(self._requests)
        self._free = list(range(size, 2 * size))
        # Places point to each other by number, so they may be moved.
        for name in ("_requests", "_facts"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(size, old.dtype)]))


def spread(replicas: NDArray[np.void]) -> float:
    """Coefficient of variation of the requests in flight on available replicas [n] REPLICA_VIEW."""
    loads = replicas["in_flight"][replicas["available"] != 0].astype(np.float64)
    mean = float(loads.mean()) if loads.size else 0.0
    return float(loads.std()) / mean if mean > 0 else 0.0
