"""The simulator from Python: :func:`simulate` a whole run, or a :class:`Simulation` by steps."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Cluster, Engine, Event, RouterSettings
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.policy.base import (
    BuiltinPolicy,
    Policy,
    asked_order,
    call_hook,
    decide,
    holding_of,
    order_of,
)
from tailrace.sim import engine as kernel
from tailrace.sim.build import build_fleet, build_tables, why_not_compiled
from tailrace.sim.feasibility import check_cluster, check_requests
from tailrace.sim.reference import ReferenceEngine
from tailrace.sim.result import FAILED, FINISHED, PENDING, REPLICA_RESULT, REQUEST_RESULT, SimResult
from tailrace.sim.types import (
    DONE,
    LOST,
    NEWS_FAILED,
    NEWS_FINISHED,
    NEWS_FIRST_TOKEN,
    Fleet,
    Tables,
)
from tailrace.view.devices import resolved
from tailrace.view.holding import holding_row
from tailrace.view.ordering import order_row
from tailrace.view.records import View
from tailrace.workload.table import RequestTable

#: Decisions between two progress reports, and capacity of the batch log.
SLICE = 20_000
BATCH_LOG = 65_536

DEFAULT_ROUTER = RouterSettings()
DEFAULT_ENGINE = Engine()

Progress = Callable[[int], None]


def simulate(
    cluster: Cluster,
    table: RequestTable,
    policy: str | Policy,
    *,
    router: RouterSettings = DEFAULT_ROUTER,
    engine: Engine = DEFAULT_ENGINE,
    events: Sequence[Event] = (),
    seed: int = 0,
    record_batches: bool = False,
    progress: Progress | None = None,
) -> SimResult:
    """Route a whole table with one policy; ``progress`` gets the requests settled so far."""
    chosen = registry.get(policy) if isinstance(policy, str) else policy
    cluster = cluster.served_by(order=asked_order(chosen) is not None)
    world: Any = {"router": router, "engine": engine, "events": events, "seed": seed}
    if uses_reference(cluster, engine):
        return ReferenceEngine(cluster, table, **world).run(chosen, record_batches=record_batches)
    rule = chosen.rule if isinstance(chosen, BuiltinPolicy) else None
    simulation = Simulation(
        cluster,
        table,
        **world,
        record_batches=record_batches,
        listen=rule is None,
        lookahead=rule is not None and rule.in_engine,
    )
    if rule is not None:
        holding = holding_of(chosen)
        gated = holding is not None and holding.uses_metrics
        simulation.look_only_at(
            metrics=rule.uses_metrics or gated, prefix=rule.uses_prefix, context=rule.uses_context
        )
    call_hook(chosen, "reset", cluster.size, seed)
    simulation.run(chosen, progress)
    return simulation.result()


def uses_reference(cluster: Cluster, engine: Engine) -> bool:
    """Whether a cluster runs on the reference engine; raises if that contradicts the settings."""
    reason = why_not_compiled(cluster)
    if engine.engine == "compiled" and reason is not None:
        raise TailraceError(f"engine = compiled is not possible: {reason}")
    return engine.engine == "reference" or reason is not None


class Simulation:
    """One cluster of the compiled engine, decision by decision.

    ``next_decision()`` returns what the router sees, or None at the end; ``assign(replica)`` sends
    the current request. ``copy()`` gives an independent twin that continues from the same state.
    """

    def __init__(
        self,
        cluster: Cluster,
        table: RequestTable,
        *,
        router: RouterSettings = DEFAULT_ROUTER,
        engine: Engine = DEFAULT_ENGINE,
        events: Sequence[Event] = (),
        seed: int = 0,
        record_batches: bool = False,
        listen: bool = False,
        lookahead: bool = False,
    ) -> None:
        """Set the cluster up at time 0.

        ``listen`` records events for a policy's hooks; ``lookahead`` makes room for policies that
        simulate ahead.
        """
        reason = why_not_compiled(cluster)
        if reason is not None:
            raise TailraceError(reason)
        replicas = resolved(cluster)
        check_cluster(replicas, events)
        if not engine.vidur_compat:
            check_requests(replicas, table)
        self.table = table
        self._tables = build_tables([table], events, router, seed)
        self._fleet = build_fleet(
            cluster,
            [table],
            self._tables,
            router,
            engine,
            [seed],
            record_batches=BATCH_LOG if record_batches else 0,
            record_news=listen,
            lookahead=lookahead,
        )
        self._batches: list[NDArray[np.void]] = []
        self._lookahead = lookahead

    def look_only_at(
        self, *, metrics: bool, prefix: bool, context: bool, accounts: bool = False
    ) -> None:
        """Skip the parts of the view that a policy does not read; call it before the run.

        ``context`` covers the tokens of streaming responses and all moving averages; ``accounts``
        the cost accrued so far (sim/cost_accounts.py).
        """
        if not metrics:
            self._fleet.clusters["scrape_s"] = np.inf
        self._fleet.clusters["view_prefix"] = prefix
        self._fleet.clusters["view_context"] = context
        self._fleet.clusters["accounts"] = accounts

    def copy(self) -> "Simulation":
        """Return an independent simulation in the same state, on the same requests."""
        twin = object.__new__(Simulation)
        twin.table = self.table
        twin._tables = self._tables
        twin._fleet = Fleet._make(array.copy() for array in self._fleet)
        twin._batches = list(self._batches)
        twin._lookahead = self._lookahead
        return twin

    @property
    def arrays(self) -> tuple[Fleet, Tables]:
        """The state itself, for compiled loops; the cluster is number 0."""
        return self._fleet, self._tables

    @property
    def now(self) -> float:
        """Simulated time, s."""
        return float(self._fleet.clusters[0]["now"])

    @property
    def settled(self) -> int:
        """Requests that have finished or failed."""
        cluster = self._fleet.clusters[0]
        return int(cluster["n_requests"] - cluster["unsettled"])

    def next_decision(self) -> View | None:
        """Move to the next routing decision; None when there are no more."""
        while True:
            status = kernel.next_decision(self._fleet, self._tables, 0)
            if status == kernel.NEEDS_DECISION:
                return self.view()
            if self._is_over(status):
                return None

    def view(self) -> View:
        """What the router sees now; live records, not copies."""
        fleet = self._fleet
        return View(fleet.requests_view[0], fleet.replicas_view[0], fleet.costs[0], fleet.router[0])

    def assign(self, replica: int) -> None:
        """Send the current request to a replica."""
        if self._fleet.clusters[0]["request"] < 0:
            raise TailraceError("there is no request at hand; call next_decision() first")
        available = self._fleet.replicas_view[0]["available"]
        if not 0 <= replica < len(available) or not available[replica]:
            raise TailraceError(f"replica {replica} does not exist or is not available")
        kernel.assign(self._fleet, self._tables, 0, replica)

    def run(self, policy: Policy, progress: Progress | None = None) -> None:
        """Route all remaining requests with one policy."""
        self._fleet.clusters["order"] = order_row(order_of(policy))
        holding = holding_of(policy)
        self._fleet.clusters["holding"] = holding_row(holding)
        if holding is not None and holding.uses_metrics:
            # Metrics change within what fast-forward skips, and with them who has room.
            self._fleet.servers["exact"] = 1
        if isinstance(policy, BuiltinPolicy):
            self._run_builtin(policy, progress)
        else:
            self._run_python(policy, progress)

    def run_some(self, policy: BuiltinPolicy, decisions: int) -> bool:
        """Route at most so many requests with a built-in policy; return whether all are done.

        Call it again, with the same policy or another one that takes over.
        """
        self._fleet.clusters["order"] = order_row(order_of(policy))
        rule = (policy.rule.code, policy.params, policy.lowest_id_wins)
        return self._is_over(kernel.run(self._fleet, self._tables, 0, *rule, decisions))

    def replay(self, replicas: NDArray[np.int64]) -> None:
        """Send every request to the replica recorded for it, ``replicas`` [R]."""
        while True:
            status = kernel.replay(self._fleet, self._tables, 0, replicas)
            if self._is_over(status):
                return

    def _run_builtin(self, policy: BuiltinPolicy, progress: Progress | None) -> None:
        if policy.rule.in_engine and not self._lookahead:
            raise TailraceError(
                f"{policy.rule.name} simulates ahead: make the Simulation with lookahead=True"
            )
        limit = SLICE if progress else np.iinfo(np.int64).max
        rule = (policy.rule.code, policy.params, policy.lowest_id_wins)
        while True:
            status = kernel.run(self._fleet, self._tables, 0, *rule, limit)
            if progress:
                progress(self.settled)
            if self._is_over(status):
                return

    def _run_python(self, policy: Policy, progress: Progress | None) -> None:
        decisions = 0
        while (view := self.next_decision()) is not None:
            self._pass_on_news(policy)
            replica = decide(policy, view)
            request, now = int(view.request["id"]), float(view.request["now"])
            self.assign(replica)
            call_hook(policy, "sent", replica, request, now)
            decisions += 1
            if progress and decisions % 1000 == 0:
                progress(self.settled)
        self._pass_on_news(policy)

    def _pass_on_news(self, policy: Policy) -> None:
        """Call the policy's hooks, in time order, for all events since the last call."""
        cluster = self._fleet.clusters[0]
        news = self._fleet.news[0, : cluster["news_count"]]
        hooks = {NEWS_FIRST_TOKEN: "first_token", NEWS_FINISHED: "finished", NEWS_FAILED: "failed"}
        for k in np.argsort(news["at"], kind="stable"):
            item = news[k]
            replica, request, at = int(item["replica"]), int(item["request"]), float(item["at"])
            call_hook(policy, hooks[int(item["kind"])], replica, request, at)
        cluster["news_count"] = 0

    def _is_over(self, status: int) -> bool:
        cluster = self._fleet.clusters[0]
        if cluster["batch_count"] and status in (kernel.LOG_FULL, kernel.OVER):
            self._batches.append(self._fleet.batches[0, : cluster["batch_count"]].copy())
            cluster["batch_count"] = 0
        if status == kernel.STUCK:
            raise TailraceError(
                "a replica has requests waiting but can start none of them; raise its num_blocks"
            )
        return bool(status == kernel.OVER)

    def result(self) -> SimResult:
        """Return the results so far."""
        fleet = self._fleet
        requests = np.zeros(len(self.table), REQUEST_RESULT)
        states = fleet.requests[0, : len(self.table)]
        for target, source in (
            ("arrived_s", "arrived"),
            ("scheduled_s", "scheduled"),
            ("first_token_s", "first"),
            ("finished_s", "done"),
            ("replica", "replica"),
            ("restarts", "restarts"),
            ("reroutes", "reroutes"),
            ("expected_cached", "believed"),
        ):
            requests[target] = states[source]
        requests["cached_tokens"] = np.maximum(states["cached"], 0)
        requests["status"] = np.select(
            [states["status"] == DONE, states["status"] == LOST], [FINISHED, FAILED], PENDING
        )
        replicas = np.zeros(fleet.servers.shape[1], REPLICA_RESULT)
        for target, source in (
            ("requests", "requests"),
            ("iterations", "iterations"),
            ("busy_s", "busy_s"),
            ("tokens", "sum_tokens"),
            ("context", "sum_context"),
            ("prefill_work", "sum_work"),
            ("batched", "sum_batched"),
            ("preemptions", "preemptions"),
            ("partial_preemptions", "partial_preemptions"),
        ):
            replicas[target] = fleet.servers[0][source]
        batches = None
        if fleet.batches.shape[1] > 0:
            latest = fleet.batches[0, : fleet.clusters[0]["batch_count"]]
            batches = np.concatenate([*self._batches, latest])
            batches = batches[np.lexsort((batches["replica"], batches["start_s"]))]
        return SimResult(self.table, requests, replicas, int(fleet.router[0]["decisions"]), batches)
