"""The configuration of a running router: its settings, and changes by admin calls.

A change makes a new configuration with the next version. It is validated completely before it is
published, and then replaces the old one as a whole. Workers of one router read it from a shared
folder, so that it also applies to workers started later.
"""

import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import ValidationError

from tailrace.config import MAX_REPLICAS, Settings, parse
from tailrace.errors import TailraceError
from tailrace.router.decide.chooser import ChooserSettings
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings

#: Settings that are read at the start only.
FIXED = (
    "listen", "processes", "share_port", "tokenizer", "tokens.source", "decisions.folder",
    "admin.listen", "admin.token_env", "tls", "admin.tls",
    "discovery", "tracing", "limits.connect_s", "log.level", "autopilot", "store",
)  # fmt: skip
_PREFIX = "configuration-"
#: Earlier versions that are kept, so that a worker that is behind cannot publish one of them.
_KEPT = 16
#: Time in which several changes of a folder may look like one, s.
_TICK_S = 0.1


class BackendSlot(Settings):
    """The number of a backend. It is reused only after the last user has released it."""

    url: str
    removed_in: int = 0
    """Version in which its backend was removed; 0: it is there."""


class Configuration(Settings):
    """Everything about a running router that can change, but for what it observes."""

    version: int = 0
    settings: ServeSettings
    """As last read, but with the fixed settings of the start."""
    added: tuple[BackendSettings, ...] = ()
    """Backends that admin calls have added."""
    removed: tuple[str, ...] = ()
    """URLs of backends of the settings that admin calls have removed."""
    drained: tuple[str, ...] = ()
    """URLs of backends that get no more requests."""
    found: tuple[BackendSettings, ...] = ()
    """Backends that discovery has found."""
    leaving: tuple[str, ...] = ()
    """URLs of found backends that are about to end, and get no more requests."""
    slots: tuple[BackendSlot, ...] = ()
    """Backends by number."""
    routing: ChooserSettings | None = None
    """How replicas are chosen, by an admin call; None: as the settings say."""
    routing_by: Literal["admin", "autopilot"] = "admin"
    """Who made that call."""
    vetoed: tuple[str, ...] = ()
    """Policies that admin calls may not put in any role, because an operator said so."""

    @classmethod
    def first(cls, settings: ServeSettings) -> Self:
        """Return the configuration of a router that starts."""
        return cls(
            settings=settings, slots=tuple(BackendSlot(url=b.url) for b in settings.backends)
        )

    @property
    def backends(self) -> tuple[BackendSettings, ...]:
        """The backends, in the order of the settings; then those added, then those found."""
        listed = (*self.settings.backends, *self.found)
        kept = [b for b in listed if b.url not in self.removed]
        if not self.found:
            return (*kept, *self.added)
        by_url = {b.url: b for b in (*kept, *self.added)}
        first = {b.url: b for b in (*self.settings.backends, *self.added)}
        return tuple(first.get(url, b) for url, b in by_url.items())

    @property
    def draining(self) -> frozenset[str]:
        """URLs of backends that get no more requests, for whatever reason."""
        return frozenset((*self.drained, *self.leaving))

    @property
    def effective(self) -> ServeSettings:
        """The settings with what admin calls have changed."""
        routing = self.settings.routing if self.routing is None else self.routing
        return self.settings.model_copy(update={"backends": self.backends, "routing": routing})

    # Changes. Each returns the next version without its slots, see ``placed``.

    def reloaded(self, settings: ServeSettings) -> tuple["Configuration", list[str]]:
        """Go by other settings; return also those that have changed but need a restart.

        Only what the settings change is changed: backends that admin calls have added, removed or
        drained stay so, and roles that they gave to policies until `routing` is changed.
        """
        routing = self.routing if settings.routing == self.settings.routing else None
        settings, fixed = _keep_fixed(self.settings, settings)
        urls = [b.url for b in (*settings.backends, *self.found)]
        new = self._next(
            settings=settings,
            added=tuple(b for b in self.added if b.url not in urls or b.url in self.removed),
            removed=tuple(url for url in self.removed if url in urls),
            routing=routing,
        )
        return new, fixed

    def with_backend(self, backend: BackendSettings) -> "Configuration":
        """Add a backend."""
        removed = tuple(url for url in self.removed if url != backend.url)
        listed = [b for b in self.settings.backends if b.url == backend.url]
        if len(removed) < len(self.removed) and listed == [backend]:
            return self._next(removed=removed)
        if any(b.url == backend.url for b in self.backends):
            raise TailraceError(f"there is a backend {backend.url} already")
        return self._next(added=(*self.added, backend))

    def without_backend(self, url: str) -> "Configuration":
        """Remove a backend; its requests in progress go on."""
        removed = self.removed
        listed = (*self.settings.backends, *self.found)
        if any(b.url == url for b in listed) and url not in removed:
            removed = (*removed, url)
        return self._next(added=tuple(b for b in self.added if b.url != url), removed=removed)

    def with_drain(self, url: str, draining: bool) -> "Configuration":
        """Give a backend no more requests, or some again."""
        drained = tuple(u for u in self.drained if u != url)
        return self._next(drained=(*drained, url) if draining else drained)

    def with_found(
        self, found: Sequence[BackendSettings], leaving: Collection[str]
    ) -> "Configuration":
        """Go by what discovery has found; ``leaving``: URLs of those that are about to end.

        A name or an address that the settings give to another backend stays with that one.
        """
        own = (*self.settings.backends, *self.added)
        urls, labels = {b.url for b in own}, {b.label for b in own}
        kept = tuple(b for b in found if b.url not in urls and b.label not in labels)
        gone = {b.url for b in self.found} - {b.url for b in kept}
        return self._next(
            found=kept,
            leaving=tuple(b.url for b in kept if b.url in leaving),
            removed=tuple(url for url in self.removed if url not in gone),
        )

    def with_routing(
        self, changes: dict[str, Any], by: Literal["admin", "autopilot"] = "admin"
    ) -> "Configuration":
        """Give policies other roles; what ``changes`` does not name is as the settings say."""
        routing = parse(ChooserSettings, _plain(self.settings.routing) | changes)
        for policy in (routing.policy, routing.canary, routing.shadow):
            if policy in self.vetoed:
                raise TailraceError(f"policy {policy} was vetoed; POST /autopilot/resume allows it")
        return self._next(routing=routing if changes else None, routing_by=by)

    def with_veto(self, policies: Sequence[str] = ()) -> "Configuration":
        """Go back to the settings' policy; those that admin calls gave a role get none again.

        ``policies``: others that get none.
        """
        if self.routing is None and policies:
            return self._next(vetoed=tuple(dict.fromkeys((*self.vetoed, *policies))))
        if self.routing is None:
            raise TailraceError("there is nothing to veto: policies have the roles of the settings")
        own, given = ({r.policy, r.canary, r.shadow} for r in (self.settings.routing, self.routing))
        vetoed = dict.fromkeys((*self.vetoed, *policies, *sorted(given - own - {""})))
        return self._next(routing=None, vetoed=tuple(vetoed))

    def without_vetoes(self) -> "Configuration":
        """Allow all policies again."""
        return self._next(vetoed=())

    def _next(self, **changes: Any) -> "Configuration":
        new = self.model_copy(update={"version": self.version + 1, **changes})
        backends = new.backends
        if not backends and not self.settings.discovery.is_used:
            raise TailraceError("a router needs a backend: the last one cannot be removed")
        parse(ServeSettings, _plain(new.effective))  # names and addresses must still be unique
        urls = {b.url for b in backends}
        return new.model_copy(update={"drained": tuple(u for u in new.drained if u in urls)})

    def placed(self, room: int, is_idle: Callable[[int, int], bool]) -> "Configuration":
        """Give every backend a number below ``room``; one that comes back gets its old one.

        ``is_idle``: whether a number, removed in a version, is needed by no worker any more.
        """
        slots = list(self.slots)
        wanted = {b.url for b in self.backends}
        for number, slot in enumerate(slots):
            if slot.url in wanted:
                wanted.discard(slot.url)
                slots[number] = BackendSlot(url=slot.url)
            elif not slot.removed_in:
                slots[number] = BackendSlot(url=slot.url, removed_in=self.version)
        free = [
            number for number, slot in enumerate(slots)
            if 0 < slot.removed_in < self.version and is_idle(number, slot.removed_in)
        ]  # fmt: skip
        for url in (b.url for b in self.backends if b.url in wanted):
            if free:
                slots[free.pop(0)] = BackendSlot(url=url)
            elif len(slots) < room:
                slots.append(BackendSlot(url=url))
            else:
                raise TailraceError(
                    f"there is room for {room} backends, including removed ones that still have "
                    "requests in progress; try again later, or restart the router to have more"
                )
        while slots and free and free[-1] == len(slots) - 1:
            slots.pop()
            free.pop()
        return self.model_copy(update={"slots": tuple(slots)})


