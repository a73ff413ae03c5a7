"""The hard rules about waiting, in the live router: any traffic, any time, without sockets."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.clusters import Clock, backends, chat, new_chooser, new_cluster, send
from router.conftest import quiet_settings
from tailrace.autopilot.served_costs import ServedCosts
from tailrace.config import Replica
from tailrace.policy import registry
from tailrace.queueing.fair_queue import OVERTAKES
from tailrace.router.app import Router
from tailrace.router.decide.waiting_rules import WaitingRules
from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.intake.request_body import read_request
from tailrace.router.proxy.routed_request import RoutedRequest
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.shared_state import new_shared_state
from tailrace.view.objective import composite_cost
from tailrace.workload import decision_log

REPLICAS = 3
SECONDS = st.sampled_from([0.0, 0.01, 0.3, 2.0])
ARRIVAL = st.tuples(
    st.just("arrives"),
    st.integers(0, 1),  # client
    st.sampled_from([0, 0, 0, -1, 2]),  # priority, lower first
    st.sampled_from([1, 30, 600, 3000]),  # words
    st.sampled_from([None, 0.5, 9.0]),  # target, s
)
EVENTS = st.lists(
    st.tuples(
        SECONDS,
        ARRIVAL
        | st.tuples(st.sampled_from(["first token", "ends", "leaves"]), st.integers(0, 99))
        | st.just(("sweep",)),
    ),
    min_size=20,
    max_size=120,
)
QUEUES = (
    "max_in_flight=1",
    "max_in_flight=2,order=wspt,max_wait_s=3",
    "max_queued=1,w=3,most=1",
    "max_prefill_s=0.02,order=edf,max_wait_s=5",
    "max_in_flight=2,max_queued=1,w=9,most=2,d=0.5",
)


@pytest.fixture(autouse=True, scope="module")
def _keys() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in "ab":
            patch.setenv(f"KEY_{name.upper()}", f"secret-{name}")
        yield


class Played(RoutedRequest):
    """A request whose response comes when the test says so."""

    __slots__ = ("about", "overdue", "sent_at", "status")

    def __init__(self, world: "World", about: dict[str, Any], *given: Any) -> None:
        self.about = {**about, "world": world}
        self.sent_at: float | None = None
        self.status = 0
        self.overdue = False
        super().__init__(*given)

    def admitted(self, queued: Any = None, *, overdue: bool = False) -> bool:
        self.overdue = overdue
        return super().admitted(queued, overdue=overdue)

    def _send(self) -> None:
        world = self.about["world"]
        self.sent_at = world.clock.now
        world.sent(self)

    def _reply(self, status: int, why: str, outcome: str, extra: bytes = b"") -> None:
        self.status = status
        self._finish(outcome, status)

    def ends(self) -> None:
        self.status = 200
        if self.attempt is not None:
            if self.attempt.first_at is None:
                self.attempt.tokens(1)
            self.attempt.usage(self.about["words"], 10, None)
        self._finish("done", 200)


class World:
    """A router that is not started, and requests in it."""

    def __init__(self, policy: str, **over: Any) -> None:
        self.clock = Clock(100.0)
        backends = [{"url": f"http://127.0.0.1:{9000 + i}"} for i in range(REPLICAS)]
        clients = [{"name": n, "key_env": f"KEY_{n.upper()}", "priorities": [-1, 0, 2]}
                   for n in "ab"]  # fmt: skip
        routing = {"policy": policy, "limit_ms": 1e6}
        given = quiet_settings(backends, clients=clients, routing=routing, **over)
        self.router = Router(given, clock=self.clock, salt=b"s" * 16)
        self.context = self.router.intake.context
        self.requests: list[Played] = []
        self.order: list[Played] = []
        self.tokens: Counter[str] = Counter()

    @property
    def waiting(self) -> list[Played]:
        return [queued.item for queued in self.context.queue._waiting]

    @property
    def running(self) -> list[Played]:
        return [r for r in self.requests if r.sent_at is not None and not r.status]

    def arrive(self, client: int, priority: int, words: int, target_s: float | None) -> Played:
        body = orjson.dumps({"prompt": "word " * words, "max_tokens": 10, "stream": True})
        headers = {b"x-priority": b"%d" % priority}
        if target_s is not None:
            headers[b"x-slo-ttft-ms"] = b"%d" % (1000 * target_s)
        asked = read_request("/v1/completions", headers, body)
        arrival = self.router.backends.cluster.arrive(asked)
        owner = self.router.keyring.clients[client]
        about = {
            "client": owner.name,
            "priority": priority,
            "words": words,
            "at": self.clock.now,
            "target_s": 1.0 if target_s is None else target_s,
        }
        number = b"%d" % len(self.requests)
        made = Played(self, about, self.context, number, "completions", arrival, owner, 0.0, "")
        self.requests.append(made)
        made.start()
        return made

    def play(self, seconds: float, event: tuple[Any, ...]) -> None:
        """Let time pass, then something happen."""
        self.clock.now += seconds
        self.router.now = self.context.now = self.clock.now
        what, *given = event
        if what == "arrives":
            self.arrive(*given)
        elif what == "leaves" and self.waiting:
            gone = self.waiting[given[0] % len(self.waiting)]
            self.context.queue.remove(gone)
            gone.status = 499
            gone._finish("client_gone", 499)
        elif what in ("first token", "ends") and self.running:
            one = self.running[given[0] % len(self.running)]
            if what == "ends":
                one.ends()
            elif one.attempt is not None and one.attempt.first_at is None:
                one.attempt.tokens(1)
        if what == "sweep":
            self.router.intake.sweep(self.clock.now)

    def sent(self, request: Played) -> None:
        self.order.append(request)
        self.tokens[request.about["client"]] += int(request.cost)


def check(world: World, sent_before: int) -> None:
    """What must hold after every event."""
    rules = world.router.backends.chooser.waiting_rules
    holding, waiting = rules.holding, world.waiting
    assert holding is not None
    rows = world.router.backends.cluster.replicas
    if waiting:
        assert (rows["in_flight"][rows["available"] == 1] > 0).all()  # work conservation
        assert rules.full() == set(range(REPLICAS))
    order = holding.order
    for request in world.order[sent_before:]:
        decision = request.decision
        if decision is None or decision.waited_s is None or request.overdue:
            continue
        mine = request.about
        earlier = [w.about for w in waiting if w.about["at"] < mine["at"]]
        for other in earlier:
            assert mine["priority"] <= other["priority"]
            if (mine["client"], mine["priority"]) == (other["client"], other["priority"]):
                bound_s = order.most * (order.w > 0) + order.d * other["target_s"]
                assert mine["at"] - other["at"] <= bound_s + 0.001
        if order.w == 0 and order.d == 1:  # earliest deadline first
            for w in (w.about for w in waiting):
                if (mine["client"], mine["priority"]) == (w["client"], w["priority"]):
                    assert mine["at"] + mine["target_s"] <= w["at"] + w["target_s"] + 0.001
        assert (decision.overtook_why in OVERTAKES) == (decision.overtook > 0)


@pytest.mark.parametrize("queue", QUEUES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_the_hard_rules_hold(queue: str, events: list[tuple[float, tuple[Any, ...]]]) -> None:
    world = World(f"least_outstanding+queue:{queue}")
    limit_s = world.router.backends.chooser.waiting_rules.max_wait_s
    for seconds, event in events:
        before = len(world.order)
        world.play(seconds, event)
        check(world, before)
        if event[0] == "sweep":
            assert all(world.clock.now - w.about["at"] < limit_s + 1e-9 for w in world.waiting)
    overtaken = sum(r.decision.overtaken for r in world.order if r.decision is not None)
    overtaken += sum(
        world.context.queue._waiting.overtaken(q) for q in world.context.queue._waiting
    )
    overtook = sum(r.decision.overtook for r in world.order if r.decision is not None)
    assert overtaken <= overtook  # those who left the queue were overtaken as well
    for _ in range(len(world.requests) + 1):
        for one in world.running:
            one.ends()
    assert not world.waiting
    assert all(r.status in (200, 499) for r in world.requests)
    assert (world.router.backends.cluster.replicas["in_flight"] == 0).all()


@pytest.mark.parametrize("order", ["order=wspt", "order=fcfs", "w=3"])
def test_clients_share_by_tokens_whatever_the_order_within_each(order: str) -> None:
    """One has short prompts, which every order by size would prefer, and many of them."""
    world = World(f"least_outstanding+queue:max_in_flight=1,{order}")
    for _ in range(60):
        world.arrive(0, 0, 30, None)
    for _ in range(20):
        world.arrive(1, 0, 600, None)
    longest = max(int(r.cost) for r in world.requests)
    start = Counter(world.tokens)
    for _ in range(25):
        world.running[0].ends()
        assert {"a", "b"} <= {w.about["client"] for w in world.waiting}
        got = world.tokens - start
        assert abs(got["a"] - got["b"]) <= 2 * longest


def test_counts_of_overtaking_by_hand() -> None:
    world = World("least_outstanding+queue:max_in_flight=1,order=wspt")
    first = [world.arrive(0, 0, 1, None) for _ in range(REPLICAS)]
    long, gone, short, urgent, other = (
        world.arrive(0, 0, 3000, None), world.arrive(0, 0, 3000, None), world.arrive(0, 0, 1, None),
        world.arrive(0, -1, 600, None), world.arrive(1, 0, 600, None),
    )  # fmt: skip
    world.context.queue.remove(gone)
    seen = []
    for _ in range(4):
        world.running[0].ends()
        sent = world.order[-1]
        decision = sent.decision
        assert decision is not None
        seen.append((sent, decision.overtook, decision.overtook_why, decision.overtaken))
    assert seen == [
        (urgent, 2, "priority", 0),
        (other, 2, "fair_share", 0),  # its client has had nothing yet
        (short, 1, "order", 2),
        (long, 0, "", 3),
    ]
    assert all(one.decision is not None and one.decision.waited_s is None for one in first)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS, policy=st.sampled_from(["load_aware", "tailrace"]))
def test_where_nobody_waits_nothing_changes(
    events: list[tuple[float, tuple[Any, ...]]], policy: str
) -> None:
    worlds = [World(policy), World(f"{policy}+queue:max_in_flight=1e6,w=9")]
    for seconds, event in events:
        for world in worlds:
            world.play(seconds, event)
    plain, queued = (
        [(r.decision.replica, r.decision.priority, r.decision.waited_s, r.decision.reason)
         for r in world.order if r.decision is not None]
        for world in worlds
    )  # fmt: skip
    assert plain == queued
    assert not worlds[1].waiting
    for name in worlds[0].router.backends.cluster.replicas.dtype.names or ():
        rows = [world.router.backends.cluster.replicas[name].tolist() for world in worlds]
        assert rows[0] == rows[1]


def test_what_servers_have_cached_that_cannot_take_it_does_not_count() -> None:
    cluster = new_cluster(2)
    asked = chat("the same long question " * 200)
    rules = WaitingRules(cluster, registry.get("round_robin+order:w=9"))
    new = rules.key(cluster.arrive(asked))
    send(cluster, asked, 0).close("done")
    known = cluster.arrive(asked)
    assert rules.key(known) < new
    assert rules.key(known, {1}) == rules.key(known)
    assert rules.key(known, {0}) == new


@pytest.mark.parametrize(("workers", "members"), [(1, 0), (2, 0), (1, 2)])
def test_who_had_no_room_has_some_again_whoever_else_sends_requests(
    workers: int, members: int
) -> None:
    """Also with other workers, and with routers on other machines."""
    given = backends(Replica(), Replica())
    view = new_shared_state(given, workers, DiscoverySettings(), members).of(0)
    cluster = ClusterState(given, Clock(), worker_view=view)
    chooser = new_chooser(cluster, "least_outstanding+queue:max_in_flight=1")
    rules = chooser.waiting_rules
    first = send(cluster, chat("a"), 0)
    assert chooser.choose(cluster.arrive(chat("b")), {0}).replica == 1  # sees what is sent
    assert rules.full() == {0}
    second = send(cluster, chat("b"), 1)
    assert chooser.choose(cluster.arrive(chat("c")), {0, 1}) is None
    assert rules.full() == {0, 1}
    for attempt in (first, second):
        attempt.close("done")
    chooser.choose(cluster.arrive(chat("c")), {0, 1})
    assert rules.full() == set()


def test_a_request_rejected_in_the_queue_leaves_a_line_that_its_policy_is_charged_with(
    tmp_path: Path,
) -> None:
    policy = "least_outstanding+queue:max_in_flight=1"
    folder = {"decisions": {"folder": str(tmp_path)}}
    world = World(policy, admission={"queue": 1, "max_wait_s": 20}, **folder)
    for _ in range(REPLICAS + 1):
        world.arrive(0, 0, 30, 0.5)
    assert len(world.waiting) == 1
    world.clock.now += 2.0
    pushed_out = world.arrive(0, 0, 30, 0.5)  # the queue is full
    assert pushed_out.status == 429
    for request in world.running:
        request.ends()
    world.running[0].ends()
    log = world.context.decision_log
    log.close()
    lines = [data for _, _, data in decision_log.records(tmp_path)]
    (rejected,) = [line for line in lines if line["outcome"] == "shed"]
    assert (rejected["policy"], rejected["status"], rejected["replica"]) == (
        world.router.backends.chooser.policy.name, 429, None,
    )  # fmt: skip
    assert rejected["waited_s"] == 0.0
    done = [line for line in lines if line["outcome"] == "done"]
    assert len(done) == REPLICAS + 1
    costs = ServedCosts.read(tmp_path, 0.0)
    assert costs.by(policy).all()
    assert len(costs.cost_s) == REPLICAS + 2
    assert costs.cost_s[-1] == composite_cost(0.0, 0.0, 0.0, True) == costs.cost_s.max()
    assert decision_log.answered(tmp_path).skipped == 1


def test_who_is_in_charge_of_a_rejected_request_goes_by_its_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = new_cluster(2, Clock(1000.0))
    turns = {"canary_block_s": 60.0, "canary_share": 0.5}
    chooser = new_chooser(cluster, "least_outstanding", canary="round_robin", **turns)
    begin = 1_700_000_000 // 120 * 120.0
    arrival = cluster.arrive(chat("hello"))
    for now in np.arange(begin, begin + 1200.0, 30.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        at_once = chooser.in_charge(arrival, 1000.0)
        assert at_once == chooser._role_for(arrival).policy.name
        monkeypatch.setattr("time.time", lambda now=now: now + 45.0)
        assert chooser.in_charge(arrival, 1045.0) == at_once
