"""The router's side of a Vidur run: what it sees, built from Vidur's live objects.

The records and the book-keeping are those of every other world (view/records.py, view/ledger.py).
Vidur's replica schedulers are the servers; of them a router may know no more than the metrics that
a real server publishes. Vidur 0.0.26 has no prefix cache, so nothing is ever believed cached.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.config import Replica, RouterSettings
from tailrace.policy.base import Policy, call_hook, checked_scores
from tailrace.sim.reference.routing import replica_views
from tailrace.view import ledger
from tailrace.view.cost_model import cost_rows
from tailrace.view.devices import cost_of
from tailrace.view.records import REQUEST_VIEW, ROUTER, View
from tailrace.view.selection import NO_REPLICA, choose, mix
from tailrace.workload.predict import predicted_output
from tailrace.workload.prefix import prefix_hash
from tailrace.workload.table import DEFAULT_TPOT_SLO_S, DEFAULT_TTFT_SLO_S, RequestTable


@dataclass(frozen=True)
class Facts:
    """What a router is told of a request and Vidur's own request does not say."""

    number: int  #: of the request, for policies and results
    prefix_hash: int
    session: int = -1
    turn: int = 0
    priority: int = 0
    ttft_slo_s: float = DEFAULT_TTFT_SLO_S
    tpot_slo_s: float = DEFAULT_TPOT_SLO_S
    predicted: float | None = None  #: output tokens; None: the mean of those finished so far


def private_facts(request: Any) -> Facts:
    """Facts of a request that Vidur made: by itself, with the usual targets."""
    with np.errstate(over="ignore"):
        return Facts(request.id, int(mix(np.uint64(request.id))))


def table_facts(table: RequestTable, router: RouterSettings, seed: int) -> list[Facts]:
    """Facts of every request of a table."""
    predicted = predicted_output(table, router.predictor, router.predictor_sigma, seed)
    return [
        Facts(
            number=number,
            prefix_hash=int(hashed),
            session=int(row["session"]),
            turn=int(row["turn"]),
            priority=int(row["priority"]),
            ttft_slo_s=float(row["ttft_slo_s"]),
            tpot_slo_s=float(row["tpot_slo_s"]),
            predicted=None if predicted is None else float(predicted[number]),
        )
        for number, (row, hashed) in enumerate(zip(table.rows, prefix_hash(table), strict=True))
    ]


@dataclass
class Sent:
    """A request on its way, as the router remembers it."""

    request: Any  #: Vidur's
    facts: Facts
    prompt: int  #: tokens; an eviction changes Vidur's own number
    output: int  #: tokens
    at: float  #: when it was sent, s
    predicted: int  #: output tokens, as predicted then


class Watcher:
    """Told of everything the router hears; does nothing by itself. Times in s."""

    def decided(self, view: View, replica: int) -> None:
        """A request goes to a replica; the view is that of the decision."""

    def first_token(self, number: int, now: float) -> None:
        """The first token of a request has come back."""

    def finished(self, number: int, now: float) -> None:
        """A request is complete."""


