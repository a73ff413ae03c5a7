"""Which replica a request goes to: a policy, protected by a guard and a fallback rule.

The fallback rule decides instead of the policy when the policy fails, takes too long, returns what
is no number, sees what it was not trained on, or chooses a replica whose predicted first token is
much later than that of the rule's choice. Every such case is counted by its cause.

The fallback rule is ``tolerant_sticky``: the best all-round rule on synthetic and recorded traffic
(benchmarks/guard_figures.py), and it needs only what the router counts itself. What drives a policy
out of its range, such as broken metrics or a wrong cost model, does not affect it.
"""

import struct
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy, Policy, call_hook, checked_scores, order_of
from tailrace.policy.learned.architecture import FEATURE_NAMES, STD_FLOOR
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.router.decide.chooser_settings import ChooserSettings
from tailrace.router.decide.reasons import phrase
from tailrace.router.decide.waiting_rules import WaitingRules
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.settings import BackendSettings
from tailrace.router.state import kernels as k
from tailrace.router.state.arrival import Arrival, Decision
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.server_speeds import speed_of
from tailrace.router.state.shared_state import memory_of
from tailrace.view.ordering import Order, priority_number
from tailrace.view.records import View
from tailrace.view.selection import NO_REPLICA
from tailrace.workload.table import DEFAULT_TTFT_SLO_S

__all__ = ["Chooser", "ChooserSettings", "Decision"]

#: Names of the causes of a fallback, by their number in state/kernels.py.
CAUSES = ("", "nan", "range", "guard", "error", "time")
#: After this many failures or overruns in a row a policy is not asked for this long, s.
_STRIKES, _REST_S = 3, 10.0
_NO_BOUNDS = np.zeros((2, 0), np.float32)
_NO_PARAMS = np.zeros(0)
_UNLIMITED = float("inf")
#: What is written to a DECISION record before a decision, and read from it afterwards: the rest but
#: the configuration.
_INPUTS = struct.Struct("=qqddq")
_RESULTS = struct.Struct("=qqqqqqdddd")
assert k.DECISION.fields is not None
_RESULTS_AT = k.DECISION.fields["cause"][1]


class _Role(NamedTuple):
    """A policy in one of its roles."""

    policy: Policy
    row: int  # of the router records
    code: int  # of its compiled rule, k.NO_RULE: Python
    params: NDArray[np.float64]
    guard: NDArray[np.float64]  # the fallback rule's parameters and the trained range, see k.judge
    record: NDArray[np.void]  # [1] DECISION
    buffer: memoryview  # its bytes
    order: Order | None  # gives requests the priorities that servers see


