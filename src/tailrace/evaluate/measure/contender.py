"""A policy that takes part in an evaluation, and its role there."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a policy is in an evaluation for."""

    SUBJECT = "subject"
    """Under test."""
    RULE = "rule"
    """A built-in rule with the constants it comes with."""
    TUNED = "tuned"
    """A built-in rule with constants found on tuning seeds."""
    LEARNED = "learned"
    """A simple learned baseline."""
    ORACLE = "look-ahead"
    """Simulates the future: shown for reference, never the rule to beat."""


#: Roles of the policies among which the best rule is chosen.
CANDIDATES = (Role.RULE, Role.TUNED, Role.LEARNED)


@dataclass(frozen=True)
class Contender:
    """A policy in an evaluation."""

    label: str  #: its name in tables
    spec: str  #: what the registry knows it by
    role: Role
    fingerprint: str  #: changes with whatever it decides by

    @property
    def is_candidate(self) -> bool:
        """Whether it can be the best rule."""
        return self.role in CANDIDATES
