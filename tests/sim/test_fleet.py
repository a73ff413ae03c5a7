"""Fleets: exact accounts of cost, stepping many clusters, running for a time, copying."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.config import Cluster, Engine, Event, Replica, RouterSettings
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.sim import cost_accounts, engine
from tailrace.sim.allocation import Allocation, new_fleet
from tailrace.sim.build import build_fleet, build_tables
from tailrace.sim.fleet import (
    NO_ACTION,
    SKIP,
    accrued_cost,
    copy_cluster,
    follow,
    new_step,
    run_for,
    step_fleet,
)
from tailrace.sim.result import FAILED
from tailrace.sim.simulator import simulate
from tailrace.sim.types import LOST, Fleet, Tables
from tailrace.view.objective import composite_cost
from tailrace.workload import library
from tailrace.workload.table import RequestTable

TROUBLE = (
    Event(at_s=1, replica=0, kind="slow", factor=0.3),
    Event(at_s=2, replica=1, kind="die"),
    Event(at_s=4, replica=1, kind="return"),
    Event(at_s=5, replica=0, kind="die"),
    Event(at_s=5, replica=1, kind="die"),
    Event(at_s=5, replica=2, kind="die"),
    Event(at_s=7, replica=0, kind="return"),
)
COMMON = {"scheduler": "vllm_v1", "num_blocks": 2500}
CLUSTER = Cluster(replicas=(Replica(count=2, **COMMON), Replica(speed=0.6, **COMMON)))


def make(tables: list[RequestTable], count: int = 1, events=()) -> tuple[Fleet, Tables]:  # type: ignore[no-untyped-def]
    router = RouterSettings(staleness_s=0.3)
    laid_out = build_tables(tables, events, router, seed=1)
    fleet = build_fleet(CLUSTER, tables, laid_out, router, Engine(), list(range(1, count + 1)))
    return fleet, laid_out


def rule(name: str) -> tuple[int, NDArray[np.float64], bool]:
    policy = registry.get(name)
    assert isinstance(policy, BuiltinPolicy)
    return policy.rule.code, policy.params, policy.lowest_id_wins


def cost_by(requests: NDArray[np.void], facts: NDArray[np.void], t: float) -> float:
    """Composite cost of REQUEST_STATE rows up to time ``t``, by the definition."""
    total = 0.0
    for request, fact in zip(requests, facts, strict=True):
        if not request["arrived"] <= t:
            continue
        first = np.nanmin([request["first"], t])
        done = np.nanmin([request["done"], t])
        ttft = first - request["arrived"]
        late = max(0.0, ttft - fact["ttft_slo"])
        lost = request["status"] == LOST and request["done"] <= t
        total += composite_cost(done - request["arrived"], ttft, late, lost)
    return total


def random_actions(step, rng: np.random.Generator) -> NDArray[np.int64]:  # type: ignore[no-untyped-def]
    return np.array(
        [rng.choice(np.flatnonzero(row)) if row.any() else NO_ACTION for row in step.mask]
    )


def episode(fleet: Fleet, tables: Tables, seed: int = 0) -> tuple[float, float, int]:
    """Play cluster 0 to its end at random; returns total cost, total time and decisions."""
    step = new_step(1, 3)
    rng = np.random.default_rng(seed)
    total = elapsed = 0.0
    step_fleet(fleet, tables, np.array([NO_ACTION]), step)
    decisions = 0
    while True:
        total += step.cost[0]
        elapsed += step.elapsed_s[0]
        if step.status[0] != engine.NEEDS_DECISION:
            assert step.status[0] == engine.OVER
            return total, elapsed, decisions
        assert step.cost[0] >= -1e-9
        step_fleet(fleet, tables, random_actions(step, rng), step)
        decisions += 1


@pytest.mark.parametrize("events", [(), TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("workload", ["chat", "sessions-hot"])
def test_rewards_of_an_episode_add_up_to_the_cost_of_its_requests(workload, events) -> None:
    table = library.make(workload, 150, 14.0, seed=3)
    table.rows["ttft_slo_s"] = np.random.default_rng(0).choice([0.0, 0.1, 0.5, 3.0], len(table))
    fleet, tables = make([table], events=events)
    total, elapsed, decisions = episode(fleet, tables)
    requests = fleet.requests[0]
    end = np.nanmax(requests["done"])
    assert elapsed == pytest.approx(end)
    lost = int((requests["status"] == LOST).sum())
    assert (lost > 0) == bool(events)
    assert decisions == len(table) + requests["reroutes"].sum()
    ttft = requests["first"] - requests["arrived"]
    e2e = requests["done"] - requests["arrived"]
    late = np.maximum(ttft - table.rows["ttft_slo_s"], 0)
    expected = composite_cost(e2e, ttft, late, requests["status"] == LOST).sum()
    assert total == pytest.approx(expected, rel=1e-9)
    assert total == pytest.approx(cost_by(requests, tables.facts[0], end), rel=1e-9)


def test_requests_that_can_never_be_routed_cost_until_the_end() -> None:
    table = library.make("chat", 60, 20.0, seed=3)
    events = tuple(Event(at_s=2, replica=r, kind="die") for r in range(3))
    fleet, tables = make([table], events=events)
    total, *_ = episode(fleet, tables)
    requests = fleet.requests[0]
    waiting = np.isnan(requests["done"])
    assert waiting.any()
    end = max(np.nanmax(requests["done"]), np.nanmax(requests["arrived"]))
    assert total == pytest.approx(cost_by(requests, tables.facts[0], end), rel=1e-9)


@pytest.mark.parametrize("workload", ["chat", "sessions-hot"])
def test_costs_of_any_moment_are_exact(workload) -> None:
    """Also if a later time was asked for before, and then decisions followed."""
    table = library.make(workload, 120, 20.0, seed=5)
    table.rows["ttft_slo_s"] = np.random.default_rng(1).choice([0.02, 0.3, 2.0], len(table))
    fleet, tables = make([table], events=TROUBLE)
    for t in np.linspace(0.1, 30.0, 80):
        status = run_for(fleet, tables, 0, *rule("load_aware"), t)
        assert fleet.clusters[0]["now"] == t
        for ahead in (1.5, 0.0, 0.4):
            expected = cost_by(fleet.requests[0], tables.facts[0], t + ahead)
            got = accrued_cost(fleet, tables, 0, t + ahead)
            assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert status == engine.OVER


def test_stopping_on_the_way_changes_nothing() -> None:
    table = library.make("sessions-hot", 200, 20.0, seed=5)
    router = RouterSettings(staleness_s=0.3)
    for name in ("least_load", "lmetric"):
        whole = simulate(CLUSTER, table, name, router=router, events=TROUBLE, seed=1)
        fleet, tables = make([table], events=TROUBLE)
        for t in np.linspace(0.05, 25.0, 211):
            run_for(fleet, tables, 0, *rule(name), t)
        assert run_for(fleet, tables, 0, *rule(name), np.inf) == engine.OVER
        requests = fleet.requests[0]
        assert (requests["replica"] == whole.requests["replica"]).all()
        done = whole.requests["finished_s"]
        np.testing.assert_array_equal(requests["done"], done)
        lost = (whole.requests["status"] == FAILED).sum()
        assert fleet.clusters[0]["lost"] == lost


def test_run_for_decides_only_what_comes_before_its_time() -> None:
    table = RequestTable.build(np.array([1.0, 2.0]), np.array([10, 10]), np.array([5, 5]))
    fleet, tables = make([table])
    assert run_for(fleet, tables, 0, *rule("random"), 2.0) == engine.LIMIT
    assert fleet.router[0]["decisions"] == 1
    assert run_for(fleet, tables, 0, *rule("random"), 2.001) == engine.LIMIT
    assert fleet.router[0]["decisions"] == 2
    assert run_for(fleet, tables, 0, *rule("random"), 50.0) == engine.OVER


def test_a_fleet_steps_like_its_clusters_alone() -> None:
    tables = [library.make("sessions-hot", 60, 15.0, seed=s) for s in (1, 2, 3)]
    fleet, laid_out = make(tables, 3)
    step = new_step(3, 3)
    rng = np.random.default_rng(0)
    step_fleet(fleet, laid_out, np.full(3, NO_ACTION), step)
    costs = np.zeros(3)
    chosen: list[list[int]] = [[], [], []]
    going = np.arange(3)
    while going.size:
        actions = random_actions(step, rng)
        for c in going:
            chosen[c].append(int(actions[c]))
        actions[np.setdiff1d(np.arange(3), going)] = SKIP
        step_fleet(fleet, laid_out, actions, step)
        costs[going] += step.cost[going]
        going = going[step.status[going] == engine.NEEDS_DECISION]
    for c, table in enumerate(tables):
        alone, its_tables = make([table])
        alone.router[0]["rng"] = fleet.router[c]["rng"]
        one = new_step(1, 3)
        step_fleet(alone, its_tables, np.array([NO_ACTION]), one)
        total = 0.0
        for action in chosen[c]:
            step_fleet(alone, its_tables, np.array([action]), one)
            total += one.cost[0]
        assert one.status[0] == engine.OVER
        assert total == costs[c]
        np.testing.assert_array_equal(one.replica_obs[0], step.replica_obs[c])
        np.testing.assert_array_equal(one.request_obs[0], step.request_obs[c])


def test_what_a_rule_would_have_paid() -> None:
    tables = [library.make("chat", 80, 25.0, seed=s) for s in (1, 2)]
    fleet, laid_out = make(tables, 2)
    step = new_step(2, 3)
    total = np.zeros(2)
    for t in (1.0, 2.5, 9.0):
        follow(fleet, laid_out, *rule("round_robin"), np.array([t, t + 1]), step)
        total += step.cost
    for c in range(2):
        expected = cost_by(fleet.requests[c], laid_out.facts[c], 9.0 + c)
        assert total[c] == pytest.approx(expected, rel=1e-9)


def test_accounts_that_are_not_kept_cannot_be_read() -> None:
    fleet, tables = make([library.make("chat", 5, 1.0, seed=1)])
    fleet.clusters["accounts"] = 0
    with pytest.raises(ValueError, match="no accounts"):
        accrued_cost(fleet, tables, 0, 1.0)


# ---- copies -------------------------------------------------------------------------------------


def future(fleet: Fleet, tables: Tables, c: int, name: str, until: float) -> tuple[bytes, float]:
    """Where the requests of a cluster go from here, and what they cost."""
    before = fleet.clusters[c]["now"]
    run_for(fleet, tables, c, *rule(name), until)
    rows = fleet.requests[c]
    open_ = np.isnan(rows["done"]) | (rows["done"] > before)
    fields = b"".join(
        rows[name][open_].tobytes() for name in ("arrived", "first", "done", "replica", "status")
    )
    return fields, float(accrued_cost(fleet, tables, c, until))


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm", "vllm_v1"])
def test_a_copy_has_the_same_future_and_leaves_the_source_alone(scheduler) -> None:
    table = library.make("sessions-hot", 220, 25.0, seed=5)
    other = library.make("sessions-hot", 220, 25.0, seed=6)
    router = RouterSettings(staleness_s=0.3)
    kind = Replica(scheduler=scheduler, num_blocks=1500, max_batch_tokens=100_000)
    cluster = Cluster(replicas=(kind, kind, kind))
    both = [table, other]
    tables = build_tables(both, TROUBLE, router, 1)
    fleet = build_fleet(cluster, both, tables, router, Engine(), [1, 2])
    twin = empty_twin(fleet, 2)
    for c in (0, 1):
        run_for(fleet, tables, c, *rule("load_aware"), 3.0)
    before = [array.tobytes() for array in fleet]
    for c, d in ((0, 0), (1, 0), (1, 1), (0, 0), (0, 0), (0, 1)):  # reused, also for another table
        copy_cluster(fleet, c, twin, d)
        run_for(twin, tables, d, *rule("random"), 6.0)  # arrivals the copy has to forget again
        copy_cluster(fleet, c, twin, d)
        fleet.clusters["lowest"] = 0  # the only thing a copy notes in its source
        assert [array.tobytes() for array in fleet] == before
        got = future(twin, tables, d, "lmetric", 12.0)
        assert got == future(rebuilt(fleet), tables, c, "lmetric", 12.0)


def empty_twin(fleet: Fleet, clusters: int = 1) -> Fleet:
    """Memory for copies of a fleet's clusters; copies record nothing."""
    recorded = ("batches", "news")
    return Fleet(
        **{
            name: np.zeros((clusters, *([0] if name in recorded else array.shape[1:])), array.dtype)
            for name, array in fleet._asdict().items()
        }
    )


