"""Adapter of the vector environment to the interface of Stable-Baselines3."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from tailrace.env.core import Observation
from tailrace.env.vector_env import RouterVectorEnv


class RouterVecEnv(VecEnv):
    """A RouterVectorEnv as a Stable-Baselines3 ``VecEnv``; use it with ``MultiInputPolicy``."""

    def __init__(self, env: RouterVectorEnv) -> None:
        """Wrap an environment."""
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._actions: NDArray[np.int64] = np.zeros(env.num_envs, np.int64)

    def reset(self) -> Observation:
        """Start new episodes on all clusters."""
        seed = self._seeds[0]
        observation, _ = self.env.reset(seed=seed)
        self._reset_seeds()
        self._reset_options()
        return observation

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Keep the actions for step_wait."""
        self._actions = actions

    def step_wait(self) -> tuple[Observation, NDArray[Any], NDArray[Any], list[dict[str, Any]]]:
        """Carry the actions out."""
        observation, rewards, terminated, truncated, info = self.env.step(self._actions)
        over = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for c in np.flatnonzero(over):
            final = {name: array[c] for name, array in info["final_obs"].items()}
            episode = info["final_info"]["episode"]
            infos[c] = {
                "terminal_observation": final,
                "TimeLimit.truncated": bool(truncated[c]),
                "episode": {"r": float(episode["r"][c]), "l": int(episode["l"][c]), "t": 0.0},
            }
        return observation, rewards.astype(np.float32), over, infos

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the vector environment, once per cluster."""
        return [getattr(self.env, attr_name)] * len(self._chosen(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:  # noqa: ARG002
        """Set an attribute of the vector environment."""
        setattr(self.env, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the vector environment once."""
        result = getattr(self.env, method_name)(*method_args, **method_kwargs)
        return [result] * len(self._chosen(indices))

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:  # noqa: ARG002
        """Nothing is wrapped."""
        return [False] * len(self._chosen(indices))

    def _chosen(self, indices: Any) -> Sequence[int]:
        return list(self._get_indices(indices))
