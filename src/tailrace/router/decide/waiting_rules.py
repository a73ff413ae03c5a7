"""What a policy says about requests that wait at the router (view/holding.py, view/ordering.py)."""

import math
from collections.abc import Callable, Set

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.base import Policy, asked_order, holding_of
from tailrace.router.state import kernels
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.cluster import ClusterState
from tailrace.view.holding import holding_row
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
        self._rows = np.array([holding_row(self.holding)])
        self._full = np.zeros(0, np.bool_)
        if self.holding is not None:
            cluster.listen(self)
            self.full()  # compiles what is needed

    def first_token(self, replica: int, request_id: int, now: float) -> None:
        """A prompt has been prefilled."""
        del replica, request_id, now
        self.room_made()

    def any_room(self) -> bool:
        """Whether there may be a replica with room: no means that nobody need be asked."""
        cluster = self._cluster
        # Other workers and routers count too, and only a decision looks at what they have sent.
        if self.holding is None or not cluster.worker_view.shared.alone:
            return True
        return self._without_room(cluster.seen) < len(cluster.seen)

    def full(self) -> Set[int]:
        """Return the numbers of the replicas without room."""
        if self.holding is None:
            return _NONE
        own, seen = self._cluster.replicas, self._cluster.seen
        if not self._cluster.worker_view.shared.alone:
            # As of this worker's last decision, which hid some replicas.
            seen = seen.copy()
            seen["available"] = own["available"]
        if not self._without_room(seen):
            return _NONE
        return frozenset([r for r, is_full in enumerate(self._full.tolist()) if is_full])

    def _without_room(self, seen: NDArray[np.void]) -> int:
        """Mark the replicas without room; return how many there are."""
        if self._full.size != seen.size:
            self._full = np.zeros(seen.size, np.bool_)
        return int(kernels.without_room(self._rows, seen, self._full))

    def key(self, arrival: Arrival, excluded: Set[int] = _NONE) -> int:
        """Return the key of a request that begins to wait, lower first.

        ``excluded``: replicas that cannot take it, whatever they have cached.
        """
        order, cluster = self.order, self._cluster
        if order is None:
            return 0
        work_s = cluster.least_work_s(arrival, excluded)
        target_s = arrival.asked.ttft_slo_s
        target_s = DEFAULT_TTFT_SLO_S if target_s is None else target_s
        return priority_number(order, arrival.arrived_at, work_s, target_s, 0)
