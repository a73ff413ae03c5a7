"""Requests that wait at the router: both engines alike, the hard rules, and cases by hand."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from odd_cases import assert_same, longest, small_clusters, small_tables
from reference_runs import replica_of, table_of
from tailrace.config import Cluster, Engine, Event, Replica, RouterSettings
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.sim.simulator import simulate
from tailrace.workload import library

REFERENCE = Engine(engine="reference")
COMPILED = Engine(engine="compiled")
EXACT = Engine(engine="compiled", exact=True)
BOTH = pytest.mark.parametrize("engine", [REFERENCE, EXACT], ids=["reference", "compiled"])

QUEUES = (
    "max_in_flight=1",
    "max_in_flight=2,order=wspt",
    "max_queued=1,w=3",
    "max_prefill_s=0.05,order=edf,max_wait_s=1",
    "max_saturation=0.1",
    "max_saturation=0.02,max_wait_s=0.5,w=9,most=2",
)


def played(rows, queue, engine, *, replicas=1, **columns):
    """Run rows (arrival, prompt, output) on servers whose iterations take a second."""
    table = table_of(rows, **columns)
    cluster = Cluster(replicas=(replica_of("vllm_v1", count=replicas, prefix_caching=False),))
    return simulate(cluster, table, f"least_outstanding+queue:{queue}", engine=engine)


@BOTH
def test_first_come_first_served_one_at_a_time(engine):
    rows = [(0.0, 10, 3), (0.1, 10, 1), (0.2, 10, 1), (0.3, 10, 1)]
    result = played(rows, "max_in_flight=1", engine)
    assert result.requests["scheduled_s"].tolist() == [0.0, 3.0, 4.0, 5.0]


@BOTH
def test_the_shortest_prompt_goes_first(engine):
    rows = [(0.0, 10, 3), (0.1, 30, 1), (0.2, 10, 1), (0.3, 20, 1)]
    result = played(rows, "max_in_flight=1,order=wspt", engine)
    assert result.requests["scheduled_s"].tolist() == [0.0, 5.0, 3.0, 4.0]


@BOTH
def test_the_earliest_deadline_goes_first(engine):
    rows = [(0.0, 10, 3), (0.1, 10, 1), (0.2, 10, 1), (0.3, 10, 1)]
    result = played(
        rows, "max_in_flight=1,order=edf", engine, ttft_slo_s=np.array([1.0, 9.0, 2.0, 5.0])
    )
    assert result.requests["scheduled_s"].tolist() == [0.0, 5.0, 3.0, 4.0]


@BOTH
def test_a_more_urgent_class_goes_first(engine):
    rows = [(0.0, 10, 3), (0.1, 10, 1), (0.2, 10, 1), (0.3, 10, 1)]
    result = played(rows, "max_in_flight=1", engine, priority=np.array([0, -1, 0, 2]))
    assert result.requests["scheduled_s"].tolist() == [0.0, 5.0, 4.0, 3.0]


@BOTH
def test_clients_take_turns_whatever_the_order_within_each(engine):
    rows = [(0.0, 10, 3), *((0.1 + 0.01 * k, 10, 1) for k in range(4)), (0.2, 90, 1)]
    tenant = np.array([0, 0, 0, 0, 0, 1])
    result = played(rows, "max_in_flight=1,order=wspt", engine, tenant=tenant)
    # The client with one long prompt waits for one request of the other, not for four.
    assert result.requests["scheduled_s"].tolist() == [0.0, 3.0, 5.0, 6.0, 7.0, 4.0]


@BOTH
def test_nobody_waits_longer_than_the_limit(engine):
    rows = [(0.0, 10, 9), (0.1, 10, 1), (0.2, 10, 1)]
    result = played(rows, "max_in_flight=1,max_wait_s=2", engine)
    # Sent after two seconds, and admitted when the running iteration ends.
    assert result.requests["scheduled_s"].tolist() == [0.0, 3.0, 3.0]


@BOTH
def test_an_idle_replica_is_never_left_without_work(engine):
    rows = [(0.0, 10, 5), (0.1, 10, 2), (0.2, 10, 2), (0.3, 10, 2)]
    result = played(rows, "max_in_flight=0.5", engine, replicas=2)
    assert result.requests["scheduled_s"].tolist() == [0.0, 0.1, 2.1, 4.1]
    assert result.requests["replica"][0] != result.requests["replica"][1]


@BOTH
def test_those_that_wait_are_served_when_all_replicas_return(engine):
    rows = [(0.0, 10, 9), (0.1, 10, 1), (0.2, 10, 1)]
    cluster = Cluster(replicas=(replica_of("vllm_v1", prefix_caching=False),))
    events = (Event(at_s=0.5, replica=0, kind="die"), Event(at_s=4.0, replica=0, kind="return"))
    result = simulate(
        cluster, table_of(rows), "round_robin+queue:max_in_flight=1,max_wait_s=2",
        engine=engine, events=events,
    )  # fmt: skip
    assert (result.requests["scheduled_s"] >= 4.0).all()
    assert (result.requests["status"] == result.requests["status"].max()).all()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    small_tables(),
    small_clusters(),
    st.sampled_from(QUEUES),
    st.sampled_from(["least_outstanding", "load_aware+order:w=20", "llm_d"]),
    st.booleans(),
    st.data(),
)
def test_agrees_with_the_reference_engine_on_odd_cases(table, cluster, queue, policy, die, data):
    assume(longest(table) <= 1500)
    count = len(table)
    clients = st.lists(st.integers(-1, 1), min_size=count, max_size=count)
    table.rows["tenant"] = data.draw(clients)
    events = (Event(at_s=0.3, replica=0, kind="die"), Event(at_s=0.9, replica=0, kind="return"))
    common = {"seed": 1, "events": events if die else ()}
    name = f"{policy}+queue:{queue}"
    reference = simulate(cluster, table, name, engine=REFERENCE, **common)
    assert_same(reference, simulate(cluster, table, name, engine=EXACT, **common))
    assert_same(reference, simulate(cluster, table, name, engine=COMPILED, **common), 1e-9)


def mixed(workload, count, rate, seed):
    table = library.make(workload, count, rate, seed=seed)
    rng = np.random.default_rng(seed)
    table.rows["priority"] = rng.integers(-1, 2, count)
    table.rows["tenant"] = rng.integers(0, 3, count)
    return table


@pytest.mark.compiled
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("workload", ["chat", "sessions-hot"])
def test_agrees_with_the_reference_engine(workload, caching, queue):
    table = mixed(workload, 120, 30.0, seed=3)
    cluster = Cluster(replicas=(Replica(count=2, prefix_caching=caching), Replica(speed=0.6)))
    name = f"load_aware+queue:{queue}"
    reference = simulate(cluster, table, name, engine=REFERENCE, seed=5)
    assert_same(reference, simulate(cluster, table, name, engine=EXACT, seed=5))
    assert_same(reference, simulate(cluster, table, name, engine=COMPILED, seed=5), 1e-9)


@pytest.mark.compiled
def test_without_a_limit_that_binds_everything_is_as_without_a_queue():
    table = library.make("sessions-hot", 400, 30.0, seed=1)
    cluster = Cluster(replicas=(Replica(count=3),))
    plain = simulate(cluster, table, "load_aware", seed=2)
    queued = simulate(cluster, table, "load_aware+queue:max_in_flight=1e6", seed=2)
    assert_same(plain, queued)


class Recorder(Policy):
    """Fewest in flight, and notes when requests were sent and finished."""

    def __init__(self, queue: str) -> None:
        self.name = "recorder"
        self.holding = registry.get(f"round_robin+queue:{queue}").holding
        self.sent_s: dict[int, float] = {}
        self.busy: dict[int, list[tuple[float, int]]] = {}

    def scores(self, view):
        return view.replicas["in_flight"].astype(float)

    def sent(self, replica, request_id, now):
        self.sent_s[request_id] = now
        self.busy.setdefault(replica, []).append((now, 1))

    def finished(self, replica, request_id, now):
        self.busy.setdefault(replica, []).append((now, -1))

    def idle_times(self, replica):
        """Intervals in which a replica had no requests."""
        since, load = 0.0, 0
        for at, change in sorted(self.busy.get(replica, ())):
            if load == 0 and at > since:
                yield since, at
            load += change
            since = at
        yield since, np.inf


@pytest.mark.parametrize("engine", [REFERENCE, COMPILED], ids=["reference", "compiled"])
@pytest.mark.parametrize("queue", QUEUES)
def test_the_hard_rules_hold(queue, engine):
    table = mixed("chat", 150, 40.0, seed=7)
    policy = Recorder(queue)
    result = simulate(Cluster(replicas=(Replica(count=3),)), table, policy, engine=engine)
    arrived = result.requests["arrived_s"]
    sent = np.array([policy.sent_s[n] for n in range(len(table))])
    limit_s = policy.holding.max_wait_s
    waited = np.flatnonzero(sent > arrived)
    assert len(waited) > 20
    # Longest wait.
    assert (sent - arrived).max() <= limit_s + 1e-9
    # Work conservation: while anybody waits, no replica is idle for a time.
    for replica in range(3):
        for begin, end in policy.idle_times(replica):
            assert not ((arrived[waited] < end) & (sent[waited] > begin)).any()
    overdue = sent - arrived >= limit_s - 1e-9
    order, rows = policy.holding.order, table.rows
    for n in waited:
        passed = (sent < sent[n]) & (sent > arrived[n]) & (arrived > arrived[n]) & ~overdue
        # Priorities: nobody less urgent goes first.
        assert (rows["priority"][passed] >= rows["priority"][n]).all()
        # Bounded overtaking, among the requests of one client and class.
        same = passed & (rows["priority"] == rows["priority"][n])
        same &= rows["tenant"] == rows["tenant"][n]
        bound_s = order.most * (order.w > 0) + order.d * rows["ttft_slo_s"][n]
        assert ((arrived - arrived[n])[same] <= bound_s + 0.001).all()


@BOTH
def test_a_snapshot_that_is_never_old_shows_what_was_sent_just_now(engine):
    """One request at a time has room, so an urgent one still overtakes those that wait."""
    rows = [(0.0, 10, 3), (0.1, 10, 1), (0.1, 10, 1), (0.1, 10, 1), (0.1, 10, 1), (4.5, 10, 1)]
    result = simulate(
        Cluster(replicas=(replica_of("vllm_v1", batch_cap=1, prefix_caching=False),)),
        table_of(rows, priority=np.array([0, 0, 0, 0, 0, 5])),
        "least_outstanding+queue:max_saturation=0.3",
        router=RouterSettings(staleness_s=0.0),
        engine=engine,
    )
    assert result.requests["scheduled_s"].tolist() == [0.0, 3.0, 4.0, 5.0, 7.0, 6.0]
