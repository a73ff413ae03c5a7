"""A cluster of emulated servers on local ports, in one event loop."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from tailrace.config import Cluster, parse
from tailrace.emulate.clock import Clock, LoopClock
from tailrace.emulate.connection import ApiError, EmulatedConnection, Listener, read_object
from tailrace.emulate.faults import Fault
from tailrace.emulate.metrics import Meter
from tailrace.emulate.replica import EmulatedReplica
from tailrace.emulate.request_body import Served
from tailrace.emulate.service import EmulatedService, max_model_len
from tailrace.errors import TailraceError
from tailrace.net.server import HttpRequest, Work
from tailrace.sim.feasibility import check_cluster
from tailrace.view.cost_model import cost_rows, iteration_s
from tailrace.view.devices import cost_of, resolved

if TYPE_CHECKING:  # needs an extra
    from tailrace.emulate.kv_publisher import KvPublisher

BACKLOG = 4096
#: How often refused connections are checked for clients that keep them open, s.
SWEEP_S = 1.0


class Emulator:
    """Emulated servers, up while this asynchronous context is entered.

    ``port`` is that of the first replica, the others follow; 0: any free ones. ``time_scale`` is
    real seconds per emulated second: 0.1 runs ten times as fast. With ``faults`` there is an admin
    server as well, at ``admin_port``: ``POST /replicas/N/fault`` with a :class:`Fault` as JSON.
    With ``kv_events_port`` each publishes its KV events: the first there and its replays at the
    next port, the others behind; 0: any free ports.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        time_scale: float = 1.0,
        model: str = "emulated",
        adapters: Sequence[str] = (),
        max_tokens: int | None = None,
        seed: int = 0,
        faults: bool = False,
        admin_port: int = 0,
        old_metric_names: bool = False,
        tokens_per_event: int = 1,
        kv_events_port: int | None = None,
    ) -> None:
        if not (time_scale > 0):
            raise TailraceError(f"time_scale must be positive, got {time_scale}")
        self._replicas = resolved(cluster)
        check_cluster(self._replicas)
        self._host, self._first_port, self._admin_port = host, port, admin_port
        self._time_scale = time_scale
        self._model, self._max_tokens, self._seed = model, max_tokens, seed
        self._adapters = tuple(adapters)
        self._faults = faults
        self._old_metric_names = old_metric_names
        self._tokens_per_event = tokens_per_event
        self._kv_events_port = kv_events_port
        self.publishers: list[KvPublisher] = []
        """Of KV events, by replica; empty: none are published."""
        self._listeners: list[asyncio.Server | None] = []
        self._admin = _Admin(self)
        self._admin_listener: asyncio.Server | None = None
        self.services: list[EmulatedService] = []
        self.ports: list[int] = []
        self.admin_url: str | None = None
        self._clock: LoopClock | None = None
        self._sweeper: asyncio.Task[None] | None = None

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
                if self._kv_events_port is not None:
                    self._publish(number, self._kv_events_port)
                self._listeners.append(None)
                self.ports.append(self._first_port and self._first_port + number)
                await self._listen(number)
            if self._faults:
                await self._listen_for_faults()
        except BaseException:
            await self._close()
            raise
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
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
            for publisher in self.publishers[replica : replica + 1]:
                publisher.cut()
        if fault.kind == "return":
            service.replica.set_speed(1.0)
            if self._listeners[replica] is None:
                await self._listen(replica)
                for publisher in self.publishers[replica : replica + 1]:
                    publisher.restart()

    # ---- ports ----------------------------------------------------------------------------------

    def _service(self, number: int, clock: Clock) -> EmulatedService:
        config = self._replicas[number]
        most = max_model_len(config)
        if self._max_tokens is not None:
            most = min(most, self._max_tokens)
        replica = EmulatedReplica(number, config, clock, Meter(self._time_scale))
        served = Served(self._model, most, self._seed, self._tokens_per_event, self._adapters)
        return EmulatedService(replica, served, old_names=self._old_metric_names)

    def _publish(self, number: int, first_port: int) -> None:
        from tailrace.emulate.kv_publisher import KvPublisher

        port = first_port and first_port + 2 * number
        publisher = KvPublisher(self._host, port=port, replay_port=port and port + 1)
        self.publishers.append(publisher)
        self.services[number].replica.tell(publisher.publish)

    async def _listen(self, number: int) -> None:
        service = self.services[number]
        listener = await self._serve(service, self.ports[number])
        self._listeners[number] = listener
        self.ports[number] = listener.sockets[0].getsockname()[1]

    async def _listen_for_faults(self) -> None:
        listener = await self._serve(self._admin, self._admin_port)
        self._admin_listener = listener
        self.admin_url = f"http://{self._host}:{listener.sockets[0].getsockname()[1]}"

    async def _serve(self, service: Listener, port: int) -> asyncio.Server:
        try:
            return await asyncio.get_running_loop().create_server(
                service.connect, self._host, port, backlog=BACKLOG
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

    async def _sweep(self) -> None:
        start_s = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            for listener in (*self.services, self._admin):
                listener.sweep(time.monotonic() - start_s)

    async def _close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for number, service in enumerate(self.services):
            await self._stop_listening(number)
            service.drop_all()
            service.replica.freeze()
        if self._admin_listener is not None:
            self._admin_listener.close()
            self._admin.drop_all()
        for publisher in self.publishers:
            publisher.close()
        if self._clock is not None:
            self._clock.close()
        await asyncio.sleep(0)  # the loop tells the connections that they are closed


class _Admin(Listener):
    """Faults by HTTP."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self._emulator = emulator
        self._tasks: set[asyncio.Task[None]] = set()

    def respond(self, client: EmulatedConnection, request: HttpRequest) -> Work | None:
        """Respond to GET /replicas and POST /replicas/N/fault."""
        method = request.head.method
        if request.path == b"/replicas" and method == b"GET":
            client.reply_json(request.head, self._states())
            return None
        match request.path.decode("latin-1").split("/"):
            case ["", "replicas", number, "fault"] if number.isdecimal() and method == b"POST":
                replica = int(number)
            case _:
                raise ApiError(404, "ask for GET /replicas or POST /replicas/N/fault")
        if replica >= len(self._emulator.services):
            raise ApiError(404, f"there is no replica {replica}")
        try:
            fault = parse(Fault, read_object(request.body))
        except TailraceError as error:
            raise ApiError(400, str(error)) from None
        task = asyncio.ensure_future(self._apply(client, request, replica, fault))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _apply(
        self, client: EmulatedConnection, request: HttpRequest, replica: int, fault: Fault
    ) -> None:
        try:
            await self._emulator.fault(replica, fault)
        except TailraceError as error:
            body = ApiError(503, str(error), "ServiceUnavailable").body()
            client.reply(request.head, 503, body)
            return
        client.reply_json(request.head, self._states()[replica])

    def _states(self) -> list[dict[str, object]]:
        emulator = self._emulator
        return [
            {"replica": k, "url": emulator.urls[k], "fault": s.fault and s.fault.kind,
             "speed": s.replica.server.speed, "waiting": s.replica.waiting,
             "running": s.replica.running}
            for k, s in enumerate(emulator.services)
        ]  # fmt: skip
