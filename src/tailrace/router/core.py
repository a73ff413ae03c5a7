"""What every front of the router is built on: listeners, admin endpoints, life cycle, time limits.

A subclass adds a listener for requests: the proxy (``app.py``), or the endpoint picker.
"""

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable
from typing import Any

import orjson

from tailrace.config import parse
from tailrace.errors import TailraceError
from tailrace.net.byte_budget import ByteBudget
from tailrace.net.server import ClientConnection
from tailrace.net.tls import TlsContext
from tailrace.router import listening, process
from tailrace.router.admin import JSON, Admin, AdminResponse, AdminRoutes, TakesBody, json
from tailrace.router.configuration import Configuration
from tailrace.router.configured import ConfiguredRouter
from tailrace.router.discovery.discovery import Discovery, sources
from tailrace.router.listening import RouterListener
from tailrace.router.observe import prometheus, status
from tailrace.router.proxy.backends import Backend
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings, ListenerTls
from tailrace.router.state import server_speeds

#: How often time limits are checked, in s.
SWEEP_S = 0.1
#: Time between the end of many bodies and the return of their memory to the system, s.
RETURN_MEMORY_S = 1.0
#: How often it is checked whether the files of certificates have changed, in s.
CERTIFICATES_S = 2.0
#: How often a stopping router checks whether all clients have gone, in s.
STOP_POLL_S = 0.02

#: Body of a successful health check.
OK_BODY = b'{"status":"ok"}'

_log = logging.getLogger("tailrace.router")


