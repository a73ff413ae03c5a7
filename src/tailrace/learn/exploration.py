"""How much the policy tries out: entropy bonus, temperature with pulses, and random choices.

A pure state machine: the same calls give the same values, and its state is a few numbers, so a
resumed run goes on exactly as it would have. Everything is off by default.
"""

import itertools
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from tailrace.config import Settings, Share

Weight = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Updates = Annotated[int, Field(ge=1)]
#: A schedule: (update, value) with rising updates. Linear in between, constant before and after.
Points = tuple[tuple[Annotated[int, Field(ge=0)], float], ...]

#: The bonus moves by at most this factor away from its schedule when it seeks a target.
MAX_ADAPTATION = 1000.0
#: The same for the temperature, and the deviation from the target at which it moves at full rate.
MAX_TEMPERATURE_FACTOR, FULL_RATE_AT = 10.0, 0.1
#: After the floor was hit, the raised bonus loses this share per update.
FLOOR_DECAY = 0.1
#: What is left of a raise below this is nothing.
NEGLIGIBLE = 1e-3


class ExplorationSettings(Settings):
    """Exploration during PPO; nothing by default."""

    RENAMED: ClassVar = {
        "stagnation": "pulse_patience",
        "stagnation_margin": "pulse_min_improvement",
    }

    entropy_start: Weight = 0.0
    """Weight of the entropy bonus at the first update."""
    entropy_end: Weight = 0.0
    """The same after `entropy_updates`."""
    entropy_updates: Updates = 1
    """Updates over which the weight goes from start to end."""
    entropy_points: Points = ()
    """Instead, the weight at several updates: [[0, 0.02], [10, 0.005], [40, 0]]; linear between."""
    target_entropy: Share | None = None
    """Entropy to keep, as a share of that of a uniform choice; the bonus is raised and lowered
    towards it."""
    target_rate: float = Field(default=1.1, gt=1, le=10, allow_inf_nan=False)
    """Largest factor by which the bonus or temperature moves per update to meet its target."""
    entropy_floor: Share | None = None
    """Entropy below which the bonus is raised to `floor_weight` at once."""
    floor_weight: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.05
    """Least weight of the bonus after the floor was hit; fades once the entropy is back."""
    temperature_start: Temperature = 1.0
    """Divisor of the logits at the first update; 1: the policy as it is, more: flatter."""
    temperature_end: Temperature = 1.0
    """The same after `temperature_updates`."""
    temperature_updates: Updates = 1
    """Updates over which the temperature goes from start to end."""
    temperature_points: Points = ()
    """Instead, the temperature at several updates, as in `entropy_points`."""
    temperature_entropy: Share | None = None
    """Entropy of the choices that the temperature holds, as a share of that of a uniform choice: it
    is raised and lowered around its schedule, by at most `target_rate` per update."""
    pulse_factor: float = Field(default=1.0, ge=1, le=100, allow_inf_nan=False)
    """By how much a pulse raises the temperature; 1: no pulses."""
    pulse_interval: int = Field(default=0, ge=0)
    """Updates from one periodic pulse to the next; 0: none."""
    pulse_updates: Updates = 5
    """Updates a pulse lasts before it decays."""
    pulse_decay: float = Field(default=0.7, ge=0, lt=1, allow_inf_nan=False)
    """Share of the raise that is left after each update then."""
    pulse_patience: int = Field(default=0, ge=0)
    """Evaluations without a better score that start a pulse; 0: none do. Red flags always do."""
    pulse_min_improvement: float = Field(default=1e-3, ge=0, lt=1, allow_inf_nan=False)
    """Share by which a score must be better to count as such."""
    epsilon_start: Share = 0.0
    """Share of random choices at the first update."""
    epsilon_end: Share = 0.0
    """The same after `epsilon_updates`."""
    epsilon_updates: Updates = 1
    """Updates over which that share goes from start to end."""
    epsilon_points: Points = ()
    """Instead, that share at several updates, as in `entropy_points`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, limits in (
            ("entropy", (0, 100)),
            ("temperature", (0.01, 100)),
            ("epsilon", (0, 1)),
        ):
            self._check_points(name, limits)
        if self.target_entropy is not None and self.temperature_entropy is not None:
            raise ValueError(
                "target_entropy and temperature_entropy would both steer the entropy; choose one"
            )
        bonus = [self.entropy_start, self.entropy_end]
        if self.entropy_points:
            bonus = [weight for _, weight in self.entropy_points]
        if self.target_entropy is not None and 0 in bonus:
            raise ValueError(
                "target_entropy adapts the entropy bonus: set entropy_start and entropy_end "
                "above zero, for example both to 0.01"
            )
        if (
            self.target_entropy is not None
            and self.entropy_floor is not None
            and self.entropy_floor > self.target_entropy
        ):
            raise ValueError(
                f"entropy_floor = {self.entropy_floor:g} lies above target_entropy = "
                f"{self.target_entropy:g}; set it lower"
            )
        for name in ("pulse_patience", "pulse_interval"):
            if getattr(self, name) and self.pulse_factor == 1:
                raise ValueError(f"{name} starts pulses: set pulse_factor above 1")
        if self.pulse_interval and self.pulse_interval <= self.pulse_updates:
            raise ValueError(
                f"pulse_interval = {self.pulse_interval} leaves no time between pulses of "
                f"pulse_updates = {self.pulse_updates}; raise it"
            )
        return self

    def _check_points(self, name: str, limits: tuple[float, float]) -> None:
        """Raise if the points of a schedule make no sense."""
        points: Points = getattr(self, f"{name}_points")
        if not points:
            return
        parts = (f"{name}_start", f"{name}_end", f"{name}_updates")
        if any(getattr(self, part) != type(self).model_fields[part].default for part in parts):
            raise ValueError(f"{name}_points and {name}_start both say what to do; choose one")
        updates = [update for update, _ in points]
        if any(b <= a for a, b in itertools.pairwise(updates)):
            raise ValueError(f"the updates of {name}_points must rise, got {updates}")
        if not all(limits[0] <= value <= limits[1] for _, value in points):
            raise ValueError(
                f"values of {name}_points must lie from {limits[0]:g} to {limits[1]:g}"
            )

    def scheduled(self, name: str, update: int) -> float:
        """Return the value of a schedule (entropy, temperature or epsilon) in an update."""
        points: Points = getattr(self, f"{name}_points")
        if not points:
            start, end = (float(getattr(self, f"{name}_{part}")) for part in ("start", "end"))
            return _interpolate(start, end, update, getattr(self, f"{name}_updates"))
        (first, value), last = points[0], points[-1]
        if update <= first:
            return value
        for (a, low), (b, high) in itertools.pairwise(points):
            if update <= b:
                return _interpolate(low, high, update - a, b - a)
        return last[1]


class ExplorationValues(NamedTuple):
    """Exploration of one update."""

    entropy_weight: float = 0.0
    temperature: float = 1.0
    epsilon: float = 0.0
    pulse: bool = False  #: a pulse is at its full height


class Exploration:
    """Says how to explore in each update, from schedules and from what happened so far."""

    def __init__(self, settings: ExplorationSettings) -> None:
        """Begin before the first update, which has number 0."""
        self.settings = settings
        self._factor = 1.0  # of the scheduled entropy bonus, seeking the target
        self._heat = 1.0  # of the scheduled temperature, likewise
        self._raised = 0.0  # least bonus since the floor was hit
        self._best: float | None = None
        self._stale = 0  # evaluations since the best one
        self._pulse_from: int | None = None

    def values(self, update: int) -> ExplorationValues:
        """Return what holds in this update; changes nothing."""
        s = self.settings
        return ExplorationValues(
            entropy_weight=max(s.scheduled("entropy", update) * self._factor, self._raised),
            temperature=s.scheduled("temperature", update) * self._heat * self._pulse(update),
            epsilon=s.scheduled("epsilon", update),
            pulse=self._pulsing(update),
        )

    def after_update(self, entropy_fraction: float) -> None:
        """Tell the policy's mean entropy, as a share of that of a uniform choice."""
        s = self.settings
        if s.temperature_entropy is not None:
            off = (s.temperature_entropy - entropy_fraction) / FULL_RATE_AT
            heat = self._heat * s.target_rate ** min(max(off, -1.0), 1.0)
            self._heat = min(max(heat, 1 / MAX_TEMPERATURE_FACTOR), MAX_TEMPERATURE_FACTOR)
        if s.target_entropy is not None:
            low = entropy_fraction < s.target_entropy
            factor = self._factor * (s.target_rate if low else 1 / s.target_rate)
            self._factor = min(max(factor, 1 / MAX_ADAPTATION), MAX_ADAPTATION)
        if s.entropy_floor is not None:
            self._raised *= 1 - FLOOR_DECAY
            if entropy_fraction < s.entropy_floor:
                self._raised = s.floor_weight
            elif self._raised < NEGLIGIBLE * s.floor_weight:
                self._raised = 0.0

    def after_evaluation(self, update: int, score: float) -> None:
        """Tell the score of an evaluation (lower is better) that followed this update."""
        s = self.settings
        if self._best is None or score < self._best - s.pulse_min_improvement * abs(self._best):
            self._best, self._stale = score, 0
            return
        self._stale += 1
        if s.pulse_patience and self._stale >= s.pulse_patience:
            self.red_flag(update)

    def red_flag(self, update: int) -> None:
        """Start a pulse with the next update, unless one is at its full height then."""
        if self.settings.pulse_factor > 1 and not self._pulsing(update + 1):
            self._pulse_from = update + 1
            self._stale = 0

    def state(self) -> dict[str, float]:
        """Return all that has to be kept to go on exactly; what there is not yet is left out."""
        kept = {
            "factor": self._factor,
            "heat": self._heat,
            "raised": self._raised,
            "best": self._best,
            "stale": self._stale,
            "pulse_from": self._pulse_from,
        }
        return {name: float(value) for name, value in kept.items() if value is not None}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        self._factor, self._raised = float(state["factor"]), float(state["raised"])
        self._heat = float(state.get("heat", 1.0))  # runs of version 0.1 have none
        self._best = float(state["best"]) if "best" in state else None
        self._stale = int(state["stale"])
        self._pulse_from = int(state["pulse_from"]) if "pulse_from" in state else None

    def _pulse_start(self, update: int) -> int | None:
        """Return the update at which the latest pulse began, if there was one by then."""
        starts = [] if self._pulse_from is None else [self._pulse_from]
        if interval := self.settings.pulse_interval:
            starts.append(update // interval * interval or update + 1)  # none at update 0
        return max((start for start in starts if start <= update), default=None)

    def _pulsing(self, update: int) -> bool:
        start = self._pulse_start(update)
        return start is not None and update < start + self.settings.pulse_updates

    def _pulse(self, update: int) -> float:
        """Factor of the temperature."""
        s, start = self.settings, self._pulse_start(update)
        if start is None:
            return 1.0
        over = max(0, update - start - s.pulse_updates + 1)
        share = s.pulse_decay**over
        return 1.0 if share < NEGLIGIBLE else 1.0 + (s.pulse_factor - 1.0) * share


def _interpolate(start: float, end: float, update: int, updates: int) -> float:
    """Linear from ``start`` at update 0 to ``end`` at update ``updates`` and after."""
    share = min(update / updates, 1.0)
    return start + (end - start) * share
