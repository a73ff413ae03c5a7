"""What the requests in progress of a router share: backends, queue, budgets, settings."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.router.access.forwarded import TrustedProxies
from tailrace.router.observe.decision_log import DecisionLog
from tailrace.router.observe.events import EventSink
from tailrace.router.observe.tracing import Tracer
from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.proxy.backends import Backends
from tailrace.router.proxy.catalogue import ModelCatalogue
from tailrace.router.proxy.prompt_tokens import PromptLearner
from tailrace.router.proxy.tokenize_probe import TokenizeProbe
from tailrace.router.serve_settings import ServeSettings


class InProgress(Protocol):
    """A request that is not over."""

    def check(self, now: float) -> None:
        """Enforce its time limits at ``now`` (s)."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """What all requests in progress share."""

    settings: ServeSettings
    backends: Backends
    events: EventSink
    decision_log: DecisionLog
    queue: Queue
    retry_budget: RetryBudget
    tokenize_probe: TokenizeProbe
    models: ModelCatalogue
    prompt_learner: PromptLearner | None = None
    """Learns the tokens of prompts; None: no backend publishes KV events."""
    explains: bool = False
    """Whether routing decisions are explained to clients without their own setting."""
    attempts: int = 1
    """How often a request is sent at most."""
    logs_requests: bool = False
    """Whether every request is logged."""
    proxies: TrustedProxies = field(default_factory=lambda: TrustedProxies(()))
    """Proxies that say for whom they ask."""
    forwards: bool = False
    """Whether there are such."""
    tracer: Tracer | None = None
    """Where spans go; None: nothing is traced."""
    now: float = 0.0
    """Coarse clock, s; set by the sweep."""
    active: "set[InProgress]" = field(default_factory=set)
    """Requests that are not over."""

    def set_up(self, settings: ServeSettings) -> None:
        """Go by settings. What every request needs is kept apart: two reads of nested settings
        took 0.4 us."""
        self.settings = settings
        self.explains = settings.explains
        self.attempts = settings.retry.attempts
        self.logs_requests = settings.log.requests
        self.proxies = TrustedProxies(settings.trusted_proxies)
        self.forwards = bool(self.proxies)

    def admit_waiting(self) -> None:
        """There may be room for a request: admit those that wait, in order."""
        if self.queue.items:
            most_s = self.backends.chooser.waiting_rules.max_wait_s
            if most_s < math.inf:
                # Who waits only because of the policy is sent before it would be rejected.
                most_s = min(most_s, self.settings.admission.max_wait_s)
            self.queue.pump(self.now, most_s, self.backends.has_room)
            self.report_waiting()

    def report_waiting(self) -> None:
        """Let other workers know whether requests wait here, so that they leave some room."""
        room = self.backends.room
        if room is not None:
            room.wait(len(self.queue) > 0)
