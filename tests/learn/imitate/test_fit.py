import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.imitate.fit import (  # noqa: E402
    ImitationDataset,
    ObservationBatch,
    imitate,
    minibatches,
)
from tailrace.learn.samples import Samples  # noqa: E402
from tailrace.policy.learned.architecture import NetworkConfig  # noqa: E402
from tailrace.policy.learned.network import Network  # noqa: E402
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES  # noqa: E402

torch.set_num_threads(1)
CLONING = {"epochs": 10, "batch_size": 128, "learning_rate": 1e-2, "temperature_s": 0.1}


def toy(rows: int = 600, replicas: int = 4, seed: int = 0) -> Samples:
    """The cost of a choice is its first feature; some replicas are away."""
    rng = np.random.default_rng(seed)
    made = Samples.empty(rows, replicas, 0)
    made.replica_obs[:] = rng.standard_normal(made.replica_obs.shape)
    made.request_obs[:] = rng.standard_normal(made.request_obs.shape)
    made.mask[:] = rng.random(made.mask.shape) < 0.8
    made.mask[:, 0] = True
    made.tried[:] = made.mask
    made.costs[:] = made.replica_obs[:, :, 0]
    return made


def fresh_network(seed: int = 1, **changes) -> Network:
    torch.manual_seed(seed)
    config = NetworkConfig(hidden=16, **changes)
    return Network(config, len(REPLICA_FEATURES), len(REQUEST_FEATURES))


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def regret(network: Network, samples: Samples) -> float:
    with torch.no_grad():
        log_policy = ObservationBatch.of(samples).log_policy(network)
    log_policy = log_policy.masked_fill(torch.from_numpy(~samples.mask), -torch.inf)
    choice = log_policy.argmax(-1).numpy()
    return float(samples.regrets()[np.arange(len(samples)), choice].mean())


def test_minibatches_take_every_row_of_every_group_once():
    seen: dict[int, list[int]] = {0: [], 1: []}
    sizes = []
    for group, index in minibatches([10, 7], 4, rng()):
        seen[group] += index.tolist()
        sizes.append((group, len(index)))
    assert sorted(seen[0]) == list(range(10))
    assert sorted(seen[1]) == list(range(7))
    assert sorted(sizes) == [(0, 2), (0, 4), (0, 4), (1, 3), (1, 4)]


def test_the_target_of_a_demonstration_by_hand():
    made = Samples.empty(1, 3, 0)
    made.mask[:] = True
    made.tried[0] = [True, True, False]
    made.costs[0] = [2.0, 2.0 + 0.1 * np.log(3), 0.0]
    dataset = ImitationDataset.of(made, temperature_s=0.1)
    assert dataset.target[0].tolist() == pytest.approx([0.75, 0.25, 0])
    made.costs[0, 1] = 1000.0
    assert ImitationDataset.of(made, 0.1).regret.max() == 5.0


def test_imitation_finds_the_cheap_choice_in_clusters_of_any_size():
    network, held_out = fresh_network(), (toy(seed=9), toy(replicas=7, seed=10))
    before = [regret(network, samples) for samples in held_out]
    imitate(network, [toy(), toy(replicas=2, seed=5)], rng=rng(), **CLONING)
    after = [regret(network, samples) for samples in held_out]
    assert after[0] < 0.2 * before[0]
    assert after[1] < 0.35 * before[1]


def test_a_loss_that_is_no_number_stops_the_fit_and_says_what_to_do():
    poisoned = toy()
    poisoned.replica_obs[3, 0, 0] = np.nan
    with pytest.raises(TailraceError, match=r"loss of cloning is nan: lower its learning_rate"):
        imitate(fresh_network(), [poisoned], rng=rng(), **CLONING)
