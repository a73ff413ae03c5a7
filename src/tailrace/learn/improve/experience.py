"""Decisions to learn from as tensors, cut into the stretches that minibatches are made of.

``K`` stretches of ``L`` decisions in a row: single decisions, or for rollouts of a network with
memory whole chunks, each with the memory at its start. Stretches are shuffled, time never is.
Clusters of different sizes are kept apart, so nothing is padded. ``c`` choices of a decision have a
known advantage: the one that was taken in a rollout, or those that were tried in branches.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as fn

from tailrace.learn.improve import fused
from tailrace.learn.improve.rollout import BootstrapStates, Rollout
from tailrace.learn.samples import Samples
from tailrace.policy.learned.network import Network

#: Decisions that are computed at once where no gradient is needed: of rollouts, and of others.
SLICE, ROWS = 4096, 8192


@dataclass(frozen=True)
class Experience:
    """Decisions to learn from, [L, K, ...] each."""

    replica_obs: Tensor  #: [L, K, n, F]
    request_obs: Tensor  #: [L, K, G]
    mask: Tensor  #: [L, K, n]
    prior: Tensor  #: [L, K, n]; 0 without a prior
    starts: Tensor  #: [L, K]
    memory: Tensor  #: [K, M] before the first decision
    choice: Tensor  #: [L, K, c] choices with a known advantage
    log_prob: Tensor  #: [L, K, c] of those choices when the decision was made
    advantage: Tensor  #: [L, K, c]
    weight: Tensor  #: [L, K, c] in the clipped objective: 1 if taken, old probability if tried
    returns: Tensor  #: [L, K] normalised; [L, K, 0] for branches, which need no value
    value: Tensor  #: [L, K] normalised value when the decision was made; as above
    log_policy: Tensor  #: [L, K, n] before the update; [L, K, 0] if nothing needs it
    start_log_policy: Tensor  #: [L, K, n] of the warm-start policy; [L, K, 0] if nothing needs it
    target: Tensor  #: [L, K, n] target of the KL-limited objective; [L, K, 0] if nothing needs it

    def __len__(self) -> int:
        return self.memory.shape[0]

    @property
    def decisions(self) -> int:
        """How many there are."""
        return self.mask.shape[0] * self.mask.shape[1]

    @property
    def has_returns(self) -> bool:
        """Whether there are returns for the value to learn."""
        return self.returns.numel() > 0

    def all_advantages(self) -> Tensor:
        """Return the advantages [L, K, n] of all choices, 0 where unknown."""
        empty = torch.zeros(self.mask.shape)
        return empty.scatter(-1, self.choice, self.advantage)

    def most_entropy(self) -> float:
        """Return the entropy of choosing uniformly, summed over the decisions, nats."""
        return max(float(self.mask.sum(-1).log().sum()), 1e-9)

    def tile(self, rows: slice) -> "Experience":
        """Return stretches in a row, in the same memory."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Experience(
            **{name: x[rows] if name == "memory" else x[:, rows] for name, x in parts.items()}
        )

    def part(self, index: Tensor) -> "Experience":
        """Return some of the stretches."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Experience(
            **{
                name: x.index_select(0 if name == "memory" else 1, index)
                for name, x in parts.items()
            }
        )


def joined(parts: Sequence[Experience]) -> list[Experience]:
    """Put experience together, one for each number of replicas, in rising order."""
    by_size: dict[int, list[Experience]] = defaultdict(list)
    for part in parts:
        by_size[part.mask.shape[-1]].append(part)
    return [_cat(by_size[n]) for n in sorted(by_size)]


def _cat(parts: Sequence[Experience]) -> Experience:
    if len(parts) == 1:
        return parts[0]
    whole = {
        field.name: torch.cat(
            [getattr(part, field.name) for part in parts], 0 if field.name == "memory" else 1
        )
        for field in fields(Experience)
    }
    return Experience(**whole)


def minibatches(
    groups: Sequence[Experience], decisions: int, rng: torch.Generator
) -> Iterator[Experience]:
    """Yield every stretch once, in random order, in minibatches of at most ``decisions``."""
    parts = []
    for number, group in enumerate(groups):
        order = torch.randperm(len(group), generator=rng)
        length = group.mask.shape[0]
        parts += [(number, index) for index in order.split(max(1, decisions // length))]
    for k in torch.randperm(len(parts), generator=rng).tolist():
        number, index = parts[k]
        yield groups[number].part(index)


def sequences(array: NDArray[np.generic] | Tensor, length: int) -> Tensor:
    """Cut [T, C, ...] into stretches of ``length`` decisions: [L, K, ...]."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
    if length == 1:
        return tensor.flatten(0, 1).unsqueeze(0)
    cut: Tensor = tensor.unflatten(0, (-1, length))
    return cut.transpose(0, 1).flatten(1, 2)


def evaluate(network: Network, part: Experience) -> tuple[Tensor, Tensor]:
    """Return logits [L, B, n] and normalised values [L, B] of a minibatch."""
    prior = part.prior if network.config.prior else None
    if not part.has_returns:
        # Torch's own pass: policies that earlier versions trained are reproduced to the last bit.
        flat = None if prior is None else prior[0]
        seen = (part.replica_obs[0], part.request_obs[0], part.mask[0])
        logits, values, _ = network.step(*seen, part.memory, flat)
        return logits[None], values[None]
    if network.config.memory:
        logits, values, _ = network.sequence(
            part.replica_obs, part.request_obs, part.mask, part.memory, part.starts, prior
        )
        return logits, values
    flat = None if prior is None else prior[0]
    logits, values = _single(network, part.replica_obs[0], part.request_obs[0], part.mask[0], flat)
    return logits[None], values[None]


