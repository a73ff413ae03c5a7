"""The trainable network of a learned policy (needs torch, extra ``train``).

Every replica is encoded by the same weights, attends to the others in one attention block, and gets
one logit, so the number and order of replicas do not matter. Shapes: ``B`` states, ``n``
replicas (rows beyond a smaller cluster are masked), ``F`` features per replica, ``G`` of the
request and the cluster, ``M`` units of memory, ``T`` decisions in a row.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as fn

from tailrace.policy.learned.architecture import FEATURE_NAMES, SKETCH, STD_FLOOR, NetworkConfig

#: A masked replica's attention score: finite, so that a state without any replica gives no NaN.
NOT_ATTENDED = -1e9
HIDDEN_VARIANCE = 1e30
HIDDEN_GAIN, LOGIT_GAIN, VALUE_GAIN = math.sqrt(2), 0.01, 1.0


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as the compiled forward pass has it."""
    return fn.gelu(x, approximate="tanh")


class RunningNorm(nn.Module):
    """Running mean and variance of ``size`` numbers, kept with the weights."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Merge values [k, size] into the moments of all values seen so far."""
        if values.shape[0] == 0:
            return
        var, mean = torch.var_mean(values.double(), dim=0, correction=0)
        count = self.count.double()
        total = count + values.shape[0]
        share = values.shape[0] / total
        shift = mean - self.mean
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * shift**2)
        self.mean.copy_(self.mean + share * shift)
        self.count.copy_(total)

    @property
    def std(self) -> Tensor:
        """Standard deviation [size], bounded below."""
        return self.var.sqrt().clamp(min=STD_FLOOR)

    def normalise(self, values: Tensor) -> Tensor:
        """Shift and scale to mean 0 and deviation 1."""
        return (values - self.mean) / self.std

    def denormalise(self, values: Tensor) -> Tensor:
        """Undo :meth:`normalise`."""
        return values * self.std + self.mean


