"""Is the run all right? Reasons to stop it, and a verdict at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tailrace.errors import TailraceError
from tailrace.learn.settings import StoppingSettings
from tailrace.learn.validation import ValidationResult

#: What the figures of a healthy run look like.
MAX_CLIP_FRACTION = 0.4
MIN_ENTROPY_FRACTION, MAX_ENTROPY_FRACTION = 0.005, 0.98
#: Largest share of the requests a replica gets if there is no reason to prefer it, times n.
MAX_RELATIVE_SHARE = 1.5


def check_collapse(result: ValidationResult, settings: StoppingSettings) -> None:
    """Raise if the policy sends everything to one replica, whatever the state."""
    if result.largest_shares and min(result.largest_shares) >= settings.collapse_share:
        raise TailraceError(
            "the policy has collapsed: in every evaluation one replica gets "
            f"{min(result.largest_shares):.1%} of the requests or more; lower the learning rate, "
            "raise exploration.entropy_start, or start from more demonstrations"
        )


@dataclass
class EvaluationsBehind:
    """Counts evaluations in a row in which a rule was better."""

    settings: StoppingSettings
    count: int = 0

    def update(self, score: float, best_rule: tuple[str, float]) -> bool:
        """Take an evaluation in; True: red flag. Raises after too many."""
        if not isfinite(score):
            raise TailraceError("the policy's score is no number; report this with the run folder")
        self.count = self.count + 1 if score > best_rule[1] else 0
        if self.settings.patience and self.count >= self.settings.patience:
            raise TailraceError(
                f"the policy has been behind {best_rule[0]} for {self.count} evaluations "
                f"({score:.4f} against {best_rule[1]:.4f}); best.tailrace is the best so far. "
                "Lower the learning rate or branching.kl_limit, clone more demonstrations, or set "
                "stopping.patience = 0 to go on"
            )
        return self.count > 0


@dataclass(frozen=True)
class Check:
    """One question about a run."""

    name: str
    ok: bool
    found: str


def health(
    rows: Sequence[Mapping[str, float]],
    best_score: float,
    best_rule: tuple[str, float],
    equal_shares: Sequence[tuple[int, float]],
) -> list[Check]:
    """Return the checks of a run from the figures of its updates.

    ``equal_shares``: replicas and largest share of each evaluated world whose replicas are equal.
    """
    checks = [
        Check(
            "ahead of the best rule",
            best_score < best_rule[1],
            f"{best_score:.4f} against {best_rule[1]:.4f} of {best_rule[0]}",
        )
    ]

    def last(name: str) -> list[float]:
        return [row[name] for row in rows[-10:] if name in row]

    if clipped := last("clip_fraction"):
        share = float(np.mean(clipped))
        checks.append(Check("few clipped ratios", share <= MAX_CLIP_FRACTION, f"{share:.1%}"))
    if entropy := last("entropy_fraction"):
        mean = float(np.mean(entropy))
        fine = MIN_ENTROPY_FRACTION <= mean <= MAX_ENTROPY_FRACTION
        checks.append(Check("neither random nor rigid", fine, f"entropy {mean:.1%} of uniform"))
    if deviations := last("raw_reward_deviation"):
        least = min(deviations)
        checks.append(Check("the reward is alive", least > 0, f"deviation {least:.3g}"))
    if equal_shares:
        worst = max(n * share for n, share in equal_shares)
        text = f"largest share is {worst:.2f} times an equal one"
        checks.append(Check("no hoarding on equal replicas", worst <= MAX_RELATIVE_SHARE, text))
    return checks
