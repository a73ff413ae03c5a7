"""The router as one value: listeners, endpoints, background work, reload and an orderly stop."""

import asyncio
import errno
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson

from tailrace.errors import TailraceError
from tailrace.net.byte_budget import ByteBudget
from tailrace.net.chunk_kernel import RequestChunks
from tailrace.net.head_cache import RequestHeadCache
from tailrace.net.server import ClientConnection, HttpRequest, Service, Work, error_body
from tailrace.router import process
from tailrace.router.admin import JSON, Admin, AdminResponse, AdminRoutes, json
from tailrace.router.decide.chooser import Chooser
from tailrace.router.intake.tokens import TokenCounter
from tailrace.router.observe import prometheus, status
from tailrace.router.observe.decision_log import DecisionLog, load_salt
from tailrace.router.observe.events import EventSink
from tailrace.router.observe.scrape import Scraper
from tailrace.router.observe.snapshot import RouterSnapshot
from tailrace.router.observe.telemetry import Telemetry
from tailrace.router.proxy.backends import Backend, Backends
from tailrace.router.proxy.dispatcher import RequestDispatcher
from tailrace.router.proxy.models import ModelsRequest
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import address
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.shared_state import WorkerView

#: How often time limits are checked, in s.
SWEEP_S = 0.1
#: How often a stopping router checks whether all clients have gone, in s.
STOP_POLL_S = 0.02
BACKLOG = 4096

_log = logging.getLogger("tailrace.router")


