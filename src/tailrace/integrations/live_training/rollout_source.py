"""Rollouts of PPO from the requests of a live router, which starts with the first update."""

from dataclasses import replace
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.integrations.live_training.router import LiveRouter, read_settings
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.improve.rollout_source import TaskProgress
from tailrace.learn.settings import Stage
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network


class LiveRollouts:
    """Records the next requests of the router; between rollouts it takes the best replica."""

    def __init__(self, network: Network, schedule: WorldSchedule, first_seed: int) -> None:
        """Raise if the router's settings cannot be learnt from; see RolloutSourceFactory."""
        self._network, self._serve = network, Path(schedule.settings.serve)
        if len(read_settings(self._serve).backends) < 2:
            raise TailraceError(f"{self._serve}: with one backend there is no choice to learn")
        p = schedule.settings.ppo
        self._recording = Recording(
            network.config,
            schedule.settings.reward,
            p.decisions,
            p.chunk,
            p.warmup,
            schedule.seed(first_seed),
            name="live",
            latency_limit_s=schedule.settings.stopping.latency_limit_s,
            greedy_warmup=p.greedy_warmup,
        )
        self.router: LiveRouter | None = None

    def rollouts(
        self,
        number: int,
        stage: Stage | None,
        exploration: ExplorationValues,
        workers: WorkerPool,
        progress: TaskProgress,
    ) -> list[Rollout]:
        """Record for the ``number``-th update; a live router has no stages and no workers."""
        del stage, workers
        params = pack(self._network.config, self._network.tensors())
        if self.router is None:
            # Another stream with every start: a resumed run must not repeat its choices.
            recording = replace(self._recording, stream=f"choices-{number}")
            self.router = LiveRouter(self._serve, recording, params)
        return [
            self.router.roll_out(params, exploration.temperature, exploration.epsilon, progress)
        ]

    def updated(self) -> None:
        """Let the router go on with the new weights at once."""
        if self.router is not None:
            self.router.use(pack(self._network.config, self._network.tensors()))

    def close(self) -> None:
        """Stop the router once the requests in flight have ended."""
        if self.router is not None:
            self.router.close()
