"""Who decides where requests go. The engine asks for replicas and reports what happens."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.server import Server


class Dispatcher:
    """Base of all: sends requests to replicas and may listen to what becomes of them.

    At one instant the engine calls, in this order: ``before``, the hooks of all iterations that end
    then, ``ended``, ``lost`` for replicas that die, and ``route`` for the requests of that instant.
    """

    servers: Sequence[Server] = ()

    def start(self, servers: Sequence[Server]) -> None:
        """A run begins; the servers may be looked at (queues, caches) during it."""
        self.servers = servers

    def route(self, now: float, requests: Sequence[Request]) -> Iterable[int]:
        """Return a replica for each of the requests that have come at one instant, in order of id.

        Of a generator the engine takes one replica at a time, and each request joins its server
        before the next replica is asked for.
        """
        raise NotImplementedError

    def before(self, now: float) -> None:
        """Nothing more happens before ``now`` (s)."""

    def first_token(self, server: Server, request: Request, now: float) -> None:
        """The first output token of a request has come."""

    def finished(self, server: Server, request: Request, now: float) -> None:
        """A request is complete; ``first_token`` was called before."""

    def batch_ended(self, server: Server, batch: Batch, now: float) -> None:
        """An iteration is over, and the hooks of its requests have been called."""

    def ended(self, now: float) -> None:
        """All iterations that end at ``now`` (s) have been reported."""

    def lost(self, server: Server, requests: Sequence[Request], now: float) -> None:
        """A replica has died with these requests on it."""

    def expected_cached(self, request_id: int) -> int:  # noqa: ARG002 (most expect nothing)
        """Prompt tokens believed to be cached where a request was sent."""
        return 0


class RecordedDispatcher(Dispatcher):
    """Sends every request where it went in a recorded run."""

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
