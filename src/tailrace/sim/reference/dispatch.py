"""Dispatchers decide where requests go; the engine calls them and reports events."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.server import Server


class Dispatcher:
    """Base class: chooses replicas for requests, and may listen to what happens to them.

    At one instant the engine calls, in this order: ``before``, the hooks of all iterations that end
    then, ``ended``, ``lost`` for replicas that die, and ``route`` for the requests of that instant.
    """

    servers: Sequence[Server] = ()

    def start(self, servers: Sequence[Server]) -> None:
        """Start a run over these servers, whose queues and caches may be read during it."""
        self.servers = servers

    def route(self, now: float, requests: Sequence[Request]) -> Iterable[int]:
        """Return a replica for each of the requests that arrive at one instant, in order of id.

        From a generator the engine takes one replica at a time: each request joins its server
        before the next is decided.
        """
        raise NotImplementedError

    def sent(self, now: float, requests: Sequence[Request]) -> Iterable[tuple[Request, int]]:
        """Give out each request that is sent now with its replica; ``requests`` have arrived."""
        if not requests:
            return ()
        return zip(requests, self.route(now, requests), strict=True)

    def next_due(self) -> float:
        """Return when a request that waits at the router must be sent, s; inf: never."""
        return math.inf

    def before(self, now: float) -> None:
        """Called before anything happens at ``now`` (s)."""

    def first_token(self, server: Server, request: Request, now: float) -> None:
        """Called at the first output token of a request."""

    def finished(self, server: Server, request: Request, now: float) -> None:
        """Called when a request is complete, after ``first_token``."""

    def batch_ended(self, server: Server, batch: Batch, now: float) -> None:
        """Called at the end of an iteration, after the hooks of its requests."""

    def ended(self, now: float) -> None:
        """Called after all iterations that end at ``now`` (s)."""

    def lost(self, server: Server, requests: Sequence[Request], now: float) -> None:
        """Called when a replica has died with these requests on it."""

    def expected_cached(self, request_id: int) -> int:  # noqa: ARG002 (most expect nothing)
        """Return the prompt tokens believed cached where a request was sent."""
        return 0


class RecordedDispatcher(Dispatcher):
    """Sends every request to the replica it went to in a recorded run."""

    def __init__(self, replicas: NDArray[np.integer] | Sequence[int]) -> None:
        self._replicas = [int(replica) for replica in replicas]

    def start(self, servers: Sequence[Server]) -> None:
        """Check that the recorded replicas exist."""
        super().start(servers)
        for request_id, replica in enumerate(self._replicas):
            if not 0 <= replica < len(servers):
                raise TailraceError(
                    f"request {request_id} was recorded on replica {replica}, "
                    f"but the cluster has {len(servers)}, counted from 0"
                )

    def route(self, now: float, requests: Sequence[Request]) -> Iterable[int]:  # noqa: ARG002
        """Return the recorded replicas."""
        return [self._replicas[request.id] for request in requests]
