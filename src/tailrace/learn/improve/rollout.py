"""Let a network route simulated clusters for a while and write down all that happened.

A roll-out is stateless: the task holds the weights and the seeds, and the same task gives the same
bytes in any process, so a run can be resumed exactly and done on many machines. No torch in here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import jit
from tailrace.config import Scenario
from tailrace.env.core import EnvSettings
from tailrace.env.latency_limit import LatencyLimit
from tailrace.env.reward import RAW_QUANTILES, Reward, RewardSettings
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.errors import TailraceError
from tailrace.policy.learned.architecture import SKETCH, NetworkConfig, Tensors, pack
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.policy.learned.policy import forward_and_pool, forward_many, prior_scores
from tailrace.seeds import generator
from tailrace.view.records import View

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
#: Environments kept per process: laying one out takes longer than a short roll-out.
ENVIRONMENTS = 4


@dataclass(frozen=True)
class RolloutTask:
    """What to play, with which network, and how much of it."""

    worlds: tuple[Scenario | str, ...] | Callable[[int], Scenario]
    """Scenarios, of which an episode's seed draws one, or a function from a seed to a scenario (at
    the top level of a module, or a frozen dataclass with ``__call__``)."""
    episode_seeds: tuple[int, ...]
    """A training seed per group of clusters."""
    config: NetworkConfig
    tensors: Tensors
    """Weights, as :meth:`tailrace.policy.learned.network.Network.tensors` gives them."""
    seed: int
    """Training seed of the choices."""
    clusters: int
    group: int = 1
    """So many neighbouring clusters play the same episode, each with choices of its own."""
    warmup: int = 0
    """Decisions per cluster that are not recorded: they fill the queues."""
    greedy_warmup: bool = False
    """Of those, the best choice is always taken."""
    unbalanced: float = 0.0
    """Share of the groups in which most of those go to one replica towards the end, or none do."""
    decisions: int = 256
    """Decisions per cluster that are."""
    chunk: int = 32
    """Decisions per chunk: the memory at the start of each is kept."""
    temperature: float = 1.0
    """Divisor of the logits."""
    epsilon: float = 0.0
    """Share of the choices that is uniform."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    limit: LatencyLimit = field(default_factory=LatencyLimit)
    max_replicas: int | None = None
    """Replicas there is room for in an observation; default: the largest cluster's."""

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        if self.decisions % self.chunk:
            raise TailraceError(
                f"{self.decisions} decisions cannot be cut into chunks of {self.chunk}"
            )
        if not 0 <= self.epsilon < 1 or not 0 < self.temperature < np.inf:
            raise TailraceError(
                f"temperature = {self.temperature:g} must be above 0, "
                f"and epsilon = {self.epsilon:g} from 0 to below 1"
            )


@dataclass(frozen=True)
class BootstrapStates:
    """States ``K`` in which a recorded stretch ended: their values stand for what would follow.

    There is one for the last decision of every cluster, and one for each episode that ended before.
    """

    step: Ints  #: [K] the decision before it
    cluster: Ints  #: [K]
    replica_obs: F32  #: [K, n, F]
    request_obs: F32  #: [K, G]
    mask: Bools  #: [K, n]
    memory: F32  #: [K, M] before it is seen
    terminated: Bools  #: [K] an alarm ended the episode: nothing follows


