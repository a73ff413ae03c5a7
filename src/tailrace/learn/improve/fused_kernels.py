# mypy: disallow-untyped-defs=False
"""The parts of the network between its matrix products, forwards and backwards, in compiled code.

Torch does these as dozens of passes over memory; here each is one. All arrays are float32 and
contiguous: ``rows`` [M, k] are the replicas of ``B`` states one after the other, ``M = B n``. A
function named ``..._back`` turns the gradient of a result into that of what it was made of.
"""

import numpy as np

from tailrace.compiled import vectorised
from tailrace.policy.learned.inference import (
    GELU_CUBE,
    GELU_SCALE,
    HALF,
    LAYER_NORM_EPS,
    ONE,
    _tanh,
    f32,
)

THREE = f32(3.0)


@vectorised
def _gelu(v):
    """GELU and its derivative."""
    square = v * v
    t = _tanh(GELU_SCALE * (v + GELU_CUBE * v * square))
    up = HALF * (ONE + t)
    slope = up + HALF * v * (ONE - t * t) * GELU_SCALE * (ONE + THREE * GELU_CUBE * square)
    return v * up, slope


@vectorised
def hidden_layer(rows, bias, y, slope):
    """Fill ``y`` with GELU of ``rows`` + ``bias`` [k] and ``slope`` with its derivative, [M, k]."""
    for i in range(rows.shape[0]):
        row, out, d = rows[i], y[i], slope[i]
        for k in range(row.size):
            out[k], d[k] = _gelu(row[k] + bias[k])


