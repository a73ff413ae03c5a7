"""Vidur's own routers, decision by decision and draw by draw, for the parity benchmark.

They look into the servers (queues, caches), as they do in Vidur; Tailrace's own rules of similar
name do not. ``main`` and ``canary`` are Vidur's two branches.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.errors import TailraceError, unknown_name
from tailrace.sim.reference.dispatch import Dispatcher
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.server import Server


@dataclass(frozen=True)
class RouterSettings:
    """What a run says about its router."""

    sessions: Sequence[int]
    """Session of each request, -1: none."""
    python_seed: int = 42
    """Of Python's global generator."""
    router_seed: int = 67
    """Of the router's own generator (canary)."""
    top_k: int = 2
    """ranked_sticky_lop_uncached: ranks a session's replica may have."""
    tolerance_factor: float = 2.0
    """tolerant_sticky_lop_uncached: how much worse than the best it may be."""


class VidurRouter(Dispatcher):
    """Decides for one request after the other."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.own_random = random.Random(settings.router_seed)

    @property
    def replicas(self) -> range:
        """Numbers of all replicas."""
        return range(len(self.servers))

    def route(self, now: float, requests: Sequence[Request]) -> list[int]:  # noqa: ARG002
        """Route all requests of one instant before any of them joins its server."""
        return [self.choose(request) for request in requests]

    def choose(self, request: Request) -> int:
        """Return the replica of one request."""
        raise NotImplementedError

    def least(self, loads: Sequence[int]) -> int:
        """Return a replica of least load; draws even when there is only one such."""
        best = min(loads)
        return self.own_random.choice([i for i in self.replicas if loads[i] == best])

    def session_of(self, request: Request) -> int:
        """Return the session of a request, which must have one."""
        session = self.settings.sessions[request.id]
        if session < 0:
            raise TailraceError(f"request {request.id} has no session, but its router needs one")
        return session


class RoundRobin(VidurRouter):
    """One replica after the other."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.counter = 0

    def choose(self, request: Request) -> int:  # noqa: ARG002
        """Return the next replica."""
        self.counter += 1
        return (self.counter - 1) % len(self.servers)


class MainRandom(VidurRouter):
    """Any replica, drawn from Python's global generator."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.global_random = random.Random(settings.python_seed)

    def choose(self, request: Request) -> int:  # noqa: ARG002
        """Draw a replica."""
        return self.global_random.randint(1, len(self.servers)) - 1


class CanaryRandom(MainRandom):
    """Any replica."""

    def choose(self, request: Request) -> int:  # noqa: ARG002
        """Draw a replica."""
        return self.global_random.randint(0, len(self.servers) - 1)


class MainLeastWaiting(VidurRouter):
    """lor of the main branch: fewest *waiting* requests, ties to the lowest number."""

    def route(self, now: float, requests: Sequence[Request]) -> list[int]:  # noqa: ARG002
        """Count the queues once for all requests of an instant, adding every choice."""
        waiting = [len(server.scheduler.waiting) for server in self.servers]
        chosen: list[int] = []
        for _ in requests:
            replica = waiting.index(min(waiting))
            waiting[replica] += 1
            chosen.append(replica)
        return chosen


class PendingLoad(VidurRouter):
    """Keeps an amount of pending work per replica and chooses the least."""

    def start(self, servers: Sequence[Server]) -> None:
        """Nothing is pending."""
        super().start(servers)
        self.pending = [0] * len(servers)

    def amount(self, request: Request, replica: int) -> int:
        """Return what a request adds to a replica when it is sent there."""
        raise NotImplementedError

    def send(self, request: Request, replica: int) -> int:
        """Book a request on a replica, and return that."""
        self.pending[replica] += self.amount(request, replica)
        return replica

    def choose(self, request: Request) -> int:
        """Return a replica with the least pending work."""
        return self.send(request, self.least(self.pending))


class LeastOutstanding(PendingLoad):
    """lor of the canary branch: fewest requests assigned and not finished."""

    def amount(self, request: Request, replica: int) -> int:  # noqa: ARG002
        """Return one per request."""
        return 1

    def finished(self, server: Server, request: Request, now: float) -> None:  # noqa: ARG002
        """A request less."""
        self.pending[server.number] -= 1


class LeastPrefill(PendingLoad):
    """lop: fewest prompt tokens whose prefill has not ended."""

    def amount(self, request: Request, replica: int) -> int:  # noqa: ARG002
        """Return the prompt as it is now: a preemption may have cut it since it was sent."""
        return request.prompt

    def first_token(self, server: Server, request: Request, now: float) -> None:  # noqa: ARG002
        """Its prefill has ended for the first time."""
        self.pending[server.number] -= self.amount(request, server.number)


class LeastPrefillRequests(LeastPrefill):
    """lop_binary: fewest requests whose prefill has not ended."""

    def amount(self, request: Request, replica: int) -> int:  # noqa: ARG002
        """Return one per request."""
        return 1


class LeastPrefillByBatch(PendingLoad):
    """lop_batch_end: prompt tokens sent less prompt tokens really computed."""

    def amount(self, request: Request, replica: int) -> int:  # noqa: ARG002
        """Return the whole prompt, cached or not."""
        return request.prompt

    def batch_ended(self, server: Server, batch: Batch, now: float) -> None:  # noqa: ARG002
        """Cached tokens are never taken off, tokens computed twice are taken off twice."""
        self.pending[server.number] -= batch.prefill_tokens


class EvenUncachedPrefill(LeastPrefill):
    """lop_uncached: the replica whose choice leaves the least spread of pending uncached tokens."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.cached: dict[tuple[int, int], int] = {}

    def amount(self, request: Request, replica: int) -> int:
        """Return the prompt less what was cached on the replica when that was first asked for."""
        key = (request.id, replica)
        if key not in self.cached:
            self.cached[key] = self.servers[replica].scheduler.cached_tokens(request)
        return request.prompt - self.cached[key]

    def spreads(self, request: Request) -> list[int]:
        """Return max - min of the pending tokens [n] if each replica in turn got the request."""
        spreads: list[int] = []
        for replica in self.replicas:
            pending = list(self.pending)
            pending[replica] += self.amount(request, replica)
            spreads.append(max(pending) - min(pending))
        return spreads

    def choose(self, request: Request) -> int:
        """Return a replica of least spread."""
        return self.send(request, self.least(self.spreads(request)))


