"""One update of the policy, by branching or by PPO; the trainer does not care which."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.learn.exploration import Exploration
from tailrace.learn.imitate import fit
from tailrace.learn.improve.ppo import Learner
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.improve.rollout_source import RolloutSource, TaskProgress, run_tasks
from tailrace.learn.samples import Samples, by_cluster_size
from tailrace.learn.settings import Stage, TrainSettings
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.learn.worlds import BranchTask, branch
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.saturation import resolve_rate
from tailrace.seeds import generator

Arrays = dict[str, NDArray[Any]]
Metrics = dict[str, float]
#: Replicas up to which a cluster counts as small; a decision of a larger one takes longer to try.
SMALL = 4


class Improvement(Protocol):
    """A way to improve a policy."""

    def update(
        self,
        number: int,
        stage: Stage | None,
        rng: torch.Generator,
        demonstrations: Sequence[fit.ImitationDataset],
        progress: TaskProgress,
    ) -> Metrics:
        """Do the ``number``-th update, counted from 0."""

    def state(self) -> Arrays:
        """Return what has to be kept, besides the network, to go on exactly."""

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a state."""

    def close(self) -> None:
        """Let go of whatever was started for it."""


class Branching:
    """Try several choices at sampled decisions, and shift towards the cheaper ones."""

    def __init__(
        self, network: Network, schedule: WorldSchedule, workers: WorkerPool, first_seed: int
    ) -> None:
        """``first_seed`` is the number of the first training seed it may use."""
        self._network, self._schedule, self._workers = network, schedule, workers
        self._settings = schedule.settings
        self._first_seed = first_seed
        self._kept: list[list[Samples]] = []

    def update(
        self,
        number: int,
        stage: Stage | None,
        rng: torch.Generator,
        demonstrations: Sequence[fit.ImitationDataset],
        progress: TaskProgress,
    ) -> Metrics:
        """Do the ``number``-th update, counted from 0."""
        b = self._settings.branching
        tasks = self._tasks(number, stage)
        new = by_cluster_size(run_tasks(self._workers, branch, tasks, progress))
        if not new:
            raise TailraceError(
                "all traffic ended before the first decision to branch at: lower branching.warmup, "
                "or train on more requests"
            )
        self._kept = [*self._kept, new][-b.replay_updates :]
        share = number / max(1, self._settings.updates - 1)
        rate = b.learning_rate + share * (b.final_learning_rate - b.learning_rate)
        metrics = fit.improve(
            self._network,
            by_cluster_size([samples for update in self._kept for samples in update]),
            kl_limit=b.kl_limit,
            epochs=b.epochs,
            batch_size=b.batch_size,
            learning_rate=rate,
            rng=rng,
            demonstrations=demonstrations,
            imitation_weight=b.imitation_weight * max(0.0, 1 - number / b.imitation_updates),
        )
        replicas = np.concatenate([s.replica_obs[s.mask] for s in new])
        requests = np.concatenate([s.request_obs for s in new])
        statistics = _named(_moments(replicas), _moments(requests)) | {"learning_rate": rate}
        return metrics | statistics | {"samples": float(sum(map(len, new)))}

    def _tasks(self, number: int, stage: Stage | None) -> list[BranchTask]:
        b = self._settings.branching
        network = pack(self._network.config, self._network.tensors())
        first = self._first_seed + number * b.worlds
        tasks = []
        for world in self._schedule.worlds(first, b.worlds, 1, stage):
            rng = generator(world.seed, "branching")
            warmup = int(rng.integers(b.warmup // 10, b.warmup + 1))
            gap = int(rng.integers(max(1, b.gap // 2), b.gap + b.gap // 2 + 1))
            rate = resolve_rate(world.scenario) or 1.0
            states = max(1, b.states * SMALL // max(SMALL, world.scenario.cluster.size))
            requests = warmup + states * gap + int(rate * b.max_horizon_s) + 1
            tasks.append(
                BranchTask(
                    replace(world, requests=requests, late_share=b.late_share),
                    network,
                    warmup,
                    states,
                    gap,
                    b.candidates,
                    b.horizon,
                    b.min_horizon_s,
                    b.max_horizon_s,
                    b.logit_margin,
                )
            )
        return tasks

    def state(self) -> Arrays:
        """Return the samples kept."""
        return {
            f"kept.{u}.{g}.{name}": array
            for u, update in enumerate(self._kept)
            for g, samples in enumerate(update)
            for name, array in samples.arrays().items()
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take samples back."""
        found: dict[int, dict[int, Arrays]] = {}
        for key, array in state.items():
            if key.startswith("kept."):
                _, update, group, name = key.split(".")
                found.setdefault(int(update), {}).setdefault(int(group), {})[name] = array
        self._kept = [
            [Samples(**groups[g]) for g in sorted(groups)] for _, groups in sorted(found.items())
        ]

    def close(self) -> None:
        """Nothing was started."""


class Ppo:
    """Play with the policy's own random choices, and make the better ones more likely."""

    def __init__(
        self,
        network: Network,
        settings: TrainSettings,
        source: RolloutSource,
        workers: WorkerPool,
        exploration: Exploration,
    ) -> None:
        """Take the rollouts of every update from ``source``."""
        self._network, self._settings = network, settings
        self._source, self._workers, self._exploration = source, workers, exploration
        p = settings.ppo
        self._learner = Learner(network, p, settings.updates)
        self._start: Network | None = None
        if p.start_kl_weight > 0:
            self._start = Network(network.config, network.features, network.globals_)
            self._start.load_tensors(network.tensors())

    def update(
        self,
        number: int,
        stage: Stage | None,
        rng: torch.Generator,
        demonstrations: Sequence[fit.ImitationDataset],
        progress: TaskProgress,
    ) -> Metrics:
        """Do the ``number``-th update, counted from 0."""
        exploration = self._exploration.values(number)
        rollouts = self._source.rollouts(number, stage, exploration, self._workers, progress)
        _check_alive(rollouts, self._settings.stopping.min_reward_std)
        metrics = self._learner.update(
            rollouts, exploration, number, rng, demonstrations, self._start
        )
        self._source.updated()
        self._exploration.after_update(metrics["entropy_fraction"])
        statistics = {
            name: float(np.mean([r.metrics[name] for r in rollouts]))
            for name in rollouts[0].metrics
        }
        steps = sum(r.action.size for r in rollouts)
        statistics |= _named(
            np.mean([r.replica_moments for r in rollouts], axis=0),
            np.mean([r.request_moments for r in rollouts], axis=0),
        )
        explored = {name: float(value) for name, value in exploration._asdict().items()}
        return metrics | statistics | {"samples": float(steps), **explored}

    def state(self) -> Arrays:
        """Return optimiser and warm-start policy; the network itself is kept by the trainer."""
        kept = {k: a for k, a in self._learner.state().items() if not k.startswith("network.")}
        if self._start is not None:
            kept |= {f"start.{name}": array for name, array in self._start.tensors().items()}
        return kept

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take them back."""
        network = {f"network.{name}": array for name, array in self._network.tensors().items()}
        self._learner.restore({**state, **network})
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
            "is nothing to learn from; look at `tailrace headroom` under this reward, lower its "
            "bound or give weight to e2e and ttft"
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
