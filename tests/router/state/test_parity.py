"""The live cluster shows a policy the very numbers that the simulator shows it."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from router.clusters import LEDGER, Clock, backends, new_chooser
from tailrace.config import Cluster, Event, Replica, RouterSettings
from tailrace.policy import registry
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.router.intake.prompt_blocks import PromptBlocks, private_block
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.sim.reference import ReferenceEngine
from tailrace.sim.reference.request import Request
from tailrace.sim.reference.routing import PolicyDispatcher
from tailrace.sim.reference.server import Server
from tailrace.view.bookkeeper import RequestFacts
from tailrace.view.records import View
from tailrace.workload.library import make
from tailrace.workload.table import RequestTable


class Twin(PolicyDispatcher):
    """Routes in the simulator and tells a live cluster the same events; compares every decision."""

    def __init__(
        self, policy: str, table: RequestTable, replicas: Sequence[Replica], router: RouterSettings
    ) -> None:
        super().__init__(registry.get(policy), table, replicas, router, 0)
        self.clock = Clock()
        self.cluster = ClusterState(backends(*replicas), self.clock, learn_speeds=False)
        self.chooser = new_chooser(self.cluster, policy, guard=False, range_deviations=1e6)
        self.arrivals: dict[int, Arrival] = {}
        self.attempts: dict[int, Attempt] = {}
        self.live: dict[int, Request] = {}
        self.compared = 0

    def route(self, now: float, requests: Sequence[Request]) -> Iterator[int]:
        for request, replica in zip(requests, super().route(now, requests), strict=False):
            self._send(request, replica)
            yield replica

    def _show_replicas(self, facts: RequestFacts) -> None:
        super()._show_replicas(facts)
        self.clock.now = now = float(self.request_view["now"])
        for number, server in enumerate(self.servers):
            self.cluster.set_available(number, server.available)
        for number in self.attempts:
            self._stream(number)
        arrival = self._arrival(facts)
        decision = self.chooser.choose(arrival)
        assert decision is not None
        self.decision = decision
        live = View(
            self.cluster.request[0],
            self.cluster.replicas,
            self.cluster.costs,
            self.cluster.routers[0],
        )
        expected, found = _observed(self.view), _observed(live)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        for name in (*LEDGER, "recent_work", "cached_tokens", "index_tokens", "metrics_at"):
            np.testing.assert_array_equal(live.replicas[name], self.views[name], err_msg=name)
        assert now == live.request["now"]
        self.compared += 1

    def _send(self, request: Request, replica: int) -> None:
        assert self.decision.replica == replica  # the same ties, broken by the same numbers
        attempt = Attempt(self.cluster, self.arrivals[request.id], replica, self.decision)
        self.attempts[request.id] = attempt
        self.live[request.id] = request

    def _arrival(self, facts: RequestFacts) -> Arrival:
        if facts.number in self.arrivals:
            return self.arrivals[facts.number]
        row = self.table.rows[facts.number]
        asked = RequestBody("completion", streams=True, ttft_slo_s=float(row["ttft_slo_s"]))
        if row["session"] >= 0:
            asked.session = str(row["session"])
        arrival = self.cluster.arrive(asked)
        arrival.prompt_tokens = facts.prompt_tokens
        keys, tokens = self.runs(facts.number)
        if row["run_count"] == 0:
            arrival.runs = private_block(facts.number, facts.prompt_tokens)
        else:
            arrival.runs = PromptBlocks(
                np.append(keys, np.uint64(0)),
                np.append(tokens, np.int32(0)),
                int(tokens.sum()),
                branch_at=-1,
                prefix_hash=facts.prefix_hash,
                end_key=0,
                branch_key=0,
                whole=0,
            )
        self.arrivals[facts.number] = arrival
        return arrival

    def _stream(self, number: int) -> None:
        attempt = self.attempts[number]
        if attempt.first_at is not None:
            more = self.live[number].generated - attempt.streamed
            if more > 0:
                attempt.tokens(more)

    def first_token(self, server: Server, request: Request, now: float) -> None:
        super().first_token(server, request, now)
        self.clock.now = now
        self.attempts[request.id].tokens(1)

    def finished(self, server: Server, request: Request, now: float) -> None:
        super().finished(server, request, now)
        self.clock.now = now
        output = int(self.table.rows["output_tokens"][request.id])
        attempt = self.attempts.pop(request.id)
        attempt.tokens(output - attempt.streamed)
        attempt.close("done")

    def lost(self, server: Server, requests: Sequence[Request], now: float) -> None:
        super().lost(server, requests, now)
        self.clock.now = now
        self.cluster.forget(server.number)
        for request in requests:
            self.attempts.pop(request.id).close("backend_failed")

    def take_snapshot(self, now: float) -> None:
        super().take_snapshot(now)
        self.clock.now = now
        for number, view in enumerate(self.views):
            self.cluster.scraped(number, view["waiting"], view["running"], view["kv_used"])


def _observed(view: View) -> tuple[np.ndarray, np.ndarray]:
    replicas = np.zeros((len(view.replicas), N_REPLICA_FEATURES), np.float32)
    request = np.zeros(N_REQUEST_FEATURES, np.float32)
    observe(view, replicas, request)
    return replicas, request


MIXED = Cluster(
    replicas=(
        Replica(count=2, num_blocks=700, batch_cap=16),
        Replica(speed=0.5, num_blocks=500, batch_cap=16),
        Replica(prefix_caching=False, num_blocks=900, batch_cap=16),
    )
)


@pytest.mark.compiled
@pytest.mark.parametrize("policy", ["tailrace", "load_aware", "round_robin", "preble"])
@pytest.mark.parametrize("workload", ["sessions-hot", "chat"])
def test_every_decision_sees_what_the_simulator_shows(policy: str, workload: str) -> None:
    table = make(workload, 150, 12.0, 5)
    events = (
        Event(at_s=3.0, replica=1, kind="die"),
        Event(at_s=5.0, replica=1, kind="return"),
        Event(at_s=6.0, replica=0, kind="drain"),
        Event(at_s=8.0, replica=0, kind="return"),
    )
    router = RouterSettings(staleness_s=0.5)
    twin = Twin(policy, table, MIXED.expanded(), router)
    ReferenceEngine(MIXED, table, router=router, events=events).run(dispatcher=twin)
    assert twin.compared >= 150
    assert not twin.attempts
    for name in LEDGER:
        assert not twin.cluster.replicas[name].any(), name
    if workload == "sessions-hot":  # the index was full, and so something was forgotten
        held = twin.cluster.replicas["index_tokens"]
        assert held.max() > 0.5 * 700 * 16
