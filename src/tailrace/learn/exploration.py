"""How much the policy tries out: entropy bonus, temperature with pulses, and random choices.

A pure state machine: the same calls give the same values, and its state is a few numbers, so a
resumed run goes on exactly as it would have. Everything is off by default.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from tailrace.config import Settings

Weight = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Updates = Annotated[int, Field(ge=1)]

#: The bonus moves by at most this factor away from its schedule when it seeks a target.
MAX_ADAPTATION = 1000.0
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
    target_entropy: Share | None = None
    """Entropy to keep, as a share of that of a uniform choice; the bonus is raised and lowered
    towards it."""
    target_rate: float = Field(default=1.1, gt=1, le=10, allow_inf_nan=False)
    """Factor by which the bonus is raised or lowered per update to meet the target."""
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
    pulse_factor: float = Field(default=1.0, ge=1, le=100, allow_inf_nan=False)
    """By how much a pulse raises the temperature; 1: no pulses."""
    pulse_updates: Updates = 5
    """Updates a pulse lasts before it decays."""
    pulse_decay: float = Field(default=0.7, ge=0, lt=1, allow_inf_nan=False)
    """Share of the raise that is left after each update then."""
    pulse_patience: int = Field(default=0, ge=0)
    """Evaluations without a better score that start a pulse; 0: only red flags do."""
    pulse_min_improvement: float = Field(default=1e-3, ge=0, lt=1, allow_inf_nan=False)
    """Share by which a score must be better to count as such."""
    epsilon_start: Share = 0.0
    """Share of random choices at the first update."""
    epsilon_end: Share = 0.0
    """The same after `epsilon_updates`."""
    epsilon_updates: Updates = 1
    """Updates over which that share goes from start to end."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target_entropy is not None and 0 in (self.entropy_start, self.entropy_end):
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
        if self.pulse_patience and self.pulse_factor == 1:
            raise ValueError("pulse_patience starts pulses: set pulse_factor above 1")
        return self


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
        self._raised = 0.0  # least bonus since the floor was hit
        self._best: float | None = None
        self._stale = 0  # evaluations since the best one
        self._pulse_from: int | None = None

    def values(self, update: int) -> ExplorationValues:
        """Return what holds in this update; changes nothing."""
        s = self.settings
        bonus = _interpolate(s.entropy_start, s.entropy_end, update, s.entropy_updates)
        temperature = _interpolate(
            s.temperature_start, s.temperature_end, update, s.temperature_updates
        )
        return ExplorationValues(
            entropy_weight=max(bonus * self._factor, self._raised),
            temperature=temperature * self._pulse(update),
            epsilon=_interpolate(s.epsilon_start, s.epsilon_end, update, s.epsilon_updates),
            pulse=self._pulsing(update),
        )

    def after_update(self, entropy_fraction: float) -> None:
        """Tell the policy's mean entropy, as a share of that of a uniform choice."""
        s = self.settings
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
            "raised": self._raised,
            "best": self._best,
            "stale": self._stale,
            "pulse_from": self._pulse_from,
        }
        return {name: float(value) for name, value in kept.items() if value is not None}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        self._factor, self._raised = float(state["factor"]), float(state["raised"])
        self._best = float(state["best"]) if "best" in state else None
        self._stale = int(state["stale"])
        self._pulse_from = int(state["pulse_from"]) if "pulse_from" in state else None

    def _pulsing(self, update: int) -> bool:
        start = self._pulse_from
        return start is not None and start <= update < start + self.settings.pulse_updates

    def _pulse(self, update: int) -> float:
        """Factor of the temperature."""
        s = self.settings
        if self._pulse_from is None or update < self._pulse_from:
            return 1.0
        over = max(0, update - self._pulse_from - s.pulse_updates + 1)
        share = s.pulse_decay**over
        return 1.0 if share < NEGLIGIBLE else 1.0 + (s.pulse_factor - 1.0) * share


def _interpolate(start: float, end: float, update: int, updates: int) -> float:
    """Linear from ``start`` at update 0 to ``end`` at update ``updates`` and after."""
    share = min(update / updates, 1.0)
    return start + (end - start) * share
