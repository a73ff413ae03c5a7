"""Proximal policy optimisation: from roll-outs to better weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.errors import TailraceError
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.imitate.fit import ImitationDataset
from tailrace.learn.improve import advantages as adv
from tailrace.learn.improve.minibatch import (
    Experience,
    divergence,
    evaluate,
    evaluate_rollout,
    joined,
    log_behaviour,
    log_policy,
    minibatches,
    sequences,
)
from tailrace.learn.improve.ppo_settings import PpoSettings
from tailrace.learn.improve.returns import ReturnEstimate, describe, estimate_returns
from tailrace.learn.improve.rollout import Rollout, split_by_size
from tailrace.policy.learned.network import Network

__all__ = ["Learner", "PpoSettings"]

Array = NDArray[Any]

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-5
#: An update whose KL divergence exceeds the target by this factor was too large.
KL_TOLERANCE = 1.5
#: Factors by which penalty and learning rate are adapted, and how far they may go.
PENALTY_STEP, PENALTY_RANGE = 2.0, (1e-4, 100.0)
RATE_STEP, RATE_RANGE = 1.5, (0.01, 10.0)
#: Updates over which the normaliser of returns forgets what returns used to be.
VALUE_NORM_UPDATES = 20


@dataclass
class _UpdateContext:
    """What holds for all minibatches of an update."""

    exploration: ExplorationValues
    rng: torch.Generator
    start_weight: float
    imitation_weight: float
    demonstrations: Sequence[ImitationDataset]
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    kl: list[float] = field(default_factory=list)  # of the minibatches of the epoch under way

    def add(self, terms: Mapping[str, Tensor]) -> None:
        for name, value in terms.items():
            self.metrics.setdefault(name, []).append(value.detach())

    def means(self) -> dict[str, float]:
        return {name: float(torch.stack(values).mean()) for name, values in self.metrics.items()}


class Learner:
    """A network, its optimiser and all that changes from update to update."""

    def __init__(self, network: Network, settings: PpoSettings, total_updates: int) -> None:
        """Begin before the first of so many updates."""
        if network.config.memory and settings.minibatch < settings.chunk:
            raise TailraceError(
                f"a network with memory learns whole chunks: minibatch = {settings.minibatch} "
                f"must be at least chunk = {settings.chunk}"
            )
        self.network, self.settings = network, settings
        self.total_updates = max(1, total_updates)
        self.reward_scale = adv.RewardScale()
        self._parameters = dict(network.named_parameters())
        self._optimiser = torch.optim.Adam(
            self._parameters.values(), settings.learning_rate, ADAM_BETAS, ADAM_EPS, fused=True
        )
        self._penalty = 1.0  # weight of the KL divergence, if there is a penalty
        self._rate = 1.0  # factor of the learning rate, if it adapts

    # ---- an update ------------------------------------------------------------------------------

    def update(
        self,
        rollouts: Sequence[Rollout],
        exploration: ExplorationValues,
        update: int,
        rng: torch.Generator,
        demonstrations: Sequence[ImitationDataset] = (),
        warm_start: Network | None = None,
    ) -> dict[str, float]:
        """Learn from roll-outs that this network played with this exploration; returns figures.

        ``update`` counts from 0. Losses, entropy and the like are means over all gradient steps,
        ``kl`` is that of the last epoch. A step that is not finite is refused, not taken.
        """
        s = self.settings
        context = _UpdateContext(
            exploration,
            rng,
            start_weight=_annealed(s.start_kl_weight, update, s.start_kl_updates)
            if warm_start
            else 0.0,
            imitation_weight=(
                _annealed(s.imitation_weight, update, s.imitation_updates)
                if demonstrations
                else 0.0
            ),
            demonstrations=demonstrations,
        )
        scale = self.reward_scale if s.scale_rewards else None
        parts = [part for rollout in rollouts for part in split_by_size(rollout)]
        seen = estimate_returns(self.network, parts, s, scale)
        metrics = describe(seen, exploration) | {"reward_scale": self.reward_scale.scale}
        groups = self._experience(seen, exploration, warm_start if context.start_weight else None)
        rate = self.learning_rate(update)
        for parameters in self._optimiser.param_groups:
            parameters["lr"] = rate
        epochs = 0
        while epochs < s.epochs and self._epoch(groups, context):
            epochs += 1
        metrics |= {"imitation_loss": 0.0, "kl_to_start": 0.0, **context.means()}
        metrics |= {"kl": float(np.mean(context.kl)), "learning_rate": rate}
        metrics |= {"epochs_done": float(epochs), "kl_penalty": self._penalty_weight}
        self._adapt(metrics["kl"])
        if update < s.norm_updates:
            self._learn_norms(rollouts)
        return metrics

    def learning_rate(self, update: int) -> float:
        """Return the step size of an update."""
        share = min(update / self.total_updates, 1.0)
        falls = {"constant": 1.0, "linear": 1 - share, "cosine": math.cos(math.pi / 2 * share) ** 2}
        return (
            self.settings.learning_rate * falls[self.settings.learning_rate_schedule] * self._rate
        )

    def _epoch(self, groups: Sequence[Experience], context: _UpdateContext) -> bool:
        """Learn from every decision once; False: the policy has moved far enough before that."""
        s = self.settings
        limit = KL_TOLERANCE * s.target_kl if s.kl_stop and s.target_kl else math.inf
        context.kl = []
        for part in minibatches(groups, s.minibatch, context.rng):
            loss, terms = self._loss(part, context)
            context.kl.append(float(terms.pop("kl")))
            if context.kl[-1] > limit:
                return False
            if context.imitation_weight:
                terms["imitation_loss"] = self._imitation_loss(context)
                loss = loss + context.imitation_weight * terms["imitation_loss"]
            terms["grad_norm"] = self._gradient_step(loss, terms)
            context.add(terms)
        return True

    def _loss(self, part: Experience, context: _UpdateContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a minibatch and what it consists of."""
        s, exploration = self.settings, context.exploration
        logits, values = evaluate(self.network, part)
        policy = log_policy(logits, part.mask, exploration.temperature)
        change = log_behaviour(policy, part.mask, part.action, exploration.epsilon) - part.log_prob
        ratio = change.exp()
        bounded = ratio.clamp(1 - s.clip_range, 1 + s.clip_range)
        policy_loss = -torch.minimum(ratio * part.advantage, bounded * part.advantage).mean()
        value_loss = self._value_loss(values, part)
        entropy = -(policy.exp() * policy).sum(-1)
        loss = policy_loss + s.value_weight * value_loss
        if exploration.entropy_weight:
            loss = loss - exploration.entropy_weight * entropy.mean()
        terms = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy.mean()}
        if s.kl_penalty:
            loss = loss + self._penalty * divergence(part.log_policy, policy)
        if context.start_weight:
            terms["kl_to_start"] = divergence(part.start_log_policy, policy)
            loss = loss + context.start_weight * terms["kl_to_start"]
        with torch.no_grad():
            terms["kl"] = (ratio - 1 - change).mean()
            terms["clip_fraction"] = ((ratio - 1).abs() > s.clip_range).float().mean()
            most = part.mask.sum(-1).log().sum().clamp(min=1e-9)
            terms["entropy_fraction"] = entropy.sum() / most
        return loss, terms

    def _value_loss(self, values: Tensor, part: Experience) -> Tensor:
        error = (values - part.target) ** 2
        clip = self.settings.value_clip
        if clip is not None:
            near = part.value + (values - part.value).clamp(-clip, clip)
            error = torch.maximum(error, (near - part.target) ** 2)
        return error.mean()

    def _imitation_loss(self, context: _UpdateContext) -> Tensor:
        """Imitation loss of random demonstrations of one group, drawn by the groups' sizes."""
        sizes = torch.tensor([float(len(group)) for group in context.demonstrations])
        group = context.demonstrations[int(torch.multinomial(sizes, 1, generator=context.rng))]
        rows = min(self.settings.imitation_batch_size, len(group))
        return group.loss(self.network, torch.randint(len(group), (rows,), generator=context.rng))

    def _gradient_step(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """Take a gradient step; returns the norm of the gradient before it was bounded."""
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters.values(), self.settings.max_grad_norm, foreach=True
        )
        if not math.isfinite(float(norm)):
            bad = [name for name, value in terms.items() if not bool(value.isfinite())]
            raise TailraceError(
                f"PPO: the {bad[0] if bad else 'gradient'} is not finite; the last checkpoint is "
                "sound: go on from it with a lower ppo.learning_rate, a lower ppo.max_grad_norm or "
                "a reward with a bound"
            )
        self._optimiser.step()
        return norm

    @property
    def _penalty_weight(self) -> float:
        return self._penalty if self.settings.kl_penalty else 0.0

    def _adapt(self, kl: float) -> None:
        """Steer the next update's divergence towards the target."""
        target = self.settings.target_kl
        if target is None:
            return
        step = (kl > KL_TOLERANCE * target) - (kl < target / KL_TOLERANCE)
        if self.settings.kl_penalty:
            self._penalty = _within(self._penalty * PENALTY_STEP**step, PENALTY_RANGE)
        if self.settings.kl_learning_rate:
            self._rate = _within(self._rate * RATE_STEP**-step, RATE_RANGE)

    # ---- from roll-outs to experience -----------------------------------------------------------

    def _experience(
        self,
        seen: Sequence[ReturnEstimate],
        exploration: ExplorationValues,
        warm_start: Network | None,
    ) -> list[Experience]:
        """Tensors to make minibatches of; the normaliser of returns is brought up to date."""
        self._learn_value_norm(np.concatenate([one.returns.ravel() for one in seen]))
        everything = np.concatenate([one.advantages.ravel() for one in seen])
        mean, deviation = everything.mean(), max(everything.std(), 1e-8)
        parts = []
        for one in seen:
            advantages = one.advantages
            if self.settings.advantage_normalisation == "group":
                advantages = adv.normalised(advantages, one.rollout.group)
            elif self.settings.advantage_normalisation == "batch":
                advantages = (advantages - mean) / deviation
            parts.append(self._cut(one, advantages, exploration, warm_start))
        return joined(parts)

    def _cut(
        self,
        one: ReturnEstimate,
        advantages: adv.Array,
        exploration: ExplorationValues,
        warm_start: Network | None,
    ) -> Experience:
        """One roll-out as stretches."""
        rollout, norm = one.rollout, self.network.value_norm
        length = rollout.chunk if self.network.config.memory else 1
        mask = torch.from_numpy(rollout.mask)
        empty = torch.zeros(*rollout.action.shape, 0)
        old = start = empty
        if self.settings.kl_penalty:
            old = log_policy(one.logits, mask, exploration.temperature)
        if warm_start is not None:
            logits, _ = evaluate_rollout(warm_start, rollout, own_memory=False)
            start = log_policy(logits, mask, exploration.temperature)
        prior = empty if rollout.prior is None else torch.from_numpy(rollout.prior)
        memory = torch.from_numpy(rollout.memory).flatten(0, 1)
        if length == 1:
            memory = torch.zeros(rollout.action.size, 0)

        def normalised(values: adv.Array) -> Tensor:
            return norm.normalise(torch.from_numpy(values).float())

        return Experience(
            replica_obs=sequences(rollout.replica_obs, length),
            request_obs=sequences(rollout.request_obs, length),
            mask=sequences(mask, length),
            prior=sequences(prior, length),
            starts=sequences(rollout.starts, length),
            memory=memory,
            action=sequences(rollout.action, length),
            log_prob=sequences(rollout.log_prob, length),
            advantage=sequences(torch.from_numpy(advantages).float(), length),
            target=sequences(normalised(one.returns), length),
            value=sequences(normalised(one.values), length),
            log_policy=sequences(old, length),
            start_log_policy=sequences(start, length),
        )

    # ---- normalisers ----------------------------------------------------------------------------

    @torch.no_grad()
    def _learn_value_norm(self, returns: adv.Array) -> None:
        """Take in returns [K]; the values say the same as before in the new unit (PopArt)."""
        norm, head = self.network.value_norm, self.network.value_head.output
        fresh = float(norm.count) == 0
        mean, std = norm.mean.clone(), norm.std.clone()
        norm.count.clamp_(max=VALUE_NORM_UPDATES * returns.size)
        norm.update(torch.from_numpy(returns)[:, None])
        if fresh:  # nothing has been learnt yet that must be kept
            return
        head.weight.mul_(std / norm.std)
        head.bias.copy_((std * head.bias + mean - norm.mean) / norm.std)

    def _learn_norms(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.network.update_norms(
                torch.from_numpy(rollout.replica_obs).flatten(0, 1),
                torch.from_numpy(rollout.request_obs).flatten(0, 1),
                torch.from_numpy(rollout.mask).flatten(0, 1),
            )

    # ---- state ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """Return copies of all that has to be kept to go on exactly, weights included."""
        kept: dict[str, Array] = {
            f"network.{name}": value for name, value in self.network.tensors().items()
        }
        for name, parameter in self._parameters.items():
            for moment, value in self._optimiser.state[parameter].items():
                kept[f"adam.{moment}.{name}"] = value.numpy().copy()
        numbers = {"penalty": self._penalty, "rate": self._rate}
        numbers |= {f"reward_{name}": value for name, value in self.reward_scale.state().items()}
        return kept | {f"learner.{name}": np.array(value) for name, value in numbers.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from a state of a learner of the same network."""
        self.network.load_tensors(_with_prefix("network.", state))
        moments = {
            name: _with_prefix(f"adam.{name}.", state) for name in ("step", "exp_avg", "exp_avg_sq")
        }
        self._optimiser.state.clear()
        for name, parameter in self._parameters.items():
            if name in moments["step"]:
                self._optimiser.state[parameter] = {
                    moment: torch.from_numpy(np.array(arrays[name]))
                    for moment, arrays in moments.items()
                }
        numbers = {name: float(value) for name, value in _with_prefix("learner.", state).items()}
        self._penalty, self._rate = numbers["penalty"], numbers["rate"]
        self.reward_scale.restore(
            {name.removeprefix("reward_"): value for name, value in numbers.items()}
        )


def _with_prefix(prefix: str, state: Mapping[str, Array]) -> dict[str, Array]:
    """The entries whose names begin so, without the beginning."""
    return {name.removeprefix(prefix): a for name, a in state.items() if name.startswith(prefix)}


def _annealed(weight: float, update: int, updates: int) -> float:
    """Linear from ``weight`` at update 0 to nothing at update ``updates`` and after."""
    return weight * max(0.0, 1 - update / updates)


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
