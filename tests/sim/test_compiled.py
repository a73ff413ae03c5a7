"""The compiled engine against the reference engine, and what must hold in every run."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from books import check_books
from tailrace.config import Cluster, Engine, Event, Replica, RouterSettings
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.sim.result import FAILED, FINISHED, PENDING, SimResult
from tailrace.sim.simulator import Simulation, simulate
from tailrace.sim.types import NOT_ARRIVED, SCHEDULER_CODES
from tailrace.workload import library
from tailrace.workload.table import RequestTable

COMPILED = Engine(engine="compiled")
EXACT = Engine(engine="compiled", exact=True)
REFERENCE = Engine(engine="reference")

TROUBLE = (
    Event(at_s=1, replica=0, kind="slow", factor=0.3),
    Event(at_s=2, replica=1, kind="die"),
    Event(at_s=4, replica=1, kind="return"),
    Event(at_s=5, replica=2, kind="drain"),
    Event(at_s=6, replica=0, kind="die"),
    Event(at_s=6, replica=1, kind="die"),
    Event(at_s=9, replica=0, kind="return"),
    Event(at_s=10, replica=2, kind="return"),
)


def longest(table: RequestTable) -> int:
    return int((table.rows["prompt_tokens"] + table.rows["output_tokens"]).max())


def three(scheduler: str, num_blocks: int | None = None, **settings) -> Cluster:  # type: ignore[no-untyped-def]
    common = {
        "scheduler": scheduler,
        "num_blocks": num_blocks,
        "max_batch_tokens": 200_000,
        **settings,
    }
    return Cluster(replicas=(Replica(count=2, **common), Replica(speed=0.6, **common)))


def assert_same(left: SimResult, right: SimResult, tolerance_s: float = 0.0) -> None:
    assert left.decisions == right.decisions
    for name in left.requests.dtype.names:
        a, b = left.requests[name], right.requests[name]
        if a.dtype.kind == "f":
            assert (np.isnan(a) == np.isnan(b)).all(), name
            assert np.nanmax(np.abs(a - b), initial=0.0) <= tolerance_s, name
        else:
            assert (a == b).all(), name
    for name in left.replicas.dtype.names:
        np.testing.assert_allclose(
            left.replicas[name], right.replicas[name], rtol=1e-9, err_msg=name
        )


@pytest.mark.compiled
@pytest.mark.parametrize("trouble", [(), TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("memory", ["ample", "tight"])
@pytest.mark.parametrize("scheduler", SCHEDULER_CODES)
@pytest.mark.parametrize("workload", ["chat", "sessions-hot", "agents"])
def test_agrees_with_the_reference_engine(workload, scheduler, memory, trouble):
    table = library.make(workload, 70, 12.0, seed=3)
    blocks = None if memory == "ample" else longest(table) // 16 + 40
    cluster = three(scheduler, blocks)
    for policy in ("load_aware", "llm_d"):
        same = {"events": trouble, "seed": 5}
        assert_same(
            simulate(cluster, table, policy, engine=REFERENCE, **same),
            simulate(cluster, table, policy, engine=EXACT, **same),
        )


@pytest.mark.compiled
@pytest.mark.parametrize("policy", [r.name for r in registry.rules() if not r.in_engine])
def test_every_rule_decides_alike_in_both_engines(policy):
    table = library.make("sessions-hot", 80, 15.0, seed=8)
    cluster = three("vllm_v1", 900)
    for staleness_s in (0.0, 0.5):
        router = RouterSettings(staleness_s=staleness_s)
        assert_same(
            simulate(cluster, table, policy, router=router, engine=REFERENCE, seed=2),
            simulate(cluster, table, policy, router=router, engine=EXACT, seed=2),
        )


@st.composite
def small_tables(draw) -> RequestTable:  # type: ignore[no-untyped-def]
    """A few requests with simultaneous arrivals, block-sized lengths, shared prefixes and turns."""
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 3.0]), min_size=count, max_size=count))
    sizes = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 100, 200])
    prompts = draw(st.lists(sizes, min_size=count, max_size=count))
    outputs = draw(st.lists(st.sampled_from([1, 2, 16, 17, 40]), min_size=count, max_size=count))
    runs: list[list[tuple[int, int]]] = []
    parent = np.full(count, -1)
    think = np.zeros(count)
    for i in range(count):
        if i and draw(st.booleans()):
            p = draw(st.integers(0, i - 1))
            parent[i], think[i] = p, draw(st.sampled_from([0.0, 0.5, 2.0]))
            grown = prompts[p] + outputs[p] + prompts[i]
            tail = grown - sum(tokens for _, tokens in runs[p][:-1])
            prompts[i] = grown
            runs.append([*runs[p][:-1], (runs[p][-1][0], tail)])
            continue
        shared = draw(st.sampled_from([0, 16, 40]))
        shared = min(shared, prompts[i])
        runs.append([(1000, shared), (i, prompts[i] - shared)])
    return RequestTable.build(
        np.cumsum(gaps), np.array(prompts), np.array(outputs), runs, parent=parent, think_s=think
    )


@st.composite
def small_clusters(draw) -> Cluster:  # type: ignore[no-untyped-def]
    def replica() -> Replica:
        scheduler = draw(st.sampled_from(list(SCHEDULER_CODES)))
        cap = draw(st.sampled_from([1, 3, 32]))
        return Replica(
            scheduler=scheduler,
            batch_cap=cap,
            chunk_size=max(cap, draw(st.sampled_from([32, 64, 512]))),
            num_blocks=draw(st.sampled_from([200, 230, 4000])),
            block_size=draw(st.sampled_from([8, 16])),
            watermark=draw(st.sampled_from([0.0, 0.05])),
            prefix_caching=draw(st.booleans()),
            preallocate_tokens=draw(st.sampled_from([0, 40])),
            max_batch_tokens=100_000,
            speed=draw(st.sampled_from([0.5, 1.0, 3.0])),
        )

    return Cluster(replicas=tuple(replica() for _ in range(draw(st.integers(1, 3)))))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_tables(), small_clusters(), st.booleans(), st.booleans())
def test_agrees_with_the_reference_engine_on_odd_cases(table, cluster, compat, die):
    assume(longest(table) <= 1500)  # longer ones never fit the smallest replicas
    events = (Event(at_s=0.3, replica=0, kind="die"), Event(at_s=0.9, replica=0, kind="return"))
    common = {"seed": 1, "events": events if die else ()}
    results = [
        simulate(
            cluster,
            table,
            "least_outstanding",
            engine=engine.model_copy(update={"vidur_compat": compat}),
            **common,
        )
        for engine in (REFERENCE, EXACT)
    ]
    assert_same(*results)


@pytest.mark.compiled
@pytest.mark.parametrize("scheduler", SCHEDULER_CODES)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("memory", ["ample", "tight"])
def test_fast_forward_changes_times_by_less_than_a_nanosecond(scheduler, caching, memory):
    table = library.make("chat", 400, 10.0, seed=4)
    blocks = None if memory == "ample" else longest(table) // 16 + 400
    cluster = three(scheduler, blocks, prefix_caching=caching)
    exact = simulate(cluster, table, "round_robin", engine=EXACT)
    fast = simulate(cluster, table, "round_robin", engine=COMPILED)
    assert_same(exact, fast, tolerance_s=1e-9)
    if memory == "tight":
        assert exact.replicas["preemptions"].sum() > 0


@pytest.mark.compiled
@pytest.mark.parametrize("scheduler", SCHEDULER_CODES)
def test_an_iteration_keeps_its_speed_whatever_happens_during_it(scheduler):
    """What comes within the same iteration as a change of speed cuts the stretch once more."""
    count = np.ones(4, np.int64)
    table = RequestTable.build(
        np.array([0.01, 0.01, 0.02, 0.03]), count, np.array([1, 30, 1, 40]) * count
    )
    replica = Replica(count=2, scheduler=scheduler, prefix_caching=False)
    events = (
        Event(at_s=0.1, replica=1, kind="slow", factor=0.3),
        Event(at_s=0.102, replica=1, kind="return"),
    )
    reference, exact, fast = (
        simulate(Cluster(replicas=(replica,)), table, "round_robin", engine=engine, events=events)
        for engine in (REFERENCE, EXACT, COMPILED)
    )
    assert_same(reference, exact)
    assert_same(exact, fast, tolerance_s=1e-9)


@pytest.mark.compiled
@pytest.mark.parametrize("scheduler", SCHEDULER_CODES)
def test_books_balance_at_every_decision(scheduler):
    table = library.make("sessions-hot", 250, 25.0, seed=6)
    blocks = longest(table) // 16 + 60
    simulation = Simulation(three(scheduler, blocks), table, events=TROUBLE)
    policy = registry.get("least_outstanding")
    now = 0.0
    while (view := simulation.next_decision()) is not None:
        assert view.request["now"] >= now
        now = view.request["now"]
        check_books(simulation)
        scores = policy.scores(view) + np.where(view.replicas["available"] == 1, 0, np.inf)
        simulation.assign(int(np.argmin(scores)))
    check_books(simulation)
    fleet, _ = simulation.arrays
    assert (fleet.servers[0]["free_blocks"] == blocks).all()
    assert (fleet.requests[0]["status"] != NOT_ARRIVED).all()


@pytest.mark.compiled
@pytest.mark.parametrize("workload", library.names())
def test_every_request_ends_once_and_in_order(workload):
    table = library.make(workload, 400, 3.0, seed=9)
    result = simulate(Cluster(replicas=(Replica(count=4, num_blocks=60_000),)), table, "lmetric")
    requests = result.requests
    assert (requests["status"] == FINISHED).all()
    assert result.decisions == result.replicas["requests"].sum() == len(table)
    assert (requests["scheduled_s"] >= requests["arrived_s"]).all()
    assert (requests["first_token_s"] > requests["scheduled_s"]).all()
    assert (requests["finished_s"] >= requests["first_token_s"]).all()
    children = table.rows["parent"] >= 0
    parents = table.rows["parent"][children]
    think = requests["arrived_s"][children] - requests["finished_s"][parents]
    np.testing.assert_allclose(think, table.rows["think_s"][children], atol=1e-9)
    roots = ~children
    assert (requests["arrived_s"][roots] == table.rows["arrival_s"][roots]).all()
    outputs = table.rows["output_tokens"].astype(np.int64)
    if not result.replicas["preemptions"].any():
        computed = table.rows["prompt_tokens"] - requests["cached_tokens"] + outputs - 1
        assert result.replicas["tokens"].sum() == computed.sum()


@pytest.mark.compiled
def test_batches_of_a_replica_never_overlap():
    table = library.make("chat", 600, 20.0, seed=2)
    result = simulate(three("sarathi"), table, "random", record_batches=True)
    batches = result.batches
    assert batches is not None
    for r in range(3):
        mine = batches[batches["replica"] == r]
        assert (mine["end_s"] > mine["start_s"]).all()
        assert (mine["start_s"][1:] >= mine["end_s"][:-1]).all()
        assert mine["iterations"].sum() == result.replicas["iterations"][r]
        tokens = (mine["tokens"].astype(np.int64) * mine["iterations"]).sum()
        assert tokens == result.replicas["tokens"][r]


@pytest.mark.compiled
def test_recording_many_batches_changes_nothing(monkeypatch):
    table = library.make("sessions-hot", 150, 20.0, seed=2)
    plain = simulate(three("vllm_v1"), table, "least_load")
    monkeypatch.setattr("tailrace.sim.simulator.BATCH_LOG", 7)
    recorded = simulate(three("vllm_v1"), table, "least_load", record_batches=True)
    assert_same(plain, recorded)
    assert recorded.batches is not None
    assert recorded.batches["iterations"].sum() == plain.replicas["iterations"].sum()


@pytest.mark.compiled
def test_same_seed_same_bytes_and_another_seed_not():
    table = library.make("chat", 300, 20.0, seed=2)
    runs = [simulate(three("vllm_v1"), table, "power_of_two", seed=s) for s in (1, 1, 2)]
    assert runs[0].requests.tobytes() == runs[1].requests.tobytes()
    assert runs[0].replicas.tobytes() == runs[1].replicas.tobytes()
    assert runs[0].requests.tobytes() != runs[2].requests.tobytes()


@pytest.mark.compiled
def test_a_copy_goes_its_own_way():
    table = library.make("sessions-hot", 200, 20.0, seed=2)
    simulation = Simulation(three("vllm_v1"), table)
    for _ in range(60):
        simulation.next_decision()
        simulation.assign(0)
    simulation.next_decision()
    twin = simulation.copy()
    elsewhere = simulation.copy()
    twin.assign(1)
    elsewhere.assign(2)
    simulation.assign(1)
    for each in (simulation, twin, elsewhere):
        each.run(registry.get("lmetric"))
    assert simulation.result().requests.tobytes() == twin.result().requests.tobytes()
    assert simulation.result().requests.tobytes() != elsewhere.result().requests.tobytes()


@pytest.mark.compiled
def test_permuting_replicas_permutes_the_choices():
    table = library.make("sessions-hot", 300, 20.0, seed=2)
    speeds = (1.0, 0.7, 1.6, 1.13)
    order = [2, 0, 3, 1]
    replicas = [Replica(speed=s) for s in speeds]
    plain = simulate(Cluster(replicas=tuple(replicas)), table, "least_predicted_ttft")
    permuted = simulate(
        Cluster(replicas=tuple(replicas[i] for i in order)), table, "least_predicted_ttft"
    )
    assert (np.array(order)[permuted.requests["replica"]] == plain.requests["replica"]).all()
    assert (permuted.requests["finished_s"] == plain.requests["finished_s"]).all()


class Loud(Policy):
    """Sends everything to replica 0 if it can, and keeps what it hears."""

    name = "loud"

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int, float]] = []

    def scores(self, view) -> NDArray[np.float64]:  # type: ignore[no-untyped-def]
        return np.arange(len(view.replicas), dtype=float)

    def sent(self, replica, request_id, now):  # type: ignore[no-untyped-def]
        self.heard.append(("sent", replica, request_id, now))

    def first_token(self, replica, request_id, now):  # type: ignore[no-untyped-def]
        self.heard.append(("first_token", replica, request_id, now))

    def finished(self, replica, request_id, now):  # type: ignore[no-untyped-def]
        self.heard.append(("finished", replica, request_id, now))

    def failed(self, replica, request_id, now):  # type: ignore[no-untyped-def]
        self.heard.append(("failed", replica, request_id, now))


@pytest.mark.parametrize("engine", [COMPILED, REFERENCE])
def test_a_policy_in_python_hears_everything_in_order(engine):
    table = library.make("chat", 60, 15.0, seed=2)
    events = (Event(at_s=1.5, replica=0, kind="die"),)
    policy = Loud()
    result = simulate(three("sarathi"), table, policy, events=events, engine=engine)
    times = [now for *_, now in policy.heard]
    assert times == sorted(times)
    counts = {kind: sum(h[0] == kind for h in policy.heard) for kind, *_ in policy.heard}
    reroutes = int(result.requests["reroutes"].sum())
    lost = int((result.requests["status"] == FAILED).sum())
    assert reroutes > 0
    assert lost > 0
    assert counts["sent"] == len(table) + reroutes
    assert counts["failed"] == reroutes + lost
    assert counts["finished"] == len(table) - lost
    first = {r: now for kind, _, r, now in policy.heard if kind == "first_token"}
    answered = ~np.isnan(result.requests["first_token_s"])
    assert sorted(first) == np.flatnonzero(answered).tolist()
    assert all(first[r] == result.requests["first_token_s"][r] for r in first)


def test_without_any_replica_requests_wait_and_are_reported():
    table = library.make("chat", 20, 10.0, seed=2)
    cluster = Cluster(replicas=(Replica(),))
    dead = (Event(at_s=0.5, replica=0, kind="die"),)
    result = simulate(cluster, table, "random", events=dead)
    late = result.requests["arrived_s"] > 0.5
    assert late.any()
    assert (result.requests["status"][late] == PENDING).all()
    back = (*dead, Event(at_s=30, replica=0, kind="return"))
    result = simulate(cluster, table, "random", events=back)
    assert (result.requests["status"][late] == FINISHED).all()
    assert (result.requests["scheduled_s"][late] >= 30).all()


def test_a_slow_replica_takes_longer_from_its_next_iteration_on():
    table = RequestTable.build(np.array([0.0]), np.array([16]), np.array([11]))
    cluster = Cluster(replicas=(Replica(scheduler="sarathi"),))
    plain = simulate(cluster, table, "random").requests[0]
    slow = (Event(at_s=plain["first_token_s"] + 1e-6, replica=0, kind="slow", factor=0.5),)
    half = simulate(cluster, table, "random", events=slow).requests[0]
    assert half["first_token_s"] == plain["first_token_s"]
    decode_s = plain["finished_s"] - plain["first_token_s"]
    # Nine of ten decode iterations run at half speed.
    expected = decode_s * 1.9
    assert half["finished_s"] - half["first_token_s"] == pytest.approx(expected, rel=1e-3)


def test_engine_settings_that_contradict_each_other():
    table = library.make("chat", 5, 1.0, seed=2)
    for replica in (Replica(scheduler="orca"), Replica(scheduler="sarathi", num_stages=2)):
        cluster = Cluster(replicas=(replica,))
        assert len(simulate(cluster, table, "random").requests) == 5
        with pytest.raises(TailraceError, match="reference engine"):
            simulate(cluster, table, "random", engine=COMPILED)


def test_a_request_that_can_never_fit_is_refused():
    table = RequestTable.build(np.array([0.0]), np.array([5000]), np.array([10]))
    with pytest.raises(TailraceError, match=r"request 0 .* raise num_blocks"):
        simulate(Cluster(replicas=(Replica(num_blocks=300),)), table, "random")


def test_stepping_errors():
    simulation = Simulation(three("sarathi"), library.make("chat", 5, 1.0, seed=2))
    with pytest.raises(TailraceError, match="no request at hand"):
        simulation.assign(0)
    simulation.next_decision()
    for replica in (-1, 3):
        with pytest.raises(TailraceError, match="does not exist or is not available"):
            simulation.assign(replica)


def test_results_are_plain_values():
    result = simulate(three("sarathi"), library.make("chat", 5, 1.0, seed=2), "random")
    assert {f.name for f in dataclasses.fields(result)} >= {"table", "requests", "replicas"}
