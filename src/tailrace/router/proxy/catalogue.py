"""Which backend serves which model.

A backend's models and LoRA adapters stand in the settings, or its own ``/v1/models`` is asked again
and again; adapters that its metrics name are added. A request goes only where its model is. A
backend that cannot be asked (it has no such list, or refuses it) may have any model; one that has
not answered yet gets no request that names one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import orjson

from tailrace.net.client import FetchError
from tailrace.router.proxy.backends import Backend, Backends
from tailrace.router.settings import ModelSettings

#: How often it is checked whether a backend is due to be asked, in s.
TICK_S = 0.25
#: Pause before a backend that did not respond is queried again, s.
AGAIN_S = 1.0
#: Models that are taken from one backend's list, and the longest name of one.
MOST_MODELS, LONGEST_NAME = 4096, 256
#: Adapters of one backend that are remembered from its metrics.
MOST_ADAPTERS = 1024
#: Names whose placement is remembered.
_MOST_PLACES = 4096

_log = logging.getLogger("tailrace.router")

Entry = dict[str, Any]


class Placement(NamedTuple):
    """Where a model can be served."""

    model: str
    """The name that servers know it by."""
    group: int
    """Equal for models with the same backends."""
    excluded: frozenset[int]
    """Numbers of backends that do not serve it."""


class _Known:
    """What is known of one backend's models."""

    __slots__ = ("adapters", "asked", "due_at", "models", "opened")

    def __init__(self) -> None:
        self.asked = False  # whether it has answered, with or without a list
        self.models: dict[str, Entry] | None = None  # None: it may have any
        self.adapters: dict[str, Entry] = {}  # that its metrics have named, the latest last
        self.due_at = 0.0
        self.opened = 0  # how often its breaker had opened when it was asked


