"""How replicas are chosen: which policies have which role, and the guard around them."""

from typing import Self

from pydantic import Field, model_validator

from tailrace.config import PrefixLearns, Settings, Share
from tailrace.policy import registry
from tailrace.router.decide.turns import Turns


class ChooserSettings(Settings):
    """How replicas are chosen, and the guard around the policy."""

    policy: str = registry.SHIPPED_NAME
    """Policy that decides: a built-in rule, `tailrace`, a .tailrace file or a .py file."""
    fallback: str = "tolerant_sticky"
    """Built-in rule that decides when the policy fails or is overruled."""
    guard: bool = True
    """Overrule a learned or custom policy if the predicted time to first token of its choice
    exceeds `guard_ratio` times that of the fallback's choice plus `guard_s`. Built-in rules are
    never overruled."""
    guard_ratio: float = Field(default=3.0, ge=1, le=1e6, allow_inf_nan=False)
    """Factor of the guard's limit."""
    guard_s: float = Field(default=1.0, ge=0, le=1e6, allow_inf_nan=False)
    """Constant of the guard's limit, s."""
    range_deviations: float = Field(default=16.0, gt=0, le=1e6, allow_inf_nan=False)
    """A learned policy decides only if every feature is within this many standard deviations of its
    mean in training. At 12, the shipped policy would leave some of coding agents' requests to the
    fallback rule, at 8 most."""
    limit_ms: float = Field(default=5.0, gt=0, le=1e6, allow_inf_nan=False)
    """Time limit of a decision, ms; beyond it the fallback rule decides."""
    canary: str = ""
    """Policy that routes a share of the sessions; empty: none."""
    canary_share: Share = 0.0
    """Share of the sessions for the canary, 0 to 1; a session stays with one policy."""
    canary_block_s: float = Field(default=0.0, ge=0, le=86_400, allow_inf_nan=False)
    """Length of a time block, s. If above 0, the canary serves all requests of some blocks instead
    of a share of the sessions: of every 1 / `canary_share` blocks, one that is drawn at random."""
    canary_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draw of blocks."""
    canary_until: float = Field(default=0.0, ge=0, le=1e12, allow_inf_nan=False)
    """Unix time at which the canary ends by itself, s; 0: it does not."""
    shadow: str = ""
    """Policy whose decisions are logged but not used; empty: none."""
    prefix_learns: PrefixLearns = "sent"
    """When a prompt enters the prefix index: sent, first_token, or events (as first_token, and
    every backend must publish KV events). KV events correct the index in any case."""

    @model_validator(mode="after")
    def _canary_has_both(self) -> Self:
        if self.canary_share > 0 and not self.canary:
            raise ValueError("canary_share is given, but no canary")
        if self.canary_block_s > 0 and not 0 < self.canary_share <= 0.5:
            raise ValueError("a canary that takes turns has a canary_share above 0, at most 0.5")
        return self

    @property
    def turns(self) -> Turns | None:
        """When the canary has its turns; None: it gets sessions."""
        if self.canary_block_s <= 0:
            return None
        return Turns(self.canary_seed, self.canary_block_s, round(1 / self.canary_share))
