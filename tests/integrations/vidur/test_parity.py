"""Real Vidur against Tailrace's simulator: the same assignments, and the same times to the bit."""

import numpy as np
import pytest
from vidur_helpers import SEED, chat, cluster, largest_difference

from tailrace.config import CostModel, Engine, RouterSettings
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.demonstrations import Demonstrations
from tailrace.integrations.vidur.simulation import simulate
from tailrace.sim.simulator import Simulation
from tailrace.sim.simulator import simulate as simulate_here
from tailrace.workload import library
from tailrace.workload.table import RequestTable

pytestmark = pytest.mark.vidur

TOLERANCE_S = 1e-6
POLICIES = ("round_robin", "least_outstanding", "tailrace")
CLUSTERS = {
    # Vidur 0.0.26 adds prompts up where Tailrace, as Vidur's main branch, counts padded ones: the
    # two are the same thing while the limit does not bind.
    "sarathi": cluster("sarathi"),
    "vllm": cluster("vllm", max_batch_tokens=2**20),
    "orca": cluster("orca"),
    "sarathi, mixed speeds": cluster("sarathi", (1.5, 1.0, 0.6)),
}
REFERENCE, EXACT = Engine(engine="reference"), Engine(exact=True)


def assert_same_run(servers, table, policy, **settings):
    """Compare with both engines, where both can; returns Vidur's run."""
    there = simulate(servers, table, policy, seed=SEED, **settings)
    for engine in (REFERENCE, Engine()):
        here = simulate_here(servers, table, policy, seed=SEED, engine=engine, **settings)
        assert (there.requests["replica"] == here.requests["replica"]).all()
        assert largest_difference(there, here) < TOLERANCE_S
        assert (there.requests["status"] == here.requests["status"]).all()
        for name in ("requests", "iterations", "tokens", "context", "batched"):
            assert (there.replicas[name] == here.replicas[name]).all(), name
        np.testing.assert_allclose(there.replicas["busy_s"], here.replicas["busy_s"])
    return there


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CLUSTERS)
def test_same_assignments_and_times(name, policy):
    run = assert_same_run(CLUSTERS[name], chat(), policy)
    assert np.isfinite(run.requests["finished_s"]).all()


def test_the_policies_under_test_are_not_one_and_the_same():
    table = chat()
    chosen = [simulate(CLUSTERS["sarathi"], table, p, seed=SEED).requests for p in POLICIES]
    for a in range(len(POLICIES)):
        for b in range(a):
            assert (chosen[a]["replica"] != chosen[b]["replica"]).mean() > 0.1


def test_vllm_where_the_token_limit_binds():
    """Prompts of one length are padded to themselves: both ways of counting are one."""
    rows = chat(200, 60.0).rows
    table = RequestTable.build(
        rows["arrival_s"], np.full(len(rows), 700), np.minimum(rows["output_tokens"], 60)
    )
    wide, narrow = (cluster("vllm", max_batch_tokens=limit) for limit in (2**20, 2000))
    run = assert_same_run(narrow, table, "least_outstanding")
    assert largest_difference(run, simulate(wide, table, "least_outstanding", seed=SEED)) > 0.01


@pytest.mark.parametrize("policy", ["least_outstanding", "tailrace"])
def test_conversations_whose_turns_wait_for_the_answer_before(policy):
    table = library.make("sessions-hot", 300, 8.0, SEED)
    assert (table.rows["parent"] >= 0).any()
    assert_same_run(cluster(), table, policy)


@pytest.mark.parametrize("staleness_s", [0.0, 0.5])
def test_requests_of_one_instant_see_each_other(staleness_s):
    rows = chat(120, 20.0).rows
    together = np.repeat(rows["arrival_s"][::4], 4)
    table = RequestTable.build(together, rows["prompt_tokens"], rows["output_tokens"])
    router = RouterSettings(staleness_s=staleness_s)
    for policy in ("least_outstanding", "lmetric", "tailrace"):
        run = assert_same_run(cluster(), table, policy, router=router)
        first = run.requests["replica"].reshape(-1, 4)
        assert len(set(first[0])) > 1


def assert_same_observations(servers, table, router):
    """Follow round robin in Vidur, and its choices in the simulator; compare what is seen."""
    there, here = Demonstrations(), Demonstrations()
    simulate(servers, table, "round_robin", router=router, seed=SEED, watchers=[there])
    a = there.samples()
    simulation = Simulation(servers, table, router=router, engine=EXACT, seed=SEED)
    while (view := simulation.next_decision()) is not None:
        replica = int(a.costs[len(here)].argmin())
        here.decided(view, replica)
        simulation.assign(replica)
    b = here.samples()
    assert len(a) == len(b) == len(table)
    assert a.replica_obs.any()
    np.testing.assert_allclose(a.replica_obs, b.replica_obs, atol=1e-6)
    np.testing.assert_allclose(a.request_obs, b.request_obs, atol=1e-6)


@pytest.mark.parametrize(
    "router",
    [
        RouterSettings(staleness_s=0.0),
        RouterSettings(staleness_s=0.05),
        RouterSettings(staleness_s=5.0, predictor="noisy"),
        RouterSettings(predictor="exact"),
    ],
    ids=lambda router: f"{router.staleness_s}-{router.predictor}",
)
@pytest.mark.parametrize("workload", ["chat", "sessions-hot"])
def test_every_observation_is_the_same(router, workload):
    table = library.make(workload, 300, 18.0, SEED, arrivals="native")
    assert_same_observations(cluster(), table, router)


def test_a_snapshot_at_the_very_end_of_an_iteration():
    """All iterations take a quarter of a second without a pause: snapshots fall on their ends.

    One replica: of several that end at one instant, Vidur lets the first go on before it looks at
    the next.
    """
    quarter = CostModel(base_ms=250.0, per_token_ms=0.0)
    rng = np.random.default_rng(0)
    arrival = np.concatenate([[0.0], np.sort(rng.uniform(0.01, 8.0, 80))])
    output = np.concatenate([[60], rng.integers(2, 60, 80)])
    table = RequestTable.build(arrival, np.full(81, 300), output)
    assert_same_observations(
        cluster("sarathi", (1.0,), cost=quarter), table, RouterSettings(staleness_s=0.25)
    )


def test_an_eviction_is_explained():
    small = cluster("sarathi", (1.0,), num_blocks=400)
    with pytest.raises(TailraceError, match="cannot go on after it has evicted a request"):
        simulate(small, chat(60, 20.0), "round_robin")


def test_orca_with_fewer_slots_than_asked_for_is_refused():
    many = cluster("orca", (1.0,), num_blocks=200_000)
    with pytest.raises(TailraceError, match="set batch_cap ="):
        simulate(many, chat(10), "round_robin")
