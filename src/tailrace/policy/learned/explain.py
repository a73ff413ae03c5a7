"""Explains one decision of a learned policy: attention weights and gradients, as arrays.

Written in NumPy, since `tailrace inspect` and reports run without torch, and in double precision,
since finite differences need more digits than the compiled float32 pass has. Tests hold both to it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.learned.architecture import STD_FLOOR, NetworkConfig, Tensors, looked_at
from tailrace.policy.learned.policy import LearnedPolicy

Array = NDArray[np.float64]
STEP = 1e-5


class Explanation(NamedTuple):
    """One decision over ``n`` replicas."""

    logits: Array  #: [n], -inf where unavailable or not on the shortlist of a large cluster
    probabilities: Array  #: [n] softmax of the logits
    attention: Array  #: [heads, n, n] weight that a replica (row) gives the others; rows sum to 1
    replica_gradients: Array  #: [n, F] derivative of a replica's logit by its own features
    request_gradients: Array  #: [n, G] derivative by the features of request and cluster


def explain(
    policy: LearnedPolicy,
    replica_obs: NDArray[np.floating],
    request_obs: NDArray[np.floating],
    available: NDArray[np.bool_],
    prior: NDArray[np.floating] | None = None,
    memory: NDArray[np.floating] | None = None,
) -> Explanation:
    """Explain a decision from observations [n, F] and [G], as ``observe`` fills them.

    Gradients are of logits relative to their mean over the available replicas, since only
    differences decide, and per standard deviation of the feature in training. ``prior`` [n] holds
    the standardised scores of the network's rule, ``memory`` [M] its state before the decision.
    """
    config, tensors = policy.config, policy.tensors
    available = looked_at(config, tensors, replica_obs, available)
    x = _normalised(tensors, "replica_norm", replica_obs)
    g = _normalised(tensors, "request_norm", request_obs)
    n, features = x.shape
    offset = np.zeros(n) if prior is None else config.prior_weight * np.asarray(prior, float)
    state = np.zeros(config.memory) if memory is None else np.asarray(memory, float)

    def relative(xs: Array, gs: Array) -> Array:
        logits = _forward(config, tensors, xs, gs, available, state)[0]
        return np.asarray(logits - logits[:, available].mean(axis=1, keepdims=True))

    logits, attention = _forward(config, tensors, x[None], g[None], available, state)
    shown = np.where(available, logits[0] - offset, -np.inf)
    weights = np.exp(shown - shown.max())
    replica_gradients = np.zeros((n, features))
    steps = STEP * np.eye(features)
    for i in np.flatnonzero(available):
        up, down = (np.repeat(x[None], features, axis=0) for _ in range(2))
        up[:, i] += steps
        down[:, i] -= steps
        gs = np.repeat(g[None], features, axis=0)
        replica_gradients[i] = (relative(up, gs) - relative(down, gs))[:, i] / (2 * STEP)
    xs = np.repeat(x[None], g.size, axis=0)
    steps = STEP * np.eye(g.size)
    request_gradients = (relative(xs, g + steps) - relative(xs, g - steps)).T / (2 * STEP)
    request_gradients[~available] = 0
    return Explanation(
        shown, weights / weights.sum(), attention[0], replica_gradients, request_gradients
    )


def _normalised(tensors: Tensors, norm: str, values: NDArray[np.floating]) -> Array:
    std = np.maximum(np.sqrt(_of(tensors, f"{norm}.var")), STD_FLOOR)
    return np.asarray((values - _of(tensors, f"{norm}.mean")) / std)


def _of(tensors: Tensors, name: str) -> Array:
    return tensors[name].astype(np.float64)


def _linear(tensors: Tensors, name: str, x: Array) -> Array:
    return np.asarray(x @ _of(tensors, f"{name}.weight").T + _of(tensors, f"{name}.bias"))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _forward(
    config: NetworkConfig,
    tensors: Tensors,
    x: Array,
    g: Array,
    available: NDArray[np.bool_],
    memory: Array,
) -> tuple[Array, Array]:
    """Return logits [B, n] without prior and attention [B, heads, n, n], of normalised inputs."""
    batch, n, _ = x.shape
    both = np.concatenate([x, np.repeat(g[:, None], n, axis=1)], axis=-1)
    h = _linear(tensors, "actor.input", both)
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    h = h * _of(tensors, "actor.norm.weight") + _of(tensors, "actor.norm.bias")
    h = _gelu(_linear(tensors, "actor.hidden", _gelu(h)))

    def projected(part: str) -> Array:
        rows = h @ _of(tensors, f"actor.{part}.weight").T
        return np.asarray(rows.reshape(batch, n, config.heads, -1).transpose(0, 2, 1, 3))

    query, key, value = projected("query"), projected("key"), projected("value")
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
    scores = np.where(available, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = (weights @ value).transpose(0, 2, 1, 3).reshape(batch, n, -1)
    h = h + mixed @ _of(tensors, "actor.output.weight").T
    if config.memory:
        state = _gru(tensors, h[:, available].mean(axis=1), memory)
        h = np.concatenate([h, np.repeat(state[:, None], n, axis=1)], axis=-1)
    logits = _linear(tensors, "scorer.output", _gelu(_linear(tensors, "scorer.hidden", h)))
    return logits[..., 0], weights


def _gru(tensors: Tensors, pooled: Array, memory: Array) -> Array:
    """Return the next memory [B, M]."""
    given = pooled @ _of(tensors, "gru.weight_ih").T + _of(tensors, "gru.bias_ih")
    kept = memory @ _of(tensors, "gru.weight_hh").T + _of(tensors, "gru.bias_hh")
    (reset, update, new), (reset_m, update_m, new_m) = (
        np.split(part, 3, axis=-1) for part in (given, kept)
    )
    update = 1 / (1 + np.exp(-(update + update_m)))
    candidate = np.tanh(new + new_m / (1 + np.exp(-(reset + reset_m))))
    return np.asarray((1 - update) * candidate + update * memory)
