"""Tailrace on a Ray cluster: workers, sweeps and a router for Ray Serve. See docs/ray.md.

Ray is imported by the modules herein only, and only when it is used.
"""

from importlib.metadata import PackageNotFoundError, version

from tailrace.errors import TailraceError


def require(what: str) -> None:
    """Raise unless Ray is installed; ``what`` needs it."""
    try:
        version("ray")
    except PackageNotFoundError:
        raise TailraceError(f"{what} needs ray: pip install 'tailrace[ray]'") from None
