"""The backends as one thing to choose from: connections, health and requests of each.

A backend's number never changes. One that a reload takes out keeps its number, gets no more
requests, and its streams go on undisturbed.
"""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from tailrace.net.client import Pool
from tailrace.router.proxy.health import CLOSED, NO_LIMIT, OPEN, Health
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings

if TYPE_CHECKING:
    from tailrace.router.decide.chooser import Chooser, Decision
    from tailrace.router.state.cluster import Arrival, ClusterState

_log = logging.getLogger("tailrace.router")


def _pool(backend: BackendSettings, settings: ServeSettings) -> Pool:
    return Pool(backend.origin, connect_s=settings.limits.connect_s, api_key=backend.api_key())


class Target:
    """One backend as the router uses it."""

    def __init__(
        self, index: int, backend: BackendSettings, settings: ServeSettings, plane: "Plane"
    ) -> None:
        self.index = index
        self.backend = backend
        self.label = backend.label
        self.label_bytes = backend.label.encode("ascii", "replace")
        self.pool = _pool(backend, settings)
        self.health = Health(
            settings.health,
            backend.max_in_flight or settings.admission.max_in_flight,
            lambda: plane.health_changed(self),
        )
        self.active = 0
        """Requests under way."""
        self.limit = self.health.max_in_flight
        """Most requests at once, for now."""
        self.heard = False
        """Whether a piece of an answer has come since this was last cleared."""
        self._full = plane.full

    def begin(self) -> None:
        """A request is being sent."""
        self.active += 1
        if self.active >= self.limit:
            self._full.add(self.index)

    def end(self) -> None:
        """A request is over, whatever became of it."""
        self.active -= 1
        if self.active < self.limit:
            self._full.discard(self.index)


class Plane:
    """Backends, what is known of them, and who chooses."""

    def __init__(
        self, settings: ServeSettings, cluster: "ClusterState", chooser: "Chooser"
    ) -> None:
        """Take the backends of the settings, in the cluster's order."""
        self.cluster = cluster
        self.chooser = chooser
        self.full: set[int] = set()
        """Replicas that have as much as they may have for now."""
        self.targets: list[Target] = []
        self._now = 0.0
        self._turn = 0
        for backend in settings.backends:
            self.targets.append(Target(len(self.targets), backend, settings, self))

    @property
    def present(self) -> list[Target]:
        """Targets that no reload has taken out."""
        return [t for t in self.targets if not t.health.removed]

    def reload(self, settings: ServeSettings) -> tuple[list[str], list[str]]:
        """Take over changed backends; return the labels of those added and of those taken out."""
        wanted = {backend.url: backend for backend in settings.backends}
        added, removed = [], []
        for target in self.targets:
            backend = wanted.pop(target.backend.url, None)
            if backend is None:
                if not target.health.removed:
                    removed.append(target.label)
                    target.health.remove(True)
                continue
            if backend.api_key_env != target.backend.api_key_env:
                target.pool.close()
                target.pool = _pool(backend, settings)
            target.backend, target.label = backend, backend.label
            target.label_bytes = backend.label.encode("ascii", "replace")
            limit = backend.max_in_flight or settings.admission.max_in_flight
            target.health.max_in_flight = limit or NO_LIMIT
            target.health.set_settings(settings.health)
            if target.health.removed:
                added.append(target.label)
                target.health.remove(False)
        for backend in wanted.values():
            target = Target(self.cluster.add(backend), backend, settings, self)
            assert target.index == len(self.targets)
            self.targets.append(target)
            added.append(target.label)
        self.refresh(self._now)
        return added, removed

    def choose(self, arrival: "Arrival", tried: Collection[Target]) -> "Decision | None":
        """Choose a replica for a request; None: no available one has room."""
        excluded: Collection[int] = self.full
        if tried:
            excluded = self.full | {t.index for t in tried}
        decision = self.chooser.choose(arrival, excluded)
        if decision is None and self.full:
            # Slow start is a courtesy: it sends nobody away.
            hard = {
                t.index for t in self.targets if t.active >= t.health.max_in_flight or t in tried
            }
            if len(hard) < len(self.targets):
                decision = self.chooser.choose(arrival, hard)
        return decision

    def any_target(self, tried: Collection[Target]) -> Target | None:
        """Return the available target with the fewest requests, for what is not routed."""
        self._turn += 1
        free = [t for t in self.targets if t.health.available and t not in tried]
        if not free:
            return None
        fewest = min(t.active for t in free)
        least = [t for t in free if t.active == fewest]
        return least[self._turn % len(least)]

    def has_other(self, tried: Collection[Target]) -> bool:
        """Whether there is an available target that was not tried."""
        return any(t.health.available and t not in tried for t in self.targets)

    def may_eject(self) -> bool:
        """Whether error answers are enough to take a replica out: not if half are out already."""
        present = self.present
        out = sum(t.health.breaker.state != CLOSED for t in present)
        return 2 * (out + 1) <= len(present)

    def refresh(self, now: float) -> None:
        """Bring the limits up to date; they grow with time after a return."""
        self._now = now
        for target in self.targets:
            self._set_limit(target)

    def health_changed(self, target: Target) -> None:
        """A breaker has changed, or a drain has begun or ended."""
        state = target.health.state
        level = logging.WARNING if state == OPEN else logging.INFO
        _log.log(
            level,
            "replica is %s", state,
            extra={"replica": target.label, "why": target.health.breaker.reason},
        )  # fmt: skip
        self.cluster.set_available(target.index, target.health.available)
        if (state == OPEN and target.health.breaker.died) or target.health.removed:
            self.cluster.forget(target.index)
        self._set_limit(target)

    def _set_limit(self, target: Target) -> None:
        if target.health.warming(self._now):
            others = [t.active for t in self.targets if t is not target and t.health.available]
            mean = sum(others) / len(others) if others else float(NO_LIMIT)
        else:
            mean = 0.0
        target.limit = target.health.limit(self._now, mean)
        if target.active >= target.limit:
            self.full.add(target.index)
        else:
            self.full.discard(target.index)