@dataclass(frozen=True)
class Rollout:
    """``T`` decisions in a row of ``C`` clusters of up to ``n`` replicas."""

    replica_obs: F32  #: [T, C, n, F]
    request_obs: F32  #: [T, C, G]
    mask: Bools  #: [T, C, n] replicas that could be chosen
    prior: F32 | None  #: [T, C, n] standardised scores of the network's prior, if it has one
    action: Ints  #: [T, C]
    log_prob: F32  #: [T, C] of the action, under the distribution it was drawn from
    reward: F64  #: [T, C] what accrued until the next decision
    elapsed_s: F64  #: [T, C] until the next decision
    starts: Bools  #: [T, C] an episode begins here; the memory is emptied before it
    memory: F32  #: [T / chunk, C, M] before the first decision of every chunk
    bootstrap: BootstrapStates
    chunk: int = 1
    group: int = 1
    names: tuple[str, ...] = ()  #: [C] scenario of each cluster, at the end
    metrics: dict[str, float] = field(default_factory=dict)
    """Means per decision of each raw reward term (``terms/NAME``), raw reward, its deviation and
    quantiles, shares of rewards at the lower and the upper bound."""
    action_share: F64 = field(default_factory=lambda: np.zeros(0))  #: [n] of all decisions
    replica_moments: F64 = field(default_factory=lambda: np.zeros((2, 0)))
    """[2, F] mean and deviation of each feature over the replicas that could be chosen."""
    request_moments: F64 = field(default_factory=lambda: np.zeros((2, 0)))
    """[2, G] the same of the request's features."""
    logits: F32 | None = None
    """[T, C, n] of the network that played, -inf where nothing can be chosen; None if not kept."""
    pooled: F32 | None = None
    """[T, C, 2 hidden] what its value head takes; None if not kept."""


#: Arrays of a roll-out whose second axis is the cluster, and which have none of replicas.
PER_CLUSTER = (
    "request_obs",
    "action",
    "log_prob",
    "reward",
    "elapsed_s",
    "starts",
    "memory",
)


def collect(task: RolloutTask) -> Rollout:
    """Do a roll-out."""
    worlds = task.worlds if callable(task.worlds) else tuple(task.worlds)
    settings = EnvSettings(
        # One more than is played, so that no episode begins behind the last decision.
        decisions=task.warmup + task.decisions + 1,
        group=task.group,
        reward=task.reward,
        max_replicas=task.max_replicas,
        **task.limit.model_dump(),
    )
    env = _environment(worlds, task.clusters, settings)
    env.reset(seed=task.seed, options={"episode_seeds": list(task.episode_seeds)})
    player = _Player(env, task)
    favourites, shunned = _uneven(task, env.core.step_out.mask)
    nobody = np.full_like(favourites, -1)
    for k in range(task.warmup):
        # A replica is full sooner than it is empty.
        player.step(
            greedy=task.greedy_warmup,
            favourites=favourites if 4 * k >= 3 * task.warmup else nobody,
            shunned=shunned if 2 * k >= task.warmup else nobody,
        )
    return player.record()


def _uneven(task: RolloutTask, mask: Bools) -> tuple[Ints, Ints]:
    """Return the replicas that get most requests and those that get none, for each cluster.

    -1: there is none. Clusters of a group have the same one. Half of the unbalanced groups have a
    favourite, the others shun a replica: a policy may also learn to pass by one that stands idle.
    """
    favourites, shunned = np.full((2, task.clusters), -1)
    for g, seed in enumerate(task.episode_seeds):
        rng = generator(seed, "unbalanced")
        if rng.random() < task.unbalanced:
            first = g * task.group
            replica = rng.choice(np.flatnonzero(mask[first]))
            uneven = favourites if rng.random() < 0.5 else shunned
            uneven[first : first + task.group] = replica
    return favourites, shunned


def _without(mask: Bools, shunned: Ints) -> Bools:
    """Return the mask [n, replicas] without one replica of each cluster, unless it is the last."""
    rest = mask & (np.arange(mask.shape[1]) != shunned[:, None])
    return np.where(rest.any(axis=1, keepdims=True), rest, mask)


@lru_cache(maxsize=ENVIRONMENTS)
def _environment(worlds: Any, clusters: int, settings: EnvSettings) -> RouterVectorEnv:
    return RouterVectorEnv(clusters, worlds, copy=False, settings=settings)


