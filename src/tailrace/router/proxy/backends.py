"""The servers behind the router: connections, health and requests in flight of each.

A backend's number never changes. One that a reload removes keeps its number, gets no more requests,
and its streams go on undisturbed.
"""

import logging
import math
from collections.abc import Callable, Collection

from tailrace.net.client import NO_FILES, FetchError, Pool
from tailrace.router.decide.chooser import Chooser, Decision
from tailrace.router.observe.scrape import Scraper
from tailrace.router.observe.snapshot import CLOSED, OPEN, BackendSnapshot
from tailrace.router.proxy.health import NO_LIMIT, Health
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.cluster import ClusterState

_log = logging.getLogger("tailrace.router")


def _pool(backend: BackendSettings, settings: ServeSettings) -> Pool:
    return Pool(backend.origin, connect_s=settings.limits.connect_s, api_key=backend.api_key())


class Backend:
    """One server as the router uses it."""

    def __init__(
        self,
        index: int,
        backend: BackendSettings,
        settings: ServeSettings,
        full: set[int],
        health_changed: "Callable[[Backend], None]",
    ) -> None:
        """``full``: numbers of backends at their limit, which this one enters and leaves."""
        self.index = index
        self.settings = backend
        self.label = backend.label
        self.label_bytes = backend.label.encode("ascii", "replace")
        self.pool = _pool(backend, settings)
        self.health = Health(
            settings.health,
            backend.max_in_flight or settings.admission.max_in_flight,
            lambda: health_changed(self),
        )
        self.active = 0
        """Requests in flight."""
        self.limit = self.health.max_in_flight
        """Most requests at once, for now."""
        self.heard = False
        """Whether a piece of a response has come since this was last cleared."""
        self._full = full

    def begin(self) -> None:
        """Count a request that is being sent."""
        self.active += 1
        if self.active >= self.limit:
            self._full.add(self.index)

    def end(self) -> None:
        """Count a request that is over, however it ended."""
        self.active -= 1
        if self.active < self.limit:
            self._full.discard(self.index)

    async def probe(self, clock: Callable[[], float]) -> str:
        """Ask its health path once; return why it counts as failed, or an empty text."""
        health = self.health.settings
        self.heard = False
        try:
            response = await self.pool.fetch("GET", health.path, timeout_s=health.timeout_s)
        except FetchError as error:
            why = str(error)
            if self.heard and error.late:
                return ""  # busy, but it is responding to others
            if why == NO_FILES:
                return why
            self.health.probed(clock(), False, why, died=error.connecting)
            return why
        good = response.status < 500
        why = "" if good else f"answers {health.path} with {response.status}"
        self.health.probed(clock(), good, why)
        return why

    async def fetch_metrics(self, path: str, timeout_s: float) -> bytes:
        """Return its metrics; raise ``FetchError``."""
        response = await self.pool.fetch("GET", path, timeout_s=timeout_s)
        if response.status != 200:
            raise FetchError(f"answers {path} with {response.status}")
        return response.body


