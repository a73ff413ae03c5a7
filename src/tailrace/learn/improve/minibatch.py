"""Roll-outs as tensors, cut into the stretches that minibatches are made of.

``K`` stretches of ``L`` decisions in a row: single decisions, or for a network with memory whole
chunks, each with the memory at its start. Stretches are shuffled, time never is. Roll-outs of
clusters of other sizes are kept apart, so nothing is padded.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as fn

from tailrace.learn.improve import fused
from tailrace.learn.improve.rollout import BootstrapStates, Rollout
from tailrace.policy.learned.network import Network

#: Decisions that are computed at once where no gradient is needed.
SLICE = 4096


@dataclass(frozen=True)
class Experience:
    """Decisions to learn from, [L, K, ...] each."""

    replica_obs: Tensor  #: [L, K, n, F]
    request_obs: Tensor  #: [L, K, G]
    mask: Tensor  #: [L, K, n]
    prior: Tensor  #: [L, K, n]; 0 without a prior
    starts: Tensor  #: [L, K]
    memory: Tensor  #: [K, M] before the first decision
    action: Tensor  #: [L, K]
    log_prob: Tensor  #: [L, K] of the action when it was chosen
    advantage: Tensor  #: [L, K]
    target: Tensor  #: [L, K] normalised return
    value: Tensor  #: [L, K] normalised value when it was chosen
    log_policy: Tensor  #: [L, K, n] before the update; empty if nobody asks for it
    start_log_policy: Tensor  #: [L, K, n] of the warm-start policy; empty if nobody asks for it

    def __len__(self) -> int:
        return self.memory.shape[0]

    @property
    def decisions(self) -> int:
        """How many there are."""
        return self.action.numel()

    def part(self, index: Tensor) -> "Experience":
        """Return some of the stretches."""
        parts = {
            field.name: getattr(self, field.name).index_select(
                0 if field.name == "memory" else 1, index
            )
            for field in fields(self)
        }
        return Experience(**parts)


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
    """Yield all stretches once, in random order, in parts of about so many decisions."""
    parts = []
    for number, group in enumerate(groups):
        order = torch.randperm(len(group), generator=rng)
        count = max(1, group.decisions // decisions)
        parts += [(number, index) for index in order.tensor_split(count)]
    for k in torch.randperm(len(parts), generator=rng).tolist():
        number, index = parts[k]
        yield groups[number].part(index)


def sequences(array: NDArray[np.generic] | Tensor, length: int) -> Tensor:
    """Cut [T, C, ...] into stretches of so many decisions: [L, K, ...]."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
    if length == 1:
        return tensor.flatten(0, 1).unsqueeze(0)
    cut: Tensor = tensor.unflatten(0, (-1, length))
    return cut.transpose(0, 1).flatten(1, 2)


def evaluate(network: Network, part: Experience) -> tuple[Tensor, Tensor]:
    """Return logits [L, B, n] and normalised values [L, B] of a minibatch."""
    prior = part.prior if network.config.prior else None
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
    """Return logits [T, C, n] and normalised values [T, C] of a whole roll-out.

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


# ---- distributions ------------------------------------------------------------------------------


def log_policy(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities [..., n] of all choices at a temperature; 0 where masked."""
    return fn.log_softmax(logits / temperature, -1).masked_fill(~mask, 0.0)


def log_behaviour(log_policy: Tensor, mask: Tensor, action: Tensor, epsilon: float) -> Tensor:
    """Return the log-probability [...] of actions, a share ``epsilon`` of which is uniform.

    The same distribution that roll-outs draw from (rollout.behaviour).
    """
    chosen = log_policy.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    if epsilon == 0:
        return chosen
    return torch.log((1 - epsilon) * chosen.exp() + epsilon / mask.sum(-1))


def divergence(old: Tensor, new: Tensor) -> Tensor:
    """Return the mean KL divergence of new from old log-policies [..., n], 0 where masked."""
    return (old.exp() * (old - new)).sum(-1).mean()
