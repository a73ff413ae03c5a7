"""The servers behind the router: connections, health and requests in flight of each.

A backend's number never changes. One that is removed gets no more requests, and its streams go on
undisturbed; once they are over, its number may be given to another one.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, field

from tailrace.net.client import NO_FILES, FetchError, Pool, failure_kind
from tailrace.net.tls import TlsContexts
from tailrace.router.configuration import Configuration
from tailrace.router.decide.chooser import Chooser, Decision
from tailrace.router.observe.kv_streams import KvStreams
from tailrace.router.observe.scrape import Scraper
from tailrace.router.observe.snapshot import CLOSED, OPEN, BackendSnapshot
from tailrace.router.proxy.health import NO_LIMIT, Health
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.exact_caches import ESTIMATED
from tailrace.router.state.server_speeds import speed_of
from tailrace.router.state.worker_room import WorkerRoom

NONE: frozenset[int] = frozenset()

_log = logging.getLogger("tailrace.router")


def _pool(backend: BackendSettings, settings: ServeSettings, tls: TlsContexts) -> Pool:
    return Pool(
        backend.origin, connect_s=settings.limits.connect_s, api_key=backend.api_key(),
        tls=tls.client(backend.tls.files) if backend.origin.tls else None,
        server_name=backend.tls.server_name,
    )  # fmt: skip


def _connects_by(backend: BackendSettings) -> tuple[object, ...]:
    """Return what connections are made with; when it changes, new ones are needed."""
    return backend.api_key_env, backend.tls


class Backend:
    """One server as the router uses it."""

    def __init__(
        self,
        index: int,
        backend: BackendSettings,
        settings: ServeSettings,
        group: "Backends",
        pool: Pool | None = None,
    ) -> None:
        """``group``: all backends, this one included. ``pool``: its connections, if there are."""
        self.index = index
        self.settings = backend
        self.label = backend.label
        self.label_bytes = backend.label.encode("ascii", "replace")
        self.pool = pool or _pool(backend, settings, group.tls)
        self.health = Health(
            settings.health,
            backend.max_in_flight or settings.admission.max_in_flight,
            lambda: group.health_changed(self),
        )
        self.active = 0
        """Requests in flight."""
        self.limit = self.health.max_in_flight
        """Most requests at once, for now."""
        self.takes_priorities = backend.takes_priorities
        """Whether it serves by the priority in a request's body."""
        self.heard_at = -math.inf
        """When the last piece of a response came, s of the coarse clock."""
        self.paused_until = -math.inf
        """It has asked for no requests until then, s."""
        self._group = group
        self._full = group.full
        self._room = group.room

    def begin(self, *, limited: bool = True) -> bool:
        """Count a request that is to be sent; False: another worker has taken the last place."""
        if self._room is not None:
            limit = self.health.max_in_flight
            if not self._room.take(self.index, limit if limited and limit < NO_LIMIT else None):
                return False
        self.active += 1
        if self.active >= self.limit:
            self._full.add(self.index)
        return True

    def end(self) -> None:
        """Count a request that is over, however it ended."""
        self.active -= 1
        if self._full and self.active < self.limit:
            self._full.discard(self.index)
        if self._room is not None:
            self._room.give_back(self.index, limited=self.health.max_in_flight < NO_LIMIT)

    @property
    def is_full(self) -> bool:
        """Whether it has as many requests, of all workers, as it may ever have."""
        limit = self.health.max_in_flight
        if self._room is None or limit == NO_LIMIT:
            return self.active >= limit
        return self._room.count(self.index) >= limit

    def set_up(self, backend: BackendSettings, settings: ServeSettings) -> None:
        """Go by other settings; what has happened so far still counts."""
        self.settings, self.label = backend, backend.label
        self.takes_priorities = backend.takes_priorities
        self.label_bytes = backend.label.encode("ascii", "replace")
        limit = backend.max_in_flight or settings.admission.max_in_flight
        self.health.max_in_flight = limit or NO_LIMIT
        self.health.set_settings(settings.health)

    async def probe(self, clock: Callable[[], float]) -> str:
        """Ask its health path once; return why it counts as failed, or an empty text."""
        health = self.health.settings
        asked_at = clock()
        try:
            response = await self.pool.fetch("GET", health.path, timeout_s=health.timeout_s)
        except FetchError as error:
            why = str(error)
            if self.heard_at >= asked_at and error.late:
                return ""  # busy, but it is responding to others
            if why == NO_FILES:
                return why
            # All are late if this process is, or if there is too much traffic.
            late = error.late or failure_kind(why, connecting=error.connecting) == "connect timeout"
            may_open = not late or self._group.may_eject(self)
            self.health.probed(clock(), False, why, died=error.connecting, may_open=may_open)
            return why
        good = response.status < 500
        why = "" if good else f"answers {health.path} with {response.status}"
        if good and not self._group.any_available:
            self.health.breaker.end_pause(clock())
        self.health.probed(clock(), good, why, trying=self.active > 0)
        return why

    async def fetch_metrics(self, path: str, timeout_s: float) -> bytes:
        """Return its metrics; raise ``FetchError``."""
        response = await self.pool.fetch("GET", path, timeout_s=timeout_s)
        if response.status != 200:
            raise FetchError(f"answers {path} with {response.status}")
        return response.body


