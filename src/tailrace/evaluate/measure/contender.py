"""A policy that takes part in an evaluation, and its role there."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Role of a policy in an evaluation."""

    SUBJECT = "subject"
    """Under test."""
    RULE = "rule"
    """A built-in rule with the constants it comes with."""
    TUNED = "tuned"
    """A built-in rule with constants found on tuning seeds."""
    LEARNED = "learned"
    """A simple learned baseline."""
    ORACLE = "look-ahead"
    """Simulates the future: a reference bound, never selected as the best rule."""


#: Roles of the policies among which the best rule is chosen.
CANDIDATES = (Role.RULE, Role.TUNED, Role.LEARNED)


@dataclass(frozen=True)
class Contender:
    """A policy in an evaluation."""

    label: str  #: its name in tables
    spec: str  #: its name in the registry
    role: Role
    fingerprint: str  #: digest of its constants, weights or source

    @property
    def is_candidate(self) -> bool:
        """Whether it can be the best rule."""
        return self.role in CANDIDATES
