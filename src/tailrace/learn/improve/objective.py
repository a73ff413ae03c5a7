"""What an update maximises: the clipped surrogate of PPO, or a target at a limited KL divergence.

Pure functions over log-policies [..., n], 0 where masked, and the advantages of some choices: the
one that was taken (rollouts), or all that were tried (branches).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Advantages below this in all decisions are none at all.
NO_ADVANTAGE = 1e-6
#: Search for the tilt: its largest value and the number of halvings.
MAX_ETA, HALVINGS = 100.0, 40


def clipped(change: Tensor, advantage: Tensor, weight: Tensor, clip: float) -> Tensor:
    """Return the clipped surrogate loss, a mean over decisions.

    ``change`` [..., c]: logarithm of new over old probability of some choices; ``advantage``
    [..., c]; ``weight`` [..., c]: how much each choice counts. One choice of weight 1 per decision
    gives the loss of PPO; all choices weighted by their old probability give its expectation.
    """
    ratio = change.exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    return -(weight * gain).sum(-1).mean()


def towards(target: Tensor, log_policy: Tensor) -> Tensor:
    """Return the mean cross-entropy of log-policies [..., n] to a target policy."""
    return -(target * log_policy).sum(-1).mean()


def tilted_targets(
    old: Sequence[Tensor], advantages: Sequence[Tensor], masks: Sequence[Tensor], kl_limit: float
) -> tuple[float, list[Tensor]]:
    """Return eta and the targets [K, n] = old policy x exp(eta x advantage), normalised.

    Each argument has one tensor [K, n] per number of replicas. Eta is the largest whose targets
    have a mean KL divergence from the old policy of at most ``kl_limit``, found by bisection.
    """
    rows = sum(map(len, old))

    def tilted(eta: float) -> list[Tensor]:
        return [
            torch.softmax((log + eta * gain).masked_fill(~mask, -torch.inf), -1)
            for log, gain, mask in zip(old, advantages, masks, strict=True)
        ]

    low, high = 0.0, MAX_ETA
    for _ in range(HALVINGS):
        eta = (low + high) / 2
        kl = 0.0
        for new, log, mask in zip(tilted(eta), old, masks, strict=True):
            kl += float((new * (new.clamp(min=1e-30).log() - log) * mask).sum())
        low, high = (eta, high) if kl / rows < kl_limit else (low, eta)
    return low, tilted(low)
