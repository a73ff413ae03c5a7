"""What a policy says about requests that wait at the router (view/holding.py, view/ordering.py)."""

import math
from collections.abc import Callable, Set

import numpy as np

from tailrace.policy.base import Policy, asked_order, holding_of
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.cluster import ClusterState
from tailrace.view.holding import holding_row, rooms
from tailrace.view.ordering import priority_number
from tailrace.workload.table import DEFAULT_TTFT_SLO_S

_NONE: Set[int] = frozenset()


class WaitingRules(Policy):
    """Which replicas have no room by a policy's ``+queue``, and the keys of those that wait.

    A policy with ``+order`` alone sets no limits, but those that wait for other reasons go by its
    order. Listens to first tokens, as they may make room.
    """

    def __init__(self, cluster: ClusterState, policy: Policy) -> None:
        self.name = "queue"
        self._cluster = cluster
        self.holding = holding_of(policy)
        self.order = self.holding.order if self.holding is not None else asked_order(policy)
        self.max_wait_s = math.inf if self.holding is None else self.holding.max_wait_s
        """Who has waited that long is sent, room or not."""
        self.room_made: Callable[[], None] = lambda: None
        """Called when there may be room."""
        self._row = holding_row(self.holding)
        if self.holding is not None:
            cluster.listen(self)
            self.full()  # compiles what is needed

    def first_token(self, replica: int, request_id: int, now: float) -> None:
        """A prompt has been prefilled."""
        del replica, request_id, now
        self.room_made()

    def full(self) -> Set[int]:
        """Return the numbers of the replicas without room."""
        if self.holding is None:
            return _NONE
        own, seen = self._cluster.replicas, self._cluster.seen
        if not self._cluster.worker_view.shared.alone:
            # As of this worker's last decision, which hid some replicas.
            seen = seen.copy()
            seen["available"] = own["available"]
        free = np.zeros(len(seen), np.bool_)
        rooms(self._row, seen, free)
        return frozenset(np.flatnonzero(~free).tolist())

    def key(self, arrival: Arrival, excluded: Set[int] = _NONE) -> int:
        """Return the key of a request that begins to wait, lower first.

        ``excluded``: replicas that cannot take it, whatever they have cached.
        """
        order, cluster = self.order, self._cluster
        if order is None:
            return 0
        rates = cluster.seen["prefill_tokens_per_s"]
        work_s = min(
            (
                (arrival.prompt_tokens - cluster.cached_on(arrival, r)) / max(float(rate), 1.0)
                for r, rate in enumerate(rates)
                if r not in excluded
            ),
            default=0.0,
        )
        target_s = arrival.asked.ttft_slo_s
        target_s = DEFAULT_TTFT_SLO_S if target_s is None else target_s
        return priority_number(order, arrival.arrived_at, work_s, target_s, 0)
