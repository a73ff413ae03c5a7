"""What a learned policy reacts to: permutation importance, gradients, attention, feature ranges.

The importance of a feature is how the policy changes when the feature is taken from another state:
its values are exchanged among the sampled states, of each replica with those of the same replica
at other times, and the choices and probabilities before and after are compared. What never changes
on a replica, such as its speed, is exchanged among the replicas of a state instead. Features that
say much the same share their importance, hence the importance of all of a source together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.policy.learned.architecture import STD_FLOOR
from tailrace.policy.learned.explain import Explanation, explain
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES, Feature
from tailrace.policy.learned.policy import LearnedPolicy, forward_many
from tailrace.seeds import generator

Array = NDArray[np.float64]
Array32 = NDArray[np.float32]

#: Permutations per feature; results are averaged over them.
REPEATS = 3
#: A feature whose values differ by less than this is constant.
CONSTANT = 1e-6
#: A feature that moves probabilities by less than this KL on average is ignored.
IGNORED_KL = 1e-5
#: A value more than this many deviations from its training mean is outside the training range ...
OUTSIDE = 4.0
#: ... and so is a feature if more than this share of its values are.
OUTSIDE_SHARE = 0.01
#: Most replicas that are explained: gradients take some milliseconds per replica.
EXPLAINED_REPLICAS = 200
#: Largest cluster that is explained: time and memory grow with the square of its size.
MAX_EXPLAINED = 128


@dataclass(frozen=True)
class States:
    """``K`` decisions over up to ``n`` replicas; rows of smaller clusters are padded and masked."""

    replica_obs: Array32  #: [K, n, F]
    request_obs: Array32  #: [K, G]
    mask: NDArray[np.bool_]  #: [K, n] replicas that could be chosen
    prior: Array32  #: [K, n] standardised scores of the network's rule, 0 without one
    memory: Array32  #: [K, M] of the network, before the decision

    def __len__(self) -> int:
        return len(self.mask)


def join(parts: Sequence[States]) -> States:
    """Concatenate states, padded to the largest cluster."""
    n = max(part.mask.shape[1] for part in parts)

    def padded(array: NDArray[np.generic]) -> NDArray[np.generic]:
        width = [(0, 0)] * array.ndim
        width[1] = (0, n - array.shape[1])
        return np.pad(array, width)

    return States(
        np.concatenate([padded(p.replica_obs) for p in parts]).astype(np.float32),
        np.concatenate([p.request_obs for p in parts]),
        np.concatenate([padded(p.mask) for p in parts]).astype(np.bool_),
        np.concatenate([padded(p.prior) for p in parts]).astype(np.float32),
        np.concatenate([p.memory for p in parts]),
    )


@dataclass(frozen=True)
class Importance:
    """Effect of permuting a feature, or all features of a source."""

    name: str
    changed: float  #: share of decisions that change
    kl: float  #: mean KL divergence of the probabilities after from those before


@dataclass(frozen=True)
class FeatureAudit:
    """One feature: its importance, and how its values compare with those in training."""

    name: str
    of: str  #: replica or request
    source: str
    changed: float
    kl: float
    exchanged: str  #: among what its values were exchanged: states or replicas
    gradient: float  #: mean change of a replica's logit per deviation of the feature
    sensitivity: float  #: the same without sign
    mean: float  #: now
    deviation: float
    trained_mean: float  #: in training, by the network's normaliser
    trained_deviation: float
    outside: float  #: share of values more than OUTSIDE deviations from the mean in training
    flags: tuple[str, ...]


@dataclass(frozen=True)
class AttentionHead:
    """What one attention head attends to, averaged over replicas and states."""

    head: int
    to_self: float
    to_chosen: float  #: weight the others give the replica that is chosen
    even: float  #: weight of each if all were looked at alike
    entropy: float  #: of the weights, 1: all alike, 0: one only


@dataclass(frozen=True)
class Audit:
    """Result of auditing a policy."""

    states: int
    explained: int  #: states gradients and attention are taken from
    features: tuple[FeatureAudit, ...]  #: most important first
    sources: tuple[Importance, ...]  #: most important first
    attention: tuple[AttentionHead, ...]


def log_policy(policy: LearnedPolicy, states: States) -> Array:
    """Return the log-probabilities [K, n] of all choices; -inf where masked."""
    logits = np.empty(states.mask.shape)
    forward_many(
        policy.params,
        states.replica_obs,
        states.request_obs,
        states.mask,
        states.prior,
        states.memory.astype(np.float64),
        logits,
    )
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def audit(policy: LearnedPolicy, states: States, seed: int = 0) -> Audit:
    """Audit a policy on sampled states; permutations depend on ``seed`` alone."""
    check_size(states.mask.shape[1])
    policy = policy.copy()
    explained = _sample(states)
    explanations = [_explain(policy, states, k) for k in explained]
    before = log_policy(policy, states)
    features = [
        _audit_feature(policy, states, before, explanations, explained, of, column, seed)
        for of, table in (("replica", REPLICA_FEATURES), ("request", REQUEST_FEATURES))
        for column in range(len(table))
    ]
    return Audit(
        states=len(states),
        explained=len(explained),
        features=tuple(sorted(features, key=lambda f: (-f.kl, -f.sensitivity))),
        sources=_sources(policy, states, before, seed),
        attention=_attention(explanations, states, explained),
    )


def check_size(replicas: int) -> None:
    """Refuse a cluster that would take too long to explain."""
    if replicas > MAX_EXPLAINED:
        raise TailraceError(
            f"inspect explains clusters of up to {MAX_EXPLAINED} replicas, not {replicas}"
        )


# ---- importance ---------------------------------------------------------------------------------


def importance(
    policy: LearnedPolicy, states: States, before: Array, name: str, others: Iterable[States]
) -> Importance:
    """Compare the log-probabilities ``before`` [K, n] with those of permuted states."""
    changed, kl = [], []
    for other in others:
        after = log_policy(policy, other)
        changed.append(np.mean(after.argmax(axis=1) != before.argmax(axis=1)))
        ratio = np.where(states.mask, before, 0.0) - np.where(states.mask, after, 0.0)
        kl.append((np.exp(before) * ratio).sum(axis=1).mean())
    return Importance(name, float(np.mean(changed)), max(float(np.mean(kl)), 0.0))


def exchanged(
    states: States, replica_columns: Sequence[int], request_columns: Sequence[int], keys: Array
) -> States:
    """Return the states with some columns taken from others, in the order of ``keys`` [K].

    The columns of a replica come from the same replica in states in which it is available, so a
    value never comes from a row that is not there.
    """
    replica_obs, request_obs = states.replica_obs.copy(), states.request_obs.copy()
    if replica_columns:
        columns = np.asarray(replica_columns)
        for i in range(states.mask.shape[1]):
            there = np.flatnonzero(states.mask[:, i])
            source = there[np.argsort(keys[there], kind="stable")]
            replica_obs[there[:, None], i, columns] = states.replica_obs[
                source[:, None], i, columns
            ]
    if request_columns:
        columns = np.asarray(request_columns)
        order = np.argsort(keys, kind="stable")
        request_obs[:, columns] = states.request_obs[order][:, columns]
    return replace(states, replica_obs=replica_obs, request_obs=request_obs)


def among_replicas(states: States, column: int, keys: Array) -> States:
    """Return the states with a column exchanged among their available replicas, by ``keys`` [K, n].

    For what is always the same on a replica, and so would not change from one time to another.
    """
    replica_obs = states.replica_obs.copy()
    for k, mask in enumerate(states.mask):
        there = np.flatnonzero(mask)
        source = there[np.argsort(keys[k, there], kind="stable")]
        replica_obs[k, there, column] = states.replica_obs[k, source, column]
    return replace(states, replica_obs=replica_obs)


def _keys(shape: tuple[int, ...], seed: int) -> Iterator[Array]:
    rng = generator(seed, "audit")
    for _ in range(REPEATS):
        yield rng.random(shape)


def _is_fixed(states: States, column: int) -> bool:
    """Whether a feature differs between replicas, but is always the same on each."""
    values = states.replica_obs[..., column]
    ranges = [np.ptp(v[m]) for v, m in zip(values.T, states.mask.T, strict=True) if m.any()]
    return bool(max(ranges) < CONSTANT <= np.ptp(values[states.mask]))


def _sources(
    policy: LearnedPolicy, states: States, before: Array, seed: int
) -> tuple[Importance, ...]:
    """Importance of all features of each source together."""
    names = dict.fromkeys(f.source for f in (*REPLICA_FEATURES, *REQUEST_FEATURES))
    found = []
    for name in names:
        columns = _from_source(REPLICA_FEATURES, name), _from_source(REQUEST_FEATURES, name)
        others = (exchanged(states, *columns, keys) for keys in _keys((len(states),), seed))
        found.append(importance(policy, states, before, name, others))
    return tuple(sorted(found, key=lambda s: -s.kl))


def _from_source(features: Sequence[Feature], source: str) -> list[int]:
    return [k for k, feature in enumerate(features) if feature.source == source]


# ---- one feature --------------------------------------------------------------------------------


def _audit_feature(
    policy: LearnedPolicy,
    states: States,
    before: Array,
    explanations: Sequence[Explanation],
    explained: Sequence[int],
    of: str,
    column: int,
    seed: int,
) -> FeatureAudit:
    is_replica = of == "replica"
    feature = (REPLICA_FEATURES if is_replica else REQUEST_FEATURES)[column]
    if is_replica:
        values = states.replica_obs[..., column][states.mask].astype(np.float64)
        columns: tuple[list[int], list[int]] = ([column], [])
    else:
        values = states.request_obs[:, column].astype(np.float64)
        columns = ([], [column])
    fixed = is_replica and _is_fixed(states, column)
    if fixed:
        others = (among_replicas(states, column, k) for k in _keys(states.mask.shape, seed))
    else:
        others = (exchanged(states, *columns, k) for k in _keys((len(states),), seed))
    found = importance(policy, states, before, feature.name, others)
    slopes = np.concatenate(
        [
            (e.replica_gradients if is_replica else e.request_gradients)[states.mask[k], column]
            for k, e in zip(explained, explanations, strict=True)
        ]
    )
    mean = float(policy.tensors[f"{of}_norm.mean"][column])
    deviation = float(np.sqrt(policy.tensors[f"{of}_norm.var"][column]))
    far = np.abs(values - mean) > OUTSIDE * max(deviation, STD_FLOOR)
    constant = float(np.ptp(values)) < CONSTANT
    flags = (
        ("constant here", constant),
        ("constant in training", deviation < CONSTANT),
        ("ignored", not constant and found.kl < IGNORED_KL and found.changed == 0),
        ("outside training range", far.mean() > OUTSIDE_SHARE),
    )
    return FeatureAudit(
        name=feature.name,
        of=of,
        source=feature.source,
        changed=found.changed,
        kl=found.kl,
        exchanged="replicas" if fixed else "states",
        gradient=float(slopes.mean()),
        sensitivity=float(np.abs(slopes).mean()),
        mean=float(values.mean()),
        deviation=float(values.std()),
        trained_mean=mean,
        trained_deviation=deviation,
        outside=float(far.mean()),
        flags=tuple(flag for flag, holds in flags if holds),
    )


# ---- gradients and attention --------------------------------------------------------------------


def _sample(states: States) -> list[int]:
    """Evenly spaced states to explain, fewer of large clusters."""
    count = max(8, EXPLAINED_REPLICAS // states.mask.shape[1])
    if len(states) <= count:
        return list(range(len(states)))
    return [int(k) for k in np.linspace(0, len(states) - 1, count).round()]


def _explain(policy: LearnedPolicy, states: States, k: int) -> Explanation:
    return explain(
        policy,
        states.replica_obs[k],
        states.request_obs[k],
        states.mask[k],
        states.prior[k],
        states.memory[k],
    )


def _attention(
    explanations: Sequence[Explanation], states: States, explained: Sequence[int]
) -> tuple[AttentionHead, ...]:
    """Means over the states with more than one replica to look at."""
    rows = []  # [states][4, heads]
    for k, explanation in zip(explained, explanations, strict=True):
        there = np.flatnonzero(states.mask[k])
        if len(there) < 2:
            continue
        weights = explanation.attention[:, there[:, None], there]
        chosen = int(explanation.probabilities[there].argmax())
        others = np.arange(len(there)) != chosen
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(weights * np.log(weights), axis=-1) / np.log(len(there))
        rows.append(
            (
                np.diagonal(weights, axis1=1, axis2=2).mean(axis=1),
                weights[:, others, chosen].mean(axis=1),
                np.full(len(weights), 1 / len(there)),
                entropy.mean(axis=1),
            )
        )
    if not rows:
        return ()
    means = np.mean(rows, axis=0)
    return tuple(AttentionHead(h, *map(float, means[:, h])) for h in range(means.shape[1]))
