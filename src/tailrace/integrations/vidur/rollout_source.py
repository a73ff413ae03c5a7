"""Training in real Vidur: rollouts, one task for each group of clusters, and evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tailrace import seeds
from tailrace.config import Scenario, VidurSettings
from tailrace.evaluate.measure.metrics import summarise
from tailrace.integrations.vidur import require
from tailrace.integrations.vidur.limits import nearest
from tailrace.integrations.vidur.rollout import VidurTask, play
from tailrace.integrations.vidur.setup import VidurSetup
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.improve.rollout_source import TaskProgress, run_tasks
from tailrace.learn.settings import Stage
from tailrace.learn.validation import ScoreFunction
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.learn.worlds import (
    CompiledPolicy,
    ScoreTask,
    World,
    WorldScore,
    figures_of,
    score,
)
from tailrace.parallel import WorkerPool
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.policy import learned_scores
from tailrace.policy.rules import LEARNED, RULES
from tailrace.saturation import with_capacity
from tailrace.view.records import View


class VidurRollouts:
    """Plays the scenarios of a run in Vidur, each as near as Vidur can play it.

    With Vidur's own settings (``vidur.arguments``) these are played instead, and policies are
    evaluated there. A scenario is evaluated in the simulator as Vidur plays it: the two give the
    same times to the microsecond, and the simulator a thousand times faster.
    """

    def __init__(self, network: Network, schedule: WorldSchedule, first_seed: int) -> None:
        """Raise if Vidur is missing or cannot play a scenario; see RolloutSourceFactory."""
        require()
        self._own = schedule.settings.vidur
        self._network, self._schedule, self._first_seed = network, schedule, first_seed
        playable = {scenario: self._playable(scenario) for scenario in schedule.scenarios}
        self._nearest: dict[Scenario, Scenario] = {
            scenario: with_capacity(found) for scenario, found in playable.items()
        }

    def _playable(self, scenario: Scenario) -> Scenario:
        return scenario if self._own.arguments else nearest(scenario)[0]

    def validation(self, worlds: Sequence[World]) -> tuple[list[World], ScoreFunction]:
        """Return the worlds as Vidur plays them, and what plays them."""
        playable = [replace(w, scenario=self._nearest[w.scenario]) for w in worlds]
        return playable, partial(score_in_vidur, self._own) if self._own.arguments else score

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
        group = self._schedule.settings.group
        groups = p.clusters // group
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
            latency_limit_s=self._schedule.settings.stopping.latency_limit_s,
            greedy_warmup=p.greedy_warmup,
        )
        tasks = []
        for g in range(groups):
            seed = self._schedule.seed(first + g)
            named = replace(recording, stream=f"choices-{g}")
            tasks.append(
                VidurTask(
                    VidurSetup(sampler(seed), self._own, sampler.load),
                    seed,
                    params,
                    named,
                    group,
                    exploration.temperature,
                    exploration.epsilon,
                )
            )
        return tasks

    def updated(self) -> None:
        """Nothing depends on it: every task carries the weights."""

    def close(self) -> None:
        """Nothing was started."""


class _Compiled(BuiltinPolicy):
    """A policy of the compiled engine, called from Python."""

    def __init__(self, policy: CompiledPolicy) -> None:
        self.rule = next(rule for rule in (*RULES, LEARNED) if rule.code == policy.code)
        self.name, self.lowest_id_wins = self.rule.name, self.rule.lowest_id_wins
        self.params = policy.params.copy()  # a network's memory is in there

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return the scores [n]."""
        if self.rule.code != LEARNED.code:
            return super().scores(view)
        out = np.empty(len(view.replicas))
        learned_scores(view, self.params, out)
        return out


def score_in_vidur(own: VidurSettings, task: ScoreTask) -> WorldScore:
    """Play a world's requests from start to end in Vidur with its own settings."""
    world = task.world
    seed = seeds.require(world.seed, seeds.Purpose.TRAINING)
    setup = VidurSetup(world.scenario, own)
    simulator = setup.simulator(setup.requests(world.requests, seed), seed)
    simulator.use(_Compiled(task.policy), seed)
    simulator.play()
    summary = summarise(simulator.result())
    return WorldScore(summary.cost_s, figures_of(summary), tuple(summary.replica_share))