class Trunk(nn.Module):
    """Embeds every replica, with attention to the others."""

    def __init__(self, inputs: int, config: NetworkConfig) -> None:
        super().__init__()
        hidden, attention = config.hidden, config.attention
        self.heads = config.heads
        self.input = linear(inputs, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.hidden = linear(hidden, hidden)
        self.query = linear(hidden, attention, 1.0, bias=False)
        self.key = linear(hidden, attention, 1.0, bias=False)
        self.value = linear(hidden, attention, 1.0, bias=False)
        self.output = linear(attention, hidden, 1.0, bias=False)

    def forward(self, x: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings [B, n, hidden] and attention weights [B, heads, n, n]."""
        features = x.shape[-1]
        # The request's part of the first layer is the same for all replicas: computed once.
        weight = self.input.weight
        of_request = fn.linear(g, weight[:, features:], self.input.bias)
        h = fn.linear(x, weight[:, :features]) + of_request.unsqueeze(-2)
        h = gelu(self.hidden(gelu(self.norm(h))))
        query, key, value = (self._split(part(h)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~mask[:, None, None, :], NOT_ATTENDED).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        return h + self.output(mixed), weights

    def _split(self, rows: Tensor) -> Tensor:
        """[B, n, attention] to [B, heads, n, attention / heads]."""
        split: Tensor = rows.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)


class Head(nn.Module):
    """One hidden layer and one output."""

    def __init__(self, inputs: int, hidden: int, gain: float) -> None:
        super().__init__()
        self.hidden = linear(inputs, hidden)
        self.output = linear(hidden, 1, gain)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [...]."""
        out: Tensor = self.output(gelu(self.hidden(x)))
        return out.squeeze(-1)


class Network(nn.Module):
    """Logits of all replicas and the value of the state, from observations.

    The value is that of normalised returns; callers convert it with ``value_norm``.
    """

    def __init__(self, config: NetworkConfig, features: int, globals_: int) -> None:
        super().__init__()
        self.config = config
        self.features, self.globals_ = features, globals_
        self.replica_norm = RunningNorm(features)
        self.request_norm = RunningNorm(globals_)
        self.value_norm = RunningNorm(1)
        inputs, hidden, memory = features + globals_, config.hidden, config.memory
        self.actor = Trunk(inputs, config)
        self.critic = Trunk(inputs, config) if config.decoupled_critic else None
        self.gru = nn.GRUCell(hidden, memory) if memory else None
        own = config.critic_memory
        self.critic_gru = nn.GRUCell(hidden, own) if own else None
        # With a prior the residual starts at zero: an untrained network plays the rule.
        gain = 0.0 if config.prior else LOGIT_GAIN
        self.scorer = Head(hidden + memory, config.scorer_hidden, gain)
        self.value_head = Head(2 * hidden + (own or memory), config.value_hidden, VALUE_GAIN)
        self._hide_ignored()

    def update_norms(self, replica_obs: Tensor, request_obs: Tensor, mask: Tensor) -> None:
        """Update the normalisers with observations [B, n, F], [B, G], but for masked replicas."""
        self.replica_norm.update(replica_obs[mask])
        self.request_norm.update(request_obs)
        self._hide_ignored()

    @torch.no_grad()
    def learn_new_norms(self, replicas: Tensor, requests: Tensor) -> None:
        """Normalise features that vary for the first time by observations [K, F] and [B, G].

        Their weights become 0: those of a feature that never varied are chance, multiplied by the
        small deviation. Decisions stay as they were where such a feature is as it always was.
        """
        parts = (
            (self.replica_norm, replicas, 0),
            (self.request_norm, requests, self.features),
        )
        for norm, values, first in parts:
            var, mean = torch.var_mean(values.double(), dim=0, correction=0)
            new = (norm.var < STD_FLOOR**2) & (var >= STD_FLOOR**2)
            norm.var[new], norm.mean[new] = var[new].float(), mean[new].float()
            for trunk in (self.actor, self.critic):
                if trunk is not None:
                    trunk.input.weight[:, first : first + new.numel()][:, new] = 0.0
        self._hide_ignored()

    def _hide_ignored(self) -> None:
        """Give ignored features a variance so large that they normalise to nothing."""
        for name in self.config.ignore:
            k = FEATURE_NAMES.index(name)
            norm = self.replica_norm if k < self.features else self.request_norm
            norm.var[k if k < self.features else k - self.features] = HIDDEN_VARIANCE

    def first_memory(self, batch: int) -> Tensor:
        """Return the memory [B, M] at the start of an episode, that of the value at its end."""
        return torch.zeros(batch, self.config.memory + self.config.critic_memory)

    def critic_memories(
        self, replica_obs: Tensor, request_obs: Tensor, mask: Tensor, starts: Tensor
    ) -> Tensor:
        """Return the value's own memory [T + 1, B, m] before each of T decisions and after them.

        It begins empty, and is emptied where an episode ``starts`` [T, B].
        """
        assert self.critic is not None
        assert self.critic_gru is not None
        steps, batch = mask.shape[:2]
        x, g = self._normalised(replica_obs.flatten(0, 1), request_obs.flatten(0, 1))
        flat_mask = mask.flatten(0, 1)
        pooled = masked_mean(self.critic(x, g, flat_mask)[0], flat_mask)
        memories = [torch.zeros(batch, self.config.critic_memory)]
        for t, seen in enumerate(pooled.unflatten(0, (steps, batch))):
            memories.append(self.critic_gru(seen, memories[-1] * (~starts[t])[:, None]))
        return torch.stack(memories)

    def forward(
        self, replica_obs: Tensor, request_obs: Tensor, mask: Tensor, prior: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, n], -inf where ``mask`` [B, n] is false, and values [B].

        ``replica_obs`` [B, n, F], ``request_obs`` [B, G], ``prior`` [B, n] standardised scores of
        the rule. The memory, if any, starts empty; see :meth:`step`.
        """
        memory = self.first_memory(len(mask))
        logits, value, _ = self.step(replica_obs, request_obs, mask, memory, prior)
        return logits, value

    def step(
        self,
        replica_obs: Tensor,
        request_obs: Tensor,
        mask: Tensor,
        memory: Tensor,
        prior: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like :meth:`forward`, from a memory [B, M]; return logits, values and the next memory."""
        h, pooled, h_value = self._embed(replica_obs, request_obs, mask)
        if self.gru is not None:
            memory = self._remember(pooled, masked_mean(h_value, mask), memory)
        return *self._heads(h, h_value, mask, memory, prior), memory

    def _remember(self, pooled: Tensor, pooled_value: Tensor, memory: Tensor) -> Tensor:
        """Return the memory [B, M] after a decision."""
        assert self.gru is not None
        if self.critic_gru is None:
            after: Tensor = self.gru(pooled, memory)
            return after
        units = self.config.memory
        if memory.shape[1] == units:  # of a policy that only acts: the value begins here
            memory = torch.cat(
                [memory, memory.new_zeros(len(memory), self.config.critic_memory)], 1
            )
        acting, own = memory[:, :units], memory[:, units:]
        return torch.cat([self.gru(pooled, acting), self.critic_gru(pooled_value, own)], 1)

    def sequence(
        self,
        replica_obs: Tensor,
        request_obs: Tensor,
        mask: Tensor,
        memory: Tensor,
        starts: Tensor,
        prior: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like :meth:`step`, over T decisions in a row, from observations [T, B, ...].

        ``memory`` [B, M] is that before the first one. ``starts`` [T, B] is true where an episode
        begins: the memory is emptied before that decision. Returns logits [T, B, n], values [T, B]
        and the memory after the last.
        """
        steps, batch = mask.shape[:2]
        flat_mask = mask.flatten(0, 1)
        h, pooled, h_value = self._embed(
            replica_obs.flatten(0, 1), request_obs.flatten(0, 1), flat_mask
        )
        memories = memory.expand(steps, *memory.shape)
        if self.gru is not None:
            states = []
            parts = (pooled, masked_mean(h_value, flat_mask))
            seen = zip(*(part.unflatten(0, (steps, batch)) for part in parts), strict=True)
            for t, (acting, own) in enumerate(seen):
                memory = self._remember(acting, own, memory * (~starts[t])[:, None])
                states.append(memory)
            memories = torch.stack(states)
        flat_prior = None if prior is None else prior.flatten(0, 1)
        logits, value = self._heads(h, h_value, flat_mask, memories.flatten(0, 1), flat_prior)
        return logits.unflatten(0, (steps, batch)), value.unflatten(0, (steps, batch)), memory

    def attention(self, replica_obs: Tensor, request_obs: Tensor, mask: Tensor) -> Tensor:
        """Return the attention of each replica to each other, [B, heads, n, n]; rows sum to 1."""
        x, g = self._normalised(replica_obs, request_obs)
        weights: Tensor = self.actor(x, g, mask)[1]
        return weights

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all weights and normalisers as NumPy arrays, for a checkpoint."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self._named()}

    def load_tensors(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        """Load weights and normalisers of a network of the same shape.

        A sketch is left out: the finished policy gets a new one.
        """
        kept = {name: torch.tensor(value) for name, value in tensors.items() if name != SKETCH}
        self.load_state_dict(kept)

    def _named(self) -> list[tuple[str, Tensor]]:
        return list(self.state_dict().items())

    def _normalised(self, replica_obs: Tensor, request_obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.replica_norm.normalise(replica_obs), self.request_norm.normalise(request_obs)

    def _embed(
        self, replica_obs: Tensor, request_obs: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings [B, n, hidden] for the scorer, their mean, and those for the value."""
        x, g = self._normalised(replica_obs, request_obs)
        h, _ = self.actor(x, g, mask)
        h_value = h if self.critic is None else self.critic(x, g, mask)[0]
        return h, masked_mean(h, mask), h_value

    def _heads(
        self, h: Tensor, h_value: Tensor, mask: Tensor, memory: Tensor, prior: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        units = self.config.memory
        own = memory[:, units:] if self.critic_gru is not None else memory
        repeated = memory[:, :units].unsqueeze(1).expand(-1, h.shape[1], -1)
        logits = self.scorer(torch.cat([h, repeated], -1))
        if self.config.prior:
            if prior is None:
                raise ValueError(f"this network needs the scores of its prior {self.config.prior}")
            logits = logits - self.config.prior_weight * prior
        logits = logits.masked_fill(~mask, -torch.inf)
        pooled = torch.cat([masked_mean(h_value, mask), masked_max(h_value, mask), own], -1)
        return logits, self.value_head(pooled)


def masked_mean(h: Tensor, mask: Tensor) -> Tensor:
    """Mean [B, k] of the rows [B, n, k] where the mask [B, n] is true; 0 without any."""
    weights = mask.unsqueeze(-1).to(h.dtype)
    return (h * weights).sum(1) / weights.sum(1).clamp(min=1)


def masked_max(h: Tensor, mask: Tensor) -> Tensor:
    """Maximum [B, k] of the rows [B, n, k] where the mask [B, n] is true; 0 without any."""
    most = h.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
    return torch.where(mask.any(1, keepdim=True), most, 0.0)


def linear(inputs: int, outputs: int, gain: float = HIDDEN_GAIN, bias: bool = True) -> nn.Linear:
    """Return a linear layer with orthogonal weights of this gain and zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.orthogonal_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
