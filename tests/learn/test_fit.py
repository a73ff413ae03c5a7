import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tailrace.learn.fit import imitate, improve, log_policy_of  # noqa: E402
from tailrace.learn.samples import Samples  # noqa: E402
from tailrace.policy.architecture import NetworkConfig  # noqa: E402
from tailrace.policy.network import Network  # noqa: E402
from tailrace.policy.observation import REPLICA_FEATURES, REQUEST_FEATURES  # noqa: E402


def toy(rows: int = 600, replicas: int = 4, seed: int = 0) -> Samples:
    """The cost of a choice is its first feature; some replicas are away."""
    rng = np.random.default_rng(seed)
    made = Samples.empty(rows, replicas, 0)
    made.replica_obs[:] = rng.standard_normal(made.replica_obs.shape)
    made.request_obs[:] = rng.standard_normal(made.request_obs.shape)
    made.mask[:] = rng.random(made.mask.shape) < 0.8
    made.mask[:, 0] = True
    made.costs[:] = np.where(made.mask, made.replica_obs[:, :, 0], np.inf)
    return made


def fresh_network(seed: int = 1) -> Network:
    torch.manual_seed(seed)
    return Network(NetworkConfig(hidden=16), len(REPLICA_FEATURES), len(REQUEST_FEATURES))


def regret(network: Network, samples: Samples) -> float:
    log_policy = log_policy_of(network, samples)
    log_policy = log_policy.masked_fill(torch.from_numpy(~samples.mask), -torch.inf)
    choice = log_policy.argmax(-1).numpy()
    rows = np.arange(len(samples))
    assert samples.mask[rows, choice].all()
    return float((samples.costs[rows, choice] - samples.costs.min(axis=1)).mean())


def test_imitation_finds_the_cheap_choice():
    network, held_out = fresh_network(), toy(seed=9)
    before = regret(network, held_out)
    settings = {"epochs": 20, "batch_size": 128, "learning_rate": 5e-3, "temperature_s": 0.1}
    imitate(network, toy(), rng=torch.Generator().manual_seed(0), **settings)
    assert regret(network, held_out) < 0.2 * before


def test_improvement_raises_the_advantage_and_keeps_to_its_limit():
    network, samples = fresh_network(), toy()
    old = log_policy_of(network, samples)
    settings = {"epochs": 30, "batch_size": 128, "learning_rate": 2e-3}
    rng = torch.Generator().manual_seed(0)
    told = improve(network, samples, old, kl_limit=0.03, rng=rng, **settings)
    assert told["gain"] > 0.05
    assert 0.005 < told["kl"] < 0.06
    assert told["eta"] > 0


def test_equal_choices_leave_the_policy_alone():
    network, samples = fresh_network(), toy()
    samples.costs[:] = np.where(samples.mask, 1.0, np.inf)
    old = log_policy_of(network, samples)
    settings = {"epochs": 3, "batch_size": 128, "learning_rate": 1e-3}
    told = improve(network, samples, old, kl_limit=0.03, rng=torch.Generator(), **settings)
    assert told["kl"] < 2e-3