def _keep_fixed(running: ServeSettings, new: ServeSettings) -> tuple[ServeSettings, list[str]]:
    """Return new settings with the fixed ones of the running router, and which of them differ."""
    changed = []
    for path in FIXED:
        group, _, name = path.rpartition(".")
        old_part, new_part = (getattr(s, group) if group else s for s in (running, new))
        value = getattr(old_part, name)
        if getattr(new_part, name) == value:
            continue
        changed.append(path)
        part = new_part.model_copy(update={name: value})
        new = new.model_copy(update={group: part}) if group else part
    servers = {b.url: b.server for b in running.backends}
    backends = tuple(
        b.model_copy(update={"server": servers[b.url]}) if b.url in servers else b
        for b in new.backends
    )
    if backends != new.backends:
        changed.append("backends.server")
    return new.model_copy(update={"backends": backends}), changed


def _plain(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data; what was not set stays so, because that matters to some."""
    return settings.model_dump(mode="json", exclude_unset=True)


class ConfigurationStore:
    """Keeps the configuration of a router that is one process."""

    room = MAX_REPLICAS
    """Most numbers of backends."""

    def latest(self, version: int = -1) -> Configuration | None:
        """Return the latest configuration if it is later than ``version``."""
        del version
        return None

    def publish(self, configuration: Configuration) -> None:
        """Make a configuration the latest; raise if another one has its version."""


class SharedConfigurationStore(ConfigurationStore):
    """Keeps the configuration of several workers in a folder, one file for each version."""

    def __init__(self, folder: Path, room: int) -> None:
        self._folder = folder
        self.room = room
        self._looked_at = 0.0  # time of the folder's last change, if it was a while ago

    def latest(self, version: int = -1) -> Configuration | None:
        """Return the latest configuration if it is later than ``version``."""
        changed_at = self._folder.stat().st_mtime
        if version >= 0 and changed_at == self._looked_at:
            return None
        # Two changes within a tick of the file system's clock have the same time.
        self._looked_at = changed_at if time.time() - changed_at > _TICK_S else 0.0
        while (found := max(self._versions(), default=-1)) > version:
            try:
                data = self._path(found).read_bytes()
            except FileNotFoundError:
                continue  # there is a later one by now
            try:
                return Configuration.model_validate(orjson.loads(data))
            except (ValidationError, orjson.JSONDecodeError) as error:
                raise TailraceError(f"{self._path(found)} is damaged: {error}") from None
        return None

    def publish(self, configuration: Configuration) -> None:
        """Make a configuration the latest, for all workers at once."""
        version = configuration.version
        try:
            if max(self._versions(), default=-1) >= version:
                raise FileExistsError
            handle, name = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(orjson.dumps(_plain(configuration)))
                os.link(name, self._path(version))  # unlike a rename, fails if it is there
            finally:
                Path(name).unlink()
        except FileExistsError:
            raise TailraceError("another change was made at the same time; try again") from None
        except OSError as error:
            raise TailraceError(
                f"cannot tell the other workers of the change: {error.strerror or error}"
            ) from None
        for old in self._versions():
            if old < version - _KEPT:
                self._path(old).unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"{_PREFIX}{version}.json"

    def _versions(self) -> list[int]:
        paths = self._folder.glob(f"{_PREFIX}*.json")
        return [int(path.stem.removeprefix(_PREFIX)) for path in paths]
