"""A router's parts, its configuration, and how both change at run time.

What it listens on, its admin endpoints and its background work are in ``core.py``.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from tailrace.errors import TailraceError
from tailrace.net.client import FetchError
from tailrace.net.tls import TlsContexts
from tailrace.router import shared_store
from tailrace.router.access.keyring import Keyring
from tailrace.router.configuration import Configuration, ConfigurationStore
from tailrace.router.decide.chooser import Chooser
from tailrace.router.discovery.found import FoundServer
from tailrace.router.intake.tokens import TokenCounter
from tailrace.router.observe import status
from tailrace.router.observe.autopilot_report import AutopilotReport
from tailrace.router.observe.decision_log import DecisionLog, load_salt
from tailrace.router.observe.events import EventSink
from tailrace.router.observe.kv_streams import KvStreams
from tailrace.router.observe.scrape import Scraper
from tailrace.router.observe.snapshot import SHOWN_WAITING, RouterSnapshot, StoreSnapshot
from tailrace.router.observe.telemetry import Telemetry
from tailrace.router.observe.tracing import Tracer
from tailrace.router.proxy.backends import Backend, BackendChange, Backends
from tailrace.router.proxy.catalogue import ModelCatalogue
from tailrace.router.proxy.prompt_tokens import PromptLearner
from tailrace.router.proxy.request_intake import RequestIntake
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings
from tailrace.router.shared_store import SharedStore
from tailrace.router.state import server_speeds
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.exact_caches import ExactCaches
from tailrace.router.state.peers import Peers
from tailrace.router.state.shared_state import WorkerView, new_shared_state
from tailrace.router.state.worker_room import WorkerRoom

#: Pause before a worker that could not take over a change tries again, in s.
CATCH_UP_S = 5.0

_log = logging.getLogger("tailrace.router")


class PreparedChange(NamedTuple):
    """What a changed configuration needs, made before anything is changed."""

    settings: ServeSettings
    """Those for this worker."""
    keyring: Keyring
    backends: BackendChange


class ConfiguredRouter:
    """The parts of a router, by a configuration that can change."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        events: EventSink | None = None,
        load: Callable[[], ServeSettings] | None = None,
        clock: Callable[[], float] = time.monotonic,
        salt: bytes | None = None,
        worker_view: WorkerView | None = None,
        room: WorkerRoom | None = None,
        router_number: int | None = None,
        store: ConfigurationStore | None = None,
        part: Callable[[ServeSettings], ServeSettings] = lambda settings: settings,
    ) -> None:
        """``events``: counts instead of the router's telemetry. ``load``: reads settings again.

        ``salt``, ``worker_view``, ``room`` and ``store``: the secret, the state, the count of
        requests and the configuration that several workers share; if the store has a configuration
        already, that counts. ``router_number``: how workers of other routers know this router, if
        it has several. ``part``: returns what of any settings is for this worker.
        """
        self._store = store or ConfigurationStore()
        self._part = part
        self.configuration = configuration = self._store.latest() or Configuration.first(settings)
        self.settings = settings = part(configuration.effective)
        self.clock = clock
        self.draining = False
        self.telemetry = Telemetry(clock)
        self.tls = TlsContexts()
        salt = salt or load_salt(settings.decisions.folder)
        counter = TokenCounter(settings.tokenizer, settings.tokens.source)
        numbered = _by_number(configuration, settings)
        if worker_view is None:
            members = settings.store.members if settings.store.url else 0
            worker_view = new_shared_state(settings.backends, 1, settings.discovery, members).of(0)
        cluster = ClusterState(
            numbered, clock, counter=counter, salt=salt,
            worker_view=worker_view, learn_speeds=settings.speeds.learn,
        )  # fmt: skip
        if settings.speeds_file is not None:
            server_speeds.restore(cluster, settings.speeds_file)
        self.decision_log = DecisionLog(settings.decisions, salt, clock_now=clock())
        self.backends = Backends(
            configuration, settings, cluster, Chooser(cluster, settings.routing), room,
            self._retired, self.tls,
        )  # fmt: skip
        self._autopilot = AutopilotReport(settings.autopilot_file)
        self.models = ModelCatalogue(self.backends, settings.models, clock)
        self.intake = self._new_intake(events or self.telemetry)
        self.scraper = Scraper(
            cluster, self._fetch_metrics, settings.metrics, self._present, self._adapters_seen
        )
        self.kv_streams: KvStreams | None = None
        self.shared_store = self._new_store(router_number)
        self.keyring = self._keyring(settings)
        self.tracer = Tracer(settings.tracing, self.tls) if settings.tracing.endpoint else None
        self.intake.context.tracer = self.tracer
        self.now = self.intake.context.now = clock()
        self._load = load
        self._tasks: set[asyncio.Task[None]] = set()
        self.behind = ""
        """Why this worker still uses old settings; empty: it does not."""
        self._wanted: Configuration | None = None  # the latest, if it could not be taken over
        self._try_at = 0.0
        self._identities: dict[str, str] = {}  # of found servers, by URL

    def _new_store(self, number: int | None) -> SharedStore | None:
        """Return the connection to routers on other machines; None: there are none."""
        settings, cluster = self.settings.store, self.backends.cluster
        if not settings.url:
            return None
        peers = Peers(
            cluster, shared_store.router_number() if number is None else number,
            receives=cluster.worker_view.worker == 0, gone_s=settings.gone_s,
            present=self._present,
        )  # fmt: skip
        return SharedStore(peers, settings, self.clock)

    # What subclasses do.

    def _new_intake(self, events: EventSink) -> RequestIntake:
        """Return what reads requests and looks after them."""
        return RequestIntake(self.settings, self.backends, events, self.decision_log, self.models)

    @property
    def open_connections(self) -> int:
        """Open connections of clients."""
        return 0

    def _check_settings(self, settings: ServeSettings) -> None:
        """Raise if settings cannot be used, before anything is changed."""

    def _take_over(self, settings: ServeSettings) -> None:
        """Go by other settings, which have been checked."""

    @property
    def events(self) -> EventSink:
        """What counts events: the telemetry, unless something else was given."""
        return self.intake.context.events

    @events.setter
    def events(self, events: EventSink) -> None:
        self.intake.context.events = events

    # Changes at run time.

    def reload(self) -> dict[str, Any]:
        """Read the settings again, all or nothing; streams go on.

        Return what has changed about the backends, and the settings that need a restart to change.
        """
        if self._load is None:
            raise TailraceError("there is no file to read again: start with --config FILE")
        settings = self._load()
        needs_restart: list[str] = []

        def change(configuration: Configuration) -> Configuration:
            changed, fixed = configuration.reloaded(settings)
            needs_restart[:] = fixed
            return changed

        done = self._change(change)
        _log.info("reloaded", extra=done)
        if needs_restart:
            _log.warning("settings that need a restart", extra={"settings": needs_restart})
            done["needs_restart"] = needs_restart
        return done

    def _reload_or_log(self) -> None:
        try:
            self.reload()
        except TailraceError as error:
            _log.error("not reloaded", extra={"why": str(error)})

    def set_routing(
        self, changes: dict[str, Any], by: Literal["admin", "autopilot"] = "admin"
    ) -> dict[str, Any]:
        """Give policies other roles until the settings' own change; none: as the settings say.

        The autopilot has a path of its own, so that it notices when an operator gives roles.
        """
        return self._allow(lambda configuration: configuration.with_routing(changes, by))

    def veto(self, body: bytes) -> dict[str, Any]:
        """Go back to the settings' policy; ``body``: a JSON list of policies not to use, or none.

        Policies that had a role by an admin call are not used again either.
        """
        try:
            names = orjson.loads(body) if body.strip() else []
        except orjson.JSONDecodeError:
            names = None
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise TailraceError('the body must be a list of policies, e.g. ["random"], or empty')
        return self._allow(lambda configuration: configuration.with_veto(names[:100]))

    def _allow(self, change: Callable[[Configuration], Configuration]) -> dict[str, Any]:
        """Change the roles of policies, or which may have one; return both."""
        self._change(change)
        found = self._roles()
        _log.info("policies", extra=found)
        return found

    def _roles(self) -> dict[str, Any]:
        """Return the roles of policies, the settings' own, and which policies may have none."""
        routing, own = self.settings.routing, self.configuration.settings.routing
        present, given = self.backends.present, self.configuration.routing
        return {
            **{name: getattr(routing, name) for name in ("policy", "canary", "shadow")},
            "canary_share": routing.canary_share,
            "canary_block_s": routing.canary_block_s,
            "settings_policy": own.policy,
            "given_by": "settings" if given is None else self.configuration.routing_by,
            "vetoed": self.configuration.vetoed,
            "takes_priorities": all(backend.takes_priorities for backend in present),
        }

    def add_backend(self, backend: BackendSettings) -> dict[str, Any]:
        """Add a backend; return its state."""
        self._change(lambda configuration: configuration.with_backend(backend))
        return self._state_of(self._find(backend.url))

    def remove_backend(self, which: str) -> dict[str, Any]:
        """Remove a backend, by number or name; its requests in progress go on."""
        url = self._find(which).settings.url
        return self._change(lambda configuration: configuration.without_backend(url))

    def drain(self, which: str, draining: bool) -> dict[str, Any]:
        """Give a backend, by number or name, no more requests, or some again; return its state."""
        url = self._find(which).settings.url
        self._change(lambda configuration: configuration.with_drain(url, draining))
        return self._state_of(self._find(which))

    def use_found(self, found: Sequence[FoundServer]) -> None:
        """Go by the servers that discovery has found; requests in progress go on."""
        identities = {server.backend.url: server.identity for server in found}
        # Another server at the same address begins as one of which nothing is known.
        known = self._identities
        same = [s for s in found if known.get(s.backend.url, s.identity) == s.identity]
        self._identities = identities
        for servers in (same, found) if len(same) < len(found) else (found,):
            backends = [server.backend for server in servers]
            leaving = frozenset(server.backend.url for server in servers if server.leaving)
            done = self._change(lambda c, b=backends, u=leaving: c.with_found(b, u))  # type: ignore[misc]
            if done["added"] or done["removed"]:
                _log.info("servers have changed", extra=done)

    def _find(self, which: str) -> Backend:
        for backend in self.backends.present:
            if which in (str(backend.index), backend.label, backend.settings.url):
                return backend
        raise TailraceError(f"there is no backend '{which[:80]}'; see GET /backends")

    def _state_of(self, backend: Backend) -> dict[str, Any]:
        return status.backend(self.snapshot().backends[backend.index])

    def _change(self, change: Callable[[Configuration], Configuration]) -> dict[str, Any]:
        """Change the configuration of all workers, or raise and leave everything as it is."""
        self.catch_up()
        room = self.backends.room
        is_idle = self.backends.is_idle if room is None else room.is_idle
        latest = self._wanted or self.configuration
        new = change(latest).placed(self._store.room, is_idle)
        prepared = self._prepare(new)
        try:
            self._store.publish(new)
        except BaseException:
            prepared.backends.discard()
            raise
        return self._apply(new, prepared)

    def catch_up(self) -> None:
        """Go by the latest configuration, if another worker has changed it.

        What cannot be done, for instance because a file is gone, is reported and tried again.
        """
        try:
            latest = self._wanted or self.configuration
            new = self._store.latest(latest.version)
            if new is not None:
                self._wanted, self._try_at = new, -math.inf
            if self._wanted is not None and self.clock() >= self._try_at:
                self._apply(self._wanted, self._prepare(self._wanted))
        except Exception as error:
            why = str(error) if isinstance(error, TailraceError) else repr(error)
            if why != self.behind:
                _log.error("this worker keeps its former settings", extra={"why": why})
            self.behind, self._try_at = why, self.clock() + CATCH_UP_S

    def _prepare(self, new: Configuration) -> PreparedChange:
        """Do what can fail; the backends last, because what they need has to be closed again."""
        settings = self._part(new.effective)
        self._check_settings(settings)
        keyring = self._keyring(settings)
        return PreparedChange(settings, keyring, self.backends.prepare(settings))

    def _keyring(self, settings: ServeSettings) -> Keyring:
        view = self.backends.cluster.worker_view
        return Keyring(settings.clients, view.shared.accounts, view.worker)

    def _apply(self, new: Configuration, prepared: PreparedChange) -> dict[str, Any]:
        """Do what cannot fail."""
        self.configuration, self._wanted, self.behind = new, None, ""
        self.settings, self.keyring, change = prepared
        settings = self.settings
        self._take_over(settings)
        self.scraper.settings = settings.metrics
        if self._tasks and not self.scraper.running and settings.metrics.path != "off":
            self._spawn(self.scraper.run())
        self.decision_log.settings = settings.decisions
        self.intake.reload(settings)
        added, removed = self.backends.apply(new, settings, change)
        self.models.reload(settings.models)
        if self._tasks:  # it has been started
            self._follow_caches()
        self._report_worker()
        self.intake.context.admit_waiting()
        return {"added": added, "removed": removed}

    def _follow_caches(self) -> None:
        """Read the KV events of the backends that publish them."""
        events, present = self.settings.events, self.backends.present
        if self.kv_streams is None:
            if not any(events.endpoints(b.settings)[0] for b in present):
                return
            caches = ExactCaches(self.backends.cluster, events.blocks)
            self.kv_streams = KvStreams(caches, events)
            self.intake.context.prompt_learner = PromptLearner(caches, events)
        self.kv_streams.settings = events
        self.kv_streams.follow({b.index: b.settings for b in present})

    def _retired(self, number: int) -> None:
        """The number of a backend is free for another one."""
        if self.kv_streams is not None:
            self.kv_streams.drop(number)
        self.telemetry.retire(number)
        self.scraper.forget(number)

    def _report_worker(self) -> None:
        room = self.backends.room
        if room is not None:
            room.applied(self.configuration.version)

    def snapshot(self) -> RouterSnapshot:
        """Return the state of the router now."""
        chooser, cluster = self.backends.chooser, self.backends.cluster
        routing, counter, now = chooser.settings, cluster.counter, self.clock()
        return RouterSnapshot(
            at=now,
            backends=self.backends.snapshot(now, self.scraper, self.kv_streams),
            draining=self.draining,
            behind=self.behind,
            policy=chooser.policy.name,
            fallback=routing.fallback,
            canary=routing.canary,
            canary_share=routing.canary_share,
            canary_block_s=routing.canary_block_s,
            shadow=routing.shadow,
            decisions=chooser.counts["decisions"],
            canary_decisions=chooser.counts["canary"],
            waiting=len(self.intake.queue),
            oldest=self.intake.queue.oldest(now, SHOWN_WAITING),
            clients=self.open_connections,
            log_lines_dropped=self.decision_log.dropped,
            token_source=self.settings.tokens.source,
            prompts_by_source=dict(counter.used),
            lengths_by_source=dict(counter.learned),
            bytes_per_token=counter.bytes_per_token(),
            tokenize_failures=self.intake.context.tokenize_probe.failed,
            autopilot=self._autopilot.read(),
            vetoed=self.configuration.vetoed,
            store=self._store_state(),
        )

    def _store_state(self) -> StoreSnapshot | None:
        store = self.shared_store
        if store is None:
            return None
        peers = store.peers
        return StoreSnapshot(
            connected=store.connected, members=len(peers.peers), lost=store.lost,
            missed=peers.missed, refused=peers.refused,
        )  # fmt: skip

    # What the parts ask for.

    def _present(self) -> list[int]:
        return [b.index for b in self.backends.present]

    async def _fetch_metrics(self, replica: int, path: str) -> bytes:
        backend = self.backends.all[replica]
        body = await backend.fetch_metrics(path, self.settings.metrics.timeout_s)
        if backend not in self.backends.all or backend.health.removed:
            raise FetchError("it was removed meanwhile")
        return body

    def _adapters_seen(self, replica: int, adapters: frozenset[str]) -> None:
        self.models.loaded(self.backends.all[replica], adapters)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_report)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)


def _by_number(configuration: Configuration, settings: ServeSettings) -> list[BackendSettings]:
    """Return the backends by number; those that are gone stand for a number that is free."""
    present = {b.url: b for b in settings.backends}
    return [present.get(s.url) or BackendSettings(url=s.url) for s in configuration.slots]


def _report(task: "asyncio.Task[None]") -> None:
    """Log background tasks that died from an unexpected exception."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("background work has failed", exc_info=task.exception())
