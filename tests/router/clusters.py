"""Small clusters with a clock that stands still until it is moved."""

import orjson

from tailrace.config import Replica
from tailrace.router.decide.chooser import Chooser, ChooserSettings, Decision
from tailrace.router.intake.request_body import RequestBody, read_request
from tailrace.router.settings import BackendSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState

#: What must be zero when nothing is in flight.
LEDGER = (
    *("in_flight", "queued", "queued_tokens", "queued_uncached", "context_tokens"),
    *("answering_prompts", "predicted_tokens", "queued_since_sum"),
)


class Clock:
    """Time that moves when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def backends(*servers: Replica) -> list[BackendSettings]:
    return [
        BackendSettings(url=f"http://127.0.0.1:{9000 + i}", server=server)
        for i, server in enumerate(servers)
    ]


def new_cluster(n: int = 2, clock: Clock | None = None, **server: object) -> ClusterState:
    return ClusterState(backends(*[Replica(**server)] * n), clock or Clock())  # type: ignore[arg-type]


def new_chooser(
    cluster: ClusterState, policy: str = "least_outstanding", **settings: object
) -> Chooser:
    """A chooser that has all the time in the world: a first decision may have to compile."""
    settings.setdefault("limit_ms", 1e6)
    return Chooser(cluster, ChooserSettings(policy=policy, **settings), warm_up=False)  # type: ignore[arg-type]


def chat(*contents: str, **fields: object) -> RequestBody:
    """A conversation of user and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    body = orjson.dumps({"model": "m", "stream": True, "messages": messages, **fields})
    return read_request("/v1/chat/completions", {}, body)


def send(cluster: ClusterState, asked: RequestBody, replica: int = 0) -> Attempt:
    """Send a request to a replica of the caller's choice."""
    arrival = cluster.arrive(asked)
    return Attempt(cluster, arrival, replica, decided(cluster, arrival, replica))


def decided(cluster: ClusterState, arrival: Arrival, replica: int) -> Decision:
    """The decision of a chooser that may take only this replica."""
    others = [r for r in range(len(cluster)) if r != replica]
    decision = new_chooser(cluster).choose(arrival, others)
    assert decision is not None
    assert decision.replica == replica
    return decision
