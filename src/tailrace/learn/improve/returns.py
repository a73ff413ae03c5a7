"""What a network thinks of its roll-outs: values, advantages and returns, before it learns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.errors import TailraceError
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve import advantages as adv
from tailrace.learn.improve.experience import (
    bootstrap_values,
    evaluate_rollout,
    log_behaviour,
    log_policy,
)
from tailrace.learn.improve.ppo_settings import PpoSettings
from tailrace.learn.improve.rollout import Rollout
from tailrace.policy.learned.network import Network

#: Beyond this, squares no longer fit into the network's numbers.
LARGEST_RETURN = 1e12


@dataclass(frozen=True)
class ReturnEstimate:
    """A roll-out and what is thought of it."""

    rollout: Rollout
    logits: Tensor  #: [T, C, n]
    values: adv.Array  #: [T, C] in the unit of the returns
    advantages: adv.Array  #: [T, C]
    returns: adv.Array  #: [T, C]


def estimate_returns(
    network: Network,
    rollouts: Sequence[Rollout],
    settings: PpoSettings,
    reward_scale: adv.RewardScale | None,
) -> list[ReturnEstimate]:
    """Look at roll-outs that this very network played; a reward scale learns from them first."""
    if network.config.critic_memory:
        rollouts = [_with_critic_memory(network, rollout) for rollout in rollouts]
    factors = [_discounts_and_lambdas(rollout, settings) for rollout in rollouts]
    scale = 1.0
    for rollout in rollouts:
        _check_finite(rollout)
    if reward_scale is not None:
        for rollout, (discount, _) in zip(rollouts, factors, strict=True):
            reward_scale.update(rollout.reward, discount, rollout.starts)
        scale = reward_scale.scale
    norm = network.value_norm
    estimates = []
    for rollout, (discount, gae_lambda) in zip(rollouts, factors, strict=True):
        logits, normalised = _evaluated(network, rollout)
        values = norm.denormalise(normalised).double().numpy()
        bootstrap = rollout.bootstrap
        after, ended = np.zeros(values.shape), np.zeros(values.shape, np.bool_)
        last = norm.denormalise(bootstrap_values(network, bootstrap)).double().numpy()
        after[bootstrap.step, bootstrap.cluster] = np.where(bootstrap.terminated, 0.0, last)
        ended[bootstrap.step, bootstrap.cluster] = True
        following = adv.next_values(values, after, ended)
        rewards = np.asarray(rollout.reward / scale)
        advantages, returns = adv.gae(
            rewards, values, following, discount, gae_lambda, truncated=ended
        )
        _check_bounded(returns)
        if rollout.group > 1:
            advantages = adv.group_relative(advantages, rollout.group)
        estimates.append(ReturnEstimate(rollout, logits, values, advantages, returns))
    return estimates


@torch.no_grad()
def _evaluated(network: Network, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return logits [T, C, n] and normalised values [T, C] of a roll-out.

    From what was kept when it was played, if it was. The logits of the last decision are computed
    anew all the same: they show whether this network played it (``behaviour_gap``). Those of the
    first would not: a cluster begins idle, with replicas that may look alike.
    """
    if rollout.logits is None or rollout.pooled is None:
        return evaluate_rollout(network, rollout, own_memory=True)
    end = replace(
        rollout,
        replica_obs=rollout.replica_obs[-1:],
        request_obs=rollout.request_obs[-1:],
        mask=rollout.mask[-1:],
        prior=None if rollout.prior is None else rollout.prior[-1:],
        action=rollout.action[-1:],
    )
    last, _ = evaluate_rollout(network, end, own_memory=True)
    logits = torch.cat([torch.from_numpy(rollout.logits[:-1]), last])
    return logits, network.value_head(torch.from_numpy(rollout.pooled))


@torch.no_grad()
def _with_critic_memory(network: Network, rollout: Rollout) -> Rollout:
    """Return a roll-out whose memories are followed by the value's own, which players do not keep.

    The value has not seen what came before the roll-out.
    """
    seen = (rollout.replica_obs, rollout.request_obs, rollout.mask, rollout.starts)
    own = network.critic_memories(*map(torch.from_numpy, seen)).numpy()
    bootstrap = rollout.bootstrap
    after = own[bootstrap.step + 1, bootstrap.cluster]
    return replace(
        rollout,
        memory=np.concatenate([rollout.memory, own[: -1 : rollout.chunk]], axis=-1),
        bootstrap=replace(bootstrap, memory=np.concatenate([bootstrap.memory, after], axis=-1)),
    )


def _check_finite(rollout: Rollout) -> None:
    seen: dict[str, NDArray[np.floating]] = {
        "reward": rollout.reward,
        "time between decisions": rollout.elapsed_s,
        "observation": rollout.replica_obs,
        "log-probability of a choice": rollout.log_prob,
    }
    for name, array in seen.items():
        if not np.isfinite(array).all():
            raise TailraceError(
                f"PPO: a {name} in a roll-out is not finite; the last checkpoint is sound: go on "
                "from it with a lower ppo.learning_rate, or give the reward a bound"
            )


def _check_bounded(returns: adv.Array) -> None:
    if not (np.abs(returns) < LARGEST_RETURN).all():
        raise TailraceError(
            "PPO: the value of a state runs away; the last checkpoint is sound: go on from it with "
            "a lower ppo.learning_rate or a lower ppo.value_weight"
        )


def _discounts_and_lambdas(rollout: Rollout, settings: PpoSettings) -> tuple[adv.Array, adv.Array]:
    """Discount and lambda [T, C] of each step."""
    if settings.discount_by == "decision":
        shape = rollout.reward.shape
        return np.full(shape, settings.gamma), np.full(shape, settings.gae_lambda)
    elapsed_s = rollout.elapsed_s
    return adv.discount_factors(elapsed_s, settings.discount_half_life_s), adv.discount_factors(
        elapsed_s, settings.gae_lambda_half_life_s
    )


def describe(
    estimates: Sequence[ReturnEstimate], exploration: ExplorationValues
) -> dict[str, float]:
    """Return figures of estimates.

    ``behaviour_gap`` is the largest difference between a log-probability as it was recorded and as
    it is computed now, at the last decision if logits were kept and at every one if not:
    rounding, unless the roll-outs are of another network.
    """
    returns = np.concatenate([one.returns.ravel() for one in estimates])
    values = np.concatenate([one.values.ravel() for one in estimates])
    advantages = np.concatenate([one.advantages.ravel() for one in estimates])
    gap = 0.0
    for one in estimates:
        mask = torch.from_numpy(one.rollout.mask)
        policy = log_policy(one.logits, mask, exploration.temperature)
        action = torch.from_numpy(one.rollout.action).unsqueeze(-1)
        log_prob = log_behaviour(policy, mask, action, exploration.epsilon).squeeze(-1)
        gap = max(gap, float((log_prob - torch.from_numpy(one.rollout.log_prob)).abs().max()))
    return {
        "explained_variance": float(1 - (returns - values).var() / max(returns.var(), 1e-12)),
        "advantage_deviation": float(advantages.std()),
        "return_mean": float(returns.mean()),
        "value_mean": float(values.mean()),
        "behaviour_gap": gap,
    }
