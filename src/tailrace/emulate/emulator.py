"""A cluster of emulated servers on local ports, in one event loop."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tailrace.config import Cluster, parse
from tailrace.emulate.clock import Clock, LoopClock
from tailrace.emulate.faults import Fault
from tailrace.emulate.http import ApiError, Connection, HttpRequest, read_object
from tailrace.emulate.metrics import Meter
from tailrace.emulate.replica import EmulatedReplica
from tailrace.emulate.request_body import Served
from tailrace.emulate.service import Service, max_model_len
from tailrace.errors import TailraceError
from tailrace.sim.feasibility import check_cluster
from tailrace.view.cost_model import cost_rows, iteration_s
from tailrace.view.devices import cost_of, resolved

BACKLOG = 4096


class Emulator:
    """Emulated servers, up while this asynchronous context is entered.

    ``port`` is that of the first replica, the others follow; 0: any free ones. ``time_scale`` is
    real seconds per emulated second: 0.1 runs ten times as fast. With ``faults`` there is an admin
    server as well, at ``admin_port``: ``POST /replicas/N/fault`` with a :class:`Fault` as JSON.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        time_scale: float = 1.0,
        model: str = "emulated",
        max_tokens: int | None = None,
        seed: int = 0,
        faults: bool = False,
        admin_port: int = 0,
        old_metric_names: bool = False,
        tokens_per_event: int = 1,
    ) -> None:
        if not (time_scale > 0):
            raise TailraceError(f"time_scale must be positive, got {time_scale}")
        self._replicas = resolved(cluster)
        check_cluster(self._replicas)
        self._host, self._first_port, self._admin_port = host, port, admin_port
        self._time_scale = time_scale
        self._model, self._max_tokens, self._seed = model, max_tokens, seed
        self._faults = faults
        self._old_metric_names = old_metric_names
        self._tokens_per_event = tokens_per_event
        self._listeners: list[asyncio.Server | None] = []
        self._admin = _Admin(self)
        self._admin_listener: asyncio.Server | None = None
        self.services: list[Service] = []
        self.ports: list[int] = []
        self.admin_url: str | None = None
        self._clock: LoopClock | None = None

    @property
    def urls(self) -> list[str]:
        """Base addresses of the replicas, in order."""
        return [f"http://{self._host}:{port}" for port in self.ports]

    @property
    def replicas(self) -> list[EmulatedReplica]:
        """The replicas, in order."""
        return [service.replica for service in self.services]

    async def __aenter__(self) -> Self:
        # Compiled on first use, which takes longer than an iteration may.
        iteration_s(cost_rows([cost_of(self._replicas[0])])[0], 1.0, 0.0, 0.0, 1.0)
        clock = self._clock = LoopClock(asyncio.get_running_loop(), self._time_scale)
        try:
            for number in range(len(self._replicas)):
                self.services.append(self._service(number, clock))
                self._listeners.append(None)
                self.ports.append(self._first_port and self._first_port + number)
                await self._listen(number)
            if self._faults:
                await self._listen_for_faults()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        await self._close()

    async def fault(self, replica: int, fault: Fault) -> None:
        """Make something go wrong with a replica, or end it."""
        service = self.services[replica]
        if fault.kind == "slow":
            service.replica.set_speed(fault.factor)
            return
        service.fault = None if fault.kind == "return" else fault
        if fault.kind == "hang":
            service.replica.freeze()
        elif fault.kind == "die" or service.replica.is_frozen:
            service.drop_all()
            service.replica.clear()
        if fault.kind == "die":
            await self._stop_listening(replica)
        if fault.kind == "return":
            service.replica.set_speed(1.0)
            if self._listeners[replica] is None:
                await self._listen(replica)

    # ---- ports ----------------------------------------------------------------------------------

    def _service(self, number: int, clock: Clock) -> Service:
        config = self._replicas[number]
        most = max_model_len(config)
        if self._max_tokens is not None:
            most = min(most, self._max_tokens)
        replica = EmulatedReplica(number, config, clock, Meter(self._time_scale))
        served = Served(self._model, most, self._seed, self._tokens_per_event)
        return Service(replica, served, old_names=self._old_metric_names)

    async def _listen(self, number: int) -> None:
        service = self.services[number]
        listener = await self._serve(lambda: Connection(service), self.ports[number])
        self._listeners[number] = listener
        self.ports[number] = listener.sockets[0].getsockname()[1]

    async def _listen_for_faults(self) -> None:
        listener = await self._serve(lambda: Connection(self._admin), self._admin_port)
        self._admin_listener = listener
        self.admin_url = f"http://{self._host}:{listener.sockets[0].getsockname()[1]}"

    async def _serve(self, protocol: Callable[[], Connection], port: int) -> asyncio.Server:
        try:
            return await asyncio.get_running_loop().create_server(
                protocol, self._host, port, backlog=BACKLOG
            )
        except OSError as error:
            raise TailraceError(
                f"cannot listen on {self._host}:{port}: {error.strerror or error}; "
                "choose another port"
            ) from None

    async def _stop_listening(self, number: int) -> None:
        listener, self._listeners[number] = self._listeners[number], None
        if listener is not None:
            listener.close()

    async def _close(self) -> None:
        for number, service in enumerate(self.services):
            await self._stop_listening(number)
            service.drop_all()
            service.replica.freeze()
        if self._admin_listener is not None:
            self._admin_listener.close()
            self._admin.drop_all()
        if self._clock is not None:
            self._clock.close()
        await asyncio.sleep(0)  # the loop tells the connections that they are closed


class _Admin:
    """Faults by HTTP."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def opened(self, connection: Connection) -> None:
        """A client has connected."""
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """A client has gone."""
        self._connections.discard(connection)

    def drop_all(self) -> None:
        """Close all connections at once."""
        for connection in list(self._connections):
            connection.abort()

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        """Answer GET /replicas and POST /replicas/N/fault."""
        if request.path == "/replicas" and request.method == "GET":
            connection.reply_json(self._states())
            return
        match request.path.split("/"):
            case ["", "replicas", number, "fault"] if (
                number.isdecimal() and request.method == "POST"
            ):
                replica = int(number)
            case _:
                raise ApiError(404, "ask for GET /replicas or POST /replicas/N/fault")
        if replica >= len(self._emulator.services):
            raise ApiError(404, f"there is no replica {replica}")
        try:
            fault = parse(Fault, read_object(request.body))
        except TailraceError as error:
            raise ApiError(400, str(error)) from None
        task = asyncio.ensure_future(self._apply(connection, replica, fault))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _apply(self, connection: Connection, replica: int, fault: Fault) -> None:
        try:
            await self._emulator.fault(replica, fault)
        except TailraceError as error:
            connection.reply(503, ApiError(503, str(error), "ServiceUnavailable").body())
            return
        connection.reply_json(self._states()[replica])

    def _states(self) -> list[dict[str, object]]:
        emulator = self._emulator
        return [
            {"replica": k, "url": emulator.urls[k], "fault": s.fault and s.fault.kind,
             "speed": s.replica.server.speed, "waiting": s.replica.waiting,
             "running": s.replica.running}
            for k, s in enumerate(emulator.services)
        ]  # fmt: skip