class VidurRouter:
    """Views, ledger and metrics snapshots over the replica schedulers of one Vidur run."""

    def __init__(
        self,
        servers: Sequence[Any],
        replicas: Sequence[Replica],
        settings: RouterSettings,
        seed: int,
        facts_of: Callable[[Any], Facts] = private_facts,
    ) -> None:
        """``servers`` [n] are Vidur's replica schedulers, ``replicas`` [n] what they amount to."""
        self.servers = servers
        self.settings = settings
        self.watchers: list[Watcher] = []
        self._facts_of = facts_of
        self._views = replica_views(replicas)
        self._request: Any = np.zeros(1, REQUEST_VIEW)[0]
        self._router: Any = np.zeros(1, ROUTER)[0]
        with np.errstate(over="ignore"):
            self._router["rng"] = mix(np.uint64(seed))
        costs = cost_rows([cost_of(replica) for replica in replicas])
        self.view = View(self._request, self._views, costs, self._router)
        self._waiting: list[dict[int, Sent]] = [{} for _ in servers]
        self._answering: list[dict[int, Sent]] = [{} for _ in servers]
        self._unposted = [0] * len(servers)
        self._last_replica: dict[int, int] = {}
        self._snapshot = -1
        self._at_hand: tuple[Any, Facts] | None = None

    # ---- decisions ------------------------------------------------------------------------------

    def look(self, request: Any, now: float) -> View:
        """Return what the router sees when ``request`` comes at ``now`` (s): live records."""
        facts = self._facts_of(request)
        self._at_hand = request, facts
        if self.settings.staleness_s == 0:
            self._take_snapshot(now)
        else:
            self.snapshots_by(now)
        self._show_request(request, facts, now)
        for number, view in enumerate(self._views):
            view["context_tokens"] = sum(
                sent.request.num_processed_tokens for sent in self._answering[number].values()
            )
            if self._waiting[number]:
                view["oldest_sent"] = min(sent.at for sent in self._waiting[number].values())
        ledger.look(self._views, self._router, now)
        return self.view

    def _show_request(self, request: Any, facts: Facts, now: float) -> None:
        view = self._request
        view["now"] = now
        view["id"] = facts.number
        view["arrived_at"] = request.arrived_at
        view["prompt_tokens"] = request.num_prefill_tokens
        if facts.predicted is None:
            prior = self.settings.prior_output_tokens
            view["predicted_output"] = ledger.mean_output(self._router, prior)
        else:
            view["predicted_output"] = facts.predicted
        view["last_replica"] = self._last_replica.get(facts.session, -1)
        for field in ("session", "turn", "prefix_hash", "priority", "ttft_slo_s", "tpot_slo_s"):
            view[field] = getattr(facts, field)

    def assign(self, replica: int) -> None:
        """Enter that the request looked at last is sent to a replica."""
        assert self._at_hand is not None
        (request, facts), self._at_hand = self._at_hand, None
        now = float(self._request["now"])
        for watcher in self.watchers:
            watcher.decided(self.view, replica)
        sent = Sent(
            request=request,
            facts=facts,
            prompt=request.num_prefill_tokens,
            output=request.num_decode_tokens,
            at=now,
            predicted=ledger.whole_tokens(self._request["predicted_output"]),
        )
        self._router["decisions"] += 1
        ledger.sent(self._views[replica], sent.prompt, 0, sent.predicted, now)
        self._waiting[replica][request.id] = sent
        self._unposted[replica] += 1
        if facts.session >= 0:
            self._last_replica[facts.session] = replica

    def posted(self) -> None:
        """What was assigned has reached the queues of its servers."""
        self._unposted = [0] * len(self.servers)

    # ---- what comes back ------------------------------------------------------------------------

    def ended(self, replica: int, requests: Sequence[Any], now: float) -> None:
        """An iteration of a replica is over at ``now`` (s), and its requests have moved on."""
        view = self._views[replica]
        waiting, answering = self._waiting[replica], self._answering[replica]
        for request in requests:
            if request.is_prefill_complete and request.id in waiting:
                sent = waiting.pop(request.id)
                answering[request.id] = sent
                ledger.answering(view, sent.prompt, 0, sent.at)
                for watcher in self.watchers:
                    watcher.first_token(sent.facts.number, now)
            if request.completed:
                sent = answering.pop(request.id)
                ledger.finished(view, self._router, sent.prompt, sent.predicted, sent.output)
                for watcher in self.watchers:
                    watcher.finished(sent.facts.number, now)

    # ---- metrics --------------------------------------------------------------------------------

    def snapshots_by(self, now: float, *, before: bool = False) -> None:
        """Take the latest snapshot that is due by ``now`` (s), or ``before`` it.

        To be called before anything changes on a server, so that each snapshot is what a server
        would have published at that moment.
        """
        interval = self.settings.staleness_s
        if interval == 0:
            return
        count = math.floor(now / interval)
        while count * interval > now or (before and count * interval == now):
            count -= 1
        if count > self._snapshot:
            self._snapshot = count
            self._take_snapshot(count * interval)

    def _take_snapshot(self, now: float) -> None:
        for number, (view, server) in enumerate(zip(self._views, self.servers, strict=True)):
            waiting = server.num_pending_requests + self._unposted[number]
            blocks = server.num_allocated_blocks / server._cache_config.num_blocks
            ledger.scraped(view, waiting, len(server._allocation_map), blocks, now)


class PolicyHooks(Watcher):
    """Passes on to a policy what its hooks are for."""

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


def decide(policy: Policy, view: View) -> int:
    """Return the replica a policy chooses; ties are broken as everywhere (view/selection.py)."""
    scores = checked_scores(policy, view)
    with np.errstate(over="ignore"):  # random numbers wrap around
        replica = int(choose(scores, view.replicas, view.router, policy.lowest_id_wins))
    assert replica != NO_REPLICA
    return replica
