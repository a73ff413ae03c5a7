"""Many clusters as one Gymnasium vector environment: one kernel call per step for all of them."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from tailrace.env.core import Core, EnvSettings, Observation, spaces_of
from tailrace.env.episodes import Worlds
from tailrace.seeds import Purpose, require

Array = NDArray[np.float64]


class RouterVectorEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """``num_envs`` simulated clusters; an action is the replica the current request is sent to.

    Observations are dictionaries: ``replicas`` [n, N, F], ``request`` [n, G] (see
    policy/learned/observation.py) and ``mask`` [n, N], 1 where a replica may be chosen. An episode
    ends by truncation, after ``decisions`` decisions, or by an alarm (``latency_limit_s``), and the
    next one begins in the same step: the observation is then that of the new episode and
    ``info["final_obs"]`` that of the old.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium's way)
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        worlds: Worlds = "demo",
        *,
        copy: bool = True,
        render_mode: None = None,
        settings: EnvSettings | None = None,
        **changes: Any,
    ) -> None:
        """Make the clusters.

        ``worlds``: scenario names or values, or a function from a seed to a scenario. ``changes``
        are fields of EnvSettings. Without ``copy`` the arrays returned are overwritten by the next
        step.
        """
        self.num_envs = num_envs
        self.render_mode = render_mode
        base = settings or EnvSettings()
        self.settings = EnvSettings(**{**dict(base), **changes})
        self.core = Core(worlds, num_envs, self.settings)
        spaces = spaces_of(self.core.replicas)
        self.single_observation_space, self.single_action_space = spaces
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._copy = copy
        self._returns = np.zeros(num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start new episodes everywhere; option ``episode_seeds``: a training seed per group."""
        if seed is not None:
            require(seed, Purpose.TRAINING)
        super().reset(seed=seed)
        groups = self.num_envs // self.settings.group
        given = (options or {}).get("episode_seeds")
        self.core.reset(given or self.core.draw_seeds(self.np_random, groups))
        self._returns[:] = 0.0
        return self._observation(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, Array, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Send every cluster's request to a replica and advance to the next decision."""
        rewards, over = self.core.step(actions)
        reward = self.core.reward
        info: dict[str, Any] = {
            "elapsed_s": self.core.step_out.elapsed_s.copy(),
            "cost_s": self.core.step_out.cost.copy(),
            "terms": reward.terms,
            "raw_reward": reward.raw,
            "alarms": self.core.alarms,
        }
        terminated = self.core.terminated
        self._returns += rewards
        if over.any():
            self._autoreset(over, info)
        return self._observation(), rewards, terminated, over & ~terminated, info

    def _autoreset(self, over: NDArray[np.bool_], info: dict[str, Any]) -> None:
        info["final_obs"] = {k: v.copy() for k, v in self.core.observation().items()}
        episode = {"r": self._returns.copy(), "l": self.core.decisions.copy()}
        info["final_info"] = {"episode": episode, "_episode": over.copy()}
        info["_final_obs"] = info["_final_info"] = over.copy()
        group = self.settings.group
        groups = np.flatnonzero(over.reshape(-1, group).any(axis=1))
        which = (groups[:, None] * group + np.arange(group)).ravel()
        over[which] = True  # a group starts together
        info["_final_obs"][which] = info["final_info"]["_episode"][which] = True
        self.core.restart(which, self.core.draw_seeds(self.np_random, len(groups)))
        self._returns[which] = 0.0

    def _observation(self) -> Observation:
        observation = self.core.observation()
        if self._copy:
            return {name: array.copy() for name, array in observation.items()}
        return observation

    def close_extras(self, **_: Any) -> None:
        """Nothing to close."""