@vectorised
def first_layer(rows, shared, gain, bias, y, slope, scale):
    """LayerNorm and GELU of ``rows`` + ``shared``, which is the same for the rows of a state.

    ``rows`` [M, k] becomes what the norm made before gain and bias, ``scale`` [M] its divisor's
    inverse; ``y`` and ``slope`` [M, k] are the result and the GELU's derivative.
    """
    n = rows.shape[0] // shared.shape[0]
    size = rows.shape[1]
    for i in range(rows.shape[0]):
        row, of_state, out, d = rows[i], shared[i // n], y[i], slope[i]
        total = f32(0)
        for k in range(size):
            row[k] += of_state[k]
            total += row[k]
        mean = total / f32(size)
        squares = f32(0)
        for k in range(size):
            row[k] -= mean
            squares += row[k] * row[k]
        inverse = ONE / np.sqrt(squares / f32(size) + LAYER_NORM_EPS)
        scale[i] = inverse
        for k in range(size):
            row[k] *= inverse
            out[k], d[k] = _gelu(row[k] * gain[k] + bias[k])


@vectorised
def first_layer_back(grad, slope, normal, scale, gain, gain_grad, bias_grad, shared_grad):
    """``grad`` [M, k] of the result becomes that of the rows; the others are added to.

    ``shared_grad`` [B, k] is set.
    """
    n = grad.shape[0] // shared_grad.shape[0]
    size = grad.shape[1]
    shared_grad[:, :] = f32(0)
    for i in range(grad.shape[0]):
        row, d, x, of_state = grad[i], slope[i], normal[i], shared_grad[i // n]
        total, along = f32(0), f32(0)
        for k in range(size):
            v = row[k] * d[k]
            gain_grad[k] += v * x[k]
            bias_grad[k] += v
            v *= gain[k]
            row[k] = v
            total += v
            along += v * x[k]
        mean, share = total / f32(size), along / f32(size)
        for k in range(size):
            row[k] = scale[i] * (row[k] - mean - x[k] * share)
            of_state[k] += row[k]


@vectorised
def hidden_layer_back(grad, slope, bias_grad):
    """``grad`` [M, k] of a GELU's result becomes that of its input, summed into ``bias_grad``."""
    for i in range(grad.shape[0]):
        row, d = grad[i], slope[i]
        for k in range(row.size):
            row[k] *= d[k]
            bias_grad[k] += row[k]


@vectorised
def attend(projected, mask, weights, mixed):
    """Let every replica look at the available ones.

    ``projected`` [M, 3 A] holds queries (already scaled), keys and values, ``mask`` [B, n];
    fills ``weights`` [B, heads, n, n] and ``mixed`` [M, A].
    """
    states, heads, n = weights.shape[0], weights.shape[1], weights.shape[2]
    width = mixed.shape[1]
    size = width // heads
    for b in range(states):
        for i in range(n):
            for h in range(heads):
                at = h * size
                query = projected[b * n + i, at : at + size]
                w = weights[b, h, i]
                _softmax_of_products(projected, mask[b], query, b * n, width + at, w)
                out = mixed[b * n + i, at : at + size]
                for k in range(size):
                    out[k] = f32(0)
                for j in range(n):
                    start = 2 * width + at
                    value = projected[b * n + j, start : start + size]
                    for k in range(size):
                        out[k] += w[j] * value[k]


@vectorised
def _softmax_of_products(projected, mask, query, first, at, w):
    """Attention ``w`` [n] of a query to the keys; 0 where masked, or everywhere without any."""
    most = f32(-np.inf)
    for j in range(w.size):
        key = projected[first + j, at : at + query.size]
        total = f32(0)
        for k in range(query.size):
            total += query[k] * key[k]
        w[j] = total
        if mask[j]:
            most = max(most, total)
    total = f32(0)
    for j in range(w.size):
        w[j] = np.exp(w[j] - most) if mask[j] else f32(0)
        total += w[j]
    for j in range(w.size):
        w[j] /= max(total, ONE)


@vectorised
def attend_back(grad, projected, weights, projected_grad, scratch):
    """From ``grad`` [M, A] of what was mixed to ``projected_grad`` [M, 3 A], which is set.

    ``scratch`` [n] is working memory.
    """
    states, heads, n = weights.shape[0], weights.shape[1], weights.shape[2]
    width = grad.shape[1]
    size = width // heads
    projected_grad[:, :] = f32(0)
    for b in range(states):
        for i in range(n):
            row = b * n + i
            for h in range(heads):
                at = h * size
                g = grad[row, at : at + size]
                w = weights[b, h, i]
                mean = f32(0)
                for j in range(n):
                    start = 2 * width + at
                    value = projected[b * n + j, start : start + size]
                    value_grad = projected_grad[b * n + j, start : start + size]
                    total = f32(0)
                    for k in range(size):
                        total += g[k] * value[k]
                        value_grad[k] += w[j] * g[k]
                    scratch[j] = total
                    mean += w[j] * total
                query = projected[row, at : at + size]
                query_grad = projected_grad[row, at : at + size]
                for j in range(n):
                    d = w[j] * (scratch[j] - mean)
                    start = width + at
                    key = projected[b * n + j, start : start + size]
                    key_grad = projected_grad[b * n + j, start : start + size]
                    for k in range(size):
                        query_grad[k] += d * key[k]
                        key_grad[k] += d * query[k]


@vectorised
def weigh(rows, bias, hidden, slope, weight, last_bias, out):
    """Both layers of a head behind the product: ``rows`` [K, s] to one number ``out`` [K]."""
    for i in range(rows.shape[0]):
        row, y, d = rows[i], hidden[i], slope[i]
        total = last_bias[0]
        for k in range(row.size):
            y[k], d[k] = _gelu(row[k] + bias[k])
            total += y[k] * weight[k]
        out[i] = total


@vectorised
def weigh_back(grad, hidden, slope, weight, weight_grad, bias_grad):
    """From ``grad`` [K] to that of the hidden layer, in place of ``slope`` [K, s].

    The gradients of the last weights and of the hidden layer's bias are added to.
    """
    for i in range(grad.size):
        row, d, g = hidden[i], slope[i], grad[i]
        for k in range(row.size):
            weight_grad[k] += g * row[k]
            d[k] *= g * weight[k]
            bias_grad[k] += d[k]


@vectorised
def pool(rows, mask, pooled, highest):
    """Mean and maximum over the available replicas: ``pooled`` [B, 2 k]; 0 without any.

    ``highest`` [B, k] says which row the maximum comes from, -1: none. One short loop each, since
    LLVM makes vector instructions of these, but not of one loop for all three.
    """
    states, n = mask.shape
    size = rows.shape[1]
    for b in range(states):
        mean, most, which = pooled[b, :size], pooled[b, size:], highest[b]
        pooled[b, :] = f32(0)
        which[:] = f32(-1)
        count = f32(0)
        for i in range(n):
            if not mask[b, i]:
                continue
            row, number, none_yet = rows[b * n + i], f32(i), count == 0
            for k in range(size):
                mean[k] += row[k]
            for k in range(size):
                which[k] = number if none_yet or row[k] > most[k] else which[k]
            for k in range(size):
                most[k] = row[k] if none_yet or row[k] > most[k] else most[k]
            count += ONE
        share = ONE / max(count, ONE)
        for k in range(size):
            mean[k] *= share


@vectorised
def pool_back(grad, mask, highest, rows_grad):
    """From ``grad`` [B, 2 k] to ``rows_grad`` [M, k], which is set."""
    states, n = mask.shape
    size = rows_grad.shape[1]
    for b in range(states):
        count = f32(0)
        for i in range(n):
            count += ONE if mask[b, i] else f32(0)
        of_mean, of_most, which = grad[b, :size], grad[b, size:], highest[b]
        for i in range(n):
            row, number = rows_grad[b * n + i], f32(i)
            share = ONE / count if mask[b, i] else f32(0)
            for k in range(size):
                row[k] = share * of_mean[k] + (of_most[k] if which[k] == number else f32(0))
