"""Rollouts of PPO in real Vidur: one task for each group of clusters."""

from dataclasses import replace

from tailrace.config import Scenario
from tailrace.integrations.vidur import require
from tailrace.integrations.vidur.limits import nearest
from tailrace.integrations.vidur.rollout import VidurTask, play
from tailrace.learn.exploration import Now
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.improve.rollout_source import Tick, gather
from tailrace.learn.settings import Stage
from tailrace.learn.world_schedule import Plan
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.saturation import with_capacity


class VidurRollouts:
    """Plays the scenarios of a run in Vidur, each as near as Vidur can play it."""

    def __init__(self, network: Network, plan: Plan, first_seed: int) -> None:
        """Raise if Vidur is missing or cannot play a scenario; see RolloutSourceFactory."""
        require()
        self._network, self._plan, self._first_seed = network, plan, first_seed
        playable = {scenario: nearest(scenario)[0] for scenario in plan.scenarios}
        self._nearest: dict[Scenario, Scenario] = {
            scenario: with_capacity(found) for scenario, found in playable.items()
        }

    def rollouts(
        self, number: int, stage: Stage | None, now: Now, workers: WorkerPool, tick: Tick
    ) -> list[Rollout]:
        """Play for the ``number``-th update."""
        return gather(workers, play, self._tasks(number, stage, now), tick)

    def _tasks(self, number: int, stage: Stage | None, now: Now) -> list[VidurTask]:
        p = self._plan.settings.ppo
        groups = p.clusters // p.group
        first = self._first_seed + number * (groups + 1)
        source = self._plan.source(stage)
        source = replace(source, scenarios=tuple(self._nearest[s] for s in source.scenarios))
        params = pack(self._network.config, self._network.tensors())
        recording = Recording(
            self._network.config,
            self._plan.settings.reward_of(stage),
            p.decisions,
            p.chunk,
            p.warmup,
            self._plan.seed(first + groups),
        )
        tasks = []
        for g in range(groups):
            seed = self._plan.seed(first + g)
            named = replace(recording, stream=f"choices-{g}")
            tasks.append(
                VidurTask(source(seed), seed, params, named, p.group, now.temperature, now.epsilon)
            )
        return tasks

    def updated(self) -> None:
        """Nothing depends on it: every task carries the weights."""

    def close(self) -> None:
        """Nothing was started."""
