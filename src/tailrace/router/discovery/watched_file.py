"""Servers listed in a file that is read again whenever it changes."""

import asyncio
import logging
import os
from pathlib import Path

from tailrace.config import MAX_REPLICAS, Settings, load_toml, parse
from tailrace.errors import TailraceError
from tailrace.router.discovery.found import FoundServer, Report
from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.settings import BackendSettings

_log = logging.getLogger("tailrace.router")


class BackendFile(Settings):
    """The contents of the file."""

    backends: tuple[BackendSettings, ...] = ()
    """The servers."""


def read(path: Path) -> tuple[BackendSettings, ...]:
    """Return the servers of a file; raise what is wrong with it."""
    backends = parse(BackendFile, load_toml(path)).backends
    if len(backends) > MAX_REPLICAS:
        raise TailraceError(f"{path} lists more than {MAX_REPLICAS} servers")
    for what in ("url", "label"):
        values = [getattr(backend, what) for backend in backends]
        double = sorted({value for value in values if values.count(value) > 1})
        if double:
            raise TailraceError(f"{path} lists {double[0]} twice")
    for backend in backends:
        backend.api_key()
    return backends


class WatchedFile:
    """Reports the servers of a file."""

    def __init__(self, settings: DiscoverySettings) -> None:
        assert settings.file is not None
        self.name = f"file {settings.file}"
        self._path = settings.file
        self._interval_s = settings.interval_s

    async def run(self, report: Report) -> None:
        """Report whenever the file has changed; one that is faulty or gone changes nothing."""
        stamp: object = None
        why = ""
        while True:
            try:
                found = os.stat(self._path)  # noqa: PTH116  (a link is followed either way)
                new = found.st_ino, found.st_mtime_ns, found.st_size
                if new != stamp:
                    stamp = new
                    report([FoundServer(backend) for backend in read(self._path)])
                why = ""
            except (OSError, TailraceError) as error:
                now = str(error)
                if now != why:
                    _log.error("servers of a file stay as they were", extra={"why": now})
                why = now
                if isinstance(error, OSError):
                    stamp = None
            await asyncio.sleep(self._interval_s)
