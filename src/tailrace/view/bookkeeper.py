"""Python book-keeping of the router's records, for simulators whose requests move in Python.

The reference engine and the Vidur plug-in both build on :class:`Bookkeeper`; the compiled engine
and the live router keep the same records in compiled code. It holds no policy: its owner decides,
and reports where requests went and what came back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.config import Replica, RouterSettings
from tailrace.view import ledger
from tailrace.view.records import REQUEST_VIEW, ROUTER, View
from tailrace.view.replicas import idle_views, replica_costs
from tailrace.view.selection import mix
from tailrace.workload.predict import predicted_output
from tailrace.workload.prefix import content_hash, prefix_hash
from tailrace.workload.table import DEFAULT_TPOT_SLO_S, DEFAULT_TTFT_SLO_S, RequestTable


@dataclass(frozen=True)
class RequestFacts:
    """What never changes about a request."""

    number: int  #: of the request, for policies and results
    prompt_tokens: int
    output_tokens: int  #: entered into the ledger once the request has finished
    prefix_hash: int
    content_hash: int = 0
    session: int = -1
    turn: int = 0
    priority: int = 0
    ttft_slo_s: float = DEFAULT_TTFT_SLO_S
    tpot_slo_s: float = DEFAULT_TPOT_SLO_S
    predicted: float | None = None  #: output tokens; None: the mean of those finished so far


def table_facts(table: RequestTable, router: RouterSettings, seed: int) -> list[RequestFacts]:
    """Return the facts [R] of every request of a table."""
    predicted = predicted_output(table, router.predictor, router.predictor_sigma, seed)
    return [
        RequestFacts(
            number=number,
            prompt_tokens=int(row["prompt_tokens"]),
            output_tokens=int(row["output_tokens"]),
            prefix_hash=int(hashed),
            content_hash=int(whole),
            session=int(row["session"]),
            turn=int(row["turn"]),
            priority=int(row["priority"]),
            ttft_slo_s=float(row["ttft_slo_s"]),
            tpot_slo_s=float(row["tpot_slo_s"]),
            predicted=None if predicted is None else float(predicted[number]),
        )
        for number, (row, hashed, whole) in enumerate(
            zip(table.rows, prefix_hash(table), content_hash(table), strict=True)
        )
    ]


@dataclass(frozen=True)
class Sent:
    """A request on a replica, as the router remembers it."""

    request: Any  #: as its server knows it
    facts: RequestFacts
    at: float  #: when it was sent, s
    cached: int  #: prompt tokens believed to be cached there at that time
    predicted: int  #: output tokens predicted at that time


class Bookkeeper:
    """View, ledger and metrics snapshots of one router in front of ``n`` replicas. Times in s.

    A subclass reads its servers in ``server_metrics`` and ``streamed_context``. Requests are any
    objects with an ``id``.
    """

    def __init__(self, replicas: Sequence[Replica], settings: RouterSettings, seed: int) -> None:
        """Start at time 0 in front of idle replicas."""
        self.settings = settings
        self.views = idle_views(replicas)
        self.request_view: Any = np.zeros(1, REQUEST_VIEW)[0]
        self.router: Any = np.zeros(1, ROUTER)[0]
        with np.errstate(over="ignore"):  # the hash overflows by design
            self.router["rng"] = mix(np.uint64(seed))
        self.view = View(self.request_view, self.views, replica_costs(replicas), self.router)
        self._waiting: list[dict[int, Sent]] = [{} for _ in replicas]
        self._answering: list[dict[int, Sent]] = [{} for _ in replicas]
        self._last_replica: dict[int, int] = {}
        self._snapshot = -1  # number of the latest one

    def server_metrics(self, replica: int) -> tuple[int, int, float]:
        """Return requests waiting, requests running and the share of KV blocks in use, now."""
        raise NotImplementedError

    def streamed_context(self, sent: Sent) -> int:
        """Return prompt and streamed tokens of a request that is answering, now."""
        raise NotImplementedError

    # ---- decisions ------------------------------------------------------------------------------

    def show(self, facts: RequestFacts, arrived_s: float, now: float) -> View:
        """Return what the router sees when it routes a request at ``now``: live records."""
        if self.settings.staleness_s == 0:
            self.take_snapshot(now)
        self._show_request(facts, arrived_s, now)
        self._show_replicas(facts)
        return self.view

    def _show_request(self, facts: RequestFacts, arrived_s: float, now: float) -> None:
        view = self.request_view
        view["now"] = now
        view["id"] = facts.number
        view["arrived_at"] = arrived_s
        if facts.predicted is None:
            prior = self.settings.prior_output_tokens
            view["predicted_output"] = ledger.mean_output(self.router, prior)
        else:
            view["predicted_output"] = facts.predicted
        view["last_replica"] = self._last_replica.get(facts.session, -1)
        for field in (
            *("prompt_tokens", "session", "turn", "prefix_hash", "content_hash", "priority"),
            *("ttft_slo_s", "tpot_slo_s"),
        ):
            view[field] = getattr(facts, field)

    def _show_replicas(self, facts: RequestFacts) -> None:  # noqa: ARG002 (for subclasses)
        for view, waiting, answering in zip(
            self.views, self._waiting, self._answering, strict=True
        ):
            view["context_tokens"] = sum(map(self.streamed_context, answering.values()))
            if waiting:
                view["oldest_sent"] = min(sent.at for sent in waiting.values())
        ledger.look(self.views, self.router, float(self.request_view["now"]))

    def record_sent(self, replica: int, request: Any, facts: RequestFacts) -> Sent:
        """Record that the request shown last goes to a replica."""
        sent = Sent(
            request=request,
            facts=facts,
            at=float(self.request_view["now"]),
            cached=int(self.views["cached_tokens"][replica]),
            predicted=ledger.whole_tokens(self.request_view["predicted_output"]),
        )
        self.router["decisions"] += 1
        ledger.sent(self.views[replica], facts.prompt_tokens, sent.cached, sent.predicted, sent.at)
        self._waiting[replica][request.id] = sent
        if facts.session >= 0:
            self._last_replica[facts.session] = replica
        return sent

    # ---- what comes back ------------------------------------------------------------------------

    def is_waiting(self, replica: int, request: Any) -> bool:
        """Whether a request was sent to a replica and has no first token yet."""
        return request.id in self._waiting[replica]

    def record_first_token(self, replica: int, request: Any) -> Sent:
        """Record that the first token of a request has come back."""
        sent = self._answering[replica][request.id] = self._waiting[replica].pop(request.id)
        ledger.answering(self.views[replica], sent.facts.prompt_tokens, sent.cached, sent.at)
        return sent

    def record_finished(self, replica: int, request: Any) -> Sent:
        """Record that a request is complete."""
        sent = self._answering[replica].pop(request.id)
        facts = sent.facts
        ledger.finished(
            self.views[replica],
            self.router,
            facts.prompt_tokens,
            sent.predicted,
            facts.output_tokens,
        )
        return sent

    def in_flight(self, replica: int) -> list[Sent]:
        """Return the requests that were sent to a replica and have not finished."""
        return [*self._waiting[replica].values(), *self._answering[replica].values()]

    def record_death(self, replica: int) -> None:
        """Record that a replica died with all its requests."""
        ledger.lost(self.views[replica])
        self._waiting[replica].clear()
        self._answering[replica].clear()

    # ---- metrics --------------------------------------------------------------------------------

    def snapshots_by(self, now: float, *, before: bool = False) -> None:
        """Take the latest snapshot that is due by ``now``, or ``before`` it.

        To be called before anything changes on a server, so that a snapshot shows what the server
        would have published when it was due.
        """
        interval = self.settings.staleness_s
        if interval == 0:
            return
        number = math.ceil(now / interval) + 1  # never too low, whatever the division rounds to
        while number * interval > now or (before and number * interval == now):
            number -= 1
        if number > self._snapshot:
            self._snapshot = number
            self.take_snapshot(number * interval)

    def take_snapshot(self, now: float) -> None:
        """Read the metrics of all servers."""
        for replica, view in enumerate(self.views):
            waiting, running, kv_used = self.server_metrics(replica)
            ledger.scraped(view, waiting, running, kv_used, now)
