"""Where the rollouts of PPO come from: the simulator, or whatever the trainer is handed.

A rollout source decides which worlds are played and how. What a rollout looks like, how the policy
learns from it and how the policy is evaluated is the same for all sources.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve.rollout import Rollout, RolloutTask, collect
from tailrace.learn.settings import ROLLOUT_TASKS, Stage
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.network import Network

TaskProgress = Callable[[int, int], None]  #: tasks done, tasks in all


class RolloutSource(Protocol):
    """Plays with the policy in training."""

    def rollouts(
        self,
        number: int,
        stage: Stage | None,
        exploration: ExplorationValues,
        workers: WorkerPool,
        progress: TaskProgress,
    ) -> list[Rollout]:
        """Play for the ``number``-th update, counted from 0, with the network as it is now."""

    def updated(self) -> None:
        """Take note that the network has new weights."""

    def close(self) -> None:
        """Release whatever was started."""


#: Makes a source for a network, the run's worlds and the number of the first training seed that
#: updates may use. Raises TailraceError if the run cannot be played there.
RolloutSourceFactory = Callable[[Network, WorldSchedule, int], RolloutSource]


def run_tasks(
    workers: WorkerPool, work: Callable[[Any], Any], tasks: Sequence[Any], progress: TaskProgress
) -> list[Any]:
    """Do tasks side by side and tell how many are done."""
    results = []
    for result in workers.map(work, tasks):
        results.append(result)
        progress(len(results), len(tasks))
    return results


class SimulatorRollouts:
    """Rollouts in the simulator."""

    def __init__(self, network: Network, schedule: WorldSchedule, first_seed: int) -> None:
        """Split the clusters of an update over tasks in whole groups; see RolloutSourceFactory."""
        self._network, self._schedule, self._first_seed = network, schedule, first_seed
        p = schedule.settings.ppo
        groups = p.clusters // schedule.settings.group
        self._tasks = next(k for k in range(min(ROLLOUT_TASKS, groups), 0, -1) if groups % k == 0)

    def rollouts(
        self,
        number: int,
        stage: Stage | None,
        exploration: ExplorationValues,
        workers: WorkerPool,
        progress: TaskProgress,
    ) -> list[Rollout]:
        """Play for the ``number``-th update."""
        return run_tasks(
            workers, collect, self._rollout_tasks(number, stage, exploration), progress
        )

    def _rollout_tasks(
        self, number: int, stage: Stage | None, exploration: ExplorationValues
    ) -> list[RolloutTask]:
        p, reward = self._schedule.settings.ppo, self._schedule.settings.reward_of(stage)
        group = self._schedule.settings.group
        groups = p.clusters // group // self._tasks
        per_update = self._tasks * (groups + 1)
        tasks = []
        for k in range(self._tasks):
            first = self._first_seed + number * per_update + k * (groups + 1)
            tasks.append(
                RolloutTask(
                    worlds=self._schedule.sampler(stage),
                    episode_seeds=tuple(self._schedule.seed(first + g) for g in range(groups)),
                    config=self._network.config,
                    tensors=self._network.tensors(),
                    seed=self._schedule.seed(first + groups),
                    clusters=groups * group,
                    group=group,
                    warmup=p.warmup,
                    greedy_warmup=p.greedy_warmup,
                    unbalanced=p.unbalanced,
                    decisions=p.decisions,
                    chunk=p.chunk,
                    temperature=exploration.temperature,
                    epsilon=exploration.epsilon,
                    reward=reward,
                    limit=self._schedule.settings.stopping.limit,
                    max_replicas=self._schedule.max_replicas,
                )
            )
        return tasks

    def updated(self) -> None:
        """Nothing depends on it: every task carries the weights."""

    def close(self) -> None:
        """Nothing was started."""
