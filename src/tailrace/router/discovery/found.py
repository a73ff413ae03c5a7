"""What sources of servers report."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.settings import BackendDefaults, BackendSettings, BackendTls


class FoundServer(NamedTuple):
    """A server that was found."""

    backend: BackendSettings
    identity: str = ""
    """Differs between servers that have the same address one after the other."""
    leaving: bool = False
    """It is not ready or about to end: no further requests, those in progress go on."""


#: Called with all servers of a source whenever they have changed.
Report = Callable[[Sequence[FoundServer]], None]


class Source(Protocol):
    """Where servers are found."""

    name: str
    """For the log."""

    async def run(self, report: Report) -> None:
        """Report servers until cancelled. Failures are logged, and the last report stays."""


def backend_at(
    settings: DiscoverySettings,
    scheme: str,
    host: str,
    port: int,
    *,
    name: str = "",
    prefix: str = "",
    server_name: str = "",
) -> BackendSettings:
    """Return the settings of a server at an address; ``server_name``: for its certificate."""
    shown = f"[{host}]" if ":" in host else host
    given = {field: getattr(settings.backend, field) for field in BackendDefaults.model_fields}
    if scheme == "https" and server_name and not settings.backend.tls.server_name:
        given["tls"] = settings.backend.tls.model_copy(update={"server_name": server_name})
    return BackendSettings(url=f"{scheme}://{shown}:{port}{prefix}", name=name, **given)


def example(settings: DiscoverySettings) -> BackendSettings:
    """Return a server that could be found, to check what all of them have in common."""
    scheme = "http" if settings.backend.tls == BackendTls() else "https"
    return backend_at(settings, scheme, "127.0.0.1", 1, name="discovery.backend")
