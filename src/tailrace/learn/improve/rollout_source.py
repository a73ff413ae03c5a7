"""Where the rollouts of PPO come from: the simulator, or whatever the trainer is handed.

A rollout source decides which worlds are played and how. What a rollout looks like, how the policy
learns from it and how the policy is evaluated is the same for all sources.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tailrace.learn.exploration import Now
from tailrace.learn.improve.rollout import Rollout, RolloutTask, collect
from tailrace.learn.settings import ROLLOUT_TASKS, Stage
from tailrace.learn.world_schedule import Plan
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.network import Network

Tick = Callable[[int, int], None]  #: tasks done, tasks in all


class RolloutSource(Protocol):
    """Plays with the policy in training."""

    def rollouts(
        self, number: int, stage: Stage | None, now: Now, workers: WorkerPool, tick: Tick
    ) -> list[Rollout]:
        """Play for the ``number``-th update, counted from 0, with the network as it is now."""

    def updated(self) -> None:
        """Take note that the network has new weights."""

    def close(self) -> None:
        """Release whatever was started."""


#: Makes a source for a network, the run's worlds and the number of the first training seed that
#: updates may use. Raises TailraceError if the run cannot be played there.
RolloutSourceFactory = Callable[[Network, Plan, int], RolloutSource]


def gather(
    workers: WorkerPool, work: Callable[[Any], Any], tasks: Sequence[Any], tick: Tick
) -> list[Any]:
    """Do tasks side by side and tell how many are done."""
    results = []
    for result in workers.map(work, tasks):
        results.append(result)
        tick(len(results), len(tasks))
    return results


class SimulatorRollouts:
    """Rollouts in the simulator."""

    def __init__(
        self, network: Network, plan: Plan, first_seed: int, tasks: int = ROLLOUT_TASKS
    ) -> None:
        """The clusters of an update are split over so many tasks."""
        self._network, self._plan, self._first_seed = network, plan, first_seed
        p = plan.settings.ppo
        groups = p.clusters // p.group
        self._tasks = next(k for k in range(min(tasks, groups), 0, -1) if groups % k == 0)

    def rollouts(
        self, number: int, stage: Stage | None, now: Now, workers: WorkerPool, tick: Tick
    ) -> list[Rollout]:
        """Play for the ``number``-th update."""
        return gather(workers, collect, self._rollout_tasks(number, stage, now), tick)

    def _rollout_tasks(self, number: int, stage: Stage | None, now: Now) -> list[RolloutTask]:
        p, reward = self._plan.settings.ppo, self._plan.settings.reward_of(stage)
        groups = p.clusters // p.group // self._tasks
        per_update = self._tasks * (groups + 1)
        tasks = []
        for k in range(self._tasks):
            first = self._first_seed + number * per_update + k * (groups + 1)
            tasks.append(
                RolloutTask(
                    worlds=self._plan.source(stage),
                    episode_seeds=tuple(self._plan.seed(first + g) for g in range(groups)),
                    config=self._network.config,
                    tensors=self._network.tensors(),
                    seed=self._plan.seed(first + groups),
                    clusters=groups * p.group,
                    group=p.group,
                    warmup=p.warmup,
                    decisions=p.decisions,
                    chunk=p.chunk,
                    temperature=now.temperature,
                    epsilon=now.epsilon,
                    reward=reward,
                    max_replicas=self._plan.most_replicas,
                )
            )
        return tasks

    def updated(self) -> None:
        """Nothing depends on it: every task carries the weights."""

    def close(self) -> None:
        """Nothing was started."""