class ModelCatalogue:
    """The models of all backends."""

    def __init__(
        self,
        backends: Backends,
        settings: ModelSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends = backends
        self._settings = settings
        self._clock = clock
        self._known: dict[str, _Known] = {}  # by URL: numbers may be given anew
        self._places: dict[str, Placement | None] = {}
        self._groups: dict[frozenset[int], int] = {}
        self._peers: dict[int, list[list[Backend]]] = {}
        backends.peers = self.peers
        self._created = int(time.time())
        self.reload(settings)

    def reload(self, settings: ModelSettings) -> None:
        """Go by other settings, and by the backends that there are now."""
        self._settings = settings
        present = {b.settings.url: b for b in self._backends.present}
        self._known = {
            url: self._stated(backend) or self._known.get(url) or _Known()
            for url, backend in present.items()
        }
        if settings.path == "off":
            for known in self._known.values():
                known.asked = True
        self._forget_places()

    def _stated(self, backend: Backend) -> _Known | None:
        """Return what the settings say of a backend's models, if they do."""
        names = backend.settings.models
        if not names:
            return None
        known = _Known()
        known.asked, known.due_at = True, float("inf")
        known.models = {name: self._entry(name) for name in names}
        return known

    def loaded(self, backend: Backend, adapters: frozenset[str]) -> None:
        """A backend's metrics name LoRA adapters, so it has them, whatever its list says."""
        known = self._of(backend)
        new = adapters - known.adapters.keys()
        if not new:
            return
        for name in sorted(new):
            known.adapters[name] = self._entry(name)
        while len(known.adapters) > MOST_ADAPTERS:
            del known.adapters[next(iter(known.adapters))]
        self._forget_places()

    def _entry(self, name: str, **more: Any) -> Entry:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "tailrace"}
        return about | more

    # Where requests go.

    def place(self, name: str) -> Placement | None:
        """Return where the model that clients call ``name`` is served; None: there is no such."""
        places = self._places
        found = places.get(name)
        if found is not None:
            return found
        if len(name) > LONGEST_NAME or name in places:
            return None
        if len(places) >= _MOST_PLACES:  # names come from clients
            places.clear()
        found = places[name] = self._place(name)
        return found

    def _place(self, name: str) -> Placement | None:
        model = self._settings.aliases.get(name, name)
        every = {b.index: self._of(b) for b in self._backends.present}
        if not name:
            return self._placement(name, frozenset())
        having = {
            i for i, known in every.items()
            if (known.models and model in known.models) or model in known.adapters
        }  # fmt: skip
        having |= {i for i, known in every.items() if known.asked and known.models is None}
        if not having and all(known.asked for known in every.values()):
            return None
        return self._placement(model, frozenset(every) - having)

    def _placement(self, model: str, excluded: frozenset[int]) -> Placement:
        group = self._groups.setdefault(excluded, len(self._groups))
        return Placement(model, group, excluded)

    def _of(self, backend: Backend) -> _Known:
        return self._known.setdefault(backend.settings.url, _Known())

    def _forget_places(self) -> None:
        self._places = {}
        self._groups = {}
        self._peers = {}

    def peers(self, backend: Backend) -> list[list[Backend]]:
        """Return the backends that serve the same models as one, itself included, for each model.

        A model that only some backends of another one have counts with that one: a LoRA adapter
        with its base model.
        """
        found = self._peers.get(backend.index)
        if found is None:
            found = self._peers[backend.index] = self._find_peers(backend)
        return found

    def _find_peers(self, backend: Backend) -> list[list[Backend]]:
        present = self._backends.present
        models = self._of(backend).models
        if not models:
            return [present]
        groups = set()
        for model in models:
            others = ((b.index, self._of(b).models) for b in present)
            groups.add(frozenset(i for i, known in others if known is None or model in known))
        largest = [group for group in groups if not any(group < other for other in groups)]
        return [[b for b in present if b.index in group] for group in largest]

    # Responses to clients.

    @property
    def is_complete(self) -> bool:
        """Whether the models of every available backend are known."""
        return all(self._of(b).models is not None for b in self._backends.all if b.health.available)

    def listed(self) -> dict[str, Entry]:
        """Return the models that can be used now, by the names clients may use."""
        found: dict[str, Entry] = {}
        for backend in self._backends.all:
            if backend.health.available:
                known = self._of(backend)
                found = (known.models or {}) | known.adapters | found
        return self.with_aliases(found)

    def with_aliases(self, models: dict[str, Entry]) -> dict[str, Entry]:
        """Return models with their further names."""
        aliases = {
            alias: models[model] | {"id": alias, "root": model}
            for alias, model in self._settings.aliases.items()
            if model in models
        }
        return models | aliases

    def names(self) -> list[str]:
        """Return all names that requests can be made with, whether or not a backend is up."""
        found = {name for k in self._known.values() for name in (*(k.models or ()), *k.adapters)}
        aliases = {a for a, model in self._settings.aliases.items() if model in found}
        return sorted(found | aliases)

    # Asking.

    async def run(self) -> None:
        """Ask backends when they are due, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            due = [b for b in self._backends.present if self._is_due(b, now)]
            if due:
                await self.ask(due)

    def _is_due(self, backend: Backend, now: float) -> bool:
        if self._settings.path == "off" or not backend.health.available:
            return False
        known = self._of(backend)
        restarted = known.opened != backend.health.breaker.opened
        return now >= known.due_at or (restarted and known.due_at < float("inf"))

    async def ask(self, backends: Iterable[Backend] | None = None) -> None:
        """Ask backends, by default all, for their models."""
        if self._settings.path == "off":
            return
        asked = self._backends.present if backends is None else list(backends)
        await asyncio.gather(*(self._ask(b) for b in asked if not b.settings.models))

    async def _ask(self, backend: Backend) -> None:
        settings, known = self._settings, self._of(backend)
        restarted = known.opened != backend.health.breaker.opened
        known.opened = backend.health.breaker.opened
        known.due_at = self._clock() + AGAIN_S
        try:
            response = await backend.pool.fetch("GET", settings.path, timeout_s=settings.timeout_s)
        except FetchError:
            return  # whether it is up is for the health checks to say
        if response.status >= 500:
            return
        known.due_at = self._clock() + settings.interval_s
        models = read_list(response.body) if response.status == 200 else None
        if models is None and (known.models is not None or not known.asked):
            _log.warning(
                "a backend does not list its models: it may get any",
                extra={"replica": backend.label, "status": response.status},
            )
        if restarted:
            known.adapters = {}
        if restarted or not known.asked or _ids(models) != _ids(known.models):
            self._forget_places()
        known.models, known.asked = models, True


def _ids(models: dict[str, Entry] | None) -> set[str] | None:
    return None if models is None else set(models)


def read_list(body: bytes) -> dict[str, Entry] | None:
    """Return the models of a response to ``/v1/models`` by their ids; None: it is no such list."""
    try:
        listed = orjson.loads(body)["data"]
        found = {str(model["id"]): dict(model) for model in listed[:MOST_MODELS]}
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    return {name: entry for name, entry in found.items() if len(name) <= LONGEST_NAME}
