"""Behaviour cloning: fit the policy to the choices that a teacher finds cheap.

Samples come in groups, one for each number of replicas; a minibatch is taken from one group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn import functional as fn

from tailrace.errors import TailraceError
from tailrace.learn.samples import Samples
from tailrace.policy.learned.network import Network

#: Regret of a choice that counts at most, s: one terrible choice must not drown the others.
MAX_REGRET_S = 5.0
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class ObservationBatch:
    """Decisions as tensors; see Samples for shapes."""

    replica_obs: Tensor
    request_obs: Tensor
    mask: Tensor
    prior: Tensor
    memory: Tensor

    @classmethod
    def of(cls, samples: Samples) -> "ObservationBatch":
        """Without copying."""
        return cls(
            torch.from_numpy(samples.replica_obs),
            torch.from_numpy(samples.request_obs),
            torch.from_numpy(samples.mask),
            torch.from_numpy(samples.prior).float(),
            torch.from_numpy(samples.memory),
        )

    def rows(self, index: Tensor) -> "ObservationBatch":
        """Some of the rows."""
        return ObservationBatch(
            self.replica_obs[index],
            self.request_obs[index],
            self.mask[index],
            self.prior[index],
            self.memory[index],
        )

    def log_policy(self, network: Network) -> Tensor:
        """Log-probabilities [K, n] of all choices; 0 where masked."""
        logits, _, _ = network.step(
            self.replica_obs, self.request_obs, self.mask, self.memory, self.prior
        )
        return fn.log_softmax(logits, -1).masked_fill(~self.mask, 0.0)


@dataclass(frozen=True)
class ImitationDataset:
    """One group of samples with what a teacher would do: target policy and regrets, [K, n]."""

    seen: ObservationBatch
    target: Tensor
    regret: Tensor

    @classmethod
    def of(cls, samples: Samples, temperature_s: float) -> "ImitationDataset":
        """The target of a decision is softmax(-cost / temperature)."""
        seen = ObservationBatch.of(samples)
        regret = torch.from_numpy(samples.regrets()).float()
        known = torch.from_numpy(samples.tried)
        target = torch.softmax((-regret / temperature_s).masked_fill(~known, -torch.inf), -1)
        return cls(seen, target, regret.clamp(max=MAX_REGRET_S))

    def __len__(self) -> int:
        return len(self.target)

    def loss(self, network: Network, index: Tensor) -> Tensor:
        """Mean loss of some rows.

        The expected regret is added to the cross-entropy, so that choices that hardly differ
        hardly matter.
        """
        seen = self.seen.rows(index)
        log_policy = seen.log_policy(network)
        cross_entropy = -(self.target[index] * log_policy).sum(-1)
        expected = (log_policy.exp() * seen.mask * self.regret[index]).sum(-1)
        return (cross_entropy + expected).mean()


def minibatches(
    sizes: Sequence[int], batch_size: int, rng: torch.Generator
) -> Iterator[tuple[int, Tensor]]:
    """Yield (group, rows) in random order, so that every row of every group comes once."""
    parts = [
        (group, index)
        for group, size in enumerate(sizes)
        for index in torch.randperm(size, generator=rng).split(batch_size)
    ]
    for k in torch.randperm(len(parts), generator=rng).tolist():
        yield parts[k]


def imitate(
    network: Network,
    groups: Sequence[Samples],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    temperature_s: float,
    rng: torch.Generator,
) -> float:
    """Fit the policy to the choices a teacher finds cheap; returns the mean loss of the last epoch.

    The learning rate falls to nothing along a cosine.
    """
    datasets = [ImitationDataset.of(samples, temperature_s) for samples in groups]
    optimiser = torch.optim.Adam(network.parameters(), lr=learning_rate)
    steps = epochs * sum(-(-len(dataset) // batch_size) for dataset in datasets)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    mean = 0.0
    for _ in range(epochs):
        total = torch.zeros(())
        for group, index in minibatches([len(dataset) for dataset in datasets], batch_size, rng):
            loss = datasets[group].loss(network, index)
            _gradient_step(network, optimiser, loss)
            schedule.step()
            total += loss.detach() * len(index)
        mean = float(total) / sum(len(dataset) for dataset in datasets)
        _check_finite(mean, "cloning")
    return mean


def _gradient_step(network: Network, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
    optimiser.step()


def _check_finite(loss: float, phase: str) -> None:
    if not isfinite(loss):
        raise TailraceError(
            f"the loss of {phase} is {loss}: lower its learning_rate, then continue with --resume "
            "from the last good checkpoint"
        )