def _single(
    network: Network, replica_obs: Tensor, request_obs: Tensor, mask: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits [B, n] and normalised values [B] of a network without memory."""
    if fused.COMPILED:
        return fused.forward(network, replica_obs, request_obs, mask, prior)
    logits, values = network(replica_obs, request_obs, mask, prior)
    return logits, values


@torch.no_grad()
def evaluate_rollout(network: Network, rollout: Rollout, own_memory: bool) -> tuple[Tensor, Tensor]:
    """Return logits [T, C, n] and normalised values [T, C] of a whole rollout.

    With ``own_memory`` the memory is that of the network which played; another network begins with
    an empty one.
    """
    replica_obs = torch.from_numpy(rollout.replica_obs)
    request_obs = torch.from_numpy(rollout.request_obs)
    mask = torch.from_numpy(rollout.mask)
    prior = None if rollout.prior is None else torch.from_numpy(rollout.prior)
    steps, clusters = rollout.action.shape
    if network.config.memory:
        memory = network.first_memory(clusters)
        if own_memory:
            memory = torch.from_numpy(rollout.memory[0])
        starts = torch.from_numpy(rollout.starts)
        logits, values, _ = network.sequence(replica_obs, request_obs, mask, memory, starts, prior)
        return logits, values
    parts = []
    for rows in torch.arange(steps).split(max(1, SLICE // clusters)):
        low, high = int(rows[0]), int(rows[-1]) + 1
        parts.append(
            _single(
                network,
                replica_obs[low:high].flatten(0, 1),
                request_obs[low:high].flatten(0, 1),
                mask[low:high].flatten(0, 1),
                None if prior is None else prior[low:high].flatten(0, 1),
            )
        )
    logits = torch.cat([part[0] for part in parts]).unflatten(0, (steps, clusters))
    return logits, torch.cat([part[1] for part in parts]).unflatten(0, (steps, clusters))


@torch.no_grad()
def bootstrap_values(network: Network, bootstrap: BootstrapStates) -> Tensor:
    """Return the normalised values [K] of the states in which stretches ended."""
    mask = torch.from_numpy(bootstrap.mask)
    _, values, _ = network.step(
        torch.from_numpy(bootstrap.replica_obs),
        torch.from_numpy(bootstrap.request_obs),
        mask,
        torch.from_numpy(bootstrap.memory),
        torch.zeros(mask.shape),  # the value does not depend on the prior
    )
    return values


@torch.no_grad()
def log_policies(network: Network, group: Experience, temperature: float) -> Tensor:
    """Return the log-probabilities [L, K, n] of all choices under a network."""
    parts = []
    for index in torch.arange(len(group)).split(max(1, ROWS // group.mask.shape[0])):
        part = group.part(index)
        parts.append(log_policy(evaluate(network, part)[0], part.mask, temperature))
    return torch.cat(parts, 1)


def of_branches(network: Network, samples: Samples) -> Experience:
    """Return decisions at which several choices were tried, seen with the network as it is."""
    tried = torch.from_numpy(samples.tried)
    advantages = torch.from_numpy(samples.advantages()).float()
    count = int(tried.sum(-1).max())
    choice = (~tried).to(torch.uint8).argsort(stable=True, dim=-1)[:, :count]
    rows = len(samples)
    unused = torch.zeros(1, rows, 0)
    seen = Experience(
        replica_obs=torch.from_numpy(samples.replica_obs)[None],
        request_obs=torch.from_numpy(samples.request_obs)[None],
        mask=torch.from_numpy(samples.mask)[None],
        prior=torch.from_numpy(samples.prior).float()[None],
        starts=torch.zeros(1, rows, dtype=torch.bool),
        memory=torch.from_numpy(samples.memory),
        choice=choice[None],
        log_prob=unused,
        advantage=advantages.gather(-1, choice)[None],
        weight=unused,
        returns=unused,
        value=unused,
        log_policy=unused,
        start_log_policy=unused,
        target=unused,
    )
    old = log_policies(network, seen, 1.0)
    log_prob = old.gather(-1, seen.choice)
    weight = log_prob.exp() * tried.gather(-1, choice)
    return replace(seen, log_policy=old, log_prob=log_prob, weight=weight)


# ---- distributions ------------------------------------------------------------------------------


def log_policy(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities [..., n] of all choices at a temperature; 0 where masked."""
    return fn.log_softmax(logits / temperature, -1).masked_fill(~mask, 0.0)


def log_behaviour(log_policy: Tensor, mask: Tensor, choice: Tensor, epsilon: float) -> Tensor:
    """Return the log-probability [..., c] of choices, a share ``epsilon`` of which is uniform.

    The same distribution that rollouts draw from (rollout.behaviour).
    """
    chosen = log_policy.gather(-1, choice)
    if epsilon == 0:
        return chosen
    return torch.log((1 - epsilon) * chosen.exp() + epsilon / mask.sum(-1, keepdim=True))


def divergence(old: Tensor, new: Tensor) -> Tensor:
    """Return the mean KL divergence of new from old log-policies [..., n], 0 where masked."""
    return (old.exp() * (old - new)).sum(-1).mean()
