"""Vidur decision by decision: the same run, and costs that add up."""

import numpy as np
import pytest
from vidur_helpers import SEED, cluster

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import traffic
from tailrace.integrations.vidur.simulation import simulate
from tailrace.integrations.vidur.world import VidurWorld
from tailrace.policy import registry
from tailrace.policy.base import decide
from tailrace.sim.fleet import NO_ACTION, new_step, step_fleet
from tailrace.sim.simulator import Simulation

pytestmark = pytest.mark.vidur


@pytest.fixture
def scenario():
    """Four replicas under a load at which some first tokens are late."""
    return Scenario.model_validate(
        {
            "cluster": cluster().model_dump(),
            "workload": {"name": "chat", "requests": 250, "rate": 27.0, "ttft_slo_s": 0.3},
            "engine": {"exact": True},
        }
    )


def played(world, policy, seed=SEED):
    """Follow a policy to the end; returns the costs of the steps, s."""
    policy.reset(world.replicas, seed)
    view, done, costs = world.reset(seed), False, []
    while not done:
        view, cost_s, done = world.step(decide(policy, view))
        costs.append(cost_s)
    assert view is None
    return np.array(costs)


@pytest.mark.parametrize("name", ["random", "least_outstanding", "tailrace"])
def test_following_a_policy_is_the_run_of_the_registered_scheduler(scenario, name):
    world = VidurWorld(scenario)
    costs = played(world, registry.get(name))
    alone = simulate(scenario.cluster, traffic(scenario, 27.0, SEED), name, seed=SEED)
    result = world.result()
    np.testing.assert_array_equal(result.requests, alone.requests)
    np.testing.assert_array_equal(result.replicas, alone.replicas)
    assert result.decisions == alone.decisions == len(costs) == 250


def test_costs_add_up_to_the_composite_cost(scenario):
    world = VidurWorld(scenario)
    costs = played(world, registry.get("least_outstanding"))
    due = composite_cost_s(world.result())
    requests = world.result().requests
    late = requests["first_token_s"] - requests["arrived_s"] > 0.3
    assert 5 < late.sum() < 250
    assert (costs >= -1e-9).all()
    assert costs.sum() == pytest.approx(due.sum(), rel=1e-9)


def test_every_step_is_that_of_the_simulators_environments(scenario):
    """Observation, cost and its terms, with random choices, against the compiled fleet."""
    world = VidurWorld(scenario)
    simulation = Simulation(
        scenario.cluster,
        traffic(scenario, 27.0, SEED),
        router=scenario.router,
        engine=scenario.engine,
        seed=SEED,
    )
    fleet, tables = simulation.arrays
    step = new_step(1, 4)
    step_fleet(fleet, tables, np.array([NO_ACTION]), step)
    world.reset(SEED)
    done, rng = False, np.random.default_rng(1)
    while True:
        for name in ("cost", "terms", "elapsed_s", "spread", "status"):
            np.testing.assert_allclose(
                getattr(world.out, name), getattr(step, name), atol=1e-9, err_msg=name
            )
        if done:
            break
        for name in ("replica_obs", "request_obs", "mask"):
            np.testing.assert_allclose(
                getattr(world.out, name), getattr(step, name), atol=1e-6, err_msg=name
            )
        replica = int(rng.integers(4))
        step_fleet(fleet, tables, np.array([replica]), step)
        _, _, done = world.step(replica)
    assert world.out.terms_before[0, 2] > 0  # some were late
    np.testing.assert_allclose(world.out.terms_before, step.terms_before)


def test_conversations_go_on_in_the_world():
    world = VidurWorld("hot-sessions", requests=120, rate=8.0)
    assert world.notes
    played(world, registry.get("least_outstanding"))
    assert np.isfinite(world.result().requests["finished_s"]).all()


def test_a_reset_forgets_everything(scenario):
    world = VidurWorld(scenario, requests=60)
    first = played(world, registry.get("least_outstanding"))
    world.reset(SEED + 1)
    for _ in range(10):
        world.step(0)
    np.testing.assert_array_equal(first, played(world, registry.get("least_outstanding")))


def test_steps_that_cannot_be(scenario):
    world = VidurWorld(scenario, requests=3)
    with pytest.raises(TailraceError, match=r"call reset\(\)"):
        world.step(0)
    world.reset(SEED)
    with pytest.raises(TailraceError, match="from 0 to 3"):
        world.step(4)
    played(world, registry.get("random"))
    with pytest.raises(TailraceError, match="is over"):
        world.step(0)


def test_the_observation_has_the_environments_shape(scenario):
    world = VidurWorld(scenario, requests=5)
    world.reset(SEED)
    shapes = {name: array.shape for name, array in world.observation().items()}
    assert shapes == {
        "replicas": world.out.replica_obs.shape[1:],
        "request": world.out.request_obs.shape[1:],
        "mask": (4,),
    }
