"""The linear sketch of a network."""

import numpy as np
import torch

from tailrace.learn.imitate import sketch
from tailrace.learn.samples import Samples
from tailrace.policy.learned.architecture import FEATURE_NAMES, NetworkConfig
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES


def states(count, replicas, seed):
    rng = np.random.default_rng(seed)
    samples = Samples.empty(count, replicas, 0)
    samples.replica_obs[:] = rng.normal(size=samples.replica_obs.shape)
    samples.request_obs[:] = rng.normal(size=samples.request_obs.shape)
    samples.mask[:] = True
    samples.mask[::5, 0] = False
    samples.replica_obs[::5, 0] = 1e3  # nobody looks at what cannot be chosen
    return samples


class Linear(Network):
    """Its logits are a weighted sum of a replica's features, and something of the request."""

    def step(self, replica_obs, request_obs, mask, memory, prior=None):
        """As the network, without learning."""
        del prior
        logits = replica_obs @ self.weights + 3 * request_obs[:, :1]
        return logits.masked_fill(~mask, -torch.inf), torch.zeros(len(mask)), memory


def test_a_linear_network_is_found_again():
    network = Linear(NetworkConfig(), N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    weights = np.random.default_rng(3).normal(size=N_REPLICA_FEATURES).astype(np.float32)
    network.weights = torch.from_numpy(weights)
    found = sketch.fit(network, [states(400, 3, 0), states(400, 7, 1)])
    np.testing.assert_allclose(found, weights, atol=0.02)
    assert found.dtype == np.float32


def test_features_that_are_hidden_from_the_network_have_no_weight():
    network = Linear(NetworkConfig(ignore=("trend",)), N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    hidden = FEATURE_NAMES.index("trend")
    weights = np.random.default_rng(3).normal(size=N_REPLICA_FEATURES).astype(np.float32)
    network.weights = torch.from_numpy(weights)
    weights[hidden] = 0.0
    seen = states(400, 7, 1)
    seen.replica_obs[:, :, hidden] = seen.replica_obs[:, :, 0]  # it would do as well as the first
    np.testing.assert_allclose(sketch.fit(network, [seen]), weights, atol=0.02)


def test_a_network_that_sees_no_replica_feature_has_a_sketch_of_zeros():
    config = NetworkConfig(ignore=FEATURE_NAMES[:N_REPLICA_FEATURES])
    network = Linear(config, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    network.weights = torch.zeros(N_REPLICA_FEATURES)
    assert not sketch.fit(network, [states(50, 7, 1)]).any()


def test_the_choice_of_a_real_network_is_among_the_first():
    torch.manual_seed(0)
    network = Network(NetworkConfig(), N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    with torch.no_grad():  # as initialised, all logits are nearly the same
        network.scorer.output.weight.mul_(100)
    found = sketch.fit(network, [states(2000, 6, 0)])
    large = states(300, 30, 1)
    with torch.no_grad():
        logits = network.step(
            torch.from_numpy(large.replica_obs),
            torch.from_numpy(large.request_obs),
            torch.from_numpy(large.mask),
            torch.zeros(len(large), 0),
            None,
        )[0].numpy()
    chosen = logits.argmax(axis=1)
    sketched = np.where(large.mask, large.replica_obs @ found, -np.inf)
    rank = (sketched > sketched[np.arange(300), chosen][:, None]).sum(axis=1)
    assert np.mean(rank < 12) > 0.8  # by chance 0.4
