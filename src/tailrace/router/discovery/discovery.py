"""Combines what all sources have found, and hands changes to the router."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tailrace.errors import TailraceError
from tailrace.net.tls import TlsContexts
from tailrace.router.discovery.dns import DnsName
from tailrace.router.discovery.found import FoundServer, Source
from tailrace.router.discovery.kubernetes import KubernetesServers
from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.discovery.watched_file import WatchedFile

#: Changes within this time are made together, s.
SETTLE_S = 0.1
#: Pause before a change that was refused is tried again, and before a source that ended is, s.
AGAIN_S = 2.0

_log = logging.getLogger("tailrace.router")

#: Makes found servers backends; may raise TailraceError.
Apply = Callable[[Sequence[FoundServer]], None]


def sources(settings: DiscoverySettings, tls: TlsContexts | None = None) -> list[Source]:
    """Return the sources that settings name."""
    found: list[Source] = [DnsName(settings, url) for url in settings.dns]
    if settings.file is not None:
        found.append(WatchedFile(settings))
    if settings.kubernetes.is_used:
        found.append(KubernetesServers(settings, tls))
    return found


class Discovery:
    """Runs the sources."""

    def __init__(self, sources: Sequence[Source], apply: Apply) -> None:
        """``apply``: called with all servers that there are, after every change."""
        self._sources = sources
        self._apply = apply
        self._found: dict[str, Sequence[FoundServer]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look for servers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._run(source))
            while True:
                await self._changed.wait()
                await asyncio.sleep(SETTLE_S)
                self._changed.clear()
                try:
                    self._apply(self.found())
                except TailraceError as error:
                    _log.error("found servers are not used", extra={"why": str(error)})
                    await asyncio.sleep(AGAIN_S)
                    self._changed.set()

    def found(self) -> list[FoundServer]:
        """Return the servers of all sources; of several at one address the first."""
        by_url: dict[str, FoundServer] = {}
        labels: set[str] = set()
        for servers in self._found.values():
            for server in servers:
                backend = server.backend
                if backend.url not in by_url and backend.label not in labels:
                    by_url[backend.url] = server
                    labels.add(backend.label)
        return list(by_url.values())

    async def _run(self, source: Source) -> None:
        def report(servers: Sequence[FoundServer]) -> None:
            self._found[source.name] = servers
            self._changed.set()

        told = ""
        while True:
            try:
                await source.run(report)
            except Exception as error:
                why = str(error) if isinstance(error, TailraceError) else repr(error)
                if why != told:
                    _log.error("servers cannot be found", extra={"in": source.name, "why": why})
                told = why
            await asyncio.sleep(AGAIN_S)
