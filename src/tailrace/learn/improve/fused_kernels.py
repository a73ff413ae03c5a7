# mypy: disallow-untyped-defs=False
"""The parts of the network between its matrix products, forwards and backwards, in compiled code.

Torch does these as dozens of passes over memory; here each is one. All arrays are float32 and
contiguous: ``rows`` [M, k] are the replicas of ``B`` states one after the other, ``M = B n``. A
function named ``..._back`` turns the gradient of a result into that of what it was made of.
"""

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tailrace.compiled import vectorised
from tailrace.policy.learned.inference import (
    GELU_CUBE,
    GELU_SCALE,
    HALF,
    LAYER_NORM_EPS,
    LEAST,
    ONE,
    _exp,
    _tanh,
    f32,
)

_numba: Any = numba

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
    """GELU of ``rows`` + ``bias`` [k], in place of ``rows`` and in ``y``; all [M, k].

    ``slope`` is filled with its derivative.
    """
    for i in range(rows.shape[0]):
        row, out, d = rows[i], y[i], slope[i]
        for k in range(row.size):
            row[k], d[k] = _gelu(row[k] + bias[k])
            out[k] = row[k]


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
def hidden_layer_back(grad, more, slope, bias_grad):
    """``grad`` + ``more`` [M, k] of a GELU's result become ``grad`` of its input.

    Its sum is added to ``bias_grad`` [k].
    """
    for i in range(grad.shape[0]):
        row, other, d = grad[i], more[i], slope[i]
        for k in range(row.size):
            row[k] = (row[k] + other[k]) * d[k]
            bias_grad[k] += row[k]


# ---- attention ----------------------------------------------------------------------------------

#: Numbers that the two functions below take at once; the size of a head is a multiple of it.
#: Written as LLVM code, since Numba's loops over so few numbers take more than twice as long.
LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where ``LANES`` numbers of an array begin."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer())


