"""Tailrace's policies inside the real Vidur (``pip install 'tailrace[vidur]'``).

:func:`register` makes every policy known to Vidur as a global scheduler. ``simulation.simulate``
plays a request table on real Vidur, ``world.VidurWorld`` does so decision by decision, and
``demonstrations`` keeps what was decided. Vidur is imported by those modules, not here, so that
Tailrace works without it. See docs/vidur.md.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tailrace.errors import TailraceError

VERSION = "0.0.26"
INSTALL = "pip install 'tailrace[vidur]'"


def require() -> None:
    """Raise unless the one version of Vidur that this was written for is installed."""
    try:
        installed = version("vidur")
    except PackageNotFoundError:
        raise TailraceError(f"vidur is not installed: {INSTALL}") from None
    if installed != VERSION:
        raise TailraceError(f"vidur {installed} is installed, {VERSION} is needed: {INSTALL}")


def register() -> Any:
    """Make Tailrace's global scheduler and its cost formula known to Vidur; may be repeated.

    Returns the class of the scheduler's settings: put ``register()(policy="tailrace")`` into
    ``ClusterConfig.global_scheduler_config``. On Vidur's command line they are
    ``--global_scheduler_config_type tailrace --tailrace_global_scheduler_config_policy NAME``.
    """
    require()
    from tailrace.integrations.vidur import predictor, scheduler

    predictor.register()
    return scheduler.register()