class Router:
    """The live router. Make it, ``await start()``, and at the end ``await stop()``."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        events: EventSink | None = None,
        load: Callable[[], ServeSettings] | None = None,
        clock: Callable[[], float] = time.monotonic,
        salt: bytes | None = None,
        worker_view: WorkerView | None = None,
    ) -> None:
        """``events``: counts instead of the router's telemetry. ``load``: reads settings again.

        ``salt`` and ``worker_view``: the secret and the state that several workers share.
        """
        self.settings = settings
        self.clock = clock
        self.draining = False
        self.telemetry = Telemetry(clock)
        salt = salt or load_salt(settings.decisions.folder)
        counter = TokenCounter(settings.tokenizer, settings.tokens.source)
        cluster = ClusterState(
            settings.backends, clock, counter=counter, salt=salt, worker_view=worker_view
        )
        self.decision_log = DecisionLog(settings.decisions, salt, clock_now=clock())
        self.backends = Backends(settings, cluster, Chooser(cluster, settings.routing))
        self.dispatcher = RequestDispatcher(
            settings, self.backends, events or self.telemetry, self.decision_log
        )
        self.scraper = Scraper(cluster, self._fetch_metrics, settings.metrics, self._present)
        self.admin = Admin(self._admin_routes(), settings.admin.token())
        self.client_routes = self._client_routes()
        # What a listener needs (net.server.Service).
        self.limits = settings.limits
        self.heads = RequestHeadCache()
        self.held = ByteBudget()
        self.now = self.admin.now = self.dispatcher.context.now = clock()
        self.clients: set[ClientConnection] = set()
        self._load = load
        self._servers: list[asyncio.AbstractServer] = []
        self._others: list[asyncio.AbstractServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Event | None = None
        self._stopped = False
        self._listen_at = self._admin_at = ("", 0)
        self._most_clients = process.most_clients()

    @property
    def events(self) -> EventSink:
        """What counts events: the telemetry, unless something else was given."""
        return self.dispatcher.context.events

    @events.setter
    def events(self, events: EventSink) -> None:
        self.dispatcher.context.events = events

    # Endpoints.

    def _client_routes(self) -> dict[tuple[bytes, bytes], Callable[[HttpRequest], Work | None]]:
        """Return what the router answers clients itself; all else goes to a backend."""
        served = {b"/health": self._respond_health, b"/v1/models": self._respond_models}
        return {(m, path): endpoint for path, endpoint in served.items() for m in (b"GET", b"HEAD")}

    def _admin_routes(self) -> AdminRoutes:
        """Return the endpoints of the admin listener; ``workers/aggregate.py`` merges responses."""
        telemetry, snapshot = self.telemetry, self.snapshot
        page = AdminResponse(200, status.PAGE_TYPE, status.PAGE, status.PAGE_HEADERS)
        return {
            ("GET", "/"): lambda: page,
            ("GET", "/health"): lambda: AdminResponse(200, JSON, b'{"status":"ok"}'),
            ("GET", "/metrics"): lambda: AdminResponse(
                200, prometheus.CONTENT_TYPE, prometheus.render(telemetry.metrics, snapshot())
            ),
            ("GET", "/status"): lambda: json(status.describe(telemetry, snapshot())),
            ("GET", "/status/history"): lambda: json(status.history(telemetry, snapshot())),
            ("GET", "/backends"): lambda: json([status.backend(b) for b in snapshot().present]),
            ("POST", "/backends/{backend}/drain"): lambda which: json(self.drain(which, True)),
            ("POST", "/backends/{backend}/undrain"): lambda which: json(self.drain(which, False)),
            ("POST", "/reload"): lambda: json(self.reload()),
        }

    def _respond_health(self, request: HttpRequest) -> None:
        available = sum(b.health.available for b in self.backends.all)
        good = available > 0 and not self.draining
        state = "draining" if self.draining else "ok" if good else "no replica is available"
        body = orjson.dumps({"status": state, "available": available})
        request.client.respond(request.head, 200 if good else 503, body)

    def _respond_models(self, request: HttpRequest) -> Work | None:
        available = [b for b in self.backends.all if b.health.available]
        if available:
            return ModelsRequest(request, available)
        request.client.respond(request.head, 503, error_body(503, "no replica is available"))
        return None

    # What a listener needs.

    def opened(self, client: ClientConnection) -> bool:
        """Accept a client unless there are too many."""
        self.clients.add(client)
        return len(self.clients) <= min(self.limits.connections, self._most_clients)

    def closed(self, client: ClientConnection) -> None:
        """Forget a client."""
        self.clients.discard(client)

    def refused(self, status: int, why: str) -> None:
        """Count a request that was not accepted."""
        del why
        self.events.request_done(None, status, "refused", "other")

    def handle(self, request: HttpRequest) -> Work | None:
        """Begin with a request."""
        endpoint = self.client_routes.get((request.head.method, request.path))
        return self.dispatcher.start(request) if endpoint is None else endpoint(request)

    # Life cycle.

    @property
    def listen_at(self) -> tuple[str, int]:
        """Host and port for clients, once started."""
        return self._listen_at

    @property
    def admin_at(self) -> tuple[str, int] | None:
        """Host and port of the admin listener, once started; None: there is none."""
        return self._admin_at if self._admin_at[1] else None

    async def start(self) -> None:
        """Listen, and begin with probes, metrics and time limits."""
        process.raise_file_limit()
        self._most_clients = process.most_clients()
        RequestChunks().feed(b"0\r\n\r\n")  # compile it now
        shared = self.settings.share_port
        self._listen_at = await self._listen(self.settings.listen, self, shared=shared)
        if self.settings.admin.listen != "off":
            try:
                self._admin_at = await self._listen(
                    self.settings.admin.listen,
                    self.admin,
                    shared=self.admin.ask_workers is not None,
                )
            except TailraceError:
                self._servers[0].close()
                raise
        self._spawn(self._sweep())
        self._spawn(self._probe())
        self._spawn(self.scraper.run())
        self._spawn(self.telemetry.run(self.snapshot))

    async def run(self, started: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reloads. Return the exit code."""
        loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        code = 0

        def end(received: int) -> None:
            nonlocal code
            code = 130 if received == signal.SIGINT else 0
            if self._stopping is not None and self._stopping.is_set():
                self._abort()  # the second signal
            elif self._stopping is not None:
                self._stopping.set()

        for received in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(received) != signal.SIG_IGN:
                loop.add_signal_handler(received, end, received)
        loop.add_signal_handler(signal.SIGHUP, self._reload_or_log)
        await self.start()
        process.settle_memory()
        started()
        try:
            await self._stopping.wait()
            await self.stop(self.settings.drain_s)
        finally:
            for received in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(received)
        return code

    def also(self, server: asyncio.AbstractServer) -> None:
        """Close another listener at the end."""
        self._others.append(server)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let those in progress end within ``drain_s``, and close all."""
        if self._stopped:
            return
        self._stopped = self.draining = True
        for server in self._servers[:1]:
            server.close()
        _log.info("stopping", extra={"in_flight": len(self.dispatcher.active)})
        for client in tuple(self.clients):
            client.shutdown()
        limit = self.clock() + drain_s
        while self.clients and self.clock() < limit:  # responses may still be on their way out
            await asyncio.sleep(STOP_POLL_S)
        if self.dispatcher.active:
            _log.warning("cut off", extra={"requests": len(self.dispatcher.active)})
        self._abort()
        self.dispatcher.context.tokenize_probe.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in (*self._servers, *self._others):
            server.close()
        for client in (*self.clients, *self.admin.clients):
            client.abort()
        for backend in self.backends.all:
            backend.pool.abort()
        await asyncio.sleep(0)  # let the transports close
        self.decision_log.close()
        _log.info("stopped")

    def _abort(self) -> None:
        self.dispatcher.queue.clear("the router is stopping")
        for client in tuple(self.clients):
            client.give_up()

    # Changes at run time.

    def reload(self) -> dict[str, Any]:
        """Read the settings again; streams go on. Listeners keep their addresses."""
        if self._load is None:
            raise TailraceError("there is no file to read again: start with --config FILE")
        new = self._load()
        added, removed = self.backends.reload(new)
        self.settings = new
        self.limits = new.limits
        self.scraper.settings = new.metrics
        self.dispatcher.reload(new)
        _log.info("reloaded", extra={"added": added, "removed": removed})
        self.dispatcher.context.admit_waiting()
        return {"added": added, "removed": removed}

    def _reload_or_log(self) -> None:
        try:
            self.reload()
        except TailraceError as error:
            _log.error("not reloaded", extra={"why": str(error)})

    def drain(self, which: str, draining: bool) -> dict[str, Any]:
        """Give a backend, by number or name, no more requests, or some again; return its state."""
        for backend in self.backends.present:
            if which in (str(backend.index), backend.label):
                backend.health.drain(draining)
                self.dispatcher.context.admit_waiting()
                return status.backend(self.snapshot().backends[backend.index])
        raise TailraceError(f"there is no backend '{which[:80]}'; see GET /backends")

    def snapshot(self) -> RouterSnapshot:
        """Return the state of the router now."""
        chooser, cluster = self.backends.chooser, self.backends.cluster
        routing, counter, now = chooser.settings, cluster.counter, self.clock()
        return RouterSnapshot(
            at=now,
            backends=self.backends.snapshot(now, self.scraper),
            draining=self.draining,
            policy=chooser.policy.name,
            fallback=routing.fallback,
            canary=routing.canary,
            canary_share=routing.canary_share,
            shadow=routing.shadow,
            decisions=chooser.counts["decisions"],
            canary_decisions=chooser.counts["canary"],
            waiting=len(self.dispatcher.queue),
            clients=len(self.clients),
            log_lines_dropped=self.decision_log.dropped,
            token_source=self.settings.tokens.source,
            prompts_by_source=dict(counter.used),
            lengths_by_source=dict(counter.learned),
            bytes_per_token=counter.bytes_per_token(),
            tokenize_failures=self.dispatcher.context.tokenize_probe.failed,
        )

    # Background work.

    async def probe(self) -> list[tuple[Backend, str]]:
        """Probe every backend once; return those that failed, and why."""
        present = self.backends.present
        whys = await asyncio.gather(*(b.probe(self.clock) for b in present))
        return [(b, why) for b, why in zip(present, whys, strict=True) if why]

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health.interval_s)
            await self.probe()
            self.dispatcher.context.admit_waiting()

    def _present(self) -> list[int]:
        return [b.index for b in self.backends.present]

    async def _fetch_metrics(self, replica: int, path: str) -> bytes:
        backend = self.backends.all[replica]
        return await backend.fetch_metrics(path, self.settings.metrics.timeout_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self.clock())

    def sweep(self, now: float) -> None:
        """Enforce all time limits at ``now`` (s)."""
        self.now = self.admin.now = now
        self.dispatcher.sweep(now)
        self.backends.refresh(now)
        self.decision_log.flush()
        for client in (*self.clients, *self.admin.clients):
            client.check(now)
        for backend in self.backends.all:
            backend.pool.sweep(now)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def _listen(
        self, where: str, service: Service, *, shared: bool = False
    ) -> tuple[str, int]:
        host, port = address(where)
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                lambda: ClientConnection(service), host, port, backlog=BACKLOG,
                reuse_port=shared or None,
            )  # fmt: skip
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            why = "something listens there already" if in_use else error.strerror or str(error)
            raise TailraceError(f"cannot listen on {where}: {why}; choose another port") from None
        self._servers.append(server)
        name = server.sockets[0].getsockname()
        return str(name[0]), int(name[1])


def _report(task: "asyncio.Task[None]") -> None:
    """Log background tasks that died from an unexpected exception."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("background work has failed", exc_info=task.exception())
