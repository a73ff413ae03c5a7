"""What ``tailrace/VidurRouter-v0`` stands for. Does not need Vidur before it is called."""

from typing import Any

from tailrace.integrations import vidur


def make(**options: Any) -> Any:
    """Return a :class:`~tailrace.integrations.vidur.env.VidurRouterEnv`."""
    vidur.require()
    from tailrace.integrations.vidur.env import VidurRouterEnv

    return VidurRouterEnv(**options)
