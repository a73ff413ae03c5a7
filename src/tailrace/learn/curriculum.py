"""Stages of a run, from easy to hard: by schedule, or by how well it goes."""

from collections.abc import Mapping, Sequence

from tailrace.env.reward import RewardSettings
from tailrace.learn.settings import Stage


class Curriculum:
    """Says which stage holds; without stages there is none."""

    def __init__(self, stages: Sequence[Stage], reward: RewardSettings | None = None) -> None:
        """Begin with the first stage; ``reward``: that of the run, which stages may change."""
        self._stages = tuple(stages)
        self._reward = reward or RewardSettings()
        self._number = 0
        self._updates = 0  # done in this stage

    @property
    def stage(self) -> Stage | None:
        """The stage of the next update; while it ramps, on its way from the one before."""
        if not self._stages:
            return None
        stage, done = self._stages[self._number], self._updates + 1
        if done >= stage.ramp:
            return stage
        return self._between(self._stages[self._number - 1], stage, done / stage.ramp)

    def _between(self, before: Stage, stage: Stage, share: float) -> Stage:
        """Return ``stage`` with load and numbers of the reward at a share of the way to it."""
        old, new = before.reward_changes, stage.reward_changes
        reward: dict[str, float | bool | str] = {}
        for name in {**old, **new}:
            usual = getattr(self._reward, name)
            a, b = old.get(name, usual), new.get(name, usual)
            numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
            reward[name] = float(a) + share * (float(b) - float(a)) if numbers else b
        load = before.load + share * (stage.load - before.load)
        return stage.model_copy(update={"load": load, "reward": reward, "late_weight": None})

    @property
    def first(self) -> Stage | None:
        """The stage demonstrations are made in."""
        return self._stages[0] if self._stages else None

    @property
    def number(self) -> int:
        """The stage's number, counted from 0."""
        return self._number

    def after_update(self, score_vs_best_rule: float | None) -> None:
        """Take in that an update is done, with its evaluation if there was one."""
        stage = self.stage
        if stage is None:
            return
        self._updates += 1
        good = (
            stage.until_score is not None
            and score_vs_best_rule is not None
            and score_vs_best_rule <= stage.until_score
        )
        long = stage.updates is not None and self._updates >= stage.updates
        if (good or long) and self._number + 1 < len(self._stages):
            self._number += 1
            self._updates = 0

    def state(self) -> dict[str, int]:
        """Return what has to be kept."""
        return {"number": self._number, "updates": self._updates}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a state."""
        self._number, self._updates = state.get("number", 0), state.get("updates", 0)
