"""The network of a learned policy without torch: its settings, its tensors, and their layout.

:func:`pack` puts settings, weights and scratch space into one float64 vector, so that a learned
policy is a rule with many parameters to the simulator. The vector starts with a header of numbers;
the rest is read as float32 (two per element) at the offsets in the header. See
policy/learned/inference.py for the arithmetic and policy/learned/network.py for training.
"""

from collections.abc import Mapping
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tailrace.config import MAX_REPLICAS, Settings
from tailrace.errors import TailraceError, unknown_name
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.policy.learned.tiles import NARROW, TILE_ROWS
from tailrace.policy.rules import RULES
from tailrace.view.ordering import Order

Tensors = Mapping[str, NDArray[np.float32]]
#: Tensor [features] of a finished policy: the shortlist are the replicas of largest product with
#: their observation. A policy without it evaluates all replicas of a cluster of any size.
SKETCH = "sketch.weight"

FEATURE_NAMES = tuple(feature.name for feature in (*REPLICA_FEATURES, *REQUEST_FEATURES))
#: Least standard deviation of a feature: one that hardly varied in training is not amplified later.
STD_FLOOR = 0.1


class NetworkConfig(Settings):
    """Shape of the network of a learned policy."""

    hidden: int = Field(default=64, ge=4, le=1024)
    """Units of the encoder of a replica."""
    attention: int = Field(default=32, ge=1, le=1024)
    """Units of the attention over replicas, all heads together."""
    heads: int = Field(default=2, ge=1, le=64)
    """Attention heads; `attention` must be a multiple of it."""
    scorer_hidden: int = Field(default=32, ge=1, le=1024)
    """Hidden units of the head that scores a replica."""
    value_hidden: int = Field(default=64, ge=1, le=1024)
    """Hidden units of the head that estimates the value of a state."""
    memory: int = Field(default=0, ge=0, le=1024)
    """Units of a GRU over the pooled embedding of the cluster; 0: no memory."""
    decoupled_critic: bool = False
    """Give the value its own encoder instead of the scorer's."""
    critic_memory: int = Field(default=0, ge=0, le=1024)
    """Units of a GRU of the value's own (needs `memory` and `decoupled_critic`); 0: the value reads
    the scorer's memory. It begins empty with every rollout."""
    prior: str = ""
    """Built-in rule whose scores are the starting point; empty: none."""
    prior_params: dict[str, float] = Field(default_factory=dict)
    """Parameters of that rule, where they differ from its defaults."""
    prior_weight: float = Field(default=3.0, gt=0, le=100, allow_inf_nan=False)
    """How much a standard deviation of the rule's scores lowers the logit."""
    ignore: tuple[str, ...] = ()
    """Names of features hidden from the network, also from that of a policy to start from."""
    shortlist: int = Field(default=12, ge=2, le=1024)
    """Maximum replicas a finished policy evaluates; of more, a linear sketch preselects."""
    order: Order | None = None
    """The policy's own order (weights w, d, most, class_s), for servers that serve by priority. No
    part of the network; a run that starts from a policy keeps its order."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.attention % self.heads:
            raise ValueError(f"attention = {self.attention} is no multiple of heads = {self.heads}")
        for name in self.ignore:
            if name not in FEATURE_NAMES:
                raise ValueError(str(unknown_name("feature", name, FEATURE_NAMES)))
        if self.critic_memory and not (self.memory and self.decoupled_critic):
            raise ValueError("critic_memory needs memory and decoupled_critic")
        if self.prior_params and not self.prior:
            raise ValueError("prior_params are given, but no prior")
        try:
            self.prior_rule()
        except TailraceError as error:
            raise ValueError(str(error)) from None
        return self

    def prior_rule(self) -> BuiltinPolicy | None:
        """Return the rule behind the prior logit, or None."""
        if not self.prior:
            return None
        known = {rule.name: rule for rule in RULES if not rule.in_engine}
        if self.prior not in known:
            raise unknown_name("rule for a prior", self.prior, known)
        return BuiltinPolicy(known[self.prior], self.prior_params)


def tensor_shapes(
    config: NetworkConfig, features: int, globals_: int
) -> dict[str, tuple[int, ...]]:
    """Return name and shape, as in torch, of every tensor of a network.

    It has ``features`` inputs per replica, and ``globals_`` of the request and the cluster.
    """
    hidden, memory = config.hidden, config.memory
    shapes: dict[str, tuple[int, ...]] = {}
    for norm, size in (("replica_norm", features), ("request_norm", globals_), ("value_norm", 1)):
        shapes |= {f"{norm}.mean": (size,), f"{norm}.var": (size,), f"{norm}.count": ()}
    for trunk in ("actor", "critic") if config.decoupled_critic else ("actor",):
        shapes |= _linear(f"{trunk}.input", features + globals_, hidden)
        shapes |= {f"{trunk}.norm.weight": (hidden,), f"{trunk}.norm.bias": (hidden,)}
        shapes |= _linear(f"{trunk}.hidden", hidden, hidden)
        for part in ("query", "key", "value"):
            shapes[f"{trunk}.{part}.weight"] = (config.attention, hidden)
        shapes[f"{trunk}.output.weight"] = (hidden, config.attention)
    for gru, units in (("gru", memory), ("critic_gru", config.critic_memory)):
        if units:
            shapes |= {f"{gru}.weight_ih": (3 * units, hidden), f"{gru}.bias_ih": (3 * units,)}
            shapes |= {f"{gru}.weight_hh": (3 * units, units), f"{gru}.bias_hh": (3 * units,)}
    shapes |= _linear("scorer.hidden", hidden + memory, config.scorer_hidden)
    shapes |= _linear("scorer.output", config.scorer_hidden, 1)
    remembered = config.critic_memory or memory
    shapes |= _linear("value_head.hidden", 2 * hidden + remembered, config.value_hidden)
    shapes |= _linear("value_head.output", config.value_hidden, 1)
    return shapes


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


# ---- one vector for compiled code ---------------------------------------------------------------

#: Positions in the header: sizes, the prior, and from OFFSETS on the offset of each part.
FEATURES, GLOBALS, HIDDEN, ATTENTION, HEADS, SCORER, MEMORY, MOST, SHORTLIST = range(9)
PRIOR_CODE, PRIOR_WEIGHT, PRIOR_COUNT, PRIOR_PARAMS = range(9, 13)
MAX_PRIOR_PARAMS = 6
NO_PRIOR = -1
OFFSETS = PRIOR_PARAMS + MAX_PRIOR_PARAMS

#: Weights, stored [inputs, outputs] so that the innermost loop runs over neighbouring outputs.
(
    REPLICA_WEIGHT,
    REQUEST_WEIGHT,
    INPUT_BIAS,
    NORM_GAIN,
    NORM_BIAS,
    HIDDEN_WEIGHT,
    HIDDEN_BIAS,
    PROJECTION_WEIGHT,
    OUTPUT_WEIGHT,
    SCORER_WEIGHT,
    SCORER_MEMORY_WEIGHT,
    SCORER_BIAS,
    LOGIT_WEIGHT,
    LOGIT_BIAS,
    GRU_INPUT_WEIGHT,
    GRU_MEMORY_WEIGHT,
    GRU_INPUT_BIAS,
    GRU_MEMORY_BIAS,
    SKETCH_WEIGHT,
) = range(OFFSETS, OFFSETS + 19)
#: Scratch space.
(
    X,  # [rows, features] observation of the replicas
    G,  # [globals] of the request
    MASK,  # [rows] 1: available
    PRIOR,  # [rows] standardised scores of the rule
    SHARED,  # [hidden] what all replicas add to their first layer, or to the scorer's
    H,  # [rows, hidden] embedding
    FIRST,  # [rows, hidden] first layer
    PROJECTED,  # [rows, 3, attention] queries, keys and values
    KEYS,  # [attention, columns] the keys once more, those of one unit side by side
    MIXED,  # [rows, attention] values weighed by attention
    WEIGHTS,  # [TILE_ROWS, columns] attention of some replicas to all
    S,  # [rows, scorer] hidden layer of the scorer
    LOGITS,  # [rows]
    GATES,  # [6 * memory] of the GRU
    M,  # [memory] its state, kept from decision to decision
    SKETCHED,  # [rows] what the sketch says of each replica
    LISTED,  # [shortlist] replicas on the shortlist, in their order
    END,
) = range(OFFSETS + 19, OFFSETS + 37)
HEADER = END + 1

#: Replicas are computed in tiles, so there are spare rows for a partial one.
MAX_ROWS = MAX_REPLICAS + NARROW


def pack(config: NetworkConfig, tensors: Tensors) -> NDArray[np.float64]:
    """Return the packed vector [p] of a network with empty memory."""
    features = tensors["replica_norm.mean"].size
    globals_ = tensors["request_norm.mean"].size
    weights = _inference_weights(config, tensors, features)
    hidden, memory = config.hidden, config.memory
    attention = config.attention * MAX_ROWS
    scratch = (
        *(features * MAX_ROWS, globals_, MAX_ROWS, MAX_ROWS, max(hidden, config.scorer_hidden)),
        *(hidden * MAX_ROWS, hidden * MAX_ROWS, 3 * attention, attention, attention),
        *(TILE_ROWS * MAX_ROWS, config.scorer_hidden * MAX_ROWS, MAX_ROWS, 6 * memory, memory),
        *(MAX_ROWS, config.shortlist),
    )
    sizes = [weight.size for weight in weights] + list(scratch)
    # Each part begins on a multiple of 16 floats: a cache line.
    starts = np.concatenate([[0], np.cumsum([-(-size // 16) * 16 for size in sizes])])
    starts += -(-2 * HEADER // 16) * 16
    params = np.zeros(int(starts[-1]) // 2)
    floats = params.view(np.float32)
    for weight, start in zip(weights, starts, strict=False):
        floats[start : start + weight.size] = weight.ravel()
    params[:OFFSETS] = 0
    params[FEATURES : SHORTLIST + 1] = (
        *(features, globals_, hidden, config.attention, config.heads),
        *(config.scorer_hidden, memory, MAX_REPLICAS),
        config.shortlist if SKETCH in tensors else MAX_REPLICAS,
    )
    params[OFFSETS:HEADER] = starts
    params[PRIOR_CODE] = NO_PRIOR
    rule = config.prior_rule()
    if rule is not None:
        params[PRIOR_CODE] = rule.rule.code
        params[PRIOR_WEIGHT] = config.prior_weight
        params[PRIOR_COUNT] = rule.params.size
        params[PRIOR_PARAMS : PRIOR_PARAMS + rule.params.size] = rule.params
    return params


def _inference_weights(
    config: NetworkConfig, tensors: Tensors, features: int
) -> list[NDArray[np.float64]]:
    """Return the weights in the order of the header, normaliser and attention scale folded in."""

    def transposed(name: str) -> NDArray[np.float64]:
        return tensors[name].astype(np.float64).T

    def plain(name: str) -> NDArray[np.float64]:
        return tensors[name].astype(np.float64) if name in tensors else np.zeros(0)

    mean = np.concatenate([plain("replica_norm.mean"), plain("request_norm.mean")])
    var = np.concatenate([plain("replica_norm.var"), plain("request_norm.var")])
    first = transposed("actor.input.weight") / np.maximum(np.sqrt(var), STD_FLOOR)[:, None]
    scorer = transposed("scorer.hidden.weight")
    query = transposed("actor.query.weight")
    scale = 1 / np.sqrt(config.attention / config.heads)
    has_memory = config.memory > 0
    return [
        first[:features],
        first[features:],
        plain("actor.input.bias") - mean @ first,
        plain("actor.norm.weight"),
        plain("actor.norm.bias"),
        transposed("actor.hidden.weight"),
        plain("actor.hidden.bias"),
        np.hstack(
            [query * scale, transposed("actor.key.weight"), transposed("actor.value.weight")]
        ),
        transposed("actor.output.weight"),
        scorer[: config.hidden],
        scorer[config.hidden :],
        plain("scorer.hidden.bias"),
        plain("scorer.output.weight"),
        plain("scorer.output.bias"),
        transposed("gru.weight_ih") if has_memory else np.zeros(0),
        transposed("gru.weight_hh") if has_memory else np.zeros(0),
        plain("gru.bias_ih"),
        plain("gru.bias_hh"),
        plain(SKETCH),
    ]


def looked_at(
    config: NetworkConfig,
    tensors: Tensors,
    replica_obs: NDArray[np.floating],
    available: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Return which of ``n`` replicas the network looks at, from [n, F] and [n].

    The readable twin of the compiled code in policy/learned/inference.py.
    """
    if SKETCH not in tensors or len(available) <= config.shortlist:
        return available
    sketched = np.where(available, replica_obs.astype(np.float64) @ tensors[SKETCH], -np.inf)
    listed = np.zeros_like(available)
    listed[np.argsort(-sketched, kind="stable")[: config.shortlist]] = True
    return np.asarray(listed & available)
