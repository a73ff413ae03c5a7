"""Servers that serve by priority: both engines alike, and orders worked out by hand."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from odd_cases import assert_same, longest, small_clusters, small_tables
from reference_runs import replica_of, table_of
from tailrace.config import Cluster, Engine, Event, Replica, Scenario, parse
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.sim.simulator import Simulation, simulate
from tailrace.view.ordering import Order
from tailrace.workload import library

REFERENCE = Engine(engine="reference")
COMPILED = Engine(engine="compiled")
EXACT = Engine(engine="compiled", exact=True)


def played(rows, priorities, engine=REFERENCE, **settings):
    """Run rows (arrival, prompt, output) on one server by priority; iterations take a second."""
    replica = replica_of("vllm_v1", scheduling_policy="priority", **settings)
    table = table_of(rows, priority=-np.array(priorities))  # in tables higher is more urgent
    return simulate(
        Cluster(replicas=(replica,)), table, "round_robin", engine=engine, record_batches=True
    )


BOTH = pytest.mark.parametrize("engine", [REFERENCE, EXACT], ids=["reference", "compiled"])


@BOTH
def test_the_most_urgent_goes_first_and_the_earlier_of_equals(engine):
    rows = [(0.0, 10, 3), (0.1, 10, 1), (0.2, 10, 1), (0.3, 10, 1), (0.4, 10, 1)]
    result = played(rows, [0, 5, 1, 5, 0], engine, batch_cap=1)
    assert result.requests["scheduled_s"].tolist() == [0.0, 5.0, 4.0, 6.0, 3.0]


@BOTH
def test_a_running_request_keeps_its_place(engine):
    result = played([(0.0, 10, 4), (0.5, 10, 1)], [9, 0], engine, batch_cap=1)
    assert result.requests["scheduled_s"].tolist() == [0.0, 4.0]
    assert result.replicas["preemptions"].tolist() == [0]


@BOTH
def test_the_least_urgent_is_preempted_not_the_last_admitted(engine):
    # Two blocks of 16 tokens each after their prompts, five blocks in all: at the second token of
    # the answers a sixth is wanted. The first is the least urgent, so it gives way.
    rows = [(0.0, 32, 8), (0.0, 32, 8)]
    common = {"num_blocks": 5, "prefix_caching": False}
    assert played(rows, [1, 0], engine, **common).requests["restarts"].tolist() == [1, 0]
    assert played(rows, [0, 1], engine, **common).requests["restarts"].tolist() == [0, 1]


@BOTH
def test_of_equal_priorities_the_latest_is_preempted(engine):
    rows = [(0.0, 32, 8), (0.5, 32, 8)]
    result = played(rows, [3, 3], engine, num_blocks=5, prefix_caching=False)
    assert result.requests["restarts"].tolist() == [0, 1]


@BOTH
def test_who_preempts_itself_ends_the_round(engine):
    """In vLLM, those behind a request that had to preempt itself get nothing in that iteration."""
    # Three blocks, one each. At 2 s request 1, the least urgent, wants a second one and preempts
    # itself; request 2 was admitted behind it and sits the iteration out.
    rows = [(0.0, 8, 8), (0.0, 14, 6), (0.5, 14, 4)]
    result = played(rows, [0, 1, 0], engine, num_blocks=3, prefix_caching=False)
    assert result.requests["first_token_s"].tolist() == [1.0, 1.0, 2.0]
    assert result.batches["decodes"].tolist()[:4] == [0, 2, 1, 2]
    assert result.requests["restarts"][[0, 2]].tolist() == [0, 0]
    assert result.requests["finished_s"][[0, 2]].tolist() == [8.0, 6.0]


@BOTH
def test_one_that_was_served_in_this_round_gives_its_block_back(engine):
    # Five blocks: request 0 gets the last free one in the second iteration, then request 1 wants
    # one too and takes it from request 0, which is the least urgent though it was served already.
    rows = [(0.0, 32, 4), (0.0, 32, 4)]
    result = played(rows, [1, 0], engine, num_blocks=5, prefix_caching=False)
    assert result.requests["restarts"].tolist() == [1, 0]
    assert result.batches["decodes"].tolist()[:2] == [0, 1]


@BOTH
def test_a_preempted_request_finds_its_own_blocks_again(engine):
    rows = [(0.0, 32, 8), (0.0, 32, 8)]
    cold = played(rows, [1, 0], engine, num_blocks=5, prefix_caching=False)
    warm = played(rows, [1, 0], engine, num_blocks=5, prefix_caching=True)
    assert warm.requests["restarts"].tolist() == cold.requests["restarts"].tolist() == [1, 0]
    assert warm.replicas["tokens"][0] < cold.replicas["tokens"][0]


def test_priority_needs_vllm_v1():
    with pytest.raises(TailraceError, match="needs scheduler = vllm_v1"):
        parse(
            Scenario,
            {"cluster": {"replicas": [{"scheduler": "sarathi", "scheduling_policy": "priority"}]}},
        )


def test_auto_goes_by_priority_only_where_the_policy_orders():
    cluster = Cluster(replicas=(Replica(), Replica(scheduler="sarathi")))
    assert [r.scheduling_policy for r in cluster.served_by(order=False).replicas] == ["fcfs"] * 2
    assert [r.scheduling_policy for r in cluster.served_by(order=True).replicas] == [
        "priority",
        "fcfs",
    ]
    plain = Cluster(replicas=(Replica(scheduling_policy="fcfs"),))
    assert plain.served_by(order=True) == plain


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    small_tables(),
    small_clusters(),
    st.sampled_from(["least_outstanding", "load_aware+order:w=20", "round_robin+order:w=1,d=2"]),
    st.booleans(),
)
def test_agrees_with_the_reference_engine_on_odd_cases(table, cluster, policy, die):
    assume(int((table.rows["prompt_tokens"] + table.rows["output_tokens"]).max()) <= 1500)
    events = (Event(at_s=0.3, replica=0, kind="die"), Event(at_s=0.9, replica=0, kind="return"))
    common = {"seed": 1, "events": events if die else ()}
    assert_same(*(simulate(cluster, table, policy, engine=e, **common) for e in (REFERENCE, EXACT)))


class Ordering(Policy):
    """Sends everything to the first replica, and has an order of its own."""

    name = "ordering"
    own_order = Order(w=40)

    def scores(self, view):
        return np.arange(len(view.replicas), dtype=float)


@BOTH
def test_a_policys_own_order_counts_only_on_servers_that_go_by_priority(engine):
    table = mixed("chat", 60, 30.0, seed=2)

    def starts(policy, **settings):
        cluster = Cluster(replicas=(Replica(count=2, batch_cap=4, **settings),))
        return simulate(cluster, table, policy, engine=engine).requests["scheduled_s"].tolist()

    own, plain = Ordering(), Ordering()
    plain.own_order = None
    asked = registry.with_order(plain, Ordering.own_order)
    by_priority = {"scheduling_policy": "priority"}
    for kind in ({}, {"scheduling_policy": "fcfs"}):
        assert starts(own, **kind) == starts(plain, **kind)
    assert starts(own, **by_priority) == starts(asked) == starts(asked, **by_priority)
    assert starts(own, **by_priority) != starts(own)


def mixed(workload, count, rate, seed):
    table = library.make(workload, count, rate, seed=seed)
    table.rows["priority"] = np.random.default_rng(seed).integers(-3, 4, count)
    return table


@pytest.mark.compiled
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("memory", ["ample", "tight"])
@pytest.mark.parametrize("workload", ["chat", "sessions-hot", "agents"])
@pytest.mark.parametrize("policy", ["load_aware", "linear_es+order:w=5"])
def test_agrees_with_the_reference_engine(workload, memory, caching, policy):
    table = mixed(workload, 120, 14.0, seed=3)
    blocks = None if memory == "ample" else longest(table) // 16 + 40
    replica = Replica(
        count=2, num_blocks=blocks, prefix_caching=caching, scheduling_policy="priority"
    )
    cluster = Cluster(replicas=(replica,))
    reference = simulate(cluster, table, policy, engine=REFERENCE, seed=5)
    assert_same(reference, simulate(cluster, table, policy, engine=EXACT, seed=5))
    if memory == "tight":
        assert reference.replicas["preemptions"].sum() > 0


@pytest.mark.compiled
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
def test_fast_forward_changes_times_by_less_than_a_nanosecond(caching):
    table = mixed("chat", 400, 12.0, seed=4)
    replica = Replica(
        count=2, num_blocks=longest(table) // 16 + 400, prefix_caching=caching,
        scheduling_policy="priority",
    )  # fmt: skip
    cluster = Cluster(replicas=(replica,))
    exact = simulate(cluster, table, "round_robin", engine=EXACT)
    fast = simulate(cluster, table, "round_robin", engine=COMPILED)
    assert_same(exact, fast, tolerance_s=1e-9)
    assert exact.replicas["preemptions"].sum() > 0


@pytest.mark.compiled
def test_the_heap_gives_requests_out_in_order():
    """Everything waits behind one long prompt, then goes in the order of its priority."""
    rng = np.random.default_rng(0)
    count = 300
    rows = [(0.0, 400, 1), *((0.001 * k, 8, 1) for k in range(1, count))]
    table = table_of(rows, priority=np.array([0, *rng.integers(-20, 20, count - 1)]))
    replica = replica_of("vllm_v1", scheduling_policy="priority", batch_cap=1)
    result = simulate(Cluster(replicas=(replica,)), table, "round_robin", engine=COMPILED)
    order = np.argsort(result.requests["scheduled_s"], kind="stable")[1:]
    wanted = sorted(range(1, count), key=lambda k: (-table.rows["priority"][k], k))
    assert order.tolist() == wanted


@pytest.mark.compiled
def test_a_copy_goes_on_alike_and_the_oldest_request_is_known():
    table = mixed("chat", 200, 40.0, seed=6)
    cluster = Cluster(replicas=(Replica(count=2, scheduling_policy="priority"),))
    simulation = Simulation(cluster, table)
    twin = None
    for k in range(len(table)):
        view = simulation.next_decision()
        assert view is not None
        if k == 120:
            twin = simulation.copy()
        states = simulation.arrays[0].requests[0]
        for r, replica in enumerate(view.replicas):
            queued = (states["replica"] == r) & np.isnan(states["first"])
            assert replica["queued"] == queued.sum()
            if queued.any():
                assert replica["oldest_sent"] == states["sent"][queued].min()
        simulation.assign(k % 2)
    assert simulation.next_decision() is None
    assert twin is not None
    for k in range(120, len(table)):
        twin.assign(k % 2)
        twin.next_decision()
    assert_same(simulation.result(), twin.result())


@pytest.mark.compiled
def test_look_ahead_runs_on_servers_by_priority():
    table = mixed("chat", 60, 20.0, seed=2)
    cluster = Cluster(replicas=(Replica(count=2, scheduling_policy="priority"),))
    for policy in ("lookahead", "lookahead+order:w=5"):
        result = simulate(cluster, table, policy)
        assert np.isfinite(result.requests["finished_s"]).all()
