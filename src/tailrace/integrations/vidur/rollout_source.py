"""Rollouts of PPO in real Vidur: one task for each group of clusters."""

from dataclasses import replace

from tailrace.config import Scenario
from tailrace.integrations.vidur import require
from tailrace.integrations.vidur.limits import nearest
from tailrace.integrations.vidur.rollout import VidurTask, play
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.improve.rollout_source import TaskProgress, run_tasks
from tailrace.learn.settings import Stage
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.saturation import with_capacity


class VidurRollouts:
    """Plays the scenarios of a run in Vidur, each as near as Vidur can play it."""

    def __init__(self, network: Network, schedule: WorldSchedule, first_seed: int) -> None:
        """Raise if Vidur is missing or cannot play a scenario; see RolloutSourceFactory."""
        require()
        self._network, self._schedule, self._first_seed = network, schedule, first_seed
        playable = {scenario: nearest(scenario)[0] for scenario in schedule.scenarios}
        self._nearest: dict[Scenario, Scenario] = {
            scenario: with_capacity(found) for scenario, found in playable.items()
        }

    def rollouts(
        self,
        number: int,
        stage: Stage | None,
        exploration: ExplorationValues,
        workers: WorkerPool,
        progress: TaskProgress,
    ) -> list[Rollout]:
        """Play for the ``number``-th update."""
        return run_tasks(workers, play, self._tasks(number, stage, exploration), progress)

    def _tasks(
        self, number: int, stage: Stage | None, exploration: ExplorationValues
    ) -> list[VidurTask]:
        p = self._schedule.settings.ppo
        groups = p.clusters // p.group_size
        first = self._first_seed + number * (groups + 1)
        sampler = self._schedule.sampler(stage)
        sampler = replace(sampler, scenarios=tuple(self._nearest[s] for s in sampler.scenarios))
        params = pack(self._network.config, self._network.tensors())
        recording = Recording(
            self._network.config,
            self._schedule.settings.reward_of(stage),
            p.decisions,
            p.chunk,
            p.warmup,
            self._schedule.seed(first + groups),
        )
        tasks = []
        for g in range(groups):
            seed = self._schedule.seed(first + g)
            named = replace(recording, stream=f"choices-{g}")
            tasks.append(
                VidurTask(
                    sampler(seed),
                    seed,
                    params,
                    named,
                    p.group_size,
                    exploration.temperature,
                    exploration.epsilon,
                )
            )
        return tasks

    def updated(self) -> None:
        """Nothing depends on it: every task carries the weights."""

    def close(self) -> None:
        """Nothing was started."""
