"""The router's side of a Vidur run: what it sees, built from Vidur's live objects.

The records and the book-keeping are those of every other world (view/bookkeeper.py). Vidur's
replica schedulers are the servers; of them a router may know no more than the metrics that a real
server publishes. Vidur 0.0.26 has no prefix cache, so nothing is ever believed cached.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tailrace.config import Replica, RouterSettings
from tailrace.policy.base import Policy, call_hook
from tailrace.view.bookkeeper import Bookkeeper, RequestFacts, Sent
from tailrace.view.devices import num_blocks_of
from tailrace.view.records import View
from tailrace.view.selection import mix


def private_facts(request: Any) -> RequestFacts:
    """Return the facts of a request that Vidur made: unlike any other, with the usual targets."""
    with np.errstate(over="ignore"):
        hashed = int(mix(np.uint64(request.id)))
    return RequestFacts(
        request.id, request.num_prefill_tokens, request.num_decode_tokens, hashed, hashed
    )


class RouterWatcher:
    """Listener to the router's events; does nothing by itself. Times in s."""

    def decided(self, view: View, replica: int) -> None:
        """Called when a request goes to a replica, with the view of the decision."""

    def first_token(self, number: int, now: float) -> None:
        """Called at the first token of a request."""

    def finished(self, number: int, now: float) -> None:
        """Called when a request is complete."""


class VidurRouter(Bookkeeper):
    """Views, ledger and metrics snapshots over the replica schedulers of one Vidur run."""

    def __init__(
        self,
        servers: Sequence[Any],
        replicas: Sequence[Replica],
        settings: RouterSettings,
        seed: int,
        facts_of: Callable[[Any], RequestFacts] = private_facts,
    ) -> None:
        """``servers`` [n] are Vidur's replica schedulers, ``replicas`` [n] what they amount to."""
        super().__init__(replicas, settings, seed)
        self.servers = servers
        self.watchers: list[RouterWatcher] = []
        self._facts_of = facts_of
        self._unposted = [0] * len(servers)
        self._total_blocks = num_blocks_of(replicas[0])
        self._at_hand: tuple[Any, RequestFacts] | None = None

    def server_metrics(self, replica: int) -> tuple[int, int, float]:
        """Return what the server would publish now."""
        server = self.servers[replica]
        waiting = server.num_pending_requests + self._unposted[replica]
        kv_used = server.num_allocated_blocks / self._total_blocks
        return waiting, len(server._allocation_map), kv_used

    def streamed_context(self, sent: Sent) -> int:
        """Return the tokens of prompt and answer that Vidur has processed."""
        return int(sent.request.num_processed_tokens)

    # ---- decisions ------------------------------------------------------------------------------

    def _show_replicas(self, facts: RequestFacts) -> None:
        super()._show_replicas(facts)
        for replica, view in enumerate(self.views):  # no two prompts have a block in common
            size = int(view["block_size"])
            prompts = (sent.facts.prompt_tokens for sent in self.in_flight(replica))
            view["active_blocks"] = sum(prompt // size for prompt in prompts)
            view["new_blocks"] = facts.prompt_tokens // size

    def look(self, request: Any, now: float) -> View:
        """Return what the router sees when ``request`` comes at ``now`` (s): live records."""
        facts = self._facts_of(request)
        self._at_hand = request, facts
        self.snapshots_by(now)
        return self.show(facts, request.arrived_at, now)

    def assign(self, replica: int) -> None:
        """Record that the request looked at last is sent to a replica."""
        assert self._at_hand is not None
        (request, facts), self._at_hand = self._at_hand, None
        for watcher in self.watchers:
            watcher.decided(self.view, replica)
        self.record_sent(replica, request, facts)
        self._unposted[replica] += 1

    def posted(self) -> None:
        """Record that all assigned requests have reached the queues of their servers."""
        self._unposted = [0] * len(self.servers)

    # ---- what comes back ------------------------------------------------------------------------

    def ended(self, replica: int, requests: Sequence[Any], now: float) -> None:
        """Record the end of an iteration at ``now`` (s); its requests have moved on."""
        for request in requests:
            if request.is_prefill_complete and self.is_waiting(replica, request):
                sent = self.record_first_token(replica, request)
                for watcher in self.watchers:
                    watcher.first_token(sent.facts.number, now)
            if request.completed:
                sent = self.record_finished(replica, request)
                for watcher in self.watchers:
                    watcher.finished(sent.facts.number, now)


class PolicyHooks(RouterWatcher):
    """Calls the hooks of a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._replica: dict[int, int] = {}

    def decided(self, view: View, replica: int) -> None:
        """Call ``sent``."""
        number, now = int(view.request["id"]), float(view.request["now"])
        self._replica[number] = replica
        call_hook(self.policy, "sent", replica, number, now)

    def first_token(self, number: int, now: float) -> None:
        """Call ``first_token``."""
        call_hook(self.policy, "first_token", self._replica[number], number, now)

    def finished(self, number: int, now: float) -> None:
        """Call ``finished``."""
        call_hook(self.policy, "finished", self._replica.pop(number), number, now)
