"""Roll-outs of a world that can be understood, for the tests of PPO. Needs torch."""

import numpy as np
import torch

from policy.networks import small
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve.learner import Learner
from tailrace.learn.improve.ppo_settings import PpoSettings
from tailrace.learn.improve.rollout import BootstrapStates, Rollout, behaviour, sample
from tailrace.policy.learned.network import LOGIT_GAIN, Network

torch.set_num_threads(1)

FEATURES, GLOBALS = 3, 2
PLAIN = ExplorationValues()


def network_of(variant: str = "plain", seed: int = 0, sharp: float = 1.0, **shape) -> Network:
    """A network; ``sharp`` scales its logits, which hardly differ at first."""
    torch.manual_seed(seed)
    sizes = {"features": FEATURES, "globals_": GLOBALS} | shape
    network = Network(small(variant), **sizes)
    if sharp != 1.0:
        torch.nn.init.orthogonal_(network.scorer.output.weight, sharp * LOGIT_GAIN)
    return network


def settings(**changes) -> PpoSettings:
    base = {"clusters": 8, "decisions": 32, "chunk": 8, "minibatch": 128, "learning_rate": 2e-2}
    return PpoSettings(**(base | changes))


def pays(replica_obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """1 for the replica whose first feature is the largest, else 0."""
    return (replica_obs[..., 0].argmax(-1) == action).astype(np.float64)


@torch.no_grad()
def play(
    network: Network,
    rng: np.random.Generator,
    reward=pays,
    exploration=PLAIN,
    n=3,
    group=1,
):
    """A roll-out of 32 decisions of 8 clusters in a world that an action does not change."""
    steps, clusters, chunk = 32, 8, 8
    replica_obs = rng.normal(size=(steps + 1, clusters, n, FEATURES)).astype(np.float32)
    request_obs = rng.normal(size=(steps + 1, clusters, GLOBALS)).astype(np.float32)
    mask = rng.random((steps + 1, clusters, n)) < 0.8
    mask[..., 0] = True
    prior = rng.normal(size=mask.shape).astype(np.float32) if network.config.prior else None
    starts = rng.random((steps, clusters)) < 0.05
    memory, memories, logits = network.first_memory(clusters), [], []
    for t in range(steps):
        memories.append(memory[:, : network.config.memory].numpy().copy())
        memory = memory * ~torch.from_numpy(starts[t])[:, None]
        seen = (torch.from_numpy(a[t]) for a in (replica_obs, request_obs, mask))
        given = None if prior is None else torch.from_numpy(prior[t])
        scores, _, memory = network.step(*seen, memory, given)
        logits.append(scores.numpy())
    policy = behaviour(
        np.concatenate(logits),
        mask[:-1].reshape(-1, n),
        exploration.temperature,
        exploration.epsilon,
    )
    action = sample(policy, rng.random(len(policy)))
    log_prob = np.log(policy[np.arange(len(policy)), action]).reshape(steps, clusters)
    action = action.reshape(steps, clusters)
    bootstrap = BootstrapStates(
        np.full(clusters, steps - 1),
        np.arange(clusters),
        replica_obs[-1],
        request_obs[-1],
        mask[-1],
        memory[:, : network.config.memory].numpy(),
        np.zeros(clusters, np.bool_),
    )
    return Rollout(
        replica_obs[:-1],
        request_obs[:-1],
        mask[:-1],
        None if prior is None else prior[:-1],
        action,
        log_prob.astype(np.float32),
        reward(np.where(mask[:-1, :, :, None], replica_obs[:-1], -9), action),
        np.full((steps, clusters), 0.5),
        starts,
        np.stack(memories[::chunk]),
        bootstrap,
        chunk,
        group,
    )


def learn(learner: Learner, updates: range, exploration=PLAIN, **options) -> dict[str, float]:
    """Play and learn; all randomness follows from the number of the update."""
    metrics = {}
    for update in updates:
        rollout = play(learner.network, np.random.default_rng(update), exploration=exploration)
        rng = torch.Generator().manual_seed(update)
        metrics = learner.update([rollout], exploration, update, rng, **options)
    return metrics


def bytes_of(network: Network) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in network.tensors().items()}
