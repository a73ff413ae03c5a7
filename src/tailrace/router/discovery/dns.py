"""Servers behind a DNS name: every address is one."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from tailrace.net.origin import Origin
from tailrace.router.discovery.found import FoundServer, Report, backend_at
from tailrace.router.discovery.settings import DiscoverySettings

#: Time for one resolution, s.
TIMEOUT_S = 10.0

_log = logging.getLogger("tailrace.router")

#: Returns the addresses of a host.
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host, IPv4 and IPv6; raise ``OSError``."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


class DnsName:
    """Reports the addresses of a name."""

    def __init__(self, settings: DiscoverySettings, url: str, resolve: Resolve = resolve) -> None:
        self.name = f"name {url}"
        self._settings = settings
        self._origin = Origin.parse(url)
        self._resolve = resolve

    async def run(self, report: Report) -> None:
        """Report whenever the addresses have changed; a failed resolution changes nothing."""
        host, port, tls, prefix = self._origin
        known: list[str] = []
        failed = False
        while True:
            try:
                addresses = sorted(set(await self._resolve(host, port)))
                failed = False
            except OSError as error:
                addresses = known
                if not failed:
                    _log.error(
                        "a name cannot be resolved, its servers stay as they were",
                        extra={"host": host, "why": error.strerror or str(error) or "no answer"},
                    )
                failed = True
            if addresses and addresses != known:
                known = addresses
                scheme = "https" if tls else "http"
                report([
                    FoundServer(
                        backend_at(
                            self._settings, scheme, address, port, prefix=prefix, server_name=host
                        )
                    )
                    for address in addresses
                ])  # fmt: skip
            await asyncio.sleep(self._settings.interval_s)
