"""The improvement of a policy, update by update: collect decisions, learn from them.

One loop for all estimates of the advantage. They differ in where decisions come from: rollouts with
the policy's own random choices (gae, grouped), or branches of copied clusters (branching).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.learn.exploration import Exploration
from tailrace.learn.imitate import fit
from tailrace.learn.improve.branches import BranchSource
from tailrace.learn.improve.experience import of_branches
from tailrace.learn.improve.learner import Learner
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.improve.rollout_source import RolloutSource, TaskProgress
from tailrace.learn.samples import Samples
from tailrace.learn.settings import Stage
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES

Arrays = dict[str, NDArray[Any]]
Metrics = dict[str, Any]  #: numbers, and arrays for histograms
#: Observations of an update whose attention weights are logged.
ATTENTION_ROWS = 256


class Improvement:
    """A policy in training, the source of its experience, and the learner."""

    def __init__(
        self,
        network: Network,
        schedule: WorldSchedule,
        source: RolloutSource,
        workers: WorkerPool,
        exploration: Exploration,
        first_seed: int,
    ) -> None:
        """Take rollouts from ``source``; branches may use training seeds from ``first_seed`` on."""
        self._network, self._settings = network, schedule.settings
        self._source, self._workers, self._exploration = source, workers, exploration
        s = self._settings
        self._branches: BranchSource | None = None
        if s.advantage == "branching":
            self._branches = BranchSource(network, schedule, first_seed)
        self._start: Network | None = None
        if s.learning.start_kl_weight > 0:
            self._start = Network(network.config, network.features, network.globals_)
            self._start.load_tensors(network.tensors())
        self._learner = Learner(network, s.learning, s.updates, s.objective, self._start)

    def update(
        self,
        number: int,
        stage: Stage | None,
        rng: torch.Generator,
        demonstrations: Sequence[fit.ImitationDataset],
        progress: TaskProgress,
    ) -> Metrics:
        """Do the ``number``-th update, counted from 0."""
        values = self._exploration.values(number)
        if self._branches is None:
            rollouts = self._source.rollouts(number, stage, values, self._workers, progress)
            _check_alive(rollouts, self._settings.stopping.min_reward_std)
            metrics = self._learner.update(rollouts, values, number, rng, demonstrations)
            self._source.updated()
            metrics |= _of_rollouts(self._network, rollouts)
        else:
            samples, new = self._branches.samples(number, stage, self._workers, progress)
            groups = [of_branches(self._network, group) for group in samples]
            metrics = self._learner.learn(groups, values, number, rng, demonstrations)
            metrics |= _of_samples(self._network, new)
        self._exploration.after_update(metrics["entropy_fraction"])
        return metrics | {name: float(value) for name, value in values._asdict().items()}

    def rolled_back(self) -> None:
        """Take note that the network has the weights of an earlier update again."""
        self._learner.rolled_back()
        self._source.updated()

    def state(self) -> Arrays:
        """Return what has to be kept, besides the network, to go on exactly."""
        kept = {k: a for k, a in self._learner.state().items() if not k.startswith("network.")}
        if self._branches is not None:
            kept |= self._branches.state()
        if self._start is not None:
            kept |= {f"start.{name}": array for name, array in self._start.tensors().items()}
        return kept

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a state."""
        network = {f"network.{name}": array for name, array in self._network.tensors().items()}
        self._learner.restore({**state, **network})
        if self._branches is not None:
            self._branches.restore(state)
        if self._start is not None:
            prefix = "start."
            self._start.load_tensors(
                {k.removeprefix(prefix): a for k, a in state.items() if k.startswith(prefix)}
            )

    def close(self) -> None:
        """Close the source of rollouts."""
        self._source.close()


def _check_alive(rollouts: Sequence[Rollout], least: float) -> None:
    deviation = float(np.concatenate([r.reward.ravel() for r in rollouts]).std())
    if deviation <= least:
        raise TailraceError(
            f"the reward is dead: it varies by {deviation:.2g} from decision to decision, so there "
            "is nothing to learn from; look at `tailrace headroom` under this reward, loosen its "
            "bound or give weight to e2e and ttft"
        )


@torch.no_grad()
def _attention(
    network: Network,
    replica_obs: NDArray[np.float32],
    request_obs: NDArray[np.float32],
    mask: NDArray[np.bool_],
) -> Metrics:
    """Describe how replicas attend to each other in some of the observations [K, ...].

    All weights, and for each head their entropy as a share of that of equal attention.
    """
    some = np.linspace(0, len(mask) - 1, min(len(mask), ATTENTION_ROWS)).astype(np.int64)
    shown = torch.from_numpy(mask[some])
    weights = network.attention(
        torch.from_numpy(replica_obs[some]), torch.from_numpy(request_obs[some]), shown
    )  # [B, heads, n, n]
    there = shown[:, None, :].expand(weights.shape[:3])  # [B, heads, n]
    entropy = torch.special.entr(weights).sum(-1)
    most = shown.sum(-1).double().log()[:, None, None].expand(there.shape)
    found: Metrics = {}
    for head in range(weights.shape[1]):
        rows = there[:, head]
        share = float(entropy[:, head][rows].sum() / most[:, head][rows].sum().clamp(min=1e-9))
        found[f"attention/entropy_head_{head}"] = share
    pairs = there[..., None] & shown[:, None, None, :]
    return found | {"attention": weights[pairs].numpy()}


def _of_rollouts(network: Network, rollouts: Sequence[Rollout]) -> Metrics:
    """Describe the decisions of an update: what they cost, how many, their features."""
    metrics: Metrics = {
        name: float(np.mean([r.metrics[name] for r in rollouts])) for name in rollouts[0].metrics
    }
    metrics["samples"] = float(sum(r.action.size for r in rollouts))
    first = rollouts[0]
    metrics |= _attention(
        network,
        first.replica_obs.reshape(-1, *first.replica_obs.shape[2:]),
        first.request_obs.reshape(-1, first.request_obs.shape[2]),
        first.mask.reshape(-1, first.mask.shape[2]),
    )
    return metrics | _named(
        np.mean([r.replica_moments for r in rollouts], axis=0),
        np.mean([r.request_moments for r in rollouts], axis=0),
    )


def _of_samples(network: Network, samples: Sequence[Samples]) -> Metrics:
    """Count the branched decisions of an update and describe their features."""
    first = samples[0]
    metrics: Metrics = {"samples": float(sum(map(len, samples)))}
    metrics |= _attention(network, first.replica_obs, first.request_obs, first.mask)
    return metrics | _named(
        _moments(np.concatenate([s.replica_obs[s.mask] for s in samples])),
        _moments(np.concatenate([s.request_obs for s in samples])),
    )


def _moments(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Mean and deviation [2, k] of rows [K, k]."""
    return np.stack([values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)])


def _named(replica_moments: NDArray[Any], request_moments: NDArray[Any]) -> Metrics:
    """Mean and deviation of every feature seen, by name, from [2, F] and [2, G]."""
    statistics = {}
    for features, values in (
        (REPLICA_FEATURES, replica_moments),
        (REQUEST_FEATURES, request_moments),
    ):
        for feature, mean, deviation in zip(features, *values, strict=True):
            statistics[f"features/{feature.name}_mean"] = float(mean)
            statistics[f"features/{feature.name}_deviation"] = float(deviation)
    return statistics
