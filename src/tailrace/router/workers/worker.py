"""One of several router processes, and how they are started: ``tailrace serve --processes N``.

Each worker is a complete router with connections, health checks and a decision log file of its own;
the system spreads clients' connections over them. Limits per replica hold for all of them together,
limits of the router as a whole are divided among them. A change that one of them is asked for is
published, and all go by it, also those that are started later.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from tailrace.errors import TailraceError
from tailrace.net.server import ClientConnection, HttpRequest, Work
from tailrace.router.admin import Admin, AdminResponse, AdminRoutes, json
from tailrace.router.app import Router
from tailrace.router.configuration import Configuration, SharedConfigurationStore
from tailrace.router.core import RouterCore
from tailrace.router.decide.chooser import Chooser
from tailrace.router.observe import status
from tailrace.router.observe.decision_log import load_salt
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.shared_store import router_number
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.shared_state import new_shared_state
from tailrace.router.state.worker_room import WorkerRoom, WorkerSignals
from tailrace.router.workers import aggregate
from tailrace.router.workers.peer_workers import PeerChange, PeerRequest, PeerWorkers
from tailrace.router.workers.supervisor import Supervisor, SupervisorPipes, reserve

Load = Callable[[], ServeSettings]
Warn = Callable[[str, str], None]


def serve_several(
    settings: ServeSettings,
    load: Load | None,
    started: Callable[[ServeSettings], None],
    failing: Warn,
    idle: Callable[[], object] = lambda: None,
    *,
    make: type[RouterCore] = Router,
) -> int:
    """Serve with ``settings.processes`` workers until SIGTERM or SIGINT; return the exit code.

    ``started`` is given the settings with the addresses in use, ``failing`` the address of a
    backend that does not answer, and why. ``idle`` is called in the supervisor several times per
    second. ``make``: the router of a worker.
    """
    listen, kept = reserve(settings.listen)
    held, admin = [kept], "off"
    if settings.admin.listen != "off":
        admin, kept = reserve(settings.admin.listen)
        held.append(kept)
    count, salt = settings.processes, load_salt(settings.decisions.folder)
    settings.admin.token()
    members = settings.store.members if settings.store.url else 0
    shared = new_shared_state(settings.backends, count, settings.discovery, members)
    number_here = router_number()
    # Everything is compiled here, once: workers are copies of this process.
    Chooser(ClusterState(settings.backends, worker_view=shared.of(0)), settings.routing).close()
    shared.clear(0)
    signals = WorkerSignals(count)
    with tempfile.TemporaryDirectory(prefix="tailrace-") as folder:
        store = SharedConfigurationStore(Path(folder), shared.room)

        def part(number: int) -> Callable[[ServeSettings], ServeSettings]:
            return lambda changed: part_of(_at(changed, listen, admin), number, count)

        def work(number: int, pipes: SupervisorPipes) -> int:
            router = make(
                settings, load=load, salt=salt, worker_view=shared.of(number),
                room=WorkerRoom(shared, number, signals), store=store, part=part(number),
                router_number=number_here,
            )  # fmt: skip
            peers = PeerWorkers(Path(folder), number, count)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(router, peers, pipes, failing))

        current = Configuration.first(settings)
        store.publish(current)

        def now() -> ServeSettings:
            nonlocal current
            current = store.latest(current.version) or current
            return current.settings

        supervisor = Supervisor(
            count, work, lost=shared.clear,
            drain_s=lambda: now().lame_duck_s + now().drain_s,
            beat_at=lambda number: float(shared.reports["beat_at"][number]),
            watchdog_s=lambda: now().watchdog_s, idle=idle,
        )  # fmt: skip
        try:
            return supervisor.run(lambda: started(_at(settings, listen, admin)))
        finally:
            signals.close()
            for kept in held:
                kept.close()


def _at(settings: ServeSettings, listen: str, admin: str) -> ServeSettings:
    """Return settings with the addresses that are in use."""
    at = settings.admin.model_copy(update={"listen": admin})
    return settings.model_copy(update={"listen": listen, "admin": at})


def part_of(settings: ServeSettings, number: int, count: int) -> ServeSettings:
    """Return the settings of one worker: its part of what is limited, and a port that is shared.

    What a replica gets at most is limited for all workers together, see ``state/worker_room.py``.
    """

    def part(limit: int | None, least: int = 1) -> int | None:
        if limit is None:
            return None
        return max(least, limit // count + (number < limit % count))

    limits, admission = settings.limits, settings.admission
    return settings.model_copy(
        update={
            "share_port": True,
            "limits": limits.model_copy(
                update={
                    "connections": part(limits.connections),
                    "bodies_bytes": part(limits.bodies_bytes),
                }
            ),
            "admission": admission.model_copy(update={"queue": part(admission.queue, 0)}),
        }
    )


async def _serve(
    router: RouterCore, peers: PeerWorkers, pipes: SupervisorPipes, failing: Warn
) -> int:
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(pipes.parent)
        os.kill(os.getpid(), signal.SIGTERM)

    room = router.backends.room
    assert room is not None

    def woken(room: WorkerRoom = room) -> None:
        room.woken()
        router.intake.context.admit_waiting()

    try:
        loop.add_reader(pipes.parent, orphaned)
        loop.add_reader(room.wake, woken)
        for backend, why in await router.probe():
            if peers.number == 0:  # they would all say the same
                failing(backend.settings.url, why)
        await join_peers(router, peers)
        return await router.run(pipes.report_ready)
    finally:
        await router.stop()


async def join_peers(router: RouterCore, peers: PeerWorkers) -> None:
    """Serve the admin requests of other workers, and let this one answer for all of them."""
    if peers.number >= peers.count:
        raise TailraceError(f"there is no worker {peers.number} of {peers.count}")
    own_status = {
        ("GET", "/status"): lambda: json(
            status.describe_worker(router.telemetry, router.snapshot())
        )
    }
    own: AdminRoutes = {("POST", "/catch-up"): lambda: _caught_up(router), **own_status}
    private = Admin({**router.admin.routes, **own}, None)
    path = peers.own_path
    Path(path).unlink(missing_ok=True)  # of a worker that has died
    loop = asyncio.get_running_loop()
    router.also(await loop.create_unix_server(lambda: ClientConnection(private), path))

    def ask_workers(request: HttpRequest, asked: str) -> Work:
        if request.head.method in (b"GET", b"HEAD"):
            return PeerRequest(request, peers, asked, partial(aggregate.merge, asked))
        return PeerChange(request, peers, router.admin.response(request))

    router.admin.ask_workers = ask_workers


def _caught_up(router: RouterCore) -> AdminResponse:
    router.catch_up()
    return json({"behind": router.behind})
