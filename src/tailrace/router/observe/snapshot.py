"""The state of a router at one moment, as a value: what ``/status`` and the gauges show.

Counters are not in it: ``telemetry.py`` counts events as they happen. The router builds a snapshot
when somebody asks, and at the end of every slot of the rolling window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.router.state.server_speeds import ServerSpeed

#: States of a circuit breaker.
BREAKER_STATES = CLOSED, HALF_OPEN, OPEN = ("closed", "half_open", "open")


#: Waiting requests that are shown: those that have waited longest.
SHOWN_WAITING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSnapshot:
    """One backend. None: not known."""

    index: int
    """Its number, which never changes."""
    name: str
    url: str
    state: str = CLOSED
    """closed, half_open or open (its breaker), draining, or removed (by a reload)."""
    breaker: str = CLOSED
    available: bool = True
    """Whether it may get requests."""
    draining: bool = False
    removed: bool = False
    why: str = ""
    """Why its breaker is not closed."""
    opened: int = 0
    """How often its breaker has opened."""
    warming: bool = False
    """Whether it gets its share of requests little by little, after having been open."""
    in_flight: int = 0
    """Requests the router has sent there and not seen the end of."""
    ledger_in_flight: int = 0
    """The same by the records that policies read."""
    queued: int = 0
    """Those without a token yet."""
    limit: int | None = None
    """Most requests at once, for now; None: no limit."""
    takes_priorities: bool = False
    """Whether requests to it carry the priorities of a policy that orders."""
    connections: int = 0
    """Open connections, idle ones included."""
    waiting: float | None = None
    """Requests in the server's queue, by its own metrics."""
    running: float | None = None
    """Requests in the server's batch, by its own metrics."""
    kv_used: float | None = None
    """Share of the server's KV memory in use, 0..1, by its own metrics."""
    metrics_age_s: float | None = None
    """Age of the server's metrics."""
    scrape_failures: int = 0
    """Times its metrics could not be read."""
    cached_tokens: int = 0
    """Tokens that the prefix index holds for it."""
    caches: str = "estimated"
    """How far the prefix index can be trusted: exact, estimated or stale."""
    event_lag_s: float | None = None
    """How late its KV events are; None: it publishes none."""
    event_gaps: int = 0
    """Times KV events were missing."""
    event_gaps_lost: int = 0
    """Those that could not be replayed."""
    capacity_tokens: int = 0
    """Size of its KV memory."""
    speed: float = 1.0
    """Relative to the other backends, as set."""
    known: ServerSpeed | None = None
    """How fast it is, as far as the router knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSnapshot:
    """The connection to routers on other machines."""

    connected: bool
    members: int
    """Worker processes of other routers that are known."""
    lost: int
    """Times the connection was lost."""
    missed: int
    """Times messages of others were missing."""
    refused: int
    """Messages of others that could not be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSnapshot:
    """A request that waits at the router."""

    client: str
    """Name of its client; empty: clients have no keys."""
    priority: int
    """Lower goes first."""
    waited_s: float
    overtaken: int
    """Requests that came later and were sent before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSnapshot:
    """A router and its backends."""

    at: float
    """When it was taken, s of the router's clock."""
    backends: tuple[BackendSnapshot, ...]
    """By number, including those that a reload has removed."""
    draining: bool = False
    """Whether the router is stopping."""
    behind: str = ""
    """Why this process still uses old settings after a change; empty: it does not."""
    policy: str
    fallback: str
    canary: str = ""
    """Name of the canary policy; empty: there is none."""
    canary_share: float = 0.0
    """Share of sessions, or of time, it is given."""
    canary_block_s: float = 0.0
    """Length of its turns; 0: it gets sessions."""
    shadow: str = ""
    """Name of the shadow policy; empty: there is none."""
    decisions: int = 0
    canary_decisions: int = 0
    """Those that the canary policy made."""
    waiting: int = 0
    """Requests that wait at the router for room."""
    oldest: tuple[WaitingSnapshot, ...] = ()
    """Some of these, the one that has waited longest first."""
    clients: int = 0
    """Open connections of clients."""
    log_lines_dropped: int = 0
    """Lines of the decision log that could not be written."""
    token_source: str = "auto"
    """Where prompt lengths come from, as set."""
    prompts_by_source: Mapping[str, int] = field(default_factory=dict)
    """Prompts by how their length was known."""
    lengths_by_source: Mapping[str, int] = field(default_factory=dict)
    """Lengths that bytes per token were learned from, by who counted them."""
    bytes_per_token: float | None = None
    tokenize_failures: int = 0
    """Requests to a server's ``/tokenize`` that failed."""
    autopilot: Mapping[str, Any] | None = None
    """What the autopilot has written last, see ``autopilot/state.py``; None: it is off."""
    vetoed: tuple[str, ...] = ()
    """Policies that the autopilot may not use."""
    store: StoreSnapshot | None = None
    """The shared store; None: there is none."""

    @property
    def longest_wait_s(self) -> float:
        """How long the request has waited that waits longest; 0: nobody does."""
        return self.oldest[0].waited_s if self.oldest else 0.0

    @property
    def present(self) -> list[BackendSnapshot]:
        """Backends that no reload has removed."""
        return [b for b in self.backends if not b.removed]
