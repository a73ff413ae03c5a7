"""A limit of the end-to-end latency, and what happens to an environment when it is exceeded."""

from typing import Literal

from pydantic import Field

from tailrace.config import Positive, Settings


class LatencyLimit(Settings):
    """Alarms: requests whose end-to-end latency exceeds a limit."""

    latency_limit_s: Positive | None = None
    """End-to-end latency above which a request raises an alarm when it ends, s; none: no alarms."""
    latency_action: Literal["count", "warn", "end"] = "count"
    """What an alarm does: it is counted; a warning is shown too; or it ends the episode, which is
    then terminated, not truncated, and costs `latency_penalty`."""
    latency_penalty: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Cost of ending an episode like that, after the bound of the reward."""

    @property
    def ends_episodes(self) -> bool:
        """Whether an alarm ends an episode."""
        return self.latency_limit_s is not None and self.latency_action == "end"

    @property
    def warns(self) -> bool:
        """Whether an alarm is shown."""
        return self.latency_limit_s is not None and self.latency_action == "warn"
