"""How fast servers are is learned from what streams: a simulated cluster plays the servers."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from router.clusters import Clock, backends, new_chooser
from router.state.test_parity import Twin
from tailrace.config import Cluster, Event, Replica, RouterSettings
from tailrace.policy import registry
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state import server_model
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.server_speeds import (
    ASSUMED,
    GIVEN,
    LEARNED,
    restore,
    save,
    speed_of,
)
from tailrace.router.state.shared_state import new_shared_state
from tailrace.sim.reference import ReferenceEngine
from tailrace.sim.reference.request import Request
from tailrace.sim.reference.routing import PolicyDispatcher
from tailrace.sim.reference.server import Server
from tailrace.view.bookkeeper import RequestFacts
from tailrace.view.cost_model import token_ms
from tailrace.view.replicas import replica_costs
from tailrace.workload.library import make
from tailrace.workload.table import RequestTable

pytestmark = pytest.mark.compiled


class Stranger(Twin):
    """A live router in front of simulated servers whose speeds it does not know."""

    def __init__(
        self,
        table: RequestTable,
        servers: Sequence[Replica],
        told: Sequence[Replica],
        router: RouterSettings,
    ) -> None:
        policy = registry.get("least_outstanding")
        PolicyDispatcher.__init__(self, policy, table, servers, router, 0)
        self.clock = Clock()
        self.cluster = ClusterState(backends(*told), self.clock)
        self.chooser = new_chooser(self.cluster, "round_robin", guard=False)
        self.arrivals, self.attempts, self.live = {}, {}, {}

    def _show_replicas(self, facts: RequestFacts) -> None:
        PolicyDispatcher._show_replicas(self, facts)
        self._streams(float(self.request_view["now"]))
        decision = self.chooser.choose(self._arrival(facts))
        assert decision is not None
        self.decision = decision

    def _send(self, request: Request, replica: int) -> None:
        arrival = self.arrivals[request.id]
        self.attempts[request.id] = Attempt(self.cluster, arrival, replica, self.decision)
        self.live[request.id] = request

    def _streams(self, now: float) -> None:
        self.clock.now = now
        for number in self.attempts:
            self._stream(number)

    def first_token(self, server: Server, request: Request, now: float) -> None:
        self._streams(now)
        super().first_token(server, request, now)

    def finished(self, server: Server, request: Request, now: float) -> None:
        self._streams(now)
        super().finished(server, request, now)


class Silent(Stranger):
    """The same, with answers that do not stream: only their end is seen, and their usage."""

    def _arrival(self, facts: RequestFacts) -> Arrival:
        arrival = super()._arrival(facts)
        arrival.asked.streams = False
        return arrival

    def _streams(self, now: float) -> None:
        self.clock.now = now

    def first_token(self, server: Server, request: Request, now: float) -> None:
        PolicyDispatcher.first_token(self, server, request, now)

    def finished(self, server: Server, request: Request, now: float) -> None:
        PolicyDispatcher.finished(self, server, request, now)
        self.clock.now = now
        row = self.table.rows[request.id]
        attempt = self.attempts.pop(request.id)
        attempt.usage(int(row["prompt_tokens"]), int(row["output_tokens"]), None)
        attempt.close("done")


def learned(
    *servers: Replica,
    workload: str = "chat",
    rate: float = 6.0,
    requests: int = 400,
    told: Sequence[Replica] = (),
    events: tuple[Event, ...] = (),
    router_kind: type[Stranger] = Stranger,
) -> ClusterState:
    """What a router knows after some traffic at ``rate`` per s; told nothing unless ``told``."""
    cluster, router = Cluster(replicas=servers), RouterSettings(staleness_s=0.5)
    table = make(workload, requests, rate, 5)
    stranger = router_kind(table, servers, told or [Replica()] * len(servers), router)
    engine = ReferenceEngine(cluster, table, router=router, events=events)
    engine.run(dispatcher=stranger)
    return stranger.cluster


def errors(cluster: ClusterState, servers: Sequence[Replica]) -> list[tuple[float, float]]:
    """Relative errors of an iteration with 8 answers, and of one with 512 prompt tokens."""
    found = []
    for cost, true, server in zip(cluster.costs, replica_costs(servers), servers, strict=True):
        pair = []
        for tokens, context, work in ((8.0, 8000, 0), (512.0, 4000, 512 * 512)):
            ours, theirs = (
                token_ms(c, tokens) + c["per_context_ms"] * context + c["per_prefill_ms"] * work
                for c in (cost, true)
            )
            pair.append(float(ours * server.speed / theirs - 1))
        found.append((pair[0], pair[1]))
    return found


@pytest.mark.parametrize(
    ("servers", "workload"),
    [
        ((Replica(), Replica(speed=0.4), Replica(speed=2.0)), "chat"),
        ((Replica(), Replica(speed=0.4), Replica(speed=2.0)), "sessions-hot"),
        ((Replica(device="h100-llama2-7b"), Replica(device="a100-llama2-70b-tp4")), "chat"),
    ],
)
def test_unknown_servers_are_learned(servers: tuple[Replica, ...], workload: str) -> None:
    cluster = learned(*servers, workload=workload, rate=2.0 * len(servers))
    for (answers, prompts), replica in zip(errors(cluster, servers), range(9), strict=False):
        assert abs(answers) < 0.1, replica
        assert abs(prompts) < 0.2, replica
        known = speed_of(cluster, replica)
        assert known.source == LEARNED
        assert known.uncertainty is not None
        assert known.uncertainty < 0.1
        assert not known.unexplained
        assert cluster.replicas[replica]["prefill_tokens_per_s"] == known.prefill_tokens_per_s


def test_answers_that_do_not_stream_teach_too() -> None:
    servers = (Replica(), Replica(speed=0.4), Replica(speed=2.0))
    cluster = learned(*servers, rate=6.0, router_kind=Silent)
    assert (cluster.models["equations"] > 50).all()
    for (answers, _), replica in zip(errors(cluster, servers), range(3), strict=True):
        assert abs(answers) < 0.1, replica
        assert not speed_of(cluster, replica).unexplained


def test_a_slow_down_is_followed_within_a_minute() -> None:
    slow = Event(at_s=30.0, replica=0, kind="slow", factor=0.4)
    servers = (Replica(), Replica())
    cluster = learned(*servers, rate=4.0, requests=360, events=(slow,))  # 90 s
    (slowed, _), (same, _) = errors(cluster, (Replica(speed=0.4), Replica()))
    assert abs(slowed) < 0.15
    assert abs(same) < 0.15


@pytest.mark.parametrize("factor", [0.4, 0.7, 2.0])
@pytest.mark.parametrize(("rate", "requests"), [(2.0, 250), (4.0, 560)])
def test_a_change_of_a_well_known_server_is_followed_as_soon(
    monkeypatch: pytest.MonkeyPatch, factor: float, rate: float, requests: int
) -> None:
    """It taught by one request in 3 s until then."""
    monkeypatch.setattr(server_model, "MANY", 50)
    ends_s = make("chat", requests, rate, 5).rows["arrival_s"].max()
    changed = Event(at_s=ends_s - 60.0, replica=0, kind="slow", factor=factor)
    servers = (Replica(), Replica())
    cluster = learned(*servers, rate=rate, requests=requests, events=(changed,))
    (answers, _), (same, _) = errors(cluster, (Replica(speed=factor), Replica()))
    assert abs(answers) < 0.15
    assert abs(same) < 0.15


def test_what_the_settings_say_is_kept() -> None:
    told = (Replica(speed=0.7), Replica(device="h100-llama2-7b"))
    cluster = learned(Replica(), Replica(), told=told, requests=60)
    np.testing.assert_array_equal(cluster.costs, replica_costs(told))
    assert [speed_of(cluster, r).source for r in (0, 1)] == [GIVEN, GIVEN]


def test_before_any_traffic_the_default_is_assumed_with_little_certainty() -> None:
    known = speed_of(ClusterState(backends(Replica()), Clock()), 0)
    assert known.source == ASSUMED
    assert known.uncertainty is not None
    assert known.uncertainty > 0.5
    assert known.error is None


def test_times_that_follow_no_cost_model_are_flagged() -> None:
    models = server_model.new_models([Replica()]).reshape(1, 1)
    cluster = ClusterState(backends(Replica()), Clock())
    rng = np.random.default_rng(1)
    views = cluster.replicas.reshape(1, 1)
    for k in range(200):
        now, lesson = 10.0 * k, np.zeros(server_model.LESSON_SHAPE)
        server_model.sent(models, views, 0, lesson, now)
        server_model.first_token(models, views, 0, lesson, now + 0.1, 100, 0)
        end, prompt = now + 0.1 + float(rng.choice([0.01, 5.0])), (100.0, 0.0)
        server_model.ended(models, views, cluster.costs, 0, 0, lesson, end, 50, prompt, prompt)
    cluster.models[0] = models[0, 0]
    assert speed_of(cluster, 0).unexplained
    assert np.isfinite(models["factors"]).all()
    assert np.linalg.eigvalsh(models["covariance"][0, 0]).min() > -1e-9


def test_prompts_count_as_the_server_counts_them() -> None:
    """The index believes that nothing is cached; the server says that most of each prompt was."""
    cost = replica_costs([Replica()])[0]
    models = server_model.new_models([Replica()]).reshape(1, 1)
    cluster = ClusterState(backends(Replica()), Clock())
    views, truth = (
        cluster.replicas.reshape(1, 1),
        float(cluster.replicas[0]["prefill_tokens_per_s"]),
    )
    rng = np.random.default_rng(3)
    for k in range(150):
        now, lesson = 10.0 * k, np.zeros(server_model.LESSON_SHAPE)
        server_model.sent(models, views, 0, lesson, now)
        fresh = float(rng.choice([50, 200, 400]))
        believed, counted = (2000.0, 0.0), (fresh, 2000.0 - fresh)
        work = fresh * (counted[1] + 0.5 * fresh)
        first = token_ms(cost, fresh) + float(cost["per_prefill_ms"]) * work
        at = now + server_model.OVERHEAD_S + 1e-3 * first
        server_model.first_token(models, views, 0, lesson, at, 2000, 0)
        server_model.prefilled(models[0, 0], 2000, 0)
        end = at + 49e-3 * token_ms(cost, 1.0)
        server_model.ended(models, views, cluster.costs, 0, 0, lesson, end, 50, believed, counted)
    assert cluster.replicas[0]["prefill_tokens_per_s"] == pytest.approx(truth, rel=0.1)


def test_what_is_learned_does_not_follow_every_answer_of_a_server_whose_times_scatter() -> None:
    models = server_model.new_models([Replica()]).reshape(1, 1)
    cluster = ClusterState(backends(Replica()), Clock())
    views, prompt = cluster.replicas.reshape(1, 1), (100.0, 0.0)
    truth = token_ms(replica_costs([Replica()])[0], 1.0)
    rng = np.random.default_rng(4)
    found = []
    for k in range(300):
        now, lesson = 2.0 * k, np.zeros(server_model.LESSON_SHAPE)
        server_model.sent(models, views, 0, lesson, now)
        server_model.first_token(models, views, 0, lesson, now + 0.03, 100, 0)
        server_model.prefilled(models[0, 0], 100, 0)
        end = now + 0.03 + 49e-3 * truth * rng.uniform(0.5, 1.5)
        server_model.ended(models, views, cluster.costs, 0, 0, lesson, end, 50, prompt, prompt)
        found.append(token_ms(cluster.costs[0], 1.0) / truth)
    assert np.mean(found[100:]) == pytest.approx(1.0, abs=0.1)
    assert np.std(found[100:]) < 0.07


def test_two_workers_learn_from_what_both_send() -> None:
    """A server that answers two workers at once is no slower than one that answers one."""
    clock = Clock()
    shared = new_shared_state(backends(Replica()), 2)
    workers = [
        ClusterState(backends(Replica()), clock, worker_view=shared.of(worker)) for worker in (0, 1)
    ]
    attempts = []
    for cluster, text in zip(workers, "xy", strict=True):
        arrival = cluster.arrive(RequestBody("completion", text=text, streams=True))
        arrival.prompt_tokens = 1000
        decision = new_chooser(cluster, "round_robin").choose(arrival)
        assert decision is not None
        attempts.append(Attempt(cluster, arrival, 0, decision))
    for attempt in attempts:
        clock.now += 0.1
        attempt.tokens(3)
    lesson = attempts[1].lesson
    assert lesson is not None
    first = lesson[server_model.FIRST]
    assert first[server_model.PREFILLED] == 2000
    assert first[server_model.OUTPUT] == 3
    assert first[server_model.CONTEXTS] == 1003


def test_it_is_kept_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    before = learned(Replica(speed=0.5), requests=80, rate=2.0)
    save(before, path)
    after = ClusterState(backends(Replica()), Clock())
    assert restore(after, path) == 1
    np.testing.assert_array_equal(after.costs, before.costs)
    assert after.models["scatter"][0] == before.models["scatter"][0] > 0.0
    assert speed_of(after, 0).prefill_tokens_per_s == speed_of(before, 0).prefill_tokens_per_s
    ours, theirs = speed_of(after, 0).uncertainty, speed_of(before, 0).uncertainty
    assert ours is not None
    assert theirs is not None
    assert ours > theirs  # the server may be another one by now
    elsewhere = ClusterState(backends(Replica(), Replica(speed=2.0)), Clock())
    assert restore(elsewhere, path) == 1  # by address; what the settings say is kept
    np.testing.assert_array_equal(elsewhere.costs[1], replica_costs([Replica(speed=2.0)])[0])


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"version": 1, "servers": {"u": {}}}', "NaN"])
def test_a_damaged_file_is_left_out(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    cluster = ClusterState(backends(Replica()), Clock())
    assert restore(cluster, path) == 0  # there is none
    path.write_text(damage)
    assert restore(cluster, path) == 0
    factors: list[object] = [float("nan")] * 5
    entry = {"factors": factors, "covariance": np.eye(5).tolist(), "equations": 9}
    entry |= {"error": 0, "scatter": 0}
    url = cluster.backends[0].url
    path.write_text(json.dumps({"version": 1, "servers": {url: entry}}))
    assert restore(cluster, path) == 0
    np.testing.assert_array_equal(cluster.costs, replica_costs([Replica()]))


def test_at_a_high_rate_few_requests_teach() -> None:
    clock = Clock()
    cluster = ClusterState(backends(Replica()), clock)
    taught = 0
    cluster.models["equations"] = server_model.MANY
    for _ in range(1000):  # over 120 s
        clock.now += 0.12
        if clock.now >= cluster.lesson_at[0]:
            cluster.begin_lesson(0, clock.now)
            taught += 1
    assert 35 <= taught <= 41
