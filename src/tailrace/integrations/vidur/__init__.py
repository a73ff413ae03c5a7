"""Tailrace's policies inside the real Vidur (``pip install 'tailrace[vidur]'``).

:func:`register` makes every policy known to Vidur as a global scheduler. ``simulation.simulate``
plays a request table on real Vidur, ``world.VidurWorld`` does so decision by decision, and
``demonstrations`` keeps what was decided. Vidur is imported by those modules, not here, so that
Tailrace works without it. See docs/vidur.md.
"""

from importlib.util import find_spec
from typing import Any

from tailrace.errors import TailraceError

INSTALL = "pip install 'tailrace[vidur]'"


def require() -> None:
    """Raise unless a Vidur is installed that has what Tailrace builds on (interface.py)."""
    if find_spec("vidur") is None:
        raise TailraceError(f"vidur is not installed: {INSTALL}")
    from tailrace.integrations.vidur import interface

    interface.check()


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
