"""The loss of PPO in compiled code, for the common case: the clipped surrogate, value and entropy.

In torch the same takes sixty small operations per minibatch, forwards and backwards
(learner.Learner), which cost more than the network's pass over a tile.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailrace.learn.improve import fused_kernels as kernels
from tailrace.learn.improve.experience import Experience
from tailrace.learn.improve.fused import arrays


class LossWeights(NamedTuple):
    """Settings of the clipped loss, and what the choices were drawn with."""

    temperature: float
    epsilon: float  #: share of uniform choices
    clip: float  #: how far a ratio of probabilities may go from 1
    value_clip: float  #: how far a value may go from the one before the update; inf: any way
    value: float  #: weight of the value's loss
    entropy: float  #: weight of the entropy


class ClippedLoss:
    """PPO's clipped loss of a minibatch, tile by tile; the same as the learner's in torch."""

    def __init__(self, weights: LossWeights, part: Experience) -> None:
        """``part``: the minibatch, over which the loss is a mean."""
        self._decisions, self._most_entropy = part.decisions, part.most_entropy()
        self._softmax = (np.float32(1 / weights.temperature), np.float32(weights.epsilon))
        numbers = (weights.clip, weights.value_clip, weights.value, weights.entropy)
        self._numbers = np.array((*numbers, 1 / part.decisions), np.float32)
        taken = (part.log_prob, part.advantage, part.weight, part.returns, part.value)
        self._mask, self._choice, *self._taken = arrays(
            *(tensor[0] for tensor in (part.mask, part.choice, *taken))
        )
        self._sums = np.zeros(len(kernels.SUMS))

    def gradients(self, logits: Tensor, values: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
        """Return the loss's gradients by logits [B, n] and values [B] of a tile."""
        of_logits, of_values = np.empty_like(logits), np.empty_like(values)
        policies = np.empty((2, *of_logits.shape), np.float32)
        mask, choice = self._mask[tile], self._choice[tile]
        log_prob, of_log_prob = np.empty((2, *choice.shape), np.float32)
        entropy, of_entropy = np.empty((2, len(mask)), np.float32)
        kernels.choose(logits.numpy(), mask, choice, *self._softmax, *policies, log_prob, entropy)
        kernels.lose(
            log_prob, entropy, values.numpy(), *(array[tile] for array in self._taken),
            self._numbers, of_log_prob, of_entropy, of_values, self._sums,
        )  # fmt: skip
        kernels.choose_back(
            of_log_prob, of_entropy, mask, choice, *self._softmax, *policies, of_logits
        )
        return torch.from_numpy(of_logits), torch.from_numpy(of_values)

    def terms(self) -> dict[str, float]:
        """Return what the loss of all tiles consists of."""
        sums = dict(zip(kernels.SUMS, self._sums.tolist(), strict=True))
        weight, entropy = max(sums["weight"], 1e-9), sums["entropy"]
        return {
            "kl": sums["kl"] / weight,
            "clip_fraction": sums["clipped"] / weight,
            "policy_loss": sums["policy_loss"] / self._decisions,
            "value_loss": sums["value_loss"] / self._decisions,
            "entropy": entropy / self._decisions,
            "entropy_fraction": entropy / self._most_entropy,
        }
