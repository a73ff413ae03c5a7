"""The router's side of the reference engine: a policy, what it sees, and its prefix index."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Replica, RouterSettings
from tailrace.policy.base import BuiltinPolicy, Policy, call_hook, decide, order_of
from tailrace.sim.reference.content import BlockId, BlockNames
from tailrace.sim.reference.dispatch import Dispatcher
from tailrace.sim.reference.request import Batch, Request
from tailrace.sim.reference.server import Server
from tailrace.view import prefix_index
from tailrace.view.bookkeeper import Bookkeeper, RequestFacts, Sent, table_facts
from tailrace.view.ordering import order_row, request_priority
from tailrace.view.replicas import is_caching
from tailrace.workload.prefix import content_keys
from tailrace.workload.table import RequestTable


class PolicyDispatcher(Dispatcher, Bookkeeper):
    """Routes with a policy, which sees only what a live router can know."""

    def __init__(
        self,
        policy: Policy,
        table: RequestTable,
        replicas: Sequence[Replica],
        router: RouterSettings,
        seed: int,
    ) -> None:
        Bookkeeper.__init__(self, replicas, router, seed)
        self.policy = policy
        self.table = table
        self.facts = table_facts(table, router, seed)
        self._seed = seed
        self._caching = [is_caching(replica) for replica in replicas]
        self._index = prefix_index.new_index(len(replicas), router.index_entries)
        self._run_keys = content_keys(table)
        self._believed: dict[int, int] = {}
        self._order = order_row(order_of(policy))
        self._learns = router.prefix_learns
        self._lag_s = router.events_lag_s
        # Prompts prefilled and requests answered in the iteration that ends: number, output tokens.
        self._prefilled: list[tuple[int, int]] = []
        self._answered: list[tuple[int, int]] = []
        # KV events on their way: when they arrive (s), number, output tokens.
        self._events: list[deque[tuple[float, int, int]]] = [deque() for _ in replicas]
        uses_active = isinstance(policy, BuiltinPolicy) and policy.rule.uses_active
        self._names = BlockNames(table) if uses_active else None

    def start(self, servers: Sequence[Server]) -> None:
        """Reset the policy."""
        super().start(servers)
        if hasattr(self.policy, "reset"):
            call_hook(self.policy, "reset", len(servers), self._seed)

    def expected_cached(self, request_id: int) -> int:
        """Return what the index said when the request was sent."""
        return self._believed[request_id]

    def server_metrics(self, replica: int) -> tuple[int, int, float]:
        """Return what the server would publish now."""
        scheduler = self.servers[replica].scheduler
        kv_used = scheduler.memory.used / scheduler.memory.total
        return len(scheduler.waiting), scheduler.resident_count, kv_used

    def streamed_context(self, sent: Sent) -> int:
        """Return prompt and output tokens so far; a preemption takes neither back."""
        return sent.facts.prompt_tokens + int(sent.request.generated)

    # ---- decisions ------------------------------------------------------------------------------

    def route(self, now: float, requests: Sequence[Request]) -> Iterator[int]:
        """Decide one request after another; each decision sees the effect of the one before."""
        for request in requests:
            facts = self.facts[request.id]
            self._take_events(now)
            replica = decide(self.policy, self.show(facts, request.arrived_s, now))
            request.priority = int(
                request_priority(self._order, self.request_view, self.views[replica])
            )
            sent = self.record_sent(replica, request, facts)
            self._believed[request.id] = sent.cached
            if self._learns == "sent":
                self._index_content(replica, request.id, 0, now)
            self._call_hook("sent", replica, request, now)
            yield replica

    def _show_replicas(self, facts: RequestFacts) -> None:
        super()._show_replicas(facts)
        self._show_cached(facts)
        for number, view in enumerate(self.views):
            view["available"] = self.servers[number].available
            if self._names is not None:
                own = self._prompt_blocks(self._names, facts, int(view["block_size"]))
                active = self._active_blocks(self._names, number)
                view["active_blocks"] = len(active)
                view["new_blocks"] = len(own - active)

    def _show_cached(self, facts: RequestFacts) -> None:
        keys, tokens = self.runs(facts.number)
        for number, view in enumerate(self.views):
            view["cached_tokens"] = 0
            if self._caching[number]:
                size = int(view["block_size"])
                match = int(prefix_index.match_tokens(self._index, number, keys, tokens))
                # The last token of a prompt is always computed, so its block never counts.
                view["cached_tokens"] = min(match, facts.prompt_tokens - 1) // size * size
                view["index_tokens"] = prefix_index.held_tokens(self._index, number)

    def _active_blocks(self, names: BlockNames, replica: int) -> set[BlockId]:
        """Names of the full blocks of all prompts in flight on a replica."""
        size = int(self.views[replica]["block_size"])
        prompts = [self._prompt_blocks(names, s.facts, size) for s in self.in_flight(replica)]
        return set().union(*prompts)

    @staticmethod
    def _prompt_blocks(names: BlockNames, facts: RequestFacts, size: int) -> set[BlockId]:
        return set(names.block_ids(facts.number, size)[: facts.prompt_tokens // size])

    # ---- what comes back ------------------------------------------------------------------------

    def first_token(self, server: Server, request: Request, now: float) -> None:
        """Record that the request is answering."""
        self.record_first_token(server.number, request)
        self._prefilled.append((request.id, 0))
        self._call_hook("first_token", server.number, request, now)

    def finished(self, server: Server, request: Request, now: float) -> None:
        """Record the end of a request, whose prompt and output are now in the replica's cache."""
        sent = self.record_finished(server.number, request)
        self._answered.append((request.id, sent.facts.output_tokens))
        self._call_hook("finished", server.number, request, now)

    def batch_ended(self, server: Server, batch: Batch, now: float) -> None:
        """Let the prefix index learn of an iteration's prompts, then of its finished requests."""
        super().batch_ended(server, batch, now)
        news = [*(self._prefilled if self._learns != "sent" else ()), *self._answered]
        self._prefilled, self._answered = [], []
        for number, output in news:
            if self._learns == "events":
                self._events[server.number].append((now + self._lag_s, number, output))
            else:
                self._index_content(server.number, number, output, now)

    def _take_events(self, now: float) -> None:
        """Enter the KV events that have reached the router by ``now`` (s) into its index."""
        for replica, events in enumerate(self._events):
            while events and events[0][0] <= now:
                at, number, output = events.popleft()
                self._index_content(replica, number, output, at)

    def lost(self, server: Server, requests: Sequence[Request], now: float) -> None:
        """Forget what the router knew about a replica that died."""
        self._events[server.number].clear()
        self.record_death(server.number)
        prefix_index.forget(self._index, server.number)
        for request in requests:
            self._call_hook("failed", server.number, request, now)

    def before(self, now: float) -> None:
        """Take the last snapshot due before ``now``: nothing has changed since it was due."""
        self.snapshots_by(now, before=True)

    def ended(self, now: float) -> None:
        """Take the snapshot that is due right now."""
        self.snapshots_by(now)

    def _call_hook(self, hook: str, replica: int, request: Request, now: float) -> None:
        if hasattr(self.policy, hook):
            call_hook(self.policy, hook, replica, request.id, now)

    # ---- prefix index ---------------------------------------------------------------------------

    def runs(self, request_id: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Return keys [u] and lengths in tokens [u] of the content runs of a prompt."""
        row = self.table.rows[request_id]
        if row["run_count"] == 0:  # takes up cache, though no other prompt shares it
            private = np.array([-1 - request_id], np.int64).view(np.uint64)
            return private, np.array([row["prompt_tokens"]], np.int32)
        runs = slice(int(row["run_start"]), int(row["run_start"]) + int(row["run_count"]))
        return self._run_keys[runs], self.table.runs["tokens"][runs].copy()

    def _index_content(self, replica: int, request_id: int, output: int, now: float) -> None:
        keys, tokens = self.runs(request_id)
        if self._caching[replica]:
            tokens[-1] += output  # the output continues the stream of the last run
            capacity = self.views["capacity_tokens"][replica]
            prefix_index.insert(self._index, replica, keys, tokens, capacity, now)
