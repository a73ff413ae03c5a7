"""One cluster as a Gymnasium environment."""

from typing import Any

import gymnasium
import numpy as np

from tailrace.env.core import Core, EnvSettings, EpisodicClusters, Observation, spaces_of
from tailrace.env.episodes import Worlds
from tailrace.errors import TailraceError
from tailrace.seeds import Purpose, require


class RouterEnv(gymnasium.Env[Observation, np.int64]):
    """A simulated cluster; an action is the replica the current request is sent to.

    See RouterVectorEnv for what is observed. An episode ends by truncation, unless an alarm ends it
    (``latency_limit_s``).
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium's way)

    def __init__(
        self,
        worlds: Worlds = "demo",
        *,
        render_mode: None = None,
        settings: EnvSettings | None = None,
        **changes: Any,
    ) -> None:
        """Make the cluster; the arguments are those of RouterVectorEnv."""
        base = settings or EnvSettings()
        self.settings = EnvSettings(**{**dict(base), **changes})
        self.core = self._clusters(worlds)
        self.render_mode = render_mode
        self.observation_space, self.action_space = spaces_of(self.core.replicas)
        self._over = True

    def _clusters(self, worlds: Any) -> EpisodicClusters:
        return Core(worlds, 1, self.settings)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode; option ``episode_seed``: its training seed."""
        if seed is not None:
            require(seed, Purpose.TRAINING)
        super().reset(seed=seed)
        given = (options or {}).get("episode_seed")
        self.core.reset([given] if given else self.core.draw_seeds(self.np_random, 1))
        self._over = False
        return self._observation(), {}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Send the request to a replica and advance to the next decision."""
        if self._over:
            raise TailraceError("the episode is over or has not begun: call reset()")
        rewards, over = self.core.step(np.array([action]))
        reward = self.core.reward
        info = {
            "elapsed_s": float(self.core.step_out.elapsed_s[0]),
            "cost_s": float(self.core.step_out.cost[0]),
            "terms": {name: float(values[0]) for name, values in reward.terms.items()},
            "raw_reward": float(reward.raw[0]),
            "alarms": int(self.core.alarms[0]),
        }
        self._over = bool(over[0])
        terminated = bool(self.core.terminated[0])
        truncated = self._over and not terminated
        return self._observation(), float(rewards[0]), terminated, truncated, info

    def _observation(self) -> Observation:
        return {name: array[0].copy() for name, array in self.core.observation().items()}