def _pick(builder: Any, vector: Any, lanes: Sequence[int]) -> Any:
    """The numbers of a vector at these places."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


@intrinsic
def _compiled_dot(typing, x, x_at, y, y_at):  # noqa: ARG001
    """Product of ``x`` and ``y`` [LANES], which begin at these offsets."""

    def generate(context, builder, signature, args):
        at = [_address(context, builder, signature.args[k], args[k], args[k + 1]) for k in (0, 2)]
        total = builder.fmul(*(builder.load(address, align=4) for address in at))
        half = LANES // 2
        while half:
            low, high = range(half), range(half, 2 * half)
            total = builder.fadd(_pick(builder, total, low), _pick(builder, total, high))
            half //= 2
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(x, types.int64, y, types.int64), generate


@intrinsic
def _compiled_mix(typing, out, out_at, w, w_at, w_step, rows, rows_at, rows_step, count):  # noqa: ARG001
    """Set ``out`` [LANES] to the sum of ``count`` rows, each times its weight.

    ``w_step`` and ``rows_step``: from one weight, or row, to the next.
    """

    def generate(context, builder, signature, args):
        at, w_at, w_step, rows_at, rows_step, count = (args[k] for k in (1, 3, 4, 6, 7, 8))
        weights = context.make_array(signature.args[2])(context, builder, args[2]).data
        total = cgutils.alloca_once(builder, _VECTOR)
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(w_at, builder.mul(w_step, loop.index))
            weight = builder.load(builder.gep(weights, [place]))
            first = ir.Constant(ir.IntType(32), 0)
            one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), weight, first)
            place = builder.add(rows_at, builder.mul(rows_step, loop.index))
            row = _address(context, builder, signature.args[5], args[5], place)
            product = builder.fmul(
                _pick(builder, one, [0] * LANES), builder.load(row, align=4), flags=("contract",)
            )
            builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        target = _address(context, builder, signature.args[0], args[0], at)
        builder.store(builder.load(total), target, align=4)
        return context.get_dummy_value()

    size = types.int64
    return types.void(out, size, w, size, size, rows, size, size, size), generate


def _plain_dot(x, x_at, y, y_at):
    return x[x_at : x_at + LANES] @ y[y_at : y_at + LANES]


def _plain_mix(out, out_at, w, w_at, w_step, rows, rows_at, rows_step, count):
    out[out_at : out_at + LANES] = 0
    for k in range(count):
        row = rows[rows_at + k * rows_step :][:LANES]
        out[out_at : out_at + LANES] += w[w_at + k * w_step] * row


_is_plain = _numba.config.DISABLE_JIT
_dot: Any = _plain_dot if _is_plain else _compiled_dot
_mix: Any = _plain_mix if _is_plain else _compiled_mix


@vectorised
def attend(projected, mask, weights, mixed, heads):
    """Let every replica look at the available ones.

    ``projected`` [M, 3, heads, size] holds queries (already scaled), keys and values; fills
    ``weights`` [B, heads, n, n], 0 where ``mask`` [B, n] is false, and ``mixed`` [M, heads, size].
    All but the mask are flat. ``size`` is a multiple of LANES.
    """
    states, n = mask.shape
    width = mixed.size // mask.size
    size, row, block = width // heads, 3 * width, heads * n * n
    for b in range(states):
        first = b * n * row
        for h in range(heads):
            for i in range(n):
                query, key = first + i * row + h * size, first + width + h * size
                at, most = b * block + (h * n + i) * n, LEAST
                for j in range(n):
                    score = f32(0)
                    for part in range(0, size, LANES):
                        score += _dot(projected, query + part, projected, key + j * row + part)
                    weights[at + j] = score
                    if mask[b, j]:
                        most = max(most, score)
                for j in range(n):
                    weights[at + j] -= most
        of_state = weights[b * block : (b + 1) * block]
        for k in range(block):
            of_state[k] = _exp(min(of_state[k], f32(0)))
        for h in range(heads):
            value = first + 2 * width + h * size
            for i in range(n):
                at, total = b * block + (h * n + i) * n, f32(0)
                for j in range(n):
                    if not mask[b, j]:
                        weights[at + j] = f32(0)
                    total += weights[at + j]
                scale = ONE / max(total, ONE)
                for j in range(n):
                    weights[at + j] *= scale
                out = (b * n + i) * width + h * size
                for part in range(0, size, LANES):
                    _mix(mixed, out + part, weights, at, 1, projected, value + part, row, n)


@vectorised
def attend_back(grad, projected, weights, projected_grad, change, heads):
    """From ``grad`` [M, heads, size] of what was mixed to that of ``projected``, which is set.

    Shapes are those of :func:`attend`, all flat but ``change`` [n, n], which is working memory.
    """
    n = change.shape[0]
    block = heads * n * n
    width = grad.size // (weights.size // block * n)
    size, row = width // heads, 3 * width
    d = change.reshape(n * n)
    for b in range(weights.size // block):
        for h in range(heads):
            query = b * n * row + h * size
            key, value = query + width, query + 2 * width
            g, w = b * n * width + h * size, b * block + h * n * n
            for i in range(n):
                mean = f32(0)
                for j in range(n):
                    total = f32(0)
                    for part in range(0, size, LANES):
                        of_value = value + j * row + part
                        total += _dot(grad, g + i * width + part, projected, of_value)
                    d[i * n + j] = total
                    mean += weights[w + i * n + j] * total
                for j in range(n):
                    d[i * n + j] = weights[w + i * n + j] * (d[i * n + j] - mean)
            for i in range(n):
                for part in range(0, size, LANES):
                    at = i * row + part
                    _mix(projected_grad, query + at, d, i * n, 1, projected, key + part, row, n)
                    _mix(projected_grad, key + at, d, i, n, projected, query + part, row, n)
                    _mix(projected_grad, value + at, weights, w + i, n, grad, g + part, width, n)


# ---- heads --------------------------------------------------------------------------------------


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
    """From ``grad`` [B, 2 k] to ``rows_grad`` [M, k], which is added to."""
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
                row[k] += share * of_mean[k] + (of_most[k] if which[k] == number else f32(0))


# ---- choices ------------------------------------------------------------------------------------


@vectorised
def choose(logits, mask, choice, scale, epsilon, policy, log_policy, log_prob, entropy):
    """From logits [K, n] to the logarithm of the chances [K, c] of ``choice``, and the entropy [K].

    The policy is softmax(logits x ``scale``), with a share ``epsilon`` of uniform choices in the
    chances. ``policy`` and ``log_policy`` [K, n] are filled, with 0 where ``mask`` is false.
    """
    for b in range(logits.shape[0]):
        most, count, total = LEAST, f32(0), f32(0)
        for i in range(logits.shape[1]):
            if mask[b, i]:
                most, count = max(most, logits[b, i] * scale), count + ONE
        for i in range(logits.shape[1]):
            policy[b, i] = math.exp(logits[b, i] * scale - most) if mask[b, i] else f32(0)
            total += policy[b, i]
        log_total, spread = math.log(max(total, ONE)), f32(0)
        for i in range(logits.shape[1]):
            policy[b, i] /= max(total, ONE)
            log_policy[b, i] = logits[b, i] * scale - most - log_total if mask[b, i] else f32(0)
            spread -= policy[b, i] * log_policy[b, i]
        entropy[b] = spread
        for k in range(choice.shape[1]):
            at = choice[b, k]
            mixed = (ONE - epsilon) * policy[b, at] + epsilon / max(count, ONE)
            log_prob[b, k] = math.log(mixed) if epsilon > 0 else log_policy[b, at]


@vectorised
def choose_back(of_log_prob, of_entropy, mask, choice, scale, epsilon, policy, log_policy, grad):
    """From gradients [K, c] and [K] to ``grad`` [K, n] of the logits, which is set."""
    for b in range(policy.shape[0]):
        count, total = f32(0), f32(0)
        for i in range(policy.shape[1]):
            count += ONE if mask[b, i] else f32(0)
            grad[b, i] = -of_entropy[b] * policy[b, i] * (log_policy[b, i] + ONE)
        for k in range(choice.shape[1]):
            at, share = choice[b, k], ONE
            if epsilon > 0:
                own = (ONE - epsilon) * policy[b, at]
                share = own / (own + epsilon / max(count, ONE))
            grad[b, at] += of_log_prob[b, k] * share
        for i in range(policy.shape[1]):
            total += grad[b, i]
        for i in range(policy.shape[1]):
            grad[b, i] = scale * (grad[b, i] - policy[b, i] * total)


# ---- loss ---------------------------------------------------------------------------------------

#: What :func:`lose` adds up.
SUMS = ("policy_loss", "value_loss", "entropy", "kl", "clipped", "weight")


@vectorised
def lose(
    log_prob, entropy, values, old_log_prob, advantage, weight, returns, old_values,
    numbers, of_log_prob, of_entropy, of_values, sums,
):  # fmt: skip
    """PPO's clipped loss of some decisions: fills its gradients, adds to ``sums`` [SUMS].

    Of the choices [B, c]: ``log_prob`` now and before the update, ``advantage``, ``weight``. Of the
    decisions [B]: ``entropy``, ``values`` now and before, ``returns``. ``numbers``: how far ratios
    and values may move, weights of value and entropy, and one decision's share of the mean, which
    counts in the gradients only.
    """
    clip, value_clip, value_weight = numbers[0], numbers[1], numbers[2]
    entropy_weight, share = numbers[3], numbers[4]
    for b in range(values.size):
        for k in range(log_prob.shape[1]):
            change = log_prob[b, k] - old_log_prob[b, k]
            ratio, a, w = math.exp(change), advantage[b, k], weight[b, k]
            gain = ratio * a
            bounded = min(max(ratio, ONE - clip), ONE + clip) * a
            beyond = abs(ratio - ONE) > clip
            sums[0] -= w * min(gain, bounded)
            sums[3] += w * (ratio - ONE - change)
            sums[4] += w if beyond else f32(0)
            sums[5] += w
            of_log_prob[b, k] = f32(0) if beyond and gain > bounded else -w * gain * share
        error, moved = values[b] - returns[b], values[b] - old_values[b]
        at_bound = old_values[b] + math.copysign(value_clip, moved) - returns[b]
        if abs(moved) > value_clip and at_bound * at_bound > error * error:
            sums[1] += at_bound * at_bound
            of_values[b] = f32(0)
        else:
            sums[1] += error * error
            of_values[b] = f32(2) * value_weight * error * share
        sums[2] += entropy[b]
        of_entropy[b] = -entropy_weight * share
