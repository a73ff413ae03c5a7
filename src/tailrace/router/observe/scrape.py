"""Scrapes the servers' /metrics at an interval.

A server that does not respond keeps its last snapshot, whose age every policy can see.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from pydantic import Field

from tailrace.config import Settings
from tailrace.net.engine_metrics import Snapshot, parse_metrics
from tailrace.router.state.cluster import ClusterState

Fetch = Callable[[int, str], Awaitable[bytes]]


class ScrapeSettings(Settings):
    """Reading the servers' metrics."""

    path: str = Field(default="/metrics", pattern=r"^(/[!-~]*|off)$")
    """Path of the metrics; off: do not read any and rely on the router's own ledger."""
    interval_s: float = Field(default=0.5, gt=0, le=3600, allow_inf_nan=False)
    """Time between two reads, s; policies are trained with 0.5."""
    timeout_s: float = Field(default=2.0, gt=0, le=3600, allow_inf_nan=False)
    """Time-out of a read, s."""


class Scraper:
    """Asks every replica for its metrics at an interval, all of them at the same time."""

    def __init__(
        self,
        cluster: ClusterState,
        fetch: Fetch,
        settings: ScrapeSettings | None = None,
        present: Callable[[], Iterable[int]] | None = None,
        adapters_seen: Callable[[int, frozenset[str]], None] = lambda _, __: None,
    ) -> None:
        """``fetch`` gets a path of a replica and returns the body of its response, or raises.

        ``present``: numbers of the replicas to ask; default: all of the cluster. ``adapters_seen``:
        called with the LoRA adapters that a replica has requests for.
        """
        self.cluster = cluster
        self.fetch = fetch
        self.settings = settings or ScrapeSettings()
        self.snapshots: dict[int, Snapshot] = {}
        """The latest of each replica."""
        self.failures: dict[int, int] = {}
        """Failed attempts of each replica."""
        self._present = present or (lambda: range(len(cluster)))
        self.running = False
        self._asking: set[int] = set()
        self._adapters_seen = adapters_seen

    async def run(self) -> None:
        """Ask until cancelled or switched off. A replica that is slow delays no other."""
        self.running = True
        try:
            async with asyncio.TaskGroup() as group:
                while self.settings.path != "off":
                    for r in self._present():
                        if r not in self._asking:
                            group.create_task(self._ask(r))
                    await asyncio.sleep(self.settings.interval_s)
        finally:
            self.running = False

    async def scrape(self) -> None:
        """Ask every replica once and enter its metrics."""
        await asyncio.gather(*(self._ask(r) for r in self._present()))

    def forget(self, replica: int) -> None:
        """Forget a replica: its number may be given to another one."""
        self.snapshots.pop(replica, None)
        self.failures.pop(replica, None)

    async def _ask(self, replica: int) -> None:
        self._asking.add(replica)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                body = await self.fetch(replica, self.settings.path)
            self._enter(replica, parse_metrics(body.decode("utf-8", errors="replace")))
        except Exception:  # any failure means: no metrics now
            self._count_failure(replica)
        finally:
            self._asking.discard(replica)

    def _count_failure(self, replica: int) -> None:
        self.failures[replica] = self.failures.get(replica, 0) + 1

    def _enter(self, replica: int, snapshot: Snapshot) -> None:
        if snapshot.is_empty:
            self._count_failure(replica)
            return
        self.snapshots[replica] = snapshot
        if snapshot.adapters:
            self._adapters_seen(replica, snapshot.adapters)
        self.cluster.scraped(replica, snapshot.waiting, snapshot.running, snapshot.kv_used)
        if snapshot.kv_tokens is not None:
            self.cluster.set_capacity(replica, snapshot.kv_tokens, snapshot.block_size)
