"""What can be made to go wrong with an emulated replica."""

from typing import Literal

from pydantic import Field

from tailrace.config import Settings, SpeedFactor


class Fault(Settings):
    """A fault, or its end."""

    kind: Literal["die", "return", "slow", "hang", "garbage", "error"]
    """die: closes its port and all connections, and loses everything; return: works again, empty
    after die or hang; slow: its speed is multiplied by `factor` from the next iteration on; hang:
    accepts and never answers, streams stop; garbage: answers with bytes that are no HTTP; error:
    answers with `status` to everything but /metrics. Streams go on under garbage and error."""
    factor: SpeedFactor = 1.0
    """Multiple of the configured speed (slow)."""
    status: int = Field(default=500, ge=400, le=599)
    """HTTP status (error)."""