@dataclass(slots=True)
class BackendChange:
    """What a new configuration needs that can fail: made before anything is changed."""

    chooser: Chooser | None = None
    """None: it stays."""
    pools: dict[str, Pool] = field(default_factory=dict)
    """By URL, of new backends and of those whose key or certificates have changed."""

    def discard(self) -> None:
        """Leave everything as it is."""
        if self.chooser is not None:
            self.chooser.close()


class Backends:
    """All backends, the records that policies read, and the chooser among them."""

    def __init__(
        self,
        configuration: Configuration,
        settings: ServeSettings,
        cluster: ClusterState,
        chooser: Chooser,
        room: WorkerRoom | None = None,
        retired: Callable[[int], None] = lambda _: None,
        tls: TlsContexts | None = None,
    ) -> None:
        """Take the backends of a configuration, in the order of the cluster's records.

        ``settings``: those of the configuration as far as they concern this process. ``room``:
        where several workers count together. ``retired``: called with a number before it is given
        to another backend. ``tls``: contexts that others use, too.
        """
        self.tls = tls or TlsContexts()
        self.cluster = cluster
        self.chooser = chooser
        self.room = room
        self.full: set[int] = set()
        """Numbers of backends that are at their limit."""
        self.all: list[Backend] = []
        """By number, including those that were removed and still have their number."""
        self.peers: Callable[[Backend], Iterable[Collection[Backend]]] = lambda _: (self.present,)
        """Groups of backends of which each must keep some: those that serve the same model."""
        self.room_made: Callable[[], None] = lambda: None
        """Called when a replica may have room again by the limits of the policy's queue."""
        self._retired = retired
        self._now = 0.0
        self._turn = 0
        self._is_limited = False  # together with other workers
        backends = {b.url: b for b in settings.backends}
        for number, backend in enumerate(cluster.backends):
            self.all.append(Backend(number, backend, settings, self))
            if backend.url not in backends:
                self.all[-1].health.remove(True)
        self._drain(configuration)
        self.refresh(self._now)
        self._follow_room()

    def _follow_room(self) -> None:
        self.chooser.follow_room(lambda: self.room_made())

    @property
    def present(self) -> list[Backend]:
        """Backends that were not removed."""
        return [b for b in self.all if not b.health.removed]

    # Changes.

    def prepare(self, settings: ServeSettings) -> BackendChange:
        """Make what other settings need, or raise; nothing is changed yet."""
        change = BackendChange()
        known = {b.settings.url: b for b in self.present}
        for backend in settings.backends:
            old = known.get(backend.url)
            if old is None or _connects_by(old.settings) != _connects_by(backend):
                change.pools[backend.url] = _pool(backend, settings, self.tls)
        if settings.routing != self.chooser.settings:
            change.chooser = Chooser(self.cluster, settings.routing)
            change.chooser.counts = self.chooser.counts
        return change

    def apply(
        self, configuration: Configuration, settings: ServeSettings, change: BackendChange
    ) -> tuple[list[str], list[str]]:
        """Go by a configuration; return the labels of added and of removed backends."""
        if change.chooser is not None:
            self.chooser.close()
            self.chooser = change.chooser
            self._follow_room()
        wanted = {b.url: b for b in settings.backends}
        places = [wanted.get(s.url) if not s.removed_in else None for s in configuration.slots]
        while places and places[-1] is None and len(places) > len(self.all):
            places.pop()
        before = {b.settings.url: b.label for b in self.present}
        for number, new in enumerate(places):
            backend = self.all[number] if number < len(self.all) else None
            stays = backend is None or (new is not None and backend.settings.url == new.url)
            if backend is not None and not stays and not backend.health.removed:
                backend.health.remove(True)
                backend.pool.close()  # what is in progress goes on
            if new is None:
                if backend is None:
                    gone = BackendSettings(url=configuration.slots[number].url)
                    self._place(number, gone, settings, None).health.remove(True)
                continue
            pool = change.pools.get(new.url)
            if backend is None or backend.settings.url != new.url:
                backend = self._place(number, new, settings, pool)
            elif pool is not None:
                backend.pool.close()
                backend.pool = pool
            if backend.health.removed:
                self.cluster.replace(number, new)
                backend.health.remove(False)
            backend.set_up(new, settings)
        self._drain(configuration)
        self.refresh(self._now)
        self.chooser.resize(len(self.cluster))
        after = {b.settings.url: b.label for b in self.present}
        added = [label for url, label in after.items() if url not in before]
        return added, [label for url, label in before.items() if url not in after]

    def _place(
        self, number: int, backend: BackendSettings, settings: ServeSettings, pool: Pool | None
    ) -> Backend:
        """Give a number to a backend: a new one, or that of one which is gone."""
        placed = Backend(number, backend, settings, self, pool)
        if number == len(self.all):
            self.cluster.add(backend)
            self.all.append(placed)
        else:
            self._retired(number)
            self.full.discard(number)
            self.cluster.replace(number, backend)
            self.all[number] = placed
        return placed

    def _drain(self, configuration: Configuration) -> None:
        for backend in self.present:
            draining = backend.settings.url in configuration.draining
            if draining != backend.health.draining:
                backend.health.drain(draining)

    def trim(self) -> None:
        """Forget the last backends if they were removed and their requests are over."""
        count = len(self.all)
        while self.all and self.all[-1].health.removed and not self.all[-1].active:
            gone = self.all.pop()
            self.full.discard(gone.index)
        for number in reversed(range(len(self.all), count)):
            self._retired(number)
        if len(self.all) < count:
            self.cluster.shrink(len(self.all))
            self.chooser.resize(len(self.all))

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of all backends."""
        return frozenset(b.index for b in self.all)

    def choose(
        self, arrival: Arrival, tried: Collection[Backend], ineligible: frozenset[int] = NONE,
        *, overdue: bool = False,
    ) -> Decision | None:  # fmt: skip
        """Choose a backend for a request; None: no available one has room.

        ``ineligible``: numbers of backends that cannot take it, for instance because they do not
        serve its model. ``overdue``: it has waited so long that the policy's limits do not count.
        """
        rules = self.chooser.waiting_rules
        if rules.holding is not None and not overdue:
            ineligible = ineligible | rules.full()
            # With other workers or routers the chooser must be asked all the same: it looks at what
            # they have sent.
            if len(ineligible) >= len(self.all) and self.cluster.worker_view.shared.alone:
                return None
        excluded: Set[int] = self.full
        if ineligible:
            excluded = excluded | ineligible
        if self._is_limited:
            excluded = excluded | {b.index for b in self.all if b.is_full}
        if tried:
            excluded = excluded | {b.index for b in tried}
        decision = self.chooser.choose(arrival, excluded)
        if decision is None and self.full:
            # Slow start is a courtesy: no request is rejected for it.
            hard = ineligible | {
                b.index for b in self.all
                if b.is_full or b.paused_until > self._now or b in tried
            }  # fmt: skip
            if len(hard) < len(self.all):
                decision = self.chooser.choose(arrival, hard)
        return decision

    def has_room(self) -> bool:
        """Whether a backend may have room for requests that wait, by the policy's limits."""
        return self.chooser.waiting_rules.any_room()

    def any_backend(self, tried: Collection[Backend]) -> Backend | None:
        """Return the available backend with the fewest requests, for what is not routed."""
        self._turn += 1
        free = [b for b in self.all if b.health.available and b not in tried]
        if not free:
            return None
        free = [b for b in free if b.paused_until <= self._now] or free
        fewest = min(b.active for b in free)
        least = [b for b in free if b.active == fewest]
        return least[self._turn % len(least)]

    def has_other(self, tried: Collection[Backend], ineligible: frozenset[int] = NONE) -> bool:
        """Whether there is an available and eligible backend that was not tried."""
        return any(
            b.health.available and b not in tried and b.index not in ineligible for b in self.all
        )

    def is_idle(self, number: int, version: int) -> bool:
        """Whether a number is needed no more; for a router that is one process."""
        del version
        return number >= len(self.all) or not self.all[number].active

    @property
    def any_available(self) -> bool:
        """Whether any backend may get requests."""
        return any(b.health.available for b in self.all)

    def may_eject(self, backend: Backend) -> bool:
        """Whether requests may take a backend out: not if that would leave too few for a model.

        Whatever a client does, and however late all servers are, the others go on.
        """
        most = backend.health.settings.max_ejected
        for peers in self.peers(backend):
            serving = [b for b in peers if not b.health.draining]
            out = sum(b.health.breaker.state != CLOSED for b in serving if b is not backend)
            if out + 1 > most * len(serving):
                return False
        return True

    def failed(self, backend: Backend, now: float, why: str, *, died: bool = False) -> None:
        """A request has failed for a reason that is the backend's; ``died``: no connection."""
        backend.health.failure(now, why, may_open=self.may_eject(backend), died=died)

    def suspect(self, backend: Backend, now: float, why: str) -> None:
        """A request has failed here and at other backends, so that it may be to blame itself."""
        backend.health.suspect(now, why, may_open=self.may_eject(backend))

    def pause(self, backend: Backend, until: float) -> None:
        """A backend has asked for no requests until then (s); not all get what they ask for."""
        most = backend.health.settings.max_ejected
        for peers in self.peers(backend):
            serving = [b for b in peers if b.health.available]
            paused = sum(b.paused_until > self._now for b in serving if b is not backend)
            if paused + 1 > most * len(serving):
                return
        backend.paused_until = max(backend.paused_until, until)
        self._set_limit(backend)

    def refresh(self, now: float) -> None:
        """Bring the limits up to date; they grow with time after a return."""
        self._now = now
        limits = any(b.health.max_in_flight < NO_LIMIT for b in self.all)
        self._is_limited = limits and self.room is not None
        for backend in self.all:
            self._set_limit(backend)

    def health_changed(self, backend: Backend) -> None:
        """A breaker has changed, or a drain has begun or ended."""
        if backend.index >= len(self.all) or self.all[backend.index] is not backend:
            return  # another one has its number by now
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
        if backend.paused_until > self._now:
            backend.limit = 0
        if backend.active >= backend.limit:
            self.full.add(backend.index)
        else:
            self.full.discard(backend.index)

    def snapshot(
        self, now: float, scraper: Scraper, streams: KvStreams | None = None
    ) -> tuple[BackendSnapshot, ...]:
        """Return the state of all backends at ``now`` (s)."""
        return tuple(self._snapshot(b, now, scraper, streams) for b in self.all)

    def _snapshot(
        self, backend: Backend, now: float, scraper: Scraper, streams: KvStreams | None
    ) -> BackendSnapshot:
        r, health = backend.index, backend.health
        view, cluster = self.cluster.replicas[r], self.cluster
        metrics = scraper.snapshots.get(r)
        metrics_at = float(view["metrics_at"])
        stream = streams.streams.get(r) if streams is not None else None
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
            takes_priorities=backend.takes_priorities,
            connections=backend.pool.open,
            waiting=metrics.waiting if metrics else None,
            running=metrics.running if metrics else None,
            kv_used=metrics.kv_used if metrics else None,
            metrics_age_s=max(0.0, now - metrics_at) if math.isfinite(metrics_at) else None,
            scrape_failures=scraper.failures.get(r, 0),
            cached_tokens=int(cluster.index.totals["held_tokens"][r] / cluster.units_per_token),
            caches=streams.caches.trust_of(r) if streams is not None else ESTIMATED,
            event_lag_s=stream.lag.seconds if stream is not None else None,
            event_gaps=stream.gaps if stream is not None else 0,
            event_gaps_lost=stream.lost if stream is not None else 0,
            capacity_tokens=int(view["capacity_tokens"]),
            speed=float(view["speed"]),
            known=speed_of(cluster, r),
        )
