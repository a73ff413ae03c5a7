"""PPO in worlds other than our simulator: real Vidur, and the requests of a live router.

Only where roll-outs come from differs. What they look like, how they are learnt from and how the
policy is judged is the same everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.integrations.live_training.router import LiveRouter, read_settings
from tailrace.integrations.vidur import require
from tailrace.integrations.vidur.limits import nearest
from tailrace.integrations.vidur.rollout import VidurTask, play
from tailrace.learn.imitate import fit
from tailrace.learn.improve.improvement import Figures, Ppo, Tick, gather
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.improve.rollout import Rollout
from tailrace.learn.settings import Stage, TrainSettings
from tailrace.learn.world_schedule import Plan
from tailrace.policy.learned.architecture import pack
from tailrace.saturation import with_capacity


def check(settings: TrainSettings, plan: Plan) -> None:
    """Raise if a run cannot play in its world, before it has done anything."""
    if settings.env == "vidur":
        require()
        for scenario in plan.scenarios:
            nearest(scenario)
    elif settings.env == "live":
        backends = read_settings(Path(settings.serve)).backends
        if len(backends) < 2:
            raise TailraceError(f"{settings.serve}: with one backend there is no choice to learn")


class VidurPpo(Ppo):
    """Plays episodes in real Vidur, one task for each group of clusters."""

    def __init__(self, *args: Any) -> None:
        """Find out what Vidur can play of the scenarios; see Ppo for the arguments."""
        super().__init__(*args)
        self._nearest: dict[Scenario, Scenario] = {}
        for scenario in self._plan.scenarios:
            self._nearest[scenario] = with_capacity(nearest(scenario)[0])

    def _rollouts(self, number: int, stage: Stage | None, tick: Tick) -> list[Rollout]:
        return gather(self._workers, play, self._vidur_tasks(number, stage), tick)

    def _vidur_tasks(self, number: int, stage: Stage | None) -> list[VidurTask]:
        p, now = self._settings.ppo, self._exploration.values(number)
        groups = p.clusters // p.group
        first = self._first_seed + number * (groups + 1)
        source = self._plan.source(stage)
        source = replace(source, scenarios=tuple(self._nearest[s] for s in source.scenarios))
        params = pack(self._network.config, self._network.tensors())
        recording = Recording(
            self._network.config,
            self._reward(stage),
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


class LivePpo(Ppo):
    """Learns from the requests that a live router gets; it is started with the first update."""

    def __init__(self, *args: Any) -> None:
        """See Ppo for the arguments."""
        super().__init__(*args)
        p = self._settings.ppo
        self._recording = Recording(
            self._network.config,
            self._settings.reward,
            p.decisions,
            p.chunk,
            p.warmup,
            self._plan.seed(self._first_seed),
            name="live",
        )
        self.router: LiveRouter | None = None

    def update(
        self,
        number: int,
        stage: Stage | None,
        rng: torch.Generator,
        lessons: Sequence[fit.Demonstrations],
        tick: Tick,
    ) -> Figures:
        """Do the ``number``-th update; the router goes on with the new weights at once."""
        figures = super().update(number, stage, rng, lessons, tick)
        assert self.router is not None
        self.router.use(pack(self._network.config, self._network.tensors()))
        return figures

    def _rollouts(self, number: int, stage: Stage | None, tick: Tick) -> list[Rollout]:
        del stage
        now = self._exploration.values(number)
        params = pack(self._network.config, self._network.tensors())
        if self.router is None:
            # Another stream with every start: a resumed run must not repeat its choices.
            recording = replace(self._recording, stream=f"choices-{number}")
            self.router = LiveRouter(Path(self._settings.serve), recording, params)
        return [self.router.roll_out(params, now.temperature, now.epsilon, tick)]

    def close(self) -> None:
        """Stop the router once the requests under way have ended."""
        if self.router is not None:
            self.router.close()


#: Classes of PPO by the setting ``env``.
WORLDS: dict[str, Callable[..., Ppo]] = {"sim": Ppo, "vidur": VidurPpo, "live": LivePpo}