class RouterCore(ConfiguredRouter):
    """A router without a listener. Make a subclass, ``await start()``, at the end ``stop()``."""

    def __init__(self, settings: ServeSettings, **given: Any) -> None:
        """Arguments as for :class:`ConfiguredRouter`."""
        super().__init__(settings, **given)
        self.admin = Admin(self._admin_routes(), self.settings.admin.token())
        self.admin.now = self.now
        self.held = ByteBudget()
        """Bytes of requests that are held, all clients together."""
        self._return_memory_at = math.inf
        self._listener: RouterListener | None = None
        self._admin_listener: RouterListener | None = None
        self._others: list[asyncio.AbstractServer] = []
        self._stopped = False
        self._certificates_at = 0.0

    # What subclasses do.

    async def _listen(self) -> RouterListener:
        """Listen for requests."""
        raise NotImplementedError

    def _shutdown_clients(self) -> None:
        """Take no more requests on open connections; close those without any."""

    def _give_up_clients(self) -> None:
        """End all requests in progress with an error."""

    def _abort_clients(self) -> None:
        """Close all connections now."""

    def _check_clients(self, now: float) -> None:
        """Enforce the time limits of connections at ``now`` (s)."""

    def _server_tls(self, settings: ListenerTls, protocol: str) -> TlsContext | None:
        """Return the TLS of a listener for a protocol (ALPN); None: it has no certificate."""
        if settings.certificate is None:
            return None
        return self.tls.server(settings.files, (protocol,))

    # Admin endpoints.

    def _admin_routes(self) -> AdminRoutes:
        """Return the endpoints of the admin listener; ``workers/aggregate.py`` merges responses."""
        telemetry, snapshot = self.telemetry, self.snapshot
        page = AdminResponse(200, status.PAGE_TYPE, status.PAGE, status.PAGE_HEADERS)
        return {
            ("GET", "/"): lambda: page,
            ("GET", "/health"): lambda: AdminResponse(200, JSON, OK_BODY),
            ("GET", "/live"): lambda: AdminResponse(200, JSON, OK_BODY),
            ("GET", "/ready"): lambda: AdminResponse(
                self.readiness()[0], JSON, self.readiness()[1]
            ),
            ("GET", "/metrics"): lambda: AdminResponse(
                200, prometheus.CONTENT_TYPE, prometheus.render(telemetry.metrics, snapshot())
            ),
            ("GET", "/status"): lambda: json(status.describe(telemetry, snapshot())),
            ("GET", "/status/history"): lambda: json(status.history(telemetry, snapshot())),
            ("GET", "/backends"): lambda: json([status.backend(b) for b in snapshot().present]),
            ("POST", "/backends"): TakesBody(
                lambda body: json(self.add_backend(parse(BackendSettings, _object_in(body))))
            ),
            ("DELETE", "/backends/{backend}"): lambda which: json(self.remove_backend(which)),
            ("POST", "/backends/{backend}/drain"): lambda which: json(self.drain(which, True)),
            ("POST", "/backends/{backend}/undrain"): lambda which: json(self.drain(which, False)),
            ("POST", "/reload"): lambda: json(self.reload()),
            ("GET", "/routing"): lambda: json(self._roles()),
            ("POST", "/routing"): TakesBody(lambda body: json(self.set_routing(_object_in(body)))),
            ("POST", "/autopilot/routing"): TakesBody(
                lambda body: json(self.set_routing(_object_in(body), "autopilot"))
            ),
            ("POST", "/autopilot/veto"): TakesBody(lambda body: json(self.veto(body))),
            ("POST", "/autopilot/resume"): lambda: json(self._allow(Configuration.without_vetoes)),
        }

    def readiness(self) -> tuple[int, bytes]:
        """Return status and body of the readiness check."""
        available = sum(b.health.available for b in self.backends.all)
        good = available > 0 and not self.draining
        state = "draining" if self.draining else "ok" if good else "no replica is available"
        return 200 if good else 503, orjson.dumps({"status": state, "available": available})

    # Life cycle.

    @property
    def listen_at(self) -> tuple[str, int]:
        """Host and port for clients, once started."""
        return self._listener.at if self._listener is not None else ("", 0)

    @property
    def admin_at(self) -> tuple[str, int] | None:
        """Host and port of the admin listener, once started; None: there is none."""
        return self._admin_listener.at if self._admin_listener is not None else None

    async def start(self) -> None:
        """Listen, and begin with probes, metrics and time limits."""
        process.raise_file_limit()
        self.catch_up()
        self._report_worker()
        await self.models.ask()
        settings = self.settings
        self._listener = await self._listen()
        if settings.admin.listen != "off":
            try:
                self._admin_listener = await listening.serve(
                    settings.admin.listen, lambda: ClientConnection(self.admin),
                    shared=self.admin.ask_workers is not None,
                    tls=self._server_tls(settings.admin.tls, "http/1.1"),
                    handshake_s=settings.limits.header_s,
                )  # fmt: skip
            except TailraceError:
                self._listener.close()
                raise
        self._follow_caches()
        self._spawn(self._sweep())
        self._spawn(self._probe())
        self._spawn(self.models.run())
        self._spawn(self.scraper.run())
        self._spawn(self.telemetry.run(self.snapshot))
        self._spawn(self._keep_speeds())
        if self.tracer is not None:
            self._spawn(self.tracer.run())
        if settings.discovery.is_used and self.backends.cluster.worker_view.worker == 0:
            found = sources(settings.discovery, self.tls)
            self._spawn(Discovery(found, self.use_found).run())
        if self.shared_store is not None:
            self._spawn(self.shared_store.run())

    async def run(self, started: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reloads. Return the exit code.

        After SIGTERM the router reports that it is not ready but serves for another
        ``lame_duck_s``, so that load balancers notice. SIGINT (Ctrl-C) or a second signal skips
        this.
        """
        loop = asyncio.get_running_loop()
        stopping, hurrying = asyncio.Event(), asyncio.Event()
        code = 0

        def end(received: int) -> None:
            nonlocal code
            code = 130 if received == signal.SIGINT else 0
            if stopping.is_set() or received == signal.SIGINT:
                hurrying.set()
            if stopping.is_set():
                self._abort()  # the second signal
            stopping.set()

        for received in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(received) != signal.SIG_IGN:
                loop.add_signal_handler(received, end, received)
        loop.add_signal_handler(signal.SIGHUP, self._reload_or_log)
        await self.start()
        process.settle()
        started()
        try:
            await stopping.wait()
            self.draining = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hurrying.wait(), self.settings.lame_duck_s)
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
        if self._listener is not None:
            self._listener.close()
        _log.info("stopping", extra={"in_flight": len(self.intake.active)})
        self._shutdown_clients()
        limit = self.clock() + drain_s
        while (
            self.open_connections and self.clock() < limit
        ):  # responses may still be on their way out
            await asyncio.sleep(STOP_POLL_S)
        if self.intake.active:
            _log.warning("cut off", extra={"requests": len(self.intake.active)})
        self._abort()
        self.intake.close()
        if self.kv_streams is not None:
            await self.kv_streams.close()
        if self.shared_store is not None:
            self.shared_store.stop()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in (self._listener, self._admin_listener):
            if listener is not None:
                listener.close()
                listener.abort()
        for server in self._others:
            server.close()
        self._abort_clients()
        for client in tuple(self.admin.clients):
            client.abort()
        for backend in self.backends.all:
            backend.pool.abort()
        if self.tracer is not None:
            await self.tracer.stop()
        await asyncio.sleep(0)  # let the transports close
        self.decision_log.close()
        self._save_speeds()
        _log.info("stopped")

    async def _keep_speeds(self) -> None:
        while True:
            await asyncio.sleep(server_speeds.SAVE_EVERY_S)
            self._save_speeds()

    def _save_speeds(self) -> None:
        """Write what was learned of the servers' speed; the first worker does it for all."""
        path, cluster = self.settings.speeds_file, self.backends.cluster
        if path is not None and cluster.worker_view.worker == 0 and self.settings.speeds.learn:
            server_speeds.save_or_log(cluster, path)

    def _abort(self) -> None:
        self.intake.queue.clear("the router is stopping")
        self._give_up_clients()

    # Time limits and probes.

    async def probe(self) -> list[tuple[Backend, str]]:
        """Probe every backend once; return those that failed, and why."""
        present = self.backends.present
        whys = await asyncio.gather(*(b.probe(self.clock) for b in present))
        return [(b, why) for b, why in zip(present, whys, strict=True) if why]

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health.interval_s)
            await self.probe()
            self.intake.context.admit_waiting()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self.clock())

    def sweep(self, now: float) -> None:
        """Enforce all time limits at ``now`` (s)."""
        if self.backends.room is not None:
            self.backends.room.beat()
        self.catch_up()
        self.now = self.admin.now = now
        self.intake.sweep(now)
        self.backends.refresh(now)
        self.backends.trim()
        if self.shared_store is not None:
            self.backends.cluster.count_members()
        self.decision_log.flush()
        self.decision_log.keep_time(now)
        self._check_clients(now)
        if now >= self._certificates_at:
            self._certificates_at = now + CERTIFICATES_S
            self.tls.refresh()
        for client in tuple(self.admin.clients):
            client.check(now)
        for backend in self.backends.all:
            backend.pool.sweep(now)
        if self.held.freed(process.FREED_BYTES):
            # What belongs to the bodies, such as buffers of sockets, is free a little later.
            self._return_memory_at = min(self._return_memory_at, now + RETURN_MEMORY_S)
        elif now >= self._return_memory_at:
            self._return_memory_at = math.inf
            process.return_memory()


def _object_in(body: bytes) -> dict[str, Any]:
    """Read a JSON object from the body of an admin request."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TailraceError(f"the body is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise TailraceError('the body must be an object of settings, e.g. {"url": "http://h:8000"}')
    return data
