"""What a network thinks of roll-outs that it played in the simulator."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from policy.networks import random_tensors, small  # noqa: E402
from tailrace.config import Cluster, Replica, Scenario, Workload  # noqa: E402
from tailrace.learn.exploration import ExplorationValues  # noqa: E402
from tailrace.learn.improve.experience import evaluate_rollout  # noqa: E402
from tailrace.learn.improve.ppo_settings import PpoSettings  # noqa: E402
from tailrace.learn.improve.returns import describe, estimate_returns  # noqa: E402
from tailrace.learn.improve.rollout import (  # noqa: E402
    Rollout,
    RolloutTask,
    collect,
    split_by_size,
)
from tailrace.policy.learned.network import Network  # noqa: E402
from tailrace.policy.learned.observation import (  # noqa: E402
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
)
from tailrace.seeds import Purpose, seeds  # noqa: E402


def world(seed: int) -> Scenario:
    """Two or three replicas."""
    cluster = Cluster(replicas=(Replica(count=2 + seed % 2, num_blocks=3000),))
    return Scenario(name="chat", cluster=cluster, workload=Workload(name="chat", rate=15.0))


def network_of(variant: str, seed: int = 0) -> Network:
    network = Network(small(variant), N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    network.load_tensors(random_tensors(network.config, seed))
    return network


def played(network: Network) -> list[Rollout]:
    """Roll-outs, one per number of replicas."""
    rollout = collect(
        RolloutTask(
            world,
            tuple(seeds(Purpose.TRAINING, 4)),
            network.config,
            network.tensors(),
            seeds(Purpose.TRAINING, 1)[0],
            clusters=4,
            decisions=12,
            chunk=4,
        )
    )
    return split_by_size(rollout)


@pytest.mark.compiled
@pytest.mark.parametrize("variant", ["plain", "prior", "decoupled", "memory"])
def test_values_are_those_of_the_network_whether_kept_or_computed(variant):
    network = network_of(variant)
    rollouts = played(network)
    assert len(rollouts) == 2
    settings = PpoSettings(clusters=4, decisions=12, chunk=4, minibatch=12)
    for seen in estimate_returns(network, rollouts, settings, None):
        rollout = seen.rollout
        assert (rollout.pooled is not None) == (variant in ("plain", "prior"))
        logits, values = evaluate_rollout(network, rollout, own_memory=True)
        torch.testing.assert_close(seen.logits, logits, rtol=1e-4, atol=1e-4)
        expected = network.value_norm.denormalise(values).numpy()
        np.testing.assert_allclose(seen.values, expected, rtol=1e-4, atol=1e-4)
        assert values.std() > 0.01


@pytest.mark.compiled
def test_roll_outs_of_another_network_show():
    rollouts = played(network_of("plain"))
    settings = PpoSettings(clusters=4, decisions=12, chunk=4, minibatch=12)
    for seed, at_most in ((0, 1e-4), (1, np.inf)):
        seen = estimate_returns(network_of("plain", seed), rollouts, settings, None)
        gap = describe(seen, ExplorationValues())["behaviour_gap"]
        assert gap < at_most
    assert gap > 1e-2