class Backends:
    """All backends, the records that policies read, and the chooser among them."""

    def __init__(self, settings: ServeSettings, cluster: ClusterState, chooser: Chooser) -> None:
        """Take the backends of the settings, in the order of the cluster's records."""
        self.cluster = cluster
        self.chooser = chooser
        self.full: set[int] = set()
        """Numbers of backends that are at their limit."""
        self.all: list[Backend] = []
        """By number, including those that a reload has removed."""
        self._now = 0.0
        self._turn = 0
        for backend in settings.backends:
            self._add(len(self.all), backend, settings)

    def _add(self, index: int, backend: BackendSettings, settings: ServeSettings) -> None:
        assert index == len(self.all)
        self.all.append(Backend(index, backend, settings, self.full, self._health_changed))

    @property
    def present(self) -> list[Backend]:
        """Backends that no reload has removed."""
        return [b for b in self.all if not b.health.removed]

    def reload(self, settings: ServeSettings) -> tuple[list[str], list[str]]:
        """Take over changed settings; return the labels of added and of removed backends."""
        if settings.routing != self.chooser.settings:
            chooser = Chooser(self.cluster, settings.routing)
            self.chooser.close()
            self.chooser = chooser
        wanted = {backend.url: backend for backend in settings.backends}
        added, removed = [], []
        for backend in self.all:
            new = wanted.pop(backend.settings.url, None)
            if new is None:
                if not backend.health.removed:
                    removed.append(backend.label)
                    backend.health.remove(True)
                continue
            if new.api_key_env != backend.settings.api_key_env:
                backend.pool.close()
                backend.pool = _pool(new, settings)
            backend.settings, backend.label = new, new.label
            backend.label_bytes = new.label.encode("ascii", "replace")
            limit = new.max_in_flight or settings.admission.max_in_flight
            backend.health.max_in_flight = limit or NO_LIMIT
            backend.health.set_settings(settings.health)
            if backend.health.removed:
                added.append(backend.label)
                backend.health.remove(False)
        for new in wanted.values():
            self._add(self.cluster.add(new), new, settings)
            added.append(new.label)
        self.refresh(self._now)
        return added, removed

    def choose(self, arrival: Arrival, tried: Collection[Backend]) -> Decision | None:
        """Choose a backend for a request; None: no available one has room."""
        excluded: Collection[int] = self.full
        if tried:
            excluded = self.full | {b.index for b in tried}
        decision = self.chooser.choose(arrival, excluded)
        if decision is None and self.full:
            # Slow start is a courtesy: no request is rejected for it.
            hard = {b.index for b in self.all if b.active >= b.health.max_in_flight or b in tried}
            if len(hard) < len(self.all):
                decision = self.chooser.choose(arrival, hard)
        return decision

    def any_backend(self, tried: Collection[Backend]) -> Backend | None:
        """Return the available backend with the fewest requests, for what is not routed."""
        self._turn += 1
        free = [b for b in self.all if b.health.available and b not in tried]
        if not free:
            return None
        fewest = min(b.active for b in free)
        least = [b for b in free if b.active == fewest]
        return least[self._turn % len(least)]

    def has_other(self, tried: Collection[Backend]) -> bool:
        """Whether there is an available backend that was not tried."""
        return any(b.health.available and b not in tried for b in self.all)

    def may_eject(self) -> bool:
        """Whether error responses may take a backend out: not if half are out already."""
        present = self.present
        out = sum(b.health.breaker.state != CLOSED for b in present)
        return 2 * (out + 1) <= len(present)

    def refresh(self, now: float) -> None:
        """Bring the limits up to date; they grow with time after a return."""
        self._now = now
        for backend in self.all:
            self._set_limit(backend)

    def _health_changed(self, backend: Backend) -> None:
        """A breaker has changed, or a drain has begun or ended."""
        state = backend.health.state
        level = logging.WARNING if state == OPEN else logging.INFO
        _log.log(
            level,
            "replica is %s", state,
            extra={"replica": backend.label, "why": backend.health.breaker.reason},
        )  # fmt: skip
        self.cluster.set_available(backend.index, backend.health.available)
        if (state == OPEN and backend.health.breaker.died) or backend.health.removed:
            self.cluster.forget(backend.index)
        self._set_limit(backend)

    def _set_limit(self, backend: Backend) -> None:
        if backend.health.warming(self._now):
            others = [b.active for b in self.all if b is not backend and b.health.available]
            mean = sum(others) / len(others) if others else float(NO_LIMIT)
        else:
            mean = 0.0
        backend.limit = backend.health.limit(self._now, mean)
        if backend.active >= backend.limit:
            self.full.add(backend.index)
        else:
            self.full.discard(backend.index)

    def snapshot(self, now: float, scraper: Scraper) -> tuple[BackendSnapshot, ...]:
        """Return the state of all backends at ``now`` (s)."""
        return tuple(self._snapshot(b, now, scraper) for b in self.all)

    def _snapshot(self, backend: Backend, now: float, scraper: Scraper) -> BackendSnapshot:
        r, health = backend.index, backend.health
        view, cluster = self.cluster.replicas[r], self.cluster
        metrics = scraper.snapshots.get(r)
        metrics_at = float(view["metrics_at"])
        return BackendSnapshot(
            index=r,
            name=backend.label,
            url=backend.settings.url,
            state=health.state,
            breaker=health.breaker.state,
            available=health.available,
            draining=health.draining,
            removed=health.removed,
            why=health.breaker.reason,
            opened=health.breaker.opened,
            warming=health.warming(now) and health.available,
            in_flight=backend.active,
            ledger_in_flight=int(view["in_flight"]),
            queued=int(view["queued"]),
            limit=backend.limit if 0 < backend.limit < NO_LIMIT else None,
            connections=backend.pool.open,
            waiting=metrics.waiting if metrics else None,
            running=metrics.running if metrics else None,
            kv_used=metrics.kv_used if metrics else None,
            metrics_age_s=max(0.0, now - metrics_at) if math.isfinite(metrics_at) else None,
            scrape_failures=scraper.failures.get(r, 0),
            cached_tokens=int(cluster.index.totals["held_tokens"][r] / cluster.units_per_token),
            capacity_tokens=int(view["capacity_tokens"]),
            speed=float(view["speed"]),
        )