class Chooser:
    """Chooses replicas. Never raises, and never returns a replica that is not available."""

    def __init__(
        self,
        cluster: ClusterState,
        settings: ChooserSettings,
        *,
        warm_up: bool = True,
        everything: bool = False,
    ) -> None:
        """Load the policies and compile what they need, so that the first request need not wait.

        ``everything``: also what other policies would need.
        """
        self.cluster = cluster
        self.settings = settings
        self._limit_s = settings.limit_ms * 1e-3
        self._turns = settings.turns
        self._canary_until = settings.canary_until or _UNLIMITED
        self._size = len(cluster)
        self.counts: Counter[str] = Counter()
        """Decisions, "fallback_CAUSE", "canary", "shadow" and "shadow_differs"."""
        self.out_of_range: Counter[str] = Counter()
        """Features that were out of range, by name."""
        self.last_error = ""
        fallback = _usable(settings.fallback)
        if not isinstance(fallback, BuiltinPolicy) or isinstance(fallback, LearnedPolicy):
            raise TailraceError(
                f"fallback '{settings.fallback}' must be a built-in rule; see `tailrace policies`"
            )
        self._fallback = fallback
        cluster.index_later = settings.prefix_learns != "sent"
        if fallback.rule.uses_active:
            cluster.count_active_blocks()
        listeners = list(cluster.listeners)
        try:
            self._main = self._role(settings.policy, k.MAIN)
            self._canary = self._role(settings.canary, k.CANARY) if settings.canary else None
            self._shadow = self._role(settings.shadow, k.SHADOW) if settings.shadow else None
            self._waiting_rules = [WaitingRules(cluster, self._main.policy)]
            if self._canary is not None and self._turns is not None:
                self._waiting_rules.append(WaitingRules(cluster, self._canary.policy))
        except BaseException:
            cluster.listeners = listeners
            raise
        self._columns = len(cluster)
        self._scores = np.zeros((4, self._columns))
        self._strikes: Counter[int] = Counter()
        self._resting_until: dict[int, float] = {}
        if warm_up:
            self._warm_up(everything)

    @property
    def policy(self) -> Policy:
        """The policy that decides for all but the canary's share."""
        return self._main.policy

    @property
    def waiting_rules(self) -> WaitingRules:
        """What the policy says about requests that wait; that of a canary while it has its turn."""
        rules = self._waiting_rules
        return rules[-1] if len(rules) > 1 and self._has_turn() else rules[0]

    def follow_room(self, room_made: Callable[[], None]) -> None:
        """Call this when there may be room for requests that wait."""
        for rules in self._waiting_rules:
            rules.room_made = room_made

    def close(self) -> None:
        """Let go of the cluster, so that another chooser can take over."""
        for role in (self._main, self._canary, self._shadow):
            if role is not None:
                self.cluster.unlisten(role.policy)
        for rules in self._waiting_rules:
            self.cluster.unlisten(rules)

    def resize(self, count: int) -> None:
        """Let policies written in Python start anew if there is another number of replicas."""
        if count == self._size:
            return
        self._size = count
        for role in (self._main, self._canary, self._shadow):
            if role is not None and role.code == k.NO_RULE:
                try:
                    call_hook(role.policy, "reset", count, 0)
                except TailraceError as error:
                    self._failed(error)

    def _role(self, name: str, row: int) -> _Role:
        policy, settings, cluster = _usable(name), self.settings, self.cluster
        call_hook(policy, "reset", len(cluster), 0)
        code, params, bounds, guarded = k.NO_RULE, _NO_PARAMS, _NO_BOUNDS, True
        if isinstance(policy, BuiltinPolicy):
            code, params, guarded = policy.rule.code, policy.params, False
            if policy.rule.uses_active:
                cluster.count_active_blocks()
            if isinstance(policy, LearnedPolicy):
                bounds, guarded = training_range(policy, settings.range_deviations), True
        else:
            cluster.listen(policy)
        fallback, view = self._fallback, cluster.worker_view
        guard = np.concatenate([fallback.params, bounds.ravel()])
        record = np.zeros(1, k.DECISION)
        record["worker"], record["workers"] = view.worker, view.shared.data_rows
        record["view_row"] = view.view_row
        record["prior_output"] = cluster.prior_output_tokens
        record["row"], record["code"] = row, code
        record["lowest_id_wins"] = policy.lowest_id_wins
        record["fallback_code"] = fallback.rule.code
        record["fallback_lowest_id_wins"] = fallback.lowest_id_wins
        record["guard_ratio"] = settings.guard_ratio if guarded and settings.guard else _UNLIMITED
        record["guard_s"] = settings.guard_s
        record["bounds_at"] = fallback.params.size
        buffer = memory_of(record.view(np.uint8))
        return _Role(policy, row, code, params, guard, record, buffer, order_of(policy))

    # ---- decisions ------------------------------------------------------------------------------

    def choose(self, arrival: Arrival, excluded: Collection[int] = ()) -> Decision | None:
        """Choose a replica for a request, none of ``excluded``; None: there is none available."""
        started = time.perf_counter()
        cluster = self.cluster
        hidden = cluster.hide(excluded) if excluded else ()
        try:
            decision = self._decide(arrival, started)
        except Exception as error:  # a bug of ours must not stop the traffic
            self._failed(error)
            decision = self._plain_choice(arrival)
        finally:
            if hidden:
                cluster.unhide(hidden)
        if decision is not None:
            decision.took_s = time.perf_counter() - started
        return decision

    def _decide(self, arrival: Arrival, started: float) -> Decision | None:
        cluster, scores = self.cluster, self._scores
        if self._columns != len(cluster.epochs):
            self._columns = len(cluster.epochs)
            self._scores = scores = np.zeros((4, self._columns))
        now = cluster.clock()
        if cluster.due:
            cluster.catch_up(now)
        cluster.show_request(arrival, now)
        if cluster.active is not None:
            cluster.show_active_blocks(arrival)
        role = self._main if self._canary is None else self._role_for(arrival)
        if role.code == k.NO_RULE:
            self._show(role, arrival)
            self._judge(role, self._ask_python(role, scores[k.SCORES]))
        else:
            self._decide_compiled(role, arrival)
            if time.perf_counter() - started > self._limit_s:
                self._took_long(role, arrival)
        cause, chosen, runner_up, reason, feature, cached, ours, theirs, ttft_s, predicted = (
            _RESULTS.unpack_from(role.buffer, _RESULTS_AT)
        )
        if chosen == NO_REPLICA:
            return None
        arrival.predicted_output = predicted
        counts = self.counts
        counts["decisions"] += 1
        if role is self._canary:
            counts["canary"] += 1
        used, fell_back = k.SCORES, None
        if cause != k.NO_CAUSE:
            used, fell_back = k.FALLBACK_SCORES, CAUSES[cause]
            counts["fallback_" + fell_back] += 1
            if cause == k.CAUSE_RANGE:
                self.out_of_range[FEATURE_NAMES[feature]] += 1
        decision = Decision(
            chosen, role.policy.name, scores[used].copy(), runner_up,
            phrase(reason, ours, theirs), fell_back, None, 0.0, cached, ttft_s,
        )  # fmt: skip
        decision.order = role.order
        if self._shadow is not None:
            self._ask_shadow(self._shadow, decision)
        return decision

    def priority(self, arrival: Arrival, decision: Decision) -> int:
        """Return a priority for the chosen server, by Unix time: the same for all routers.

        Only for a decision that has an order.
        """
        assert decision.order is not None
        rate = float(self.cluster.seen["prefill_tokens_per_s"][decision.replica])
        work_s = (arrival.prompt_tokens - decision.cached) / max(rate, 1.0)
        asked = arrival.asked
        target_s = DEFAULT_TTFT_SLO_S if asked.ttft_slo_s is None else asked.ttft_slo_s
        arrived = time.time() - (self.cluster.clock() - arrival.arrived_at)
        return priority_number(decision.order, arrived, work_s, target_s, -asked.priority)

    def _took_long(self, role: _Role, arrival: Arrival) -> None:
        """Decide again, and let the rule decide if it is the policy that takes so long.

        That others had the processor meanwhile is no reason, so this thread's own time counts; to
        ask for it at every decision would take longer than most of them.
        """
        started = time.thread_time()
        self._decide_compiled(role, arrival)
        if time.thread_time() - started > self._limit_s:
            self._decide_compiled(role, arrival, k.CAUSE_TIME)

    def _role_for(self, arrival: Arrival) -> _Role:
        share = self.settings.canary_share
        if self._canary is None or share <= 0:
            return self._main
        if self._turns is not None:
            return self._canary if self._has_turn() else self._main
        if self._canary_until < _UNLIMITED and time.time() >= self._canary_until:
            return self._main
        session = arrival.asked.session
        if session is None:
            session = str(arrival.session.number if arrival.session else arrival.id)
        part = xxhash.xxh3_64_intdigest(session.encode(errors="surrogatepass")) / 2.0**64
        return self._canary if part < share else self._main

    def in_charge(self, arrival: Arrival, now: float) -> str:
        """Return the policy in charge when a request arrived; ``now``: the cluster's clock, s."""
        if self._canary is None:
            return self._main.policy.name
        if self._turns is None:
            return self._role_for(arrival).policy.name
        arrived_s = time.time() - (now - arrival.arrived_at)
        has_turn = arrived_s < self._canary_until and self._turns.is_candidates(arrived_s)
        return (self._canary if has_turn else self._main).policy.name

    def _has_turn(self) -> bool:
        """Whether a canary that takes turns has the present block of time."""
        now_s, turns = time.time(), self._turns
        return now_s < self._canary_until and turns is not None and turns.is_candidates(now_s)

    def _fill(self, role: _Role, arrival: Arrival, cause: int = k.NO_CAUSE) -> None:
        """Write what a decision needs to know of the request into the role's record."""
        runs, asked = arrival.runs, arrival.asked
        max_output: float = _UNLIMITED
        if not asked.generates:
            max_output = 1.0
        elif asked.max_tokens is not None:
            max_output = asked.max_tokens
        _INPUTS.pack_into(
            role.buffer, 0, runs.branch_at, runs.total, self.cluster.counter.units_per_token,
            max_output, cause,
        )  # fmt: skip

    def _show(self, role: _Role, arrival: Arrival) -> None:
        """Complete what the policy of a role sees."""
        self._fill(role, arrival)
        cluster, runs, shared = self.cluster, arrival.runs, self.cluster.worker_view.shared
        k.show(
            role.record, cluster.request, shared.replicas, shared.routers, shared.entries,
            shared.slots, shared.totals, cluster.beliefs, runs.keys, runs.units,
        )  # fmt: skip

    def _judge(self, role: _Role, cause: int) -> None:
        """Decide by the policy's scores, or by the fallback rule if there is a ``cause``."""
        cluster = self.cluster
        role.record["cause"] = cause
        k.judge(
            role.record, cluster.request, cluster.seen, cluster.costs, cluster.seen_routers,
            role.params, role.guard, self._scores,
        )  # fmt: skip

    def _decide_compiled(self, role: _Role, arrival: Arrival, cause: int = k.NO_CAUSE) -> None:
        """:meth:`_show` and :meth:`_judge` in one call."""
        self._fill(role, arrival, cause)
        cluster, runs, shared = self.cluster, arrival.runs, self.cluster.worker_view.shared
        k.decide(
            role.record, cluster.request, shared.replicas, shared.routers, shared.entries,
            shared.slots, shared.totals, cluster.costs, cluster.beliefs, runs.keys, runs.units,
            role.params, role.guard, self._scores,
        )  # fmt: skip

    # ---- policies written in Python -------------------------------------------------------------

    def _ask_python(self, role: _Role, scores: NDArray[np.float64]) -> int:
        """Let a user's policy fill ``scores`` [n]; return why it could not, if so."""
        started = time.perf_counter()
        if self._resting_until.get(role.row, 0.0) > started:
            return k.CAUSE_TIME
        cause = k.NO_CAUSE
        try:
            scores[:] = checked_scores(role.policy, self._copy_of_view(role.row))
        except Exception as error:
            self._failed(error)
            cause = k.CAUSE_ERROR
        ended = time.perf_counter()
        if cause == k.NO_CAUSE and ended - started > self._limit_s:
            cause = k.CAUSE_TIME
        if cause == k.NO_CAUSE:
            self._strikes[role.row] = 0
            return cause
        self._strikes[role.row] += 1
        if self._strikes[role.row] >= _STRIKES:
            self._resting_until[role.row] = ended + _REST_S
        return cause

    def _copy_of_view(self, row: int) -> View:
        """What the router sees, for code that might write to it."""
        cluster = self.cluster
        router = cluster.seen_routers[row]
        return View(cluster.request.copy()[0], cluster.seen.copy(), cluster.costs, router)

    def _ask_shadow(self, role: _Role, decision: Decision) -> None:
        cluster, scores = self.cluster, self._scores[k.SHADOW_SCORES]
        if role.code == k.NO_RULE and self._ask_python(role, scores) != k.NO_CAUSE:
            self.counts["shadow_failed"] += 1
            return
        choice = k.rate(
            cluster.request, cluster.seen, cluster.costs, cluster.seen_routers, role.row, role.code,
            role.params, scores, role.policy.lowest_id_wins,
        )  # fmt: skip
        decision.shadow = int(choice)
        decision.shadow_ttft_s = float(self._scores[k.TTFT, choice]) - decision.ttft_s
        self.counts["shadow"] += 1
        if choice != decision.replica:
            self.counts["shadow_differs"] += 1

    # ---- when all else fails --------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self.last_error = str(error) or type(error).__name__

    def _plain_choice(self, arrival: Arrival) -> Decision | None:
        """Fewest requests in flight, by nothing that could fail."""
        replicas = self.cluster.replicas
        usable = np.flatnonzero(replicas["available"] != 0)
        if usable.size == 0:
            return None
        self.counts["decisions"] += 1
        self.counts["fallback_error"] += 1
        scores = np.where(replicas["available"] != 0, replicas["in_flight"], np.inf)
        chosen = int(np.argmin(scores))
        cached = self.cluster.cached_on(arrival, chosen)
        reason = "fewest requests in flight"
        name = self._main.policy.name
        return Decision(chosen, name, scores, NO_REPLICA, reason, "error", cached=cached)

    def _warm_up(self, everything: bool) -> None:
        """Send requests through what is compiled, on a cluster of our own.

        The fallback rule decides: it runs in the same compiled functions as every other policy.
        """
        roles = (self._main, self._canary, self._shadow)
        python = everything or any(role is not None and role.code == k.NO_RULE for role in roles)
        orders = everything or any(rules.order is not None for rules in self._waiting_rules)
        rule = self.settings.fallback
        shadow = rule if everything or self._shadow is not None else ""
        # Told nothing of its servers, so that their speeds are learned.
        toy = ClusterState([BackendSettings(url="http://127.0.0.1:1")] * 2, self.cluster.clock)
        chooser = Chooser(toy, ChooserSettings(policy=rule, shadow=shadow), warm_up=False)
        completions = (
            RequestBody("completion", text=text, streams=True) for text in ("a", "a" * 4096)
        )
        arrivals = [toy.arrive(completion) for completion in completions]
        given = Decision(0, rule, np.zeros(len(toy)), 1, "")
        for arrival in arrivals:
            attempt = Attempt(toy, arrival, 0, given)
            toy.cached_on(arrival, 0)
            if orders:
                toy.least_work_s(arrival, frozenset())
            attempt.tokens(2)
            attempt.usage(8, 2, 0)
            attempt.close("done")
            Attempt(toy, arrival, 0, given).close("done")
        toy.arrive(RequestBody("chat", data=np.zeros(8, np.uint8)))
        toy.scraped(0, 1.0, 1.0, 0.5)
        index = toy.index
        k.evict_until(index.entries, index.slots, index.totals, 0, 0.0)
        speed_of(toy, 0)
        # Decisions last: the helper process compiles the policies meanwhile.
        for arrival in arrivals:
            decision = chooser.choose(arrival)
            assert decision is not None
            if python:
                chooser._show(chooser._main, arrival)
                chooser._judge(chooser._main, k.NO_CAUSE)
        toy.forget(0)


def _usable(name: str) -> Policy:
    """Return the policy of a name, unless it can only run in the simulator."""
    policy = registry.get(name)
    if isinstance(policy, BuiltinPolicy) and policy.rule.in_engine:
        raise TailraceError(
            f"policy {name} looks into the simulated servers and cannot route live traffic; "
            f"use {registry.SHIPPED_NAME} or a rule (see `tailrace policies`)"
        )
    return policy


def training_range(policy: LearnedPolicy, deviations: float) -> NDArray[np.float32]:
    """Lowest and highest value [2, F + G] of each feature that a policy may be trusted with."""
    parts = []
    for norm in ("replica_norm", "request_norm"):
        mean = policy.tensors[f"{norm}.mean"].astype(np.float64)
        std = np.maximum(np.sqrt(policy.tensors[f"{norm}.var"].astype(np.float64)), STD_FLOOR)
        parts.append(np.stack([mean - deviations * std, mean + deviations * std]))
    bounds = np.concatenate(parts, axis=1)
    for name in policy.config.ignore:  # it does not look at these
        bounds[:, FEATURE_NAMES.index(name)] = (-np.inf, np.inf)
    return bounds.astype(np.float32)
