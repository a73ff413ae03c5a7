"""The router as one value: listeners, background work, reload and an orderly end."""

import asyncio
import errno
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson

from tailrace.errors import TailraceError
from tailrace.net.client import FetchError, Response
from tailrace.net.head_cache import RequestHeadCache
from tailrace.net.server import ClientConnection, HttpRequest, Service, Work, error_body
from tailrace.router.admin import JSON, Admin, Answer
from tailrace.router.decide.chooser import Chooser
from tailrace.router.intake.tokens import TokenCounter
from tailrace.router.observe import telemetry as telemetries
from tailrace.router.observe.decision_log import DecisionLog, load_salt
from tailrace.router.observe.events import NoTelemetry, Telemetry
from tailrace.router.observe.scrape import Scraper
from tailrace.router.observe.status import PAGE, PAGE_HEADERS, PAGE_TYPE, Status
from tailrace.router.proxy.backends import Plane, Target
from tailrace.router.proxy.dispatcher import Forwarder
from tailrace.router.proxy.models import PATH as MODELS_PATH
from tailrace.router.proxy.models import ModelsAnswer
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import address
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.shared_state import WorkerView
from tailrace.router.workers import process

#: How often time limits are checked, in s.
SWEEP_S = 0.1
#: How often it is looked whether all clients have gone, in s.
STOP_LOOK_S = 0.02
BACKLOG = 4096

_log = logging.getLogger("tailrace.router")


