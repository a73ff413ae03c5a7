"""The network's forward and backward pass for training, faster than torch's own.

The same function of the same weights as ``policy.learned.network.Network``, without memory:
matrix products are torch's, and what lies between them is compiled
(learn/improve/fused_kernels.py). The tests hold values and gradients to the network's. With torch's
own pass a whole PPO update takes 1.8 times the CPU time, and so it does with torch.compile's
(docs/results/bench_passes.json).
"""

import math
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from tailrace.learn.improve import fused_kernels as kernels
from tailrace.policy.learned.network import Head, Network, Trunk

_numba: Any = numba
#: Interpreted, the kernels would be far slower than torch.
COMPILED = not _numba.config.DISABLE_JIT


def forward(
    network: Network, replica_obs: Tensor, request_obs: Tensor, mask: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits [B, n] and values [B], as the network itself does."""
    norms = (network.replica_norm, network.request_norm)
    mean, std = (torch.cat([getattr(norm, name) for norm in norms]) for name in ("mean", "std"))
    given = (replica_obs.contiguous(), request_obs.contiguous(), mask.contiguous(), mean, std)
    rows = _embed(network.actor, given)
    scorer = _weights(network.scorer)
    if network.critic is None:
        both: Any = _apply(_ScoresAndPool, rows, given[2], *scorer)
        scores, pooled = both
    else:
        scores = _apply(_Scores, rows, *scorer)
        pooled = _apply(_Pool, _embed(network.critic, given), given[2])
    logits = scores.view(mask.shape)
    if network.config.prior:
        if prior is None:
            raise ValueError(f"this network needs the scores of its prior {network.config.prior}")
        logits = logits - network.config.prior_weight * prior
    logits = logits.masked_fill(~mask, -torch.inf)
    return logits, _apply(_Scores, pooled, *_weights(network.value_head))


def choices(
    logits: Tensor, mask: Tensor, choice: Tensor, temperature: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [..., c] of choices and the entropy [...] of their policies.

    ``logits`` and ``mask`` [..., n]. The same as ``experience.log_policy`` and ``log_behaviour``
    and the entropy of the former, in one pass each way.
    """
    flat = (tensor.flatten(0, -2).contiguous() for tensor in (logits, mask, choice))
    found: tuple[Tensor, Tensor] = _Choices.apply(*flat, temperature, epsilon)  # type: ignore[no-untyped-call]
    return found[0].view(choice.shape), found[1].view(choice.shape[:-1])


def _apply(function: Any, *given: Any) -> Tensor:
    """Call a function with a gradient of its own; torch does not say what that returns."""
    out: Tensor = function.apply(*given)
    return out


def _embed(trunk: Trunk, given: tuple[Tensor, ...]) -> Tensor:
    weights = (
        *(trunk.input.weight, trunk.input.bias, trunk.norm.weight, trunk.norm.bias),
        *(trunk.hidden.weight, trunk.hidden.bias),
        *(trunk.query.weight, trunk.key.weight, trunk.value.weight, trunk.output.weight),
    )
    return _apply(_Embedding, trunk.heads, *given, *weights)


def _weights(head: Head) -> tuple[Tensor, ...]:
    return head.hidden.weight, head.hidden.bias, head.output.weight, head.output.bias


class _Embedding(torch.autograd.Function):
    """A trunk: [B, n, F], [B, G] and [B, n] to rows [B n, hidden]."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: int,
        x: Tensor,
        g: Tensor,
        mask: Tensor,
        mean: Tensor,
        std: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        first, first_bias, gain, bias, second, second_bias, query, key, value, output = weights
        states, n, features = x.shape
        scaled = first / std  # the normaliser is multiplied in
        shared = torch.addmm(first_bias - scaled @ mean, g, scaled[:, features:].T)
        normal = x.view(states * n, features) @ scaled[:, :features].T
        h1, slope1 = torch.empty_like(normal), torch.empty_like(normal)
        scale = torch.empty(len(normal))
        kernels.first_layer(*_arrays(normal, shared, gain, bias, h1, slope1, scale))
        rows, h2, slope2 = h1 @ second.T, torch.empty_like(normal), torch.empty_like(normal)
        kernels.hidden_layer(*_arrays(rows, second_bias, h2, slope2))
        scaled_query = query / math.sqrt(len(query) / heads)
        projection = torch.cat([_padded(part, heads) for part in (scaled_query, key, value)])
        output = _padded(output.T, heads).T
        projected = h2 @ projection.T
        attention = torch.empty(states * heads * n * n)
        mixed = torch.empty(states * n, output.shape[1])
        kernels.attend(*_arrays(projected.view(-1), mask, attention, mixed.view(-1)), heads)
        ctx.heads, ctx.head_size = heads, len(query) // heads
        ctx.kept = (x, g, mean, std, normal, scale, h1, slope1, h2, slope2, projection, projected)
        ctx.kept += (attention, mixed, gain, second, output)
        return rows.addmm_(mixed, output.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, g, mean, std, normal, scale, h1, slope1, h2, slope2, projection, projected = ctx.kept[
            :12
        ]
        attention, mixed, gain, second, output = ctx.kept[12:]
        grad = grad.contiguous()
        states, n, features = x.shape
        heads, size = ctx.heads, ctx.head_size
        of_projected = torch.empty_like(projected)
        flat = (tensor.view(-1) for tensor in (grad @ output, projected, attention, of_projected))
        kernels.attend_back(*_arrays(*flat, torch.empty(n, n)), heads)
        of_projection = (of_projected.T @ h2).split(mixed.shape[1])
        of_query, of_key, of_value = (_unpadded(part, heads, size) for part in of_projection)
        of_h2 = of_projected @ projection
        of_second_bias, of_gain, of_bias = torch.zeros(3, gain.numel())
        kernels.hidden_layer_back(*_arrays(of_h2, grad, slope2, of_second_bias))
        of_rows = of_h2 @ second
        of_shared = torch.empty(states, gain.numel())
        kernels.first_layer_back(
            *_arrays(of_rows, slope1, normal, scale, gain, of_gain, of_bias, of_shared)
        )
        # This way round, since torch takes half as long again for an odd number of columns.
        of_scaled = torch.cat([x.view(states * n, features).T @ of_rows, g.T @ of_shared]).T
        of_first_bias = of_shared.sum(0)
        return (
            *(None, None, None, None, None, None),
            (of_scaled - of_first_bias[:, None] * mean) / std,
            of_first_bias,
            of_gain,
            of_bias,
            of_h2.T @ h1,
            of_second_bias,
            of_query / math.sqrt(size),
            of_key,
            of_value,
            _unpadded(mixed.T @ grad, heads, size).T,
        )


def _padded(weight: Tensor, heads: int) -> Tensor:
    """Fill each head's rows of a weight [heads x size, k] up to a multiple of LANES with zeros."""
    missing = -(len(weight) // heads) % kernels.LANES
    if not missing:
        return weight
    return fn.pad(weight.reshape(heads, -1, weight.shape[1]), (0, 0, 0, missing)).flatten(0, 1)


def _unpadded(weight: Tensor, heads: int, size: int) -> Tensor:
    """Undo :func:`_padded`, for heads of ``size`` rows."""
    if len(weight) == heads * size:
        return weight
    return weight.view(heads, -1, weight.shape[1])[:, :size].flatten(0, 1)


class _Scores(torch.autograd.Function):
    """A head: [K, inputs] to [K]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, last: Tensor, last_bias: Tensor
    ) -> Tensor:
        rows, out = x @ weight.T, torch.empty(len(x))
        hidden, slope = torch.empty_like(rows), torch.empty_like(rows)
        kernels.weigh(*_arrays(rows, bias, hidden, slope, last.view(-1), last_bias, out))
        ctx.kept = (x, weight, last, hidden, slope)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, last, hidden, slope = ctx.kept
        grad = grad.contiguous()
        of_last, of_bias = torch.zeros(2, hidden.shape[1])
        kernels.weigh_back(*_arrays(grad, hidden, slope, last.view(-1), of_last, of_bias))
        return slope @ weight, slope.T @ x, of_bias, of_last.view_as(last), grad.sum().view(1)


class _Pool(torch.autograd.Function):
    """Rows [B n, k] to the mean and the maximum of each state's available ones, [B, 2 k]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mask: Tensor) -> Tensor:
        states, size = len(mask), rows.shape[1]
        pooled = torch.empty(states, 2 * size)
        highest = torch.empty(states, size)
        kernels.pool(*_arrays(rows, mask, pooled, highest))
        ctx.kept = (mask, highest)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, highest = ctx.kept
        rows_grad = torch.zeros(mask.numel(), highest.shape[1])
        kernels.pool_back(*_arrays(grad.contiguous(), mask, highest, rows_grad))
        return rows_grad, None


class _ScoresAndPool(torch.autograd.Function):
    """Both of the same rows; torch would need one more pass to add up what comes back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mask: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.scores, ctx.pool = SimpleNamespace(), SimpleNamespace()
        return _Scores.forward(ctx.scores, rows, *weights), _Pool.forward(ctx.pool, rows, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, *of_weights = _Scores.backward(ctx.scores, grads[0])
        kernels.pool_back(*_arrays(grads[1].contiguous(), *ctx.pool.kept, of_rows))
        return of_rows, None, *of_weights


class _Choices(torch.autograd.Function):
    """Logits [K, n], mask and choices [K, c] to log-probabilities [K, c] and entropies [K]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, mask: Tensor, choice: Tensor, temperature: float, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        policy, log_policy = torch.empty_like(logits), torch.empty_like(logits)
        log_prob, entropy = torch.empty(choice.shape), torch.empty(len(logits))
        ctx.settings = (np.float32(1 / temperature), np.float32(epsilon))
        ctx.kept = (mask, choice, policy, log_policy)
        given, found = _arrays(logits, mask, choice), _arrays(policy, log_policy, log_prob, entropy)
        kernels.choose(*given, *ctx.settings, *found)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask, choice, policy, log_policy = ctx.kept
        of_log_prob, of_entropy = (grad.contiguous() for grad in grads)
        of_logits = torch.empty_like(policy)
        given = _arrays(of_log_prob, of_entropy, mask, choice)
        kernels.choose_back(*given, *ctx.settings, *_arrays(policy, log_policy, of_logits))
        return of_logits, None, None, None, None


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """The same memory as NumPy arrays."""
    return tuple(tensor.detach().numpy() for tensor in tensors)
