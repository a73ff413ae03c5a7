"""Real Vidur as a Gymnasium environment: ``tailrace/VidurRouter-v0``. Imports Vidur."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.env.core import EnvSettings, EpisodicClusters
from tailrace.env.episodes import Worlds
from tailrace.env.single_env import RouterEnv
from tailrace.errors import TailraceError
from tailrace.integrations.vidur import require as require_vidur
from tailrace.integrations.vidur.setup import VidurSetup, setup_of
from tailrace.integrations.vidur.world import VidurWorld
from tailrace.seeds import Purpose, generator, require


class VidurClusters(EpisodicClusters):
    """One cluster in Vidur, drawn anew for each episode."""

    def __init__(self, worlds: Worlds, vidur: Any, settings: EnvSettings) -> None:
        """``vidur``: Vidur's own settings, played instead of the worlds; None: the worlds are."""
        require_vidur()
        if settings.reward.rule is not None:
            raise TailraceError(
                f"reward.reference = '{settings.reward.rule}' routes the same requests a second "
                "time, which only the simulator can do: Vidur needs reference = 'past'"
            )
        if settings.group != 1:
            raise TailraceError(f"one cluster cannot be split into groups of {settings.group}")
        if callable(worlds):
            raise TailraceError("Vidur plays scenarios: give some instead of a function")
        given = [worlds] if isinstance(worlds, str | Scenario) else list(worlds)
        found = [setup_of(_loaded(world), vidur) for world in given]
        self._setups: list[VidurSetup] = [setup for setup, _ in found]
        self.notes = [note for _, notes in found for note in notes]
        """What was changed of the scenarios, so that Vidur can play them."""
        super().__init__(1, max(s.scenario.cluster.size for s in self._setups), settings)
        self._world: VidurWorld | None = None

    def reset(self, episode_seeds: Sequence[int]) -> None:
        """Start an episode."""
        (seed,) = episode_seeds
        require(seed, Purpose.TRAINING)
        number = 0
        if len(self._setups) > 1:
            number = int(generator(seed, "scenario").integers(len(self._setups)))
        # One request more than decisions: the last one is observed but not decided.
        self._world = VidurWorld(
            self._setups[number],
            requests=self.settings.decisions + 1,
            reward=self.settings.reward,
            latency_limit_s=self.settings.latency_limit_s,
        )
        self._world.reset(seed)
        self._show()
        self.decisions[:] = 0
        self.reward.restart(np.arange(1))

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Send the request to a replica; an unavailable one is replaced by the next available."""
        if self._world is None:
            raise TailraceError("call reset() before step()")
        self._world.step(int(self.valid(actions)[0]))
        self._show()
        self.decisions += 1
        return self._result(self.reward(self.step_out))

    def _show(self) -> None:
        """Copy the world's step to the room there is for the largest cluster."""
        assert self._world is not None
        n, whole, part = self._world.replicas, self.step_out, self._world.out
        for padded in (whole.replica_obs, whole.mask):
            padded[:] = 0
        whole.replica_obs[:, :n], whole.mask[:, :n] = part.replica_obs, part.mask
        for name in set(whole._fields) - {"replica_obs", "mask"}:
            getattr(whole, name)[:] = getattr(part, name)


class VidurRouterEnv(RouterEnv):
    """The environment of RouterEnv with real Vidur as its world, a thousand times slower."""

    def __init__(self, worlds: Worlds = "demo", *, vidur: Any = None, **options: Any) -> None:
        """Take worlds and options as RouterEnv does.

        ``vidur``: play Vidur's own settings, a ``SimulationConfig`` or its command line as text or
        words; the targets for latencies and what a router knows are then the worlds'.
        """
        self._vidur = vidur
        super().__init__(worlds, **options)

    def _clusters(self, worlds: Any) -> EpisodicClusters:
        return VidurClusters(worlds, self._vidur, self.settings)


def _loaded(world: str | Scenario) -> Scenario:
    return scenarios.load(world) if isinstance(world, str) else world