class StickyRoundRobin(RoundRobin):
    """The first request of a session in turn, the others to the same replica."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.home: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        """Return the session's replica."""
        session = self.session_of(request)
        if session not in self.home:
            self.home[session] = super().choose(request)
        return self.home[session]


class StickyLeastOutstanding(LeastOutstanding):
    """The first request of a session by lor, the others to the same replica."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.home: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        """Return the session's replica."""
        session = self.session_of(request)
        if session not in self.home:
            self.home[session] = self.least(self.pending)
        return self.send(request, self.home[session])


class StickyEvenUncachedPrefill(EvenUncachedPrefill):
    """lop_uncached that stays with a session's replica while it is good enough."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.home: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        """Return the session's replica, or bind the session anew."""
        session = self.session_of(request)
        spreads = self.spreads(request)
        if session not in self.home or not self.may_stay(self.home[session], spreads):
            self.home[session] = self.least(spreads)
        return self.send(request, self.home[session])

    def may_stay(self, replica: int, spreads: Sequence[int]) -> bool:
        """Tell whether a session's replica is good enough."""
        raise NotImplementedError


class Tolerant(StickyEvenUncachedPrefill):
    """tolerant_sticky_lop_uncached."""

    def may_stay(self, replica: int, spreads: Sequence[int]) -> bool:
        """Allow a multiple of the least spread."""
        return spreads[replica] <= self.settings.tolerance_factor * min(spreads)


class Ranked(StickyEvenUncachedPrefill):
    """ranked_sticky_lop_uncached."""

    def may_stay(self, replica: int, spreads: Sequence[int]) -> bool:
        """Allow the first few ranks, equal spreads in random order."""
        ranking = sorted((spreads[i], self.own_random.random(), i) for i in self.replicas)
        return replica in [i for _, _, i in ranking[: self.settings.top_k]]


MAIN: dict[str, Callable[[RouterSettings], VidurRouter]] = {
    "random": MainRandom,
    "round_robin": RoundRobin,
    "lor": MainLeastWaiting,
}
CANARY: dict[str, Callable[[RouterSettings], VidurRouter]] = {
    "random": CanaryRandom,
    "round_robin": RoundRobin,
    "lor": LeastOutstanding,
    "lop": LeastPrefill,
    "lop_binary": LeastPrefillRequests,
    "lop_batch_end": LeastPrefillByBatch,
    "lop_uncached": EvenUncachedPrefill,
    "sticky_round_robin": StickyRoundRobin,
    "sticky_lor": StickyLeastOutstanding,
    "tolerant_sticky_lop_uncached": Tolerant,
    "ranked_sticky_lop_uncached": Ranked,
}


def make_router(branch: str, name: str, settings: RouterSettings) -> VidurRouter:
    """Return a fresh router of one of Vidur's branches."""
    routers = {"main": MAIN, "canary": CANARY}[branch]
    if name not in routers:
        raise unknown_name(f"router of Vidur's {branch} branch", name, routers)
    return routers[name](settings)
