"""Proximal policy optimisation: from decisions and their advantages to better weights.

The one loop of all estimates of the advantage: rollouts give that of the choice taken (GAE, with or
without groups), branches that of every choice tried (the "vine" of TRPO). The objective is the
clipped surrogate, or a target policy at a limited KL divergence.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.errors import TailraceError
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.imitate.fit import ImitationDataset
from tailrace.learn.improve import advantages as adv
from tailrace.learn.improve import fused
from tailrace.learn.improve.compiled_loss import ClippedLoss, LossWeights
from tailrace.learn.improve.experience import (
    Experience,
    divergence,
    evaluate,
    evaluate_rollout,
    joined,
    log_behaviour,
    log_policies,
    log_policy,
    minibatches,
    sequences,
)
from tailrace.learn.improve.objective import NO_ADVANTAGE, clipped, tilted_targets, towards
from tailrace.learn.improve.ppo_settings import LearningSettings, Objective, PpoSettings
from tailrace.learn.improve.returns import ReturnEstimate, describe, estimate_returns
from tailrace.learn.improve.rollout import Rollout, split_by_size
from tailrace.policy.learned.network import Network

Array = NDArray[Any]

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-5
#: An update whose KL divergence exceeds the target by this factor was too large.
KL_TOLERANCE = 1.5
#: Factors by which penalty and learning rate are adapted, and how far they may go.
PENALTY_STEP, PENALTY_RANGE = 2.0, (1e-4, 100.0)
RATE_STEP, RATE_RANGE = 1.5, (0.01, 10.0)
#: Factor of the learning rate when an earlier policy is put back.
ROLLBACK_STEP = 0.5
#: Updates over which the normaliser of returns forgets what returns used to be.
VALUE_NORM_UPDATES = 20


@dataclass
class _UpdateContext:
    """What holds for all minibatches of an update."""

    exploration: ExplorationValues
    rng: torch.Generator
    optimiser: torch.optim.Optimizer
    start_weight: float
    imitation_weight: float
    demonstrations: Sequence[ImitationDataset]
    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kl: list[float] = field(default_factory=list)  # of the minibatches of the epoch under way
    losses: list[float] = field(default_factory=list)  # of the policy in that epoch, as sums

    def add(self, terms: Mapping[str, float]) -> None:
        for name, value in terms.items():
            self.metrics[name].append(value)

    def means(self) -> dict[str, float]:
        return {name: float(np.mean(values)) for name, values in self.metrics.items()}


class Learner:
    """A network, its optimiser and all that changes from update to update."""

    def __init__(
        self,
        network: Network,
        settings: LearningSettings,
        total_updates: int,
        objective: Objective = "clipped",
        warm_start: Network | None = None,
    ) -> None:
        """Prepare for ``total_updates`` updates.

        ``warm_start``: the policy that ``start_kl_weight`` holds the network close to; None: none.
        """
        self.network, self.settings, self.objective = network, settings, objective
        self._warm_start = warm_start
        self._value_weight = 0.0
        self._value_clip: float | None = None
        if isinstance(settings, PpoSettings):
            self._value_weight, self._value_clip = settings.value_weight, settings.value_clip
            if network.config.memory and settings.minibatch < settings.chunk:
                raise TailraceError(
                    f"a network with memory learns whole chunks: minibatch = {settings.minibatch} "
                    f"must be at least chunk = {settings.chunk}"
                )
        self.total_updates = max(1, total_updates)
        self.reward_scale = adv.RewardScale()
        self._parameters = dict(network.named_parameters())
        self._optimiser = torch.optim.Adam(
            self._parameters.values(), settings.learning_rate, ADAM_BETAS, ADAM_EPS, fused=True
        )
        self._pass = None if network.config.memory else fused.NetworkPass(network)
        self._penalty = 1.0  # weight of the KL divergence, if there is a penalty
        self._rate = 1.0  # factor of the learning rate

    # ---- an update ------------------------------------------------------------------------------

    def update(
        self,
        rollouts: Sequence[Rollout],
        exploration: ExplorationValues,
        update: int,
        rng: torch.Generator,
        demonstrations: Sequence[ImitationDataset] = (),
    ) -> dict[str, float]:
        """Learn from rollouts that this network played with this exploration; returns metrics."""
        s = self.settings
        assert isinstance(s, PpoSettings)
        scale = self.reward_scale if s.scale_rewards else None
        parts = [part for rollout in rollouts for part in split_by_size(rollout)]
        seen = estimate_returns(self.network, parts, s, scale)
        metrics = describe(seen, exploration) | {"reward_scale": self.reward_scale.scale}
        start = self._warm_start if self._start_weight(update) else None
        groups = self._experience(seen, exploration, start)
        metrics |= self.learn(groups, exploration, update, rng, demonstrations)
        if update < s.norm_updates:
            self._learn_norms(rollouts)
        return metrics

    def learn(
        self,
        groups: Sequence[Experience],
        exploration: ExplorationValues,
        update: int,
        rng: torch.Generator,
        demonstrations: Sequence[ImitationDataset] = (),
    ) -> dict[str, float]:
        """Learn from decisions, one group per number of replicas; returns metrics.

        ``update`` counts from 0. Losses, entropy and the like are means over all gradient steps,
        ``kl`` is that of the last epoch. A step that is not finite is refused, not taken.
        """
        s, metrics = self.settings, {}
        if self._pass is not None:
            self._pass.read_norms()
        start_weight = self._start_weight(update)
        if start_weight and self._warm_start is not None:
            groups = [_with_start(group, self._warm_start, exploration) for group in groups]
        if self.objective == "kl_limited":
            metrics["eta"], groups = self._with_targets(groups)
        rate = self.learning_rate(update)
        context = _UpdateContext(
            exploration,
            rng,
            self._optimiser_at(rate),
            start_weight,
            imitation_weight=(
                _annealed(s.imitation_weight, update, s.imitation_updates)
                if demonstrations
                else 0.0
            ),
            demonstrations=demonstrations,
        )
        epochs = 0
        while epochs < s.epochs and self._epoch(groups, context):
            epochs += 1
        metrics |= {"imitation_loss": 0.0, "kl_to_start": 0.0, **context.means()}
        metrics |= {"kl": float(np.mean(context.kl)), "learning_rate": rate}
        metrics |= {"epochs_done": float(epochs), "kl_penalty": self._penalty_weight}
        if self.objective == "kl_limited":
            metrics |= self._compare(groups, exploration)
            rows = sum(group.decisions for group in groups)
            metrics["policy_loss"] = sum(context.losses) / rows
        self._adapt(metrics["kl"])
        return metrics

    def _start_weight(self, update: int) -> float:
        if self._warm_start is None:
            return 0.0
        return _annealed(self.settings.start_kl_weight, update, self.settings.start_kl_updates)

    def _optimiser_at(self, rate: float) -> torch.optim.Optimizer:
        """Return the optimiser of an update.

        Each KL-limited update fits a new target, so it starts without the state of earlier ones.
        """
        if self.objective == "kl_limited":
            return torch.optim.Adam(self.network.parameters(), lr=rate)
        for parameters in self._optimiser.param_groups:
            parameters["lr"] = rate
        return self._optimiser

    def _with_targets(self, groups: Sequence[Experience]) -> tuple[float, list[Experience]]:
        """Return eta and the groups with the targets of the KL-limited objective."""
        advantages = [group.all_advantages() for group in groups]
        if all(float(advantage.abs().max()) < NO_ADVANTAGE for advantage in advantages):
            raise TailraceError(
                "no choice makes any difference to the cost: there is nothing to learn here; raise "
                "the load, choose scenarios with more than one replica, or a longer horizon"
            )
        eta, targets = tilted_targets(
            [group.log_policy.flatten(0, 1) for group in groups],
            [advantage.flatten(0, 1) for advantage in advantages],
            [group.mask.flatten(0, 1) for group in groups],
            self.settings.kl_limit,
        )
        return eta, [
            replace(group, target=target.view_as(group.mask))
            for group, target in zip(groups, targets, strict=True)
        ]

    def _compare(
        self, groups: Sequence[Experience], exploration: ExplorationValues
    ) -> dict[str, float]:
        """How far the policy has moved over all decisions, and what it should gain by that."""
        kl, gain, entropy, most = 0.0, 0.0, 0.0, 0.0
        for group in groups:
            before = group.log_policy
            after = log_policies(self.network, group, exploration.temperature)
            kl += float((before.exp() * (before - after) * group.mask).sum())
            change = (after.exp() - before.exp()) * group.mask
            gain += float((change * group.all_advantages()).sum())
            entropy -= float((after.exp() * after * group.mask).sum())
            most += float(group.mask.sum(-1).float().log().sum())
        rows = sum(group.decisions for group in groups)
        return {
            "kl": kl / rows,
            "gain": gain / rows,
            "entropy": entropy / rows,
            "entropy_fraction": entropy / max(most, 1e-9),
        }

    def learning_rate(self, update: int) -> float:
        """Return the step size of an update."""
        first, last = self.settings.learning_rate, self.settings.final_learning_rate
        share = min(update / max(1, self.total_updates - 1), 1.0)
        rate = first
        if self.settings.learning_rate_schedule == "linear":
            rate = first + share * (last - first)
        elif self.settings.learning_rate_schedule == "cosine":
            rate = last + (first - last) * math.cos(math.pi / 2 * share) ** 2
        return rate * self._rate

    def _epoch(self, groups: Sequence[Experience], context: _UpdateContext) -> bool:
        """Learn from every decision once; False: the policy has moved far enough before that."""
        s = self.settings
        limit = KL_TOLERANCE * s.target_kl if s.kl_stop and s.target_kl else math.inf
        context.kl, context.losses = [], []
        for part in minibatches(groups, s.minibatch, context.rng):
            terms = self._gradients(part, context)
            context.kl.append(terms.pop("kl"))
            if context.kl[-1] > limit:
                return False
            if context.imitation_weight:
                imitation = self._imitation_loss(context)
                (context.imitation_weight * imitation).backward()
                terms["imitation_loss"] = imitation.item()
            terms["grad_norm"] = self._gradient_step(terms, context.optimiser)
            context.losses.append(terms["policy_loss"] * part.decisions)
            context.add(terms)
        return True

    def _gradients(self, part: Experience, context: _UpdateContext) -> dict[str, float]:
        """Set the gradients of a minibatch's loss; return what the loss consists of."""
        if self._pass is None or not (part.has_returns and fused.COMPILED):
            context.optimiser.zero_grad(set_to_none=True)
            loss, of_part = self._loss(part, *evaluate(self.network, part), context)
            loss.backward()
            return of_part
        self._pass.start()
        terms: dict[str, float] = defaultdict(float)
        losses = self._compiled_loss(part, context)
        for rows in fused.tiles(*part.mask[0].shape):
            seen = (part.replica_obs[0, rows], part.request_obs[0, rows], part.mask[0, rows])
            prior = part.prior[0, rows] if self.network.config.prior else None
            logits, values = self._pass.forward(*seen, prior)
            if losses is not None:
                self._pass.backward(*losses.gradients(logits, values, rows))
                continue
            logits, values = logits.requires_grad_(), values.clone().requires_grad_()
            loss, of_tile = self._loss(part.tile(rows), logits[None], values[None], context)
            share = len(values) / part.decisions
            (share * loss).backward()
            assert logits.grad is not None
            assert values.grad is not None
            self._pass.backward(logits.grad.masked_fill(~seen[2], 0.0), values.grad)
            for name, value in of_tile.items():
                terms[name] += share * value
        self._pass.set_gradients()
        return dict(terms) if losses is None else losses.terms()

    def _compiled_loss(self, part: Experience, context: _UpdateContext) -> ClippedLoss | None:
        """The loss of a minibatch in compiled code; None: it has terms that only torch computes."""
        s, exploration = self.settings, context.exploration
        if self.objective == "kl_limited" or s.kl_penalty or context.start_weight:
            return None
        weights = LossWeights(
            exploration.temperature,
            exploration.epsilon,
            s.clip_range,
            math.inf if self._value_clip is None else self._value_clip,
            self._value_weight,
            exploration.entropy_weight,
        )
        return ClippedLoss(weights, part)

    def _loss(
        self, part: Experience, logits: Tensor, values: Tensor, context: _UpdateContext
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of decisions with these logits [L, B, n] and values [L, B], and its terms."""
        s, exploration = self.settings, context.exploration
        terms: dict[str, Tensor] = {}
        policy = log_policy(logits, part.mask, exploration.temperature)
        entropy = -(policy.exp() * policy).sum(-1)
        if self.objective == "kl_limited":
            loss = towards(part.target, policy)
            with torch.no_grad():
                terms["kl"] = divergence(part.log_policy, policy)
        else:
            new = log_behaviour(policy, part.mask, part.choice, exploration.epsilon)
            change = new - part.log_prob
            loss = clipped(change, part.advantage, part.weight, s.clip_range)
            terms |= _moved(change.detach(), part.weight, s.clip_range)
        terms["policy_loss"] = loss
        if part.has_returns:
            terms["value_loss"] = self._value_loss(values, part)
            loss = loss + self._value_weight * terms["value_loss"]
        terms["entropy"] = entropy.mean()
        if exploration.entropy_weight:
            loss = loss - exploration.entropy_weight * terms["entropy"]
        if s.kl_penalty:
            loss = loss + self._penalty * divergence(part.log_policy, policy)
        if context.start_weight:
            terms["kl_to_start"] = divergence(part.start_log_policy, policy)
            loss = loss + context.start_weight * terms["kl_to_start"]
        terms["entropy_fraction"] = entropy.detach().sum() / part.most_entropy()
        return loss, {name: value.item() for name, value in terms.items()}

    def _value_loss(self, values: Tensor, part: Experience) -> Tensor:
        error = (values - part.returns) ** 2
        clip = self._value_clip
        if clip is not None:
            near = part.value + (values - part.value).clamp(-clip, clip)
            error = torch.maximum(error, (near - part.returns) ** 2)
        return error.mean()

    def _imitation_loss(self, context: _UpdateContext) -> Tensor:
        """Imitation loss of random demonstrations of one group, drawn by the groups' sizes."""
        sizes = torch.tensor([float(len(group)) for group in context.demonstrations])
        group = context.demonstrations[int(torch.multinomial(sizes, 1, generator=context.rng))]
        rows = min(self.settings.imitation_batch_size or self.settings.minibatch, len(group))
        return group.loss(self.network, torch.randint(len(group), (rows,), generator=context.rng))

    def _gradient_step(self, terms: Mapping[str, float], optimiser: torch.optim.Optimizer) -> float:
        """Take a gradient step; returns the norm of the gradient before it was bounded."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self._parameters.values(), self.settings.max_grad_norm, foreach=True
            )
        )
        if not math.isfinite(norm):
            bad = [name for name, value in terms.items() if not math.isfinite(value)]
            section = self.settings.SECTION
            raise TailraceError(
                f"PPO: the {bad[0] if bad else 'gradient'} is not finite; the last checkpoint is "
                f"sound: go on from it with a lower {section}.learning_rate, a lower "
                f"{section}.max_grad_norm or a reward with a bound"
            )
        optimiser.step()
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

    def rolled_back(self) -> None:
        """Take note that the network has the weights of an earlier update again.

        Smaller steps from now on, without the momentum of those that led astray.
        """
        self._rate = _within(self._rate * ROLLBACK_STEP, RATE_RANGE)
        self._optimiser.state.clear()

    # ---- from rollouts to experience -----------------------------------------------------------

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
        scale = (
            self.settings.advantage_normalisation
            if isinstance(self.settings, PpoSettings)
            else "raw"
        )
        parts = []
        for one in seen:
            advantages = one.advantages
            if scale == "group":
                advantages = adv.normalised(advantages, one.rollout.group)
            elif scale == "batch":
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
        """One rollout as sequences."""
        rollout, norm = one.rollout, self.network.value_norm
        length = rollout.chunk if self.network.config.memory else 1
        mask = torch.from_numpy(rollout.mask)
        empty = torch.zeros(*rollout.action.shape, 0)
        old = start = empty
        if self.settings.kl_penalty or self.objective == "kl_limited":
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
            choice=sequences(rollout.action, length).unsqueeze(-1),
            log_prob=sequences(rollout.log_prob, length).unsqueeze(-1),
            advantage=sequences(torch.from_numpy(advantages).float(), length).unsqueeze(-1),
            weight=torch.ones(length, rollout.action.size // length, 1),
            returns=sequences(normalised(one.returns), length),
            value=sequences(normalised(one.values), length),
            log_policy=sequences(old, length),
            start_log_policy=sequences(start, length),
            target=sequences(empty, length),
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
        self.network.load_tensors(_under("network.", state))
        moments = {
            name: _under(f"adam.{name}.", state) for name in ("step", "exp_avg", "exp_avg_sq")
        }
        self._optimiser.state.clear()
        for name, parameter in self._parameters.items():
            if name in moments["step"]:
                self._optimiser.state[parameter] = {
                    moment: torch.from_numpy(np.array(arrays[name]))
                    for moment, arrays in moments.items()
                }
        numbers = {name: float(value) for name, value in _under("learner.", state).items()}
        if numbers:  # those of branches had none before version 0.2
            self._penalty, self._rate = numbers["penalty"], numbers["rate"]
            self.reward_scale.restore(
                {name.removeprefix("reward_"): value for name, value in numbers.items()}
            )


def _moved(change: Tensor, weight: Tensor, clip: float) -> dict[str, Tensor]:
    """KL divergence and share of clipped ratios, from the logarithms of ratios [..., c]."""
    ratio, total = change.exp(), weight.sum().clamp(min=1e-9)
    beyond = ((ratio - 1).abs() > clip).float()
    return {
        "kl": (weight * (ratio - 1 - change)).sum() / total,
        "clip_fraction": (weight * beyond).sum() / total,
    }


def _with_start(
    group: Experience, warm_start: Network, exploration: ExplorationValues
) -> Experience:
    """Return a group with the policy of the warm start, which begins with an empty memory."""
    if group.start_log_policy.numel():
        return group
    fresh = replace(group, memory=warm_start.first_memory(len(group)))
    return replace(group, start_log_policy=log_policies(warm_start, fresh, exploration.temperature))


def _under(prefix: str, state: Mapping[str, Array]) -> dict[str, Array]:
    """The entries whose names begin so, without the beginning."""
    return {name.removeprefix(prefix): a for name, a in state.items() if name.startswith(prefix)}


def _annealed(weight: float, update: int, updates: int) -> float:
    """Linear from ``weight`` at update 0 to nothing at update ``updates`` and after."""
    return weight * max(0.0, 1 - update / updates)


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
