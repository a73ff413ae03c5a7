"""Two ways to learn from samples: imitate the cheapest choice, and shift towards better ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from tailrace.learn.samples import Samples
from tailrace.policy.network import Network


@dataclass(frozen=True)
class Batch:
    """Samples as tensors."""

    replica_obs: Tensor
    request_obs: Tensor
    mask: Tensor

    @classmethod
    def of(cls, samples: Samples) -> "Batch":
        """Without copying."""
        return cls(
            torch.from_numpy(samples.replica_obs),
            torch.from_numpy(samples.request_obs),
            torch.from_numpy(samples.mask),
        )

    def rows(self, index: Tensor) -> "Batch":
        """Some of the rows."""
        return Batch(self.replica_obs[index], self.request_obs[index], self.mask[index])


def imitate(
    network: Network,
    samples: Samples,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    temperature_s: float,
    rng: torch.Generator,
) -> float:
    """Fit the policy to the choices a teacher finds cheap; returns the mean loss of the last epoch.

    The target of a decision is softmax(-cost / temperature), and the expected regret of the policy
    is added, so that choices that hardly differ hardly matter.
    """
    data = Batch.of(samples)
    regret = samples.costs - samples.costs.min(axis=1, where=samples.mask, initial=np.inf)[:, None]
    regret = torch.from_numpy(np.where(samples.mask, regret, 0.0)).float()
    target = torch.softmax((-regret / temperature_s).masked_fill(~data.mask, -torch.inf), -1)
    optimiser = torch.optim.Adam(network.parameters(), lr=learning_rate)
    steps = epochs * -(-len(samples) // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    mean = 0.0
    for _ in range(epochs):
        order = torch.randperm(len(samples), generator=rng)
        total = 0.0
        for index in order.split(batch_size):
            part = data.rows(index)
            logits, _ = network(part.replica_obs, part.request_obs, part.mask)
            log_policy = fn.log_softmax(logits, -1).masked_fill(~part.mask, 0.0)
            cross_entropy = -(target[index] * log_policy).sum(-1)
            expected = (log_policy.exp() * part.mask * regret[index].clamp(max=5.0)).sum(-1)
            loss = (cross_entropy + expected).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(index)
        mean = total / len(samples)
    return mean


def improve(
    network: Network,
    samples: Samples,
    old_log_policy: Tensor,
    *,
    kl_limit: float,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    rng: torch.Generator,
) -> dict[str, float]:
    """Shift the policy towards choices with a better advantage, by at most ``kl_limit`` on average.

    The target is old policy x exp(eta x advantage), with eta such that its mean KL divergence from
    the old policy is the limit. ``old_log_policy`` [K, n] is that of the policy at hand.
    """
    data = Batch.of(samples)
    advantage = torch.from_numpy(samples.advantages()).float()
    eta, target = _target(old_log_policy, advantage, data.mask, kl_limit)
    optimiser = torch.optim.Adam(network.parameters(), lr=learning_rate)
    for _ in range(epochs):
        order = torch.randperm(len(samples), generator=rng)
        for index in order.split(batch_size):
            part = data.rows(index)
            logits, _ = network(part.replica_obs, part.request_obs, part.mask)
            log_policy = fn.log_softmax(logits, -1).masked_fill(~part.mask, 0.0)
            loss = -(target[index] * log_policy).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
    new = log_policy_of(network, samples)
    kl = (old_log_policy.exp() * (old_log_policy - new) * data.mask).sum(-1).mean()
    gain = ((new.exp() - old_log_policy.exp()) * advantage * data.mask).sum(-1).mean()
    return {"eta": eta, "kl": float(kl), "gain": float(gain)}


@torch.no_grad()
def log_policy_of(network: Network, samples: Samples) -> Tensor:
    """Return the log-probabilities [K, n] of all choices; 0 where masked."""
    data = Batch.of(samples)
    parts = []
    for index in torch.arange(len(samples)).split(8192):
        part = data.rows(index)
        logits, _ = network(part.replica_obs, part.request_obs, part.mask)
        parts.append(fn.log_softmax(logits, -1).masked_fill(~part.mask, 0.0))
    return torch.cat(parts)


def _target(old: Tensor, advantage: Tensor, mask: Tensor, kl_limit: float) -> tuple[float, Tensor]:
    """Tilt the old policy by exp(eta x advantage); eta by bisection on the mean KL."""
    low, high = 0.0, 100.0
    for _ in range(40):
        eta = (low + high) / 2
        tilted = _tilted(old, advantage, mask, eta)
        log = tilted.clamp(min=1e-30).log()
        kl = float((tilted * (log - old) * mask).sum(-1).mean())
        low, high = (eta, high) if kl < kl_limit else (low, eta)
    return low, _tilted(old, advantage, mask, low)


def _tilted(old: Tensor, advantage: Tensor, mask: Tensor, eta: float) -> Tensor:
    return torch.softmax((old + eta * advantage).masked_fill(~mask, -torch.inf), -1)