def rebuilt(fleet: Fleet) -> Fleet:
    """A copy of all arrays."""
    return Fleet._make(array.copy() for array in fleet)


def test_copies_at_every_decision() -> None:
    table = library.make("sessions-hot", 80, 25.0, seed=5)
    fleet, tables = make([table], events=TROUBLE)
    twin = empty_twin(fleet)
    code, params, lowest = rule("least_load")
    while engine.next_decision(fleet, tables, 0) == engine.NEEDS_DECISION:
        until = float(fleet.clusters[0]["now"]) + 2.0
        copy_cluster(fleet, 0, twin, 0)
        assert future(twin, tables, 0, "lmetric", until) == future(
            rebuilt(fleet), tables, 0, "lmetric", until
        )
        engine.assign(fleet, tables, 0, engine.choice(fleet, tables, 0, code, params, lowest))


# ---- accounts by themselves ---------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_accounts_against_the_definition(data: st.DataObject) -> None:
    """Arrivals, first tokens, ends and questions in any order, with any targets."""
    n = data.draw(st.integers(1, 8))
    fleet, tables = make([library.make("chat", n, 1.0, seed=1)])
    facts, requests, cluster = tables.facts[0], fleet.requests[0], fleet.clusters[0]
    facts["ttft_slo"] = data.draw(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 5.0]), min_size=n, max_size=n)
    )
    terms = np.zeros(cost_accounts.N_TERMS)
    t = 0.0
    for _ in range(30):
        t += data.draw(st.sampled_from([0.0, 0.25, 1.0, 3.0]))
        new = np.flatnonzero(np.isnan(requests["arrived"]))
        silent = np.flatnonzero(~np.isnan(requests["arrived"]) & np.isnan(requests["first"]))
        answering = np.flatnonzero(~np.isnan(requests["first"]) & np.isnan(requests["done"]))
        what = data.draw(st.sampled_from(["arrive", "answer", "end", "lose", "ask"]))
        if what == "arrive" and new.size:
            r = data.draw(st.sampled_from(list(new)))
            requests[r]["arrived"] = t
            cost_accounts.arrived(cluster, requests, facts, r)
        elif what == "answer" and silent.size:
            r = data.draw(st.sampled_from(list(silent)))
            requests[r]["first"] = t
            cost_accounts.answered(cluster, requests, facts, r)
        elif what in ("end", "lose") and answering.size:
            r = data.draw(st.sampled_from(list(answering)))
            requests[r]["done"] = t
            requests[r]["status"] = LOST if what == "lose" else 0
            cost_accounts.ended(cluster, requests, facts, r, what == "lose")
        else:
            ahead = data.draw(st.sampled_from([0.0, 0.3, 7.0]))
            cost_accounts.read(cluster, requests, t + ahead, terms)
            expected = cost_by(requests, facts, t + ahead)
            assert cost_accounts.composite(terms) == pytest.approx(expected, abs=1e-9)


def test_rows_of_blocks_take_memory_only_where_requests_write() -> None:
    def resident_mb() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6

    before = resident_mb()
    fleet = new_fleet(Allocation(replicas=32, explicit_slots=256, blocks_per_request=2000), 1)
    fleet.held[:, :, 0] = 1  # 32 rows of 8 KB, one per replica
    assert fleet.held.nbytes > 60e6
    assert resident_mb() - before < 10
