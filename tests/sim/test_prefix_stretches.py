"""Prefix caches with everything at once: tiny memories, preemption, sessions, deaths, copies.

A server with prefix caches goes through whole stretches of decodes in one step and leaves part of
its bookkeeping for later. Each test looks at that state in another way: the reference engine never
has it, a copy and a look-ahead come upon it in the middle.
"""

import faulthandler

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from books import check_books
from odd_cases import blocks_needed, branching_tables
from tailrace.config import Cluster, Engine, Event, Replica
from tailrace.policy import registry
from tailrace.sim import engine as kernel
from tailrace.sim.fleet import copy_cluster
from tailrace.sim.reference.engine import ReferenceEngine
from tailrace.sim.simulator import Simulation, simulate
from tailrace.sim.types import Fleet
from tailrace.workload.table import RequestTable

EXACT = Engine(engine="compiled", exact=True)
FAST = Engine(engine="compiled")
REFERENCE = Engine(engine="reference")
HARD = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
#: Nothing can interrupt compiled code: a test that takes longer, in s, ends the process.
ENDLESS_S = 1200

#: Memory that only the look-ahead uses. All else belongs to the real servers and the router.
SCRATCH = {"ghost", "ghost_slots", "ghost_phase", "ghost_requests", "ghost_numbers", "notices"}


@pytest.fixture(autouse=True)
def end_endless_loops():
    faulthandler.dump_traceback_later(ENDLESS_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@st.composite
def worlds(draw):  # type: ignore[no-untyped-def]
    """A table, two small servers with prefix caches, and what happens to them."""
    table = draw(branching_tables(sessions=True))
    size = draw(st.integers(1, 5))
    cap = draw(st.sampled_from([1, 3, 16]))
    replica = Replica(
        count=2,
        scheduler="vllm_v1",
        prefix_caching=True,
        block_size=size,
        num_blocks=blocks_needed(table, size) + draw(st.integers(0, 12)),
        batch_cap=cap,
        chunk_size=max(cap, draw(st.sampled_from([3, 16, 64]))),
        preallocate_tokens=draw(st.sampled_from([0, 0, 0, 7])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
    )
    moments = st.sampled_from([0.013, 0.04, 0.09, 0.31])
    events = [Event(at_s=draw(moments), replica=0, kind="slow", factor=0.3)]
    events += [
        Event(at_s=draw(moments), replica=1, kind="die"),
        Event(at_s=0.7, replica=1, kind="return"),
    ]
    chosen = events if draw(st.booleans()) else []
    return Cluster(replicas=(replica,)), table, tuple(chosen)


@HARD
@given(worlds())
def test_stretches_give_the_answers_of_the_reference_engine(world):
    cluster, table, events = world
    for policy in ("round_robin", "least_outstanding"):
        reference, exact, fast = (
            simulate(cluster, table, policy, engine=engine, events=events, seed=4)
            for engine in (REFERENCE, EXACT, FAST)
        )
        assert reference.requests.tobytes() == exact.requests.tobytes()
        for name in ("iterations", "tokens", "preemptions", "partial_preemptions"):
            assert (reference.replicas[name] == exact.replicas[name]).all(), name
            assert (reference.replicas[name] == fast.replicas[name]).all(), name
        for name in ("status", "replica", "cached_tokens", "restarts"):
            assert (reference.requests[name] == fast.requests[name]).all(), name
        late = np.abs(reference.requests["finished_s"] - fast.requests["finished_s"])
        assert np.nanmax(late, initial=0.0) < 1e-9


#: A child arrives as its parent's batch of prompts ends, and another of that batch goes on.
BETWEEN_ITERATIONS = (
    Cluster(
        replicas=(
            Replica(
                count=2, scheduler="vllm_v1", block_size=1, num_blocks=3, batch_cap=3, chunk_size=3
            ),
        )
    ),
    RequestTable.build(
        np.zeros(8),
        np.ones(8, np.int64),
        np.array([1, 1, 1, 1, 1, 1, 2, 1]),
        [[]] * 8,
        parent=np.array([-1, -1, -1, -1, -1, 0, -1, -1]),
    ),
    (),
)


@HARD
@example(BETWEEN_ITERATIONS, "lookahead", False)
@given(worlds(), st.sampled_from(["lookahead", "lookahead_oracle"]), st.booleans())
def test_looking_ahead_from_any_state_changes_nothing_else(world, name, exact):
    """And what the look-ahead chose gives the same answers in the reference engine."""
    cluster, table, events = world
    rule = registry.get(name)
    simulation = Simulation(
        cluster, table, events=events, engine=EXACT if exact else FAST, lookahead=True
    )
    fleet, tables = simulation.arrays
    while simulation.next_decision() is not None:
        check_books(simulation)
        before = {name: array.tobytes() for name, array in fleet._asdict().items()}
        choice = kernel.choice(fleet, tables, 0, rule.rule.code, rule.params, True)
        after = {name: array.tobytes() for name, array in fleet._asdict().items()}
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= {*SCRATCH, "scores"}
        simulation.assign(int(choice))
    check_books(simulation)
    if exact and not events:  # a rerouted request has two replicas, a recording only one
        ours = simulation.result().requests
        recorded = ReferenceEngine(cluster, table, engine=REFERENCE).run(replicas=ours["replica"])
        for column in ("scheduled_s", "first_token_s", "finished_s", "cached_tokens", "restarts"):
            assert ours[column].tobytes() == recorded.requests[column].tobytes(), column


@HARD
@given(worlds(), st.integers(1, 4), st.booleans())
def test_copies_taken_within_a_stretch_have_the_same_future(world, every, exact):
    """A copy by rows, into memory with another copy's remains, ends as a copy of all memory."""
    cluster, table, events = world
    engine = EXACT if exact else FAST
    rule = registry.get("least_outstanding")
    simulation = Simulation(cluster, table, events=events, engine=engine)
    branch = Simulation(cluster, table, events=events, engine=engine)
    branch.run(rule)
    fleet, _ = simulation.arrays
    decisions = 0
    while simulation.next_decision() is not None:
        check_books(simulation)
        decisions += 1
        if decisions % every == 0:
            copy_cluster(fleet, 0, branch.arrays[0], 0)
            twin = simulation.copy()
            settled = ~np.isnan(fleet.requests[0]["done"])
            for each in (branch, twin):
                each.assign(0 if fleet.replicas_view[0, 0]["available"] else 1)
                each.run(rule)
                check_books(each)
            assert future(branch.arrays[0], settled) == future(twin.arrays[0], settled)
        available = np.flatnonzero(fleet.replicas_view[0]["available"])
        simulation.assign(int(available[decisions % available.size]))


def future(fleet: Fleet, settled) -> list[bytes]:  # type: ignore[no-untyped-def]
    """What became of the requests that were not settled, and of the servers."""
    open_ = fleet.requests[0][~settled]
    servers = [fleet.servers[0][name].tobytes() for name in ("tick", "free_blocks", "preemptions")]
    return servers + [
        open_[name].tobytes() for name in ("first", "done", "replica", "status", "cached")
    ]
