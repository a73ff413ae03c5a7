"""A Ray Serve request router that lets a Tailrace policy choose the replica of every request.

    @serve.deployment(request_router_config=router_config("tailrace"), num_replicas=4)

or, in a Serve config file, this class's path as ``request_router_class`` and ``{policy: tailrace}``
as ``request_router_kwargs``. See docs/ray.md. Written for the interface of Ray 2.60, which Ray
calls alpha.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tailrace.integrations.ray.serve_state import HandleState, RayServeSettings, request_body_of


def router_config(
    policy: str = "tailrace", *, stats_period_s: float = 1.0, **kwargs: Any
) -> RequestRouterConfig:
    """Return the ``request_router_config`` of a deployment whose replicas a policy chooses.

    ``kwargs``: those of :class:`~tailrace.integrations.ray.serve_state.RayServeSettings`, e.g.
    ``server={"device": ...}``. ``stats_period_s``: seconds between two calls of a deployment's
    ``record_routing_stats``, if it has one.
    """
    RayServeSettings.of(policy, **kwargs)  # a mistake shows here, not in some actor
    return RequestRouterConfig(
        request_router_class=f"{TailraceRouter.__module__}.{TailraceRouter.__qualname__}",
        request_router_kwargs={"policy": policy, **kwargs},
        request_routing_stats_period_s=stats_period_s,
    )


class TailraceRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by a policy's scores; Serve takes the first that has room."""

    handle_state: HandleState

    def initialize_state(self, **kwargs: Any) -> None:
        """Load the policy; ``kwargs`` are the ``request_router_kwargs``."""
        self.handle_state = HandleState(RayServeSettings.of(**kwargs))
        self._has_stats: set[ReplicaID] = set()

    # ---- replicas -------------------------------------------------------------------------------

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """All replicas there are now, each with its latest routing stats."""
        self.handle_state.set_replicas(replica.replica_id for replica in replicas)
        for replica in replicas:
            stats = replica.routing_stats
            if isinstance(stats, Mapping) and stats:
                self._has_stats.add(replica.replica_id)
                self.handle_state.stats(replica.replica_id, stats)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._has_stats.discard(replica_id)
        self.handle_state.lost(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """A replica has told how many requests it has, from all handles."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if replica_id not in self._has_stats:
            self.handle_state.ongoing(replica_id, num_ongoing_requests)

    # ---- requests -------------------------------------------------------------------------------

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, best first, each in a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        # If all of them turn it away, wait a little before they are asked again.
        pending_request.routing_context.should_backoff = True
        known = {replica.replica_id: replica for replica in candidate_replicas}
        room = {r.replica_id for r in self.select_available_replicas(candidate_replicas)}
        about = pending_request.metadata
        request = about.internal_request_id
        ranked = self.handle_state.choose(
            request,
            lambda: request_body_of(
                pending_request.args,
                pending_request.kwargs,
                about.session_id,
                about.multiplexed_model_id,
            ),
            known.keys() - room,
        )
        pending_request.future.add_done_callback(
            lambda future: self.handle_state.dropped(request) if future.cancelled() else None
        )
        chosen = [[known[key]] for key in ranked if key in known]
        return chosen or [candidate_replicas]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has accepted a request."""
        del result
        self.handle_state.routed(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has ended, well or not."""
        self.handle_state.ended(internal_request_id, replica_id)