class Router:
    """The live router. Make it, ``await start()``, and at the end ``await stop()``."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        telemetry: Telemetry | None = None,
        load: Callable[[], ServeSettings] | None = None,
        clock: Callable[[], float] = time.monotonic,
        salt: bytes | None = None,
        worker_view: WorkerView | None = None,
    ) -> None:
        """``load`` reads the settings again, for a reload.

        ``salt`` and ``worker_view``: the secret and the state that several workers share.
        """
        self.settings = settings
        self.telemetry: Telemetry = telemetry or NoTelemetry()
        self.clock = clock
        self.started_at = clock()
        self.draining = False
        salt = salt or load_salt(settings.decisions.folder)
        counter = TokenCounter(settings.tokenizer, settings.tokens.source)
        cluster = ClusterState(
            settings.backends, clock, counter=counter, salt=salt, worker_view=worker_view
        )
        self.decision_log = DecisionLog(settings.decisions, salt, clock_now=clock())
        self.plane = Plane(settings, cluster, Chooser(cluster, settings.routing))
        self.forwarder = Forwarder(settings, self.plane, self.telemetry, self.decision_log)
        self.scraper = Scraper(cluster, self._metrics_of, settings.metrics)
        self.admin = Admin(self, settings.admin.token())
        # What a listener needs (downstream.Service).
        self.limits = settings.limits
        self.heads = RequestHeadCache()
        self.now = self.forwarder.now = clock()
        self.clients: set[ClientConnection] = set()
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs from start to stop."""
        self._load = load
        self._servers: list[asyncio.AbstractServer] = []
        self._others: list[asyncio.AbstractServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Event | None = None
        self._stopped = False
        self._listen_at = self._admin_at = ("", 0)

    # What a listener needs.

    def opened(self, client: ClientConnection) -> bool:
        """Take in a client, unless there are too many."""
        self.clients.add(client)
        return len(self.clients) <= self.limits.connections

    def closed(self, client: ClientConnection) -> None:
        """Forget a client."""
        self.clients.discard(client)

    def refused(self, status: int, why: str) -> None:
        """Count a request that was not accepted."""
        del why
        self.telemetry.request_done(None, status, "refused", "other")

    def handle(self, request: HttpRequest) -> Work | None:
        """Begin with a request."""
        head = request.head
        if head.method in (b"GET", b"HEAD"):
            if request.path == b"/health":
                self._answer_health(request)
                return None
            if request.path == MODELS_PATH:
                available = [t for t in self.plane.targets if t.health.available]
                if available:
                    return ModelsAnswer(request, available)
                request.client.respond(head, 503, error_body(503, "no replica is available"))
                return None
        return self.forwarder.start(request)

    def _answer_health(self, request: HttpRequest) -> None:
        available = sum(t.health.available for t in self.plane.targets)
        good = available > 0 and not self.draining
        state = "draining" if self.draining else "ok" if good else "no replica is available"
        body = orjson.dumps({"status": state, "available": available})
        request.client.respond(request.head, 200 if good else 503, body)

    # Life.

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
        shared = self.settings.share_port
        self._listen_at = await self._listen(self.settings.listen, self, shared=shared)
        if self.settings.admin.listen != "off":
            try:
                self._admin_at = await self._listen(
                    self.settings.admin.listen, self.admin, shared=self.admin.siblings is not None
                )
            except TailraceError:
                self._servers[0].close()
                raise
        self._spawn(self._sweep())
        self._spawn(self._probe())
        self._spawn(self.scraper.run())
        for work in self.background:
            self._spawn(work())

    async def run(self, started: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reloads. Return the exit code."""
        loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        code = 0

        def end(received: int) -> None:
            nonlocal code
            code = 130 if received == signal.SIGINT else 0
            if self._stopping is not None and self._stopping.is_set():
                self._abort()  # asked twice
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
        """Take no more requests, let those under way end within ``drain_s``, and close all."""
        if self._stopped:
            return
        self._stopped = self.draining = True
        for server in self._servers[:1]:
            server.close()
        _log.info("stopping", extra={"in_flight": len(self.forwarder.active)})
        for client in tuple(self.clients):
            client.shutdown()
        limit = self.clock() + drain_s
        while self.clients and self.clock() < limit:  # answers may still be on their way out
            await asyncio.sleep(STOP_LOOK_S)
        if self.forwarder.active:
            _log.warning("cut off", extra={"requests": len(self.forwarder.active)})
        self._abort()
        self.forwarder.asker.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in (*self._servers, *self._others):
            server.close()
        for client in (*self.clients, *self.admin.clients):
            client.abort()
        for target in self.plane.targets:
            target.pool.abort()
        await asyncio.sleep(0)  # let the transports say good-bye
        self.decision_log.close()
        _log.info("stopped")

    def _abort(self) -> None:
        self.forwarder.queue.clear("the router is stopping")
        for client in tuple(self.clients):
            client.give_up()

    # Changes at run time.

    def reload(self) -> dict[str, Any]:
        """Read the settings again; streams go on. Listeners keep their addresses."""
        if self._load is None:
            raise TailraceError("there is no file to read again: start with --config FILE")
        new = self._load()
        if new.routing != self.settings.routing:
            chooser = Chooser(self.plane.cluster, new.routing)
            self.plane.chooser.close()
            self.plane.chooser = chooser
        added, removed = self.plane.reload(new)
        self.settings = self.forwarder.settings = new
        self.limits = new.limits
        self.forwarder.queue.settings = new.admission
        self.forwarder.budget.settings = new.retry
        self.scraper.settings = new.metrics
        self.forwarder.asker.settings = new.tokens
        _log.info("reloaded", extra={"added": added, "removed": removed})
        self.forwarder.room()
        return {"added": added, "removed": removed}

    def _reload_or_log(self) -> None:
        try:
            self.reload()
        except TailraceError as error:
            _log.error("not reloaded", extra={"why": str(error)})

    def drain(self, which: str, draining: bool) -> dict[str, Any]:
        """Give a replica, by number or name, no more requests, or some again."""
        for target in self.plane.present:
            if which in (str(target.index), target.label):
                target.health.drain(draining)
                self.forwarder.room()
                return self._describe(target)
        raise TailraceError(f"there is no backend '{which[:80]}'; see GET /backends")

    def status(self) -> dict[str, Any]:
        """Return what the router is and does, for /status."""
        return {
            "state": "draining" if self.draining else "ok",
            "policy": self.plane.chooser.policy.name,
            "uptime_s": round(self.clock() - self.started_at, 3),
            "clients": len(self.clients),
            "in_flight": len(self.forwarder.active),
            "queued": len(self.forwarder.queue),
            "retries_left": round(self.forwarder.budget.left, 1),
            "decisions": dict(self.plane.chooser.counts),
            "replicas": [self._describe(t) for t in self.plane.present],
        }

    def _describe(self, target: Target) -> dict[str, Any]:
        health = target.health
        return {
            "replica": target.index,
            "name": target.label,
            "url": target.backend.url,
            "state": health.state,
            "available": health.available,
            "why": health.breaker.reason,
            "opened": health.breaker.opened,
            "in_flight": target.active,
            "ledger_in_flight": int(self.plane.cluster.replicas["in_flight"][target.index]),
            "connections": target.pool.open,
        }

    # Background work.

    async def fetch(
        self,
        replica: int,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float = 5.0,
    ) -> Response:
        """Ask a replica something on the router's own behalf; raise ``FetchError``."""
        return await self.plane.targets[replica].pool.fetch(method, path, headers, body, timeout_s)

    async def probe(self) -> list[tuple[Target, str]]:
        """Ask every replica once whether it is well; return those that are not, and why."""
        present = self.plane.present
        whys = await asyncio.gather(*(self._probe_one(t) for t in present))
        return [(t, why) for t, why in zip(present, whys, strict=True) if why]

    async def _probe_one(self, target: Target) -> str:
        health = self.settings.health
        target.heard = False
        try:
            answer = await target.pool.fetch("GET", health.path, timeout_s=health.timeout_s)
        except FetchError as error:
            why = str(error)
            if target.heard and error.late:
                return ""  # busy, but it is answering others
            target.health.probed(self.clock(), False, why, died=error.connecting)
            return why
        good = answer.status < 500
        why = "" if good else f"answers {health.path} with {answer.status}"
        target.health.probed(self.clock(), good, why)
        return why

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health.interval_s)
            await self.probe()
            self.forwarder.room()

    async def _metrics_of(self, replica: int, path: str) -> bytes:
        target = self.plane.targets[replica]
        if target.health.removed:
            raise FetchError("taken out")
        answer = await target.pool.fetch("GET", path, timeout_s=self.settings.metrics.timeout_s)
        if answer.status != 200:
            raise FetchError(f"answers {path} with {answer.status}")
        return answer.body

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self.clock())

    def sweep(self, now: float) -> None:
        """Enforce all time limits at ``now`` (s)."""
        self.now = self.admin.now = now
        self.forwarder.sweep(now)
        self.plane.refresh(now)
        self.decision_log.flush()
        for client in (*self.clients, *self.admin.clients):
            client.check(now)
        for target in self.plane.targets:
            target.pool.sweep(now)

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


def create(
    settings: ServeSettings,
    load: Callable[[], ServeSettings] | None = None,
    clock: Callable[[], float] = time.monotonic,
    salt: bytes | None = None,
    worker_view: WorkerView | None = None,
) -> Router:
    """Make a router that counts what it does, with metrics and the status page."""
    telemetry = telemetries.Telemetry(clock)
    router = Router(
        settings, telemetry=telemetry, load=load, clock=clock, salt=salt, worker_view=worker_view
    )
    telemetry.watch(router)
    status = Status(telemetry)
    page = Answer(200, PAGE_TYPE, PAGE, PAGE_HEADERS)
    router.admin.pages |= {
        "/": lambda: page,
        "/status": lambda: Answer(200, JSON, status.json()),
        "/status/history": lambda: Answer(200, JSON, status.history_json()),
    }
    router.admin.parts["/status"] = lambda: Answer(200, JSON, status.part_json())
    router.background.append(telemetry.run)
    return router


def _report(task: "asyncio.Task[None]") -> None:
    """Say it if background work has ended by a bug of ours."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("background work has failed", exc_info=task.exception())
