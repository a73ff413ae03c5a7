"""The network's forward and backward pass for training, faster than torch's own.

The same function of the same weights as ``policy.learned.network.Network``, without memory:
matrix products are torch's, and what lies between them is compiled
(learn/improve/fused_kernels.py). The tests hold values and gradients to the network's. With torch's
own pass a whole PPO update takes 1.6 times the CPU time, and with torch.compile's 1.7 times
(docs/results/bench_passes.json).
"""

import math
from typing import Any

import numba
import torch
from torch import Tensor

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
    logits = _apply(_Scores, rows, *_weights(network.scorer)).view(mask.shape)
    if network.config.prior:
        if prior is None:
            raise ValueError(f"this network needs the scores of its prior {network.config.prior}")
        logits = logits - network.config.prior_weight * prior
    logits = logits.masked_fill(~mask, -torch.inf)
    of_value = rows if network.critic is None else _embed(network.critic, given)
    pooled = _apply(_Pool, of_value, given[2])
    return logits, _apply(_Scores, pooled, *_weights(network.value_head))


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
        h2, slope2 = torch.empty_like(normal), torch.empty_like(normal)
        kernels.hidden_layer(*_arrays(h1 @ second.T, second_bias, h2, slope2))
        projection = torch.cat([query / math.sqrt(len(query) / heads), key, value])
        projected = h2 @ projection.T
        attention = torch.empty(states, heads, n, n)
        mixed = torch.empty(states * n, len(query))
        kernels.attend(*_arrays(projected, mask, attention, mixed))
        ctx.kept = (x, g, mean, std, normal, scale, h1, slope1, h2, slope2, projection, projected)
        ctx.kept += (attention, mixed, gain, second, output)
        return torch.addmm(h2, mixed, output.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, g, mean, std, normal, scale, h1, slope1, h2, slope2, projection, projected = ctx.kept[
            :12
        ]
        attention, mixed, gain, second, output = ctx.kept[12:]
        grad = grad.contiguous()
        states, n, features = x.shape
        heads, width = attention.shape[1], mixed.shape[1]
        of_projected = torch.empty_like(projected)
        kernels.attend_back(
            *_arrays(grad @ output, projected, attention, of_projected, torch.empty(n))
        )
        of_projection = of_projected.T @ h2
        of_query, of_key, of_value = of_projection.split(width)
        of_h2 = torch.addmm(grad, of_projected, projection)
        of_second_bias, of_gain, of_bias = torch.zeros(3, gain.numel())
        kernels.hidden_layer_back(*_arrays(of_h2, slope2, of_second_bias))
        of_rows = of_h2 @ second
        of_shared = torch.empty(states, gain.numel())
        kernels.first_layer_back(
            *_arrays(of_rows, slope1, normal, scale, gain, of_gain, of_bias, of_shared)
        )
        of_scaled = torch.cat([of_rows.T @ x.view(states * n, features), of_shared.T @ g], 1)
        of_first_bias = of_shared.sum(0)
        return (
            *(None, None, None, None, None, None),
            (of_scaled - of_first_bias[:, None] * mean) / std,
            of_first_bias,
            of_gain,
            of_bias,
            of_h2.T @ h1,
            of_second_bias,
            of_query / math.sqrt(width / heads),
            of_key,
            of_value,
            grad.T @ mixed,
        )


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
        rows_grad = torch.empty(mask.numel(), highest.shape[1])
        kernels.pool_back(*_arrays(grad.contiguous(), mask, highest, rows_grad))
        return rows_grad, None


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """The same memory as NumPy arrays."""
    return tuple(tensor.detach().numpy() for tensor in tensors)