class _Player:
    """A network that plays an environment."""

    def __init__(self, env: RouterVectorEnv, task: RolloutTask) -> None:
        self.env, self.task = env, task
        self.params = pack(task.config, task.tensors)
        self.rng = generator(task.seed, "choices")
        n, replicas = env.num_envs, env.core.replicas
        self.memory = np.zeros((n, task.config.memory), np.float32)
        self.logits = np.zeros((n, replicas), np.float32)
        self.prior = np.zeros((n, replicas), np.float32)
        self.starts = np.ones(n, np.bool_)
        self.has_prior = bool(task.config.prior)
        self.rows = np.arange(n)
        self.turn = 0
        config = task.config
        # All replicas go through the network, and the value looks at the same embeddings.
        keeps = not config.memory and not config.decoupled_critic and SKETCH not in task.tensors
        self.pooled = np.zeros((n, 2 * config.hidden), np.float32) if keeps else None

    def step(
        self,
        greedy: bool = False,
        favourites: Ints | None = None,
        shunned: Ints | None = None,
    ) -> tuple[Ints, F64, F64, Bools, dict[str, Any]]:
        """Play one decision of every cluster; ``greedy``: the best choice is always taken.

        Where there is a favourite (``favourites``, [n]; -1: none), it gets three in four requests.
        A replica that is shunned gets none unless it is the only one.
        Returns action, log-probability, reward, whether an alarm ended the episode, and info [n].
        """
        out = self.env.core.step_out
        if self.has_prior:
            fill_priors(self.env.core.fleet, self.params, self.prior)
        self.memory[self.starts] = 0.0
        seen = (self.params, out.replica_obs, out.request_obs, out.mask, self.prior)
        if self.pooled is None:
            forward_many(*seen, self.memory, self.logits)
        else:
            forward_and_pool(*seen, self.logits, self.pooled)
        mask = out.mask
        if shunned is not None:
            mask = _without(out.mask, shunned)
            self.logits[~mask] = -np.inf
        policy = behaviour(self.logits, mask, self.task.temperature, self.task.epsilon)
        action = policy.argmax(axis=1) if greedy else sample(policy, self.rng.random(len(policy)))
        if favourites is not None:
            self.turn += 1
            forced = (favourites >= 0) & out.mask[self.rows, favourites] & (self.turn % 4 > 0)
            action = np.where(forced, favourites, action)
        log_prob = np.log(policy[self.rows, action])
        _, reward, terminated, truncated, info = self.env.step(action)
        self.starts = terminated | truncated
        return action, log_prob, reward, terminated, info

    def record(self) -> Rollout:
        """Play and write down."""
        task, out = self.task, self.env.core.step_out
        steps, n, replicas = task.decisions, *self.logits.shape
        replica_obs = np.empty((steps, n, replicas, N_REPLICA_FEATURES), np.float32)
        request_obs = np.empty((steps, n, N_REQUEST_FEATURES), np.float32)
        mask = np.empty((steps, n, replicas), np.bool_)
        prior = np.empty((steps, n, replicas), np.float32) if self.has_prior else None
        action = np.empty((steps, n), np.int64)
        log_prob = np.empty((steps, n), np.float32)
        reward, elapsed_s = np.empty((steps, n)), np.empty((steps, n))
        starts = np.empty((steps, n), np.bool_)
        memory = np.empty((steps // task.chunk, n, task.config.memory), np.float32)
        logits = pooled = None
        if self.pooled is not None:
            logits = np.empty((steps, n, replicas), np.float32)
            pooled = np.empty((steps, *self.pooled.shape), np.float32)
        bootstrap, reward_statistics = _BootstrapStateList(), RewardStatistics(self.env.core.reward)
        for t in range(steps):
            replica_obs[t], request_obs[t], mask[t] = out.replica_obs, out.request_obs, out.mask
            starts[t] = self.starts
            if t % task.chunk == 0:
                memory[t // task.chunk] = self.memory
            action[t], log_prob[t], reward[t], terminated, info = self.step()
            if prior is not None:
                prior[t] = self.prior
            if logits is not None and pooled is not None:
                logits[t], pooled[t] = self.logits, self.pooled
            elapsed_s[t] = info["elapsed_s"]
            reward_statistics.add()
            if self.starts.any():
                which = np.flatnonzero(self.starts)
                bootstrap.add(t, which, info["final_obs"], self.memory, terminated)
        which = np.flatnonzero(~self.starts)
        going_on = np.zeros(n, np.bool_)
        bootstrap.add(steps - 1, which, self.env.core.observation(), self.memory, going_on)
        playing = [episode.scenario.name for episode in self.env.core.playing if episode]
        return Rollout(
            replica_obs,
            request_obs,
            mask,
            prior,
            action,
            log_prob,
            reward,
            elapsed_s,
            starts,
            memory,
            bootstrap.joined(),
            task.chunk,
            task.group,
            tuple(playing),
            reward_statistics.metrics(),
            np.bincount(action.ravel(), minlength=replicas) / action.size,
            moments(replica_obs.reshape(-1, N_REPLICA_FEATURES), mask.ravel()),
            moments(request_obs.reshape(-1, N_REQUEST_FEATURES), np.ones(action.size, np.bool_)),
            logits,
            pooled,
        )


def split_by_size(rollout: Rollout) -> list[Rollout]:
    """Split a roll-out by the size of its clusters, without the padding; groups stay together.

    Nothing is copied if all clusters fill their places. Figures stay those of the whole.
    """
    places, bootstrap = rollout.mask.shape[2], rollout.bootstrap
    used = np.asarray(rollout.mask.any(axis=0))
    np.logical_or.at(used, bootstrap.cluster, bootstrap.mask)
    by_group = np.asarray(used.reshape(-1, rollout.group, places).any(axis=1))
    sizes = np.repeat((by_group * np.arange(1, places + 1)).max(axis=1), rollout.group)
    if (sizes == places).all():
        return [rollout]
    parts = []
    for n in np.unique(sizes):
        which = np.flatnonzero(sizes == n)
        ended = np.isin(bootstrap.cluster, which)
        parts.append(
            replace(
                rollout,
                **{name: getattr(rollout, name)[:, which] for name in PER_CLUSTER},
                replica_obs=rollout.replica_obs[:, which, :n],
                mask=rollout.mask[:, which, :n],
                prior=None if rollout.prior is None else rollout.prior[:, which, :n],
                logits=None if rollout.logits is None else rollout.logits[:, which, :n],
                pooled=None if rollout.pooled is None else rollout.pooled[:, which],
                bootstrap=BootstrapStates(
                    bootstrap.step[ended],
                    np.searchsorted(which, bootstrap.cluster[ended]),
                    bootstrap.replica_obs[ended, :n],
                    bootstrap.request_obs[ended],
                    bootstrap.mask[ended, :n],
                    bootstrap.memory[ended],
                    bootstrap.terminated[ended],
                ),
                names=tuple(rollout.names[c] for c in which) if rollout.names else (),
            )
        )
    return parts


# ---- choices ------------------------------------------------------------------------------------


def behaviour(logits: F32, mask: Bools, temperature: float = 1.0, epsilon: float = 0.0) -> F64:
    """Return the probabilities [B, n] that choices are drawn from; 0 where ``mask`` is false.

    softmax(logits / temperature) with a share ``epsilon`` of the uniform distribution over what
    can be chosen. The learner computes the same (experience.log_behaviour).
    """
    policy = np.empty(logits.shape)
    fill_behaviour(logits, mask, temperature, epsilon, policy)
    return policy


def _fill_behaviour(logits: Any, mask: Any, temperature: Any, epsilon: Any, policy: Any) -> None:
    for b in range(policy.shape[0]):
        most, total, count = -np.inf, 0.0, 0
        for i in range(policy.shape[1]):
            most = max(most, np.float64(logits[b, i]) / temperature)
            count += mask[b, i]
        for i in range(policy.shape[1]):
            policy[b, i] = math.exp(np.float64(logits[b, i]) / temperature - most)
            total += policy[b, i]
        for i in range(policy.shape[1]):
            uniform = mask[b, i] / max(count, 1)
            policy[b, i] = (1 - epsilon) * policy[b, i] / total + epsilon * uniform


def sample(policy: F64, uniform: F64) -> Ints:
    """Return choices [B] by probabilities [B, n] and random numbers [B] in [0, 1)."""
    chosen = np.zeros(len(policy), np.int64)
    fill_sample(policy, uniform, chosen)
    return chosen


def _fill_sample(policy: Any, uniform: Any, chosen: Any) -> None:
    for b in range(policy.shape[0]):
        left = uniform[b] * policy[b].sum()
        for i in range(policy.shape[1]):
            if policy[b, i] > 0:  # rounding must not lead to one that cannot be chosen
                chosen[b] = i
                left -= policy[b, i]
                if left < 0:
                    break


fill_behaviour: Any = jit(_fill_behaviour)
fill_sample: Any = jit(_fill_sample)


def _fill_priors(fleet: Any, params: Any, out: Any) -> None:
    """Fill ``out`` [C, N] with the standardised scores of the prior; 0 beyond the last replica."""
    for c in range(out.shape[0]):
        n = fleet.clusters[c]["n_replicas"]
        view = View(
            fleet.requests_view[c], fleet.replicas_view[c, :n], fleet.costs[c, :n], fleet.router[c]
        )
        prior_scores(view, params, out[c, :n])
        for i in range(n, out.shape[1]):
            out[c, i] = 0.0


fill_priors: Any = jit(_fill_priors)


# ---- book-keeping -------------------------------------------------------------------------------


class _BootstrapStateList:
    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def add(
        self, t: int, which: Ints, obs: Mapping[str, Any], memory: F32, terminated: Bools
    ) -> None:
        arrays = (obs["replicas"], obs["request"], obs["mask"].astype(np.bool_), memory, terminated)
        self._parts.append((np.full(len(which), t), which, *(array[which] for array in arrays)))

    def joined(self) -> BootstrapStates:
        return BootstrapStates(*(np.concatenate(parts) for parts in zip(*self._parts, strict=True)))


class RewardStatistics:
    """Sums of what a reward tells of every step."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._sums: dict[str, Any] = {}
        self._raw: list[F64] = []
        self._at_bounds: list[tuple[float, float]] = []

    def add(self) -> None:
        """Take the last step in."""
        for name, values in self._reward.terms.items():
            self._sums[name] = self._sums.get(name, 0.0) + values
        self._raw.append(self._reward.raw)
        self._at_bounds.append(self._reward.shares_at_bounds())

    def metrics(self) -> dict[str, float]:
        """Return their means; see Rollout.metrics."""
        raw = np.concatenate(self._raw)
        steps = len(self._raw)
        return {
            **{f"terms/{name}": float(total.mean()) / steps for name, total in self._sums.items()},
            "raw_reward": float(raw.mean()),
            "raw_reward_deviation": float(raw.std()),
            **{
                f"raw_reward_{name}": float(np.quantile(raw, q))
                for name, q in RAW_QUANTILES.items()
            },
            "share_at_lower_bound": float(np.mean([low for low, _ in self._at_bounds])),
            "share_at_upper_bound": float(np.mean([high for _, high in self._at_bounds])),
        }


def moments(values: NDArray[np.float32], mask: Bools) -> F64:
    """Mean and deviation [2, k] of the rows [K, k] where ``mask`` [K] is true."""
    sums = np.zeros((2, values.shape[1]))
    add_up(values, mask, sums)
    mean, square = sums / max(1, int(mask.sum()))
    return np.stack([mean, np.sqrt(np.maximum(square - mean**2, 0.0))])


def _add_up(values: Any, mask: Any, sums: Any) -> None:
    for i in range(values.shape[0]):
        if mask[i]:
            for k in range(values.shape[1]):
                value = np.float64(values[i, k])
                sums[0, k] += value
                sums[1, k] += value * value


add_up: Any = jit(_add_up)
